"""What the tests of the operator share: inputs, and how results are compared."""

import torch

# Relative to the largest element: float32 rounds at 6e-8, and sums of up to a few hundred terms of mixed sign
# lose a decimal. The kernels' own tests hold a grid of shapes to the same figures.
FORWARD, BACKWARD = 2e-6, 1e-5


def qkv(q_len=40, kv_len=40, heads=4, kv_heads=2, head_dim=32, batch=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, q_len, head_dim)] + 2 * [(batch, kv_heads, kv_len, head_dim)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def leaves(tensors, device="cpu", dtype=None):
    return [x.detach().to(device=device, dtype=dtype or x.dtype).requires_grad_() for x in tensors]


def relative(got, want):
    """Largest error over the largest element; equal infinities count as equal."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape
    assert torch.equal(got.isinf(), want.isinf())
    got, want = got.nan_to_num(neginf=0), want.nan_to_num(neginf=0)
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()


def repeated(q, *keys):
    """Keys and values as every query head reads them."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in keys]


def indices(q_len, kv_len):
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]


def to(device, value):
    """Tensors, and those in tuples, on ``device``."""
    if isinstance(value, tuple):
        return tuple(to(device, x) for x in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value
