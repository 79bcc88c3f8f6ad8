"""What the operator refuses, and that the message names the argument and what is allowed."""

import pytest
import torch

from pallas_kernels.flash_attention import BlockSizes
from xla_attention import flash_attention


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
        ({"k": (2, 2, 8, 64)}, "got head_dim 64, q has 32"),
        ({"v": (2, 2, 9, 32)}, r"k and v must have one shape: got \(2, 2, 8, 32\) and \(2, 2, 9, 32\)"),
        ({"q": (2, 4, 8, 15), "k": (2, 2, 8, 15)}, "head_dim: got 15, allowed are 16 to 256"),
        ({"q": (2, 4, 8, 257), "k": (2, 2, 8, 257)}, "head_dim: got 257"),
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
        ({"causal_alignment": "bottom_right"}, ValueError, "needs is_causal=True"),
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
