"""A mask for each head, against scaled_dot_product_attention with a dense mask of [heads, q_len, kv_len]."""

import pytest
import torch
import torch.nn.functional as F
from operator_cases import BACKWARD, FORWARD, indices, leaves, qkv, relative, to

from xla_attention import flash_attention, masks

Q, KV = indices(40, 40)
# Each mask beside what it is documented to show, written out.
CAUSAL = masks.Causal(), KV <= Q
LOCAL = masks.SlidingWindow(5), (KV <= Q) & (KV >= Q - 5)
CHUNKS = masks.Chunked(16), KV // 16 == Q // 16
FAR = ~masks.SlidingWindow(3, 3), (Q - KV).abs() > 3
EVERY = masks.Full(), KV >= 0 * Q

EXTRA = {"bias": (1, 4, 40, 40), "sinks": (4,)}
CASES = {
    "one mask each": ([CAUSAL, LOCAL, CHUNKS, FAR], 4),
    "groups that share": ([CAUSAL, LOCAL, CAUSAL, LOCAL], 2),
    "groups that do not": ([CAUSAL, CAUSAL, EVERY, CAUSAL], 2),
    "one key head": ([FAR, CAUSAL, FAR, CHUNKS], 1),
}


# The kernels' own tests run them in other parts.
COMBINATIONS = [(name, everything, "eager") for name in CASES for everything in (False, True)]
COMBINATIONS += [("groups that do not", False, "xla"), ("one key head", True, "xla")]


@pytest.mark.parametrize(("name", "everything", "device"), COMBINATIONS, indirect=["device"])
def test_equals_sdpa_with_the_masks_written_out(name, everything, device):
    chosen, kv_heads = CASES[name]
    mask, shown = masks.PerHead([mask for mask, _ in chosen]), torch.stack([seen for _, seen in chosen])
    generator = torch.Generator().manual_seed(3)
    tensors = dict(zip("qkv", qkv(kv_heads=kv_heads)))
    options, added = {}, torch.zeros(2, 4, 40, 40, dtype=torch.float64)
    if everything:
        tensors |= {name: torch.randn(s, generator=generator) for name, s in EXTRA.items()}
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        added = added - options["alibi_slopes"][:, None, None] * (Q - KV).abs()
    do = torch.randn(2, 4, 40, 32, generator=generator)

    want = dict(zip(tensors, leaves(tensors.values(), dtype=torch.float64)))
    keys, values = want["k"], want["v"]
    added = (added + want.get("bias", 0.0)).masked_fill(~shown, -torch.inf)
    if everything:  # a sink is one more key, of zeros
        keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
        added = torch.cat([added, want["sinks"][:, None, None].expand(2, 4, 40, 1)], dim=-1)
    o = F.scaled_dot_product_attention(want["q"], keys, values, attn_mask=added, enable_gqa=True)
    o.backward(do.double())

    ours = dict(zip(tensors, leaves(tensors.values(), device)))
    got = flash_attention(**ours, mask=mask, **{n: to(device, x) for n, x in options.items()})
    got.backward(do.to(device))
    assert relative(got, o) < FORWARD
    for leaf in tensors:
        assert relative(ours[leaf].grad, want[leaf].grad) < BACKWARD, leaf


def test_every_head_also_sees_what_the_other_arguments_show(device):
    tensors = leaves(qkv(), device)
    ids, lens = torch.arange(40)[None].repeat(2, 1) // 13, torch.tensor([31, 40])
    together = flash_attention(
        *tensors,
        is_causal=True,
        sliding_window=9,
        mask=masks.PerHead([masks.Full(), masks.Chunked(16)] * 2),
        segment_ids=to(device, ids),
        kv_lens=to(device, lens),
    )
    seen = torch.stack([EVERY[1], CHUNKS[1]] * 2) & (KV <= Q) & (KV > Q - 9)
    seen = seen & (ids[:, None, :, None] == ids[:, None, None, :]) & (lens[:, None, None, None] > KV)
    want = flash_attention(*(x.detach().cpu().double() for x in tensors), mask=seen)
    assert relative(together, want) < FORWARD
