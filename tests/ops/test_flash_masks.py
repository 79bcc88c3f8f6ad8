"""What hides keys, against scaled_dot_product_attention with the same mask written out."""

import pytest
import torch
import torch.nn.functional as F
from operator_cases import BACKWARD, FORWARD, indices, leaves, qkv, relative, to

from xla_attention import flash_attention, masks, segment_ids_from_lengths

PACKED = torch.tensor([[9, 20, 0], [15, 15, 4]])
SHOWN = torch.rand(2, 4, 40, 40, generator=torch.Generator().manual_seed(5)) < 0.4
IDS = torch.randint(0, 3, (2, 56), generator=torch.Generator().manual_seed(6))
LENS = torch.tensor([[13, 40], [41, 17]])[:, :, None, None]


def documents(lengths, total):
    ids = [[n for n, length in enumerate(row) for _ in range(length)] for row in lengths.tolist()]
    return torch.tensor([row + [99] * (total - len(row)) for row in ids])


def same(q_ids, kv_ids):
    return (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]


SQUARE, (Q, KV) = {}, indices(40, 40)
WIDE, (WQ, WKV) = {"q_len": 24, "kv_len": 56}, indices(24, 56)
CASES = {
    "window of n keys": (SQUARE, {"is_causal": True, "sliding_window": 7}, (KV <= Q) & (KV > Q - 7)),
    "window of one key": (SQUARE, {"is_causal": True, "sliding_window": 1}, KV == Q),
    "window of two sides": (SQUARE, {"sliding_window": (6, 3)}, (KV <= Q + 3) & (KV >= Q - 6)),
    "window and causal": (SQUARE, {"is_causal": True, "sliding_window": (6, 3)}, (KV <= Q) & (KV >= Q - 6)),
    "open window": (SQUARE, {"sliding_window": (None, 4)}, KV <= Q + 4),
    "window, bottom right": (
        WIDE,
        {"is_causal": True, "sliding_window": 9, "causal_alignment": "bottom_right"},
        (WKV <= WQ + 32) & (WKV > WQ + 32 - 9),
    ),
    "mask": (SQUARE, {"mask": masks.prefix_lm(11)}, (KV <= Q) | (KV < 11)),
    "mask and causal": (
        SQUARE,
        {"mask": masks.Chunked(16) | masks.KeyLength(2), "is_causal": True},
        ((KV // 16 == Q // 16) | (KV < 2)) & (KV <= Q),
    ),
    "dense mask": (SQUARE, {"mask": SHOWN}, SHOWN),
    "dense mask for all, window": (
        SQUARE,
        {"mask": SHOWN[:1, :1], "sliding_window": (20, 20)},
        SHOWN[:1, :1] & ((Q - KV).abs() <= 20),
    ),
    "documents": (
        SQUARE,
        {"segment_ids": segment_ids_from_lengths(PACKED, 40), "is_causal": True},
        same(documents(PACKED, 40), documents(PACKED, 40)) & (KV <= Q),
    ),
    "segments of both": (WIDE, {"segment_ids": (IDS[:, :24], IDS.int())}, same(IDS[:, :24], IDS)),
    "lengths": (
        SQUARE,
        {"q_lens": torch.tensor([13, 41]), "kv_lens": torch.tensor([40, 17], dtype=torch.int32)},
        (LENS[:, :1] > Q) & (LENS[:, 1:] > KV),
    ),
    "all at once": (
        SQUARE,
        {
            "is_causal": True,
            "sliding_window": 30,
            "mask": SHOWN[:, :1],
            "segment_ids": IDS[:, :40],
            "kv_lens": torch.tensor([33, 0]),
        },
        (KV <= Q)
        & (KV > Q - 30)
        & SHOWN[:, :1]
        & same(IDS[:, :40], IDS[:, :40])
        & (torch.tensor([33, 0])[:, None, None, None] > KV),
    ),
}


# What differs in the mask alone is the same to the kernels.
IN_EAGER = ("window of one key", "open window", "window, bottom right", "mask", "dense mask for all, window")


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "eager") for name in CASES] + [(name, "xla") for name in CASES if name not in IN_EAGER],
    indirect=["device"],
)
def test_equals_sdpa_with_the_mask_written_out(name, device):
    shape, options, seen = CASES[name]
    inputs = qkv(**shape)
    seen = seen.broadcast_to(2, 4, *seen.shape[-2:])
    blind = ~seen.any(-1, keepdim=True)  # rows that see nothing, where SDPA answers otherwise
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    wide = leaves(inputs, dtype=torch.float64)
    want = F.scaled_dot_product_attention(*wide, attn_mask=seen | blind, enable_gqa=True)
    want = want.masked_fill(blind, 0.0)
    want.backward(cotangent.double())

    ours = leaves(inputs, device)
    got, lse = flash_attention(*ours, **{n: to(device, x) for n, x in options.items()}, return_lse=True)
    got.backward(cotangent.to(device))
    assert torch.equal(lse.isneginf().cpu(), blind[..., 0])
    assert not got.cpu()[blind[..., 0]].any()
    assert relative(got, want) < FORWARD
    for name_, x, y in zip("qkv", ours, wide):
        if name == "window of one key" and name_ != "v":  # a constant softmax
            assert x.grad.abs().max() < BACKWARD
        else:
            assert relative(x.grad, y.grad) < BACKWARD


def test_masks_are_those_of_the_package():
    import xla_attention

    assert set(masks.__all__) <= set(dir(masks))
    assert xla_attention.masks is masks


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_segment_ids_of_packed_documents(where, first_device):
    ids = segment_ids_from_lengths(torch.tensor([[3, 0, 2], [0, 7, 0], [1, 2, 3]], device=where), 7)
    assert ids.device.type == where
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[0, 0, 0, 2, 2, 3, 3], [1] * 7, [0, 1, 1, 2, 2, 2, 3]]
    assert segment_ids_from_lengths(torch.tensor([2, 1]), 3).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("lengths", "total", "error", "message"),
    [
        ([4, 4], 7, ValueError, r"lengths: got \[4, 4\], .* sum at most total=7"),
        ([4, -1], 7, ValueError, "each must be at least 0"),
        ([1.0], 7, TypeError, "lengths: got torch.float32, needs a tensor of int32 or int64"),
        ([[[1]]], 7, ValueError, r"lengths: got shape \(1, 1, 1\)"),
        ([1], 0, ValueError, "total 0, .* at least 1"),
        ([1], 2.0, TypeError, "total: got float, needs an int"),
    ],
)
def test_lengths_that_are_refused(lengths, total, error, message):
    with pytest.raises(error, match=message):
        segment_ids_from_lengths(torch.tensor(lengths), total)
    with pytest.raises(TypeError, match="lengths: got list"):
        segment_ids_from_lengths([1, 2], 3)
