"""What the FlexAttention tests share: problems, the reference, and how results are compared."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch_xla
from torch._higher_order_ops.flex_attention import math_attention

from xla_attention import create_block_mask, flex_attention
from xla_attention.flex.variants import Problem, Variant

# Frobenius norm of the difference over that of torch's result in float64; float32 rounds at 6e-8.
LIMIT = 1e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of an attention; ``kv_batch`` 1 is broadcast."""

    q_len: int = 64
    kv_len: int | None = None
    batch: int = 2
    kv_batch: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32

    def problem(self, device="cpu") -> Problem:
        return Problem(self.batch, self.heads, self.q_len, self.kv_len or self.q_len, device)

    def tensors(self, seed=0):
        """q, k, v and the gradients of out and lse."""
        generator = torch.Generator().manual_seed(seed)
        kv_batch, kv_len = self.kv_batch or self.batch, self.kv_len or self.q_len
        shapes = (
            (self.batch, self.heads, self.q_len, self.head_dim),
            (kv_batch, self.kv_heads, kv_len, self.head_dim),
            (kv_batch, self.kv_heads, kv_len, self.value_dim),
            (self.batch, self.heads, self.q_len, self.value_dim),
            (self.batch, self.heads, self.q_len),
        )
        return [torch.randn(s, generator=generator) for s in shapes]

    def __str__(self) -> str:
        return f"{self.q_len}x{self.kv_len or self.q_len}"


def in_torch(q, k, v, score_mod, mask_mod):
    """What torch's eager ``flex_attention`` computes, without the compiler around it.

    That one has no gradient for captured tensors of shape (), and compiles each function for seconds.
    """
    score_mod = score_mod or (lambda score, *_: score)
    mask_mod = mask_mod or (lambda b, h, q_idx, kv_idx: q_idx >= 0)
    scale = 1 / math.sqrt(q.shape[-1])
    o, lse, _ = math_attention(q, k, v, score_mod, (mask_mod,), scale, {})
    return o, lse * math.log(2)


def ours(q, k, v, score_mod, mask_mod, **options):
    block_mask = None
    if mask_mod is not None:
        # Lists are not read where there is a mask_mod; those of the whole mask would take long to make.
        block_mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device=q.device)
    return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True, **options)


def run(attention, make, shape, device="cpu", dtype=torch.float32):
    """out, lse, dq, dk, dv and the gradients of learned tensors, of ``make(problem)``'s variant."""
    leaves = [x.to(device, dtype).detach().requires_grad_() for x in shape.tensors()[:3]]
    do, dlse = (x.to(device, dtype) for x in shape.tensors()[3:])
    variant: Variant = make(shape.problem(device))
    o, lse = attention(*leaves, variant.score_mod, variant.mask_mod)
    seen = torch.isfinite(lse)  # where nothing is seen, lse is constant
    ((o * do).sum() + torch.where(seen, lse * dlse, 0.0).sum()).backward()
    if device != "cpu":
        torch_xla.sync()
    return [o, lse, *(x.grad for x in (*leaves, *variant.learned))]


def distance(got, want):
    """Frobenius norm of the difference over that of ``want``; infinite if -inf is in other places."""
    got, want = got.detach().cpu().double(), want.detach().double()
    assert got.shape == want.shape
    if not torch.equal(got.isneginf(), want.isneginf()):
        return math.inf
    got, want = (x.nan_to_num(nan=math.inf, neginf=0) for x in (got, want))
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def errors(make, shape):
    """The errors of ours, by result."""
    want = run(in_torch, make, shape, dtype=torch.float64)
    got = run(ours, make, shape, torch_xla.device())
    names = ["out", "lse", "dq", "dk", "dv", *(f"learned {n}" for n in range(len(want) - 5))]
    return {name: distance(g, w) for name, g, w in zip(names, got, want, strict=True)}


def check(make, shape):
    for name, error in errors(make, shape).items():
        assert error < LIMIT, (name, error)
