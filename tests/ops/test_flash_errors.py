"""What the operator refuses, and that the message names the argument and what is allowed."""

import pytest
import torch
from operator_cases import to

from pallas_kernels.flash_attention import BlockSizes
from xla_attention import flash_attention, masks


def tensors(q=(2, 4, 8, 32), k=(2, 2, 8, 32), v=None, dtype=torch.float32, device="cpu"):
    return [torch.ones(s, dtype=dtype, device=device) for s in (q, k, v or k)]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (4, 8, 32)}, r"q: got shape \(4, 8, 32\), needs \[batch, heads, seq, head_dim\]"),
        ({"v": (2, 8, 32)}, r"v: got shape \(2, 8, 32\)"),
        ({"q": (3, 4, 8, 32)}, "k and v: got batch 2, q has 3"),
        ({"k": (2, 3, 8, 32)}, "got 3 heads, which does not divide q's 4"),
        ({"k": (2, 8, 8, 32)}, "got 8 heads, which does not divide q's 4"),
        ({"k": (2, 2, 8, 64)}, "k: got head_dim 64, q has 32"),
        ({"v": (2, 2, 9, 32)}, r"one batch, heads and length: got \(2, 2, 8, 32\) and \(2, 2, 9, 32\)"),
        ({"v": (2, 1, 8, 32)}, r"one batch, heads and length: got \(2, 2, 8, 32\) and \(2, 1, 8, 32\)"),
        ({"q": (2, 4, 8, 15), "k": (2, 2, 8, 15)}, "head_dim: got 15, allowed are 16 to 576"),
        ({"q": (2, 4, 8, 577), "k": (2, 2, 8, 577)}, "head_dim: got 577"),
        ({"v": (2, 2, 8, 513)}, "v: got head_dim 513, allowed are 16 to 512"),
        ({"q": (2, 4, 0, 32)}, r"q: got shape \(2, 4, 0, 32\), every dimension must be at least 1"),
        ({"k": (2, 2, 0, 32)}, "k: got shape"),
        ({"k": (2, 0, 8, 32)}, "k: got shape"),
    ],
)
def test_shapes(shapes, message, device):
    with pytest.raises(ValueError, match=message):
        flash_attention(*tensors(**shapes, device=device))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": float("nan")}, ValueError, "scale: got nan, needs a finite number"),
        ({"scale": "big"}, TypeError, "scale: got str, needs a float"),
        ({"scale": True}, TypeError, "scale: got bool"),
        ({"softcap": 0.0}, ValueError, "softcap: got 0.0, needs a finite number above 0"),
        ({"softcap": float("inf")}, ValueError, "softcap: got inf"),
        (
            {"causal_alignment": "left", "is_causal": True},
            ValueError,
            "causal_alignment: got 'left', allowed",
        ),
        ({"causal_alignment": "bottom_right"}, ValueError, "needs is_causal=True, sliding_window or alibi"),
        ({"sliding_window": 4}, ValueError, r"sliding_window: got 4 without is_causal=True; .* \(3, 3\)"),
        ({"sliding_window": 0, "is_causal": True}, ValueError, "sliding_window: got 0, needs at least 1"),
        ({"sliding_window": (-1, 0)}, ValueError, "sliding_window: got -1, needs at least 0"),
        ({"sliding_window": (1, 2, 3)}, TypeError, r"sliding_window: got \(1, 2, 3\), needs an int, a pair"),
        ({"sliding_window": (1.0, None)}, TypeError, "sliding_window: got 1.0, needs an int"),
        ({"mask": "causal"}, TypeError, "mask: got str, needs a value of xla_attention.masks or a bool"),
        ({"mask": [masks.Causal()] * 4}, TypeError, r"mask: got list, needs .* masks.PerHead\(\[...\]\)"),
        ({"mask": masks.PerHead([masks.Full()] * 3)}, ValueError, "mask: got masks of 3 heads, q has 4"),
        ({"block_sizes": (128, 128)}, TypeError, "block_sizes: got tuple, needs BlockSizes or None"),
    ],
)
def test_options(options, error, message, device):
    with pytest.raises(error, match=message):
        flash_attention(*tensors(device=device), **options)


def test_not_tensors(device):
    q, k, v = tensors(device=device)
    with pytest.raises(TypeError, match="k: got list, needs a torch.Tensor"):
        flash_attention(q, k.tolist(), v)


