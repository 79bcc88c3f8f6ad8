"""Errors of ``flex_attention`` on XLA against torch's eager one in float64, over functions and shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_xla
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention

from xla_attention.benchmarks.flex_functions import Make, functions, random_function
from xla_attention.flex import create_block_mask
from xla_attention.flex.variants import VARIANTS, Problem
from xla_attention.ops import flex_attention

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

    def problem(self, device: Any, dtype: torch.dtype) -> Problem:
        return Problem(self.batch, self.heads, self.q_len, self.kv_len or self.q_len, device, dtype)

    def tensors(self, seed: int = 0) -> list[Tensor]:
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


def in_torch(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable | None, mask_mod: Callable | None
) -> tuple[Tensor, Tensor]:
    """What torch's eager ``flex_attention`` computes, without the compiler around it.

    That one has no gradient for captured tensors of shape (), and compiles each function for seconds.
    """
    score_mod = score_mod or (lambda score, *_: score)
    mask_mod = mask_mod or (lambda b, h, q_idx, kv_idx: q_idx >= 0)
    scale = 1 / math.sqrt(q.shape[-1])
    o, lse, _ = math_attention(q, k, v, score_mod, (mask_mod,), scale, {})
    return o, lse * math.log(2)


def ours(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable | None, mask_mod: Callable | None
) -> tuple[Tensor, Tensor]:
    """``flex_attention`` of this package."""
    block_mask = None
    if mask_mod is not None:
        # Its lists are not read, as there is a mask_mod: those of batch 0 and head 0 will do.
        block_mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device=q.device)
    return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True)


def run(
    attention: Callable, make: Make, shape: Shape, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """out, lse, dq, dk, dv and the gradients of learned tensors, of ``make(problem)``'s variant."""
    leaves = [x.to(device, dtype).detach().requires_grad_() for x in shape.tensors()[:3]]
    do, dlse = (x.to(device, dtype) for x in shape.tensors()[3:])
    variant = make(shape.problem(device, dtype))
    o, lse = attention(*leaves, variant.score_mod, variant.mask_mod)
    seen = torch.isfinite(lse)  # where nothing is seen, lse is constant
    ((o * do).sum() + torch.where(seen, lse * dlse, 0.0).sum()).backward()
    if device != "cpu":
        torch_xla.sync()
    return [o, lse, *(x.grad for x in (*leaves, *variant.learned))]


def distance(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; infinite if -inf is in other places."""
    got, want = got.detach().cpu().double(), want.detach().double()
    assert got.shape == want.shape
    if not torch.equal(got.isneginf(), want.isneginf()):
        return math.inf
    got, want = (x.nan_to_num(nan=math.inf, neginf=0) for x in (got, want))
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def errors(make: Make, shape: Shape) -> dict[str, float]:
    """The errors of ours, by result."""
    # In this order: the first XLA device must precede the first backward pass on the CPU.
    got = run(ours, make, shape, torch_xla.device())
    want = run(in_torch, make, shape, dtype=torch.float64)
    names = ["out", "lse", "dq", "dk", "dv", *(f"learned {n}" for n in range(len(want) - 5))]
    return {name: distance(g, w) for name, g, w in zip(names, got, want, strict=True)}


LENGTHS = (1, 37, 64, 196, 277, 1023, 2048)


def cases(*, quick: bool = False, composed: int = 20) -> Iterator[tuple[str, Make, Shape]]:
    """The grid: name, function and shape.

    Args:
        quick: each once, at length 64.
        composed: how many random compositions.
    """
    everything = VARIANTS | functions() | dict(random_function(seed) for seed in range(composed))
    for name, make in everything.items():
        yield name, make, Shape(64)
    if quick:
        return
    for name, make in VARIANTS.items():
        for length in LENGTHS:
            yield name, make, Shape(length, batch=1 if length > 1000 else 2)
    uneven = Shape(196, 277, kv_batch=1, heads=6, kv_heads=2, head_dim=48, value_dim=80)
    for name, make in everything.items():
        yield name, make, uneven


def report(*, quick: bool = False, only: str = "") -> bool:
    """Measures the grid, prints a row for each function, and returns whether every error is below the limit.

    Args:
        quick: a part of the grid.
        only: functions whose name contains this.
    """
    console, failed, worst_of_all = Console(), 0, 0.0
    chosen = [case for case in cases(quick=quick) if only in case[0]]
    for name, make, shape in chosen:
        try:
            found = errors(make, shape)
        except Exception as error:  # counts as a failure; the others are measured all the same
            line, bad = f"{name} {shape}: {error}", True
        else:
            worst = max(found, key=found.__getitem__)
            worst_of_all, bad = max(worst_of_all, found[worst]), not found[worst] < LIMIT
            line = f"{name} {shape}: {len(found)} results, {worst} is off by {found[worst]:.1e}"
        failed += bad
        console.print(f"[red]failed:[/red] {escape(line)}" if bad else escape(line), soft_wrap=True)
    console.print(f"{len(chosen)} cases, {failed} failed; worst of all {worst_of_all:.1e}, limit {LIMIT:.0e}")
    return not failed
