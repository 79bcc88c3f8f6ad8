"""The definition that the kernels are held to, against torch's attention in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_cases import Case, definition, relative
from jax.experimental import enable_x64
from operand_cases import FLOATING, by_definition, in_torch, make

from pallas_kernels.flash_attention import attention_reference
from pallas_kernels.masks import Causal, Full, KeyLength

# float64 rounds at 1e-16; sums of tens of terms lose a decimal or two.
EXACT = 1e-14


def by_torch(case, q, k, v, do, dlse):
    """o, lse, dq, dk and dv by torch's autograd; o by its own attention where that has no softcap."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    shown = case.mask.visible(rows, columns)
    s = case.spec.scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    if case.softcap is None:
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=shown, scale=case.spec.scale, enable_gqa=True
        )
    else:
        s = case.softcap * torch.tanh(s / case.softcap)
        p = s.masked_fill(~shown, -torch.inf).softmax(-1)
        o = p @ v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    lse = s.masked_fill(~shown, -torch.inf).logsumexp(-1)
    ((o * do).sum() + (lse * dlse).sum()).backward()
    return [x.detach().numpy() for x in (o, lse, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case((2, 6, kv_heads, 13, 22, 16), mask, scale=0.3, with_dlse=True)
            for kv_heads in (1, 2, 6)
            for mask in (Full(), Causal(), Causal(9), Causal() & ~Causal(-4), KeyLength(11))
        ),
        Case((1, 2, 1, 9, 14, 16), Causal(2), softcap=0.7, with_dlse=True),
    ],
)
def test_equals_torch(case):
    inputs = [np.asarray(x, np.float64) for x in case.inputs()]
    want = by_torch(case, *(torch.from_numpy(x) for x in inputs))
    for got, wanted in zip(definition(case, *inputs), want):
        assert relative(got, wanted) < EXACT


@pytest.mark.parametrize(
    "wanted",
    [
        {"segments"},
        {"bias"},
        {"alibi"},
        {"sinks"},
        {"q_lens", "kv_lens"},
        {"shuffled segments", "bias", "alibi", "sinks"},
    ],
    ids=lambda wanted: " ".join(sorted(wanted)),
)
def test_operands_equal_torch(wanted):
    """Against torch's attention with everything in its additive mask, and a sink as a key of zeros."""
    case = Case((2, 4, 2, 12, 15, 16), Causal(3), query_offset=3, scale=0.3)
    operands = make(case, wanted)
    q, k, v, do, dlse = (torch.tensor(np.asarray(x, np.float64)) for x in case.inputs())
    given = in_torch(operands)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    rows, columns = torch.arange(12)[:, None], torch.arange(15)
    shown = case.mask.visible(rows, columns).expand(2, 4, 12, 15)
    added = torch.zeros(2, 4, 12, 15, dtype=torch.float64)
    if "bias" in given:
        added = added + given["bias"]
    if "alibi_slopes" in given:
        added = added - given["alibi_slopes"][:, None, None] * (rows + 3 - columns).abs()
    if "q_segment_ids" in given:
        same = given["q_segment_ids"][:, :, None] == given["kv_segment_ids"][:, None, :]
        shown = shown & same[:, None]
    if "q_lens" in given:
        shown = shown & (rows < given["q_lens"][:, None, None, None])
        shown = shown & (columns < given["kv_lens"][:, None, None, None])
    # torch has no gradients for rows that see nothing: they see all, and count for nothing.
    counts = shown.any(-1) | ("sinks" in given)
    added = added.masked_fill(~shown & counts[..., None], -torch.inf)
    keys, values = k, v
    if "sinks" in given:
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        added = torch.cat([added, given["sinks"][:, None, None].expand(2, 4, 12, 1)], dim=-1)
    o = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=added, scale=0.3, enable_gqa=True
    )
    lse = (0.3 * q @ keys.repeat_interleave(2, dim=1).mT + added).logsumexp(-1)
    ((o * do)[counts].sum() + (lse * dlse)[counts].sum()).backward()
    o, lse = torch.where(counts[..., None], o, 0), torch.where(counts, lse, -torch.inf)
    want = [x.detach().numpy() for x in (o, lse, q.grad, k.grad, v.grad)]
    want += [given[name].grad.numpy() if name in given else None for name in FLOATING]
    for got, wanted_ in zip(by_definition(case, *case.inputs(), operands), want, strict=True):
        assert (got is None) == (wanted_ is None)
        assert got is None or relative(got, wanted_) < EXACT


@pytest.mark.parametrize("xp", [np, jnp, torch], ids=lambda xp: xp.__name__)
def test_is_one_text_for_every_library(xp):
    case = Case((1, 4, 2, 10, 12, 16), Causal(-2), softcap=3.0)  # two rows see nothing
    inputs = [np.asarray(x, np.float64) for x in case.inputs()]
    with enable_x64():
        o, lse = attention_reference(*(xp.asarray(x) for x in inputs[:3]), spec=case.spec, xp=xp)
    want = definition(case, *inputs)
    assert relative(o, want[0]) < EXACT
    assert relative(lse, want[1]) < EXACT


def test_rows_that_see_nothing_are_zeros_with_zero_gradients():
    case = Case((1, 2, 2, 10, 6, 16), Causal(-4))
    inputs = case.inputs()
    o, lse, dq, dk, dv = definition(case, *inputs)
    assert not o[:, :, :4].any()
    assert not dq[:, :, :4].any()
    assert np.isneginf(lse[:, :, :4]).all()
    q, k, v, do = (torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True) for x in inputs[:4])
    attention_reference(q, k, v, spec=case.spec, xp=torch)[0].backward(do)
    for x, want in zip((q, k, v), (dq, dk, dv)):
        assert relative(x.grad, want) < EXACT


def test_refuses_narrow_types():
    q, k, v, *_ = Case((1, 1, 1, 4, 4, 16), dtype=jnp.bfloat16).inputs()
    with pytest.raises(TypeError, match="q: got bfloat16, the reference computes in float32 or float64"):
        attention_reference(q, k, v, spec=Case((1, 1, 1, 4, 4, 16)).spec, xp=jnp)