def test_mixed_dtypes(device):
    q, k, v = tensors(device=device)
    with pytest.raises(
        TypeError, match="share one dtype: got torch.float32, torch.bfloat16 and torch.float32"
    ):
        flash_attention(q, k.bfloat16(), v)


def test_mixed_devices(first_device):
    q, k, v = tensors()
    with pytest.raises(ValueError, match="on one device: got cpu, xla:0 and cpu"):
        flash_attention(q, k.to(first_device), v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_dtypes_on_xla(dtype, first_device):
    with pytest.raises(TypeError, match=f"got {dtype} on xla, allowed there are float32, bfloat16"):
        flash_attention(*tensors(dtype=dtype, device=first_device))


def test_integers_in_eager_torch():
    with pytest.raises(TypeError, match="got torch.int64 on cpu, allowed there are float32"):
        flash_attention(*tensors(dtype=torch.int64))


def test_float16_autocast_on_xla(first_device):
    with pytest.raises(TypeError, match="torch.float16 on xla"), torch.autocast("xla", dtype=torch.float16):
        flash_attention(*tensors(device=first_device))


def test_block_sizes_are_accepted(device):
    q, k, v = tensors(device=device)
    torch.testing.assert_close(flash_attention(q, k, v, block_sizes=BlockSizes()), flash_attention(q, k, v))


IDS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.ones(2, 4, 8, 8)}, TypeError, "mask: got torch.float32, allowed .* are bool"),
        (
            {"mask": torch.ones(8, 8).bool()},
            ValueError,
            r"mask: got shape \(8, 8\), needs \[1 or 2, 1 or 4, 8",
        ),
        (
            {"bias": torch.ones(2, 2, 8, 8)},
            ValueError,
            r"bias: got shape \(2, 2, 8, 8\), needs \[1 or 2",
        ),
        ({"bias": torch.ones(1, 1, 8, 8).int()}, TypeError, "bias: got torch.int32, allowed"),
        ({"bias": torch.ones(1, 1, 8, 8).double()}, TypeError, "bias: got torch.float64, allowed"),
        ({"segment_ids": IDS[:, :7]}, ValueError, r"segment_ids of q: got shape \(2, 7\), needs \[2, 8\]"),
        ({"segment_ids": (IDS, IDS[:1])}, ValueError, r"segment_ids of k and v: got shape \(1, 8\)"),
        (
            {"segment_ids": IDS.float()},
            TypeError,
            "segment_ids of q: got torch.float32, allowed .* int32",
        ),
        ({"segment_ids": (IDS, None)}, TypeError, "segment_ids: needs a tensor, or a pair of them"),
        ({"segment_ids": [0, 1]}, TypeError, "segment_ids: needs a tensor, or a pair of them"),
        ({"alibi_slopes": torch.ones(2)}, ValueError, r"alibi_slopes: got shape \(2,\), needs \[4\]"),
        ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes: got float, needs a torch.Tensor"),
        (
            {"alibi_slopes": torch.ones(4, requires_grad=True)},
            ValueError,
            "alibi_slopes: these require grad, but slopes are constants here",
        ),
        ({"sinks": torch.ones(4, 1)}, ValueError, r"sinks: got shape \(4, 1\), needs \[4\]"),
        ({"q_lens": torch.ones(2)}, TypeError, "q_lens: got torch.float32, allowed"),
        ({"kv_lens": torch.ones(3).int()}, ValueError, r"kv_lens: got shape \(3,\), needs \[2\]"),
    ],
)
def test_optional_tensors(options, error, message, device):
    options = {name: to(device, x) for name, x in options.items()}
    with pytest.raises(error, match=message):
        flash_attention(*tensors(device=device), **options)


def test_slopes_may_require_grad_where_none_is_asked_for(device):
    slopes = torch.ones(4, device=device, requires_grad=True)
    with torch.no_grad():
        flash_attention(*tensors(device=device), alibi_slopes=slopes)


def test_one_tensor_of_segment_ids_for_two_lengths(device):
    with pytest.raises(ValueError, match="segment_ids: got one tensor for q_len 8 and kv_len 9; .* give a"):
        flash_attention(*tensors(k=(2, 2, 9, 32), device=device), segment_ids=IDS.to(device))


def test_operands_on_another_device(first_device):
    with pytest.raises(ValueError, match="sinks: got a tensor on cpu, q is on xla:0"):
        flash_attention(*tensors(device=first_device), sinks=torch.ones(4))
