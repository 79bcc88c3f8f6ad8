"""Tanh gates on scores: learned for each head and key, closed at zero as Flamingo's (arXiv:2204.14198)."""

from collections.abc import Callable

import torch
from torch import Tensor

from xla_attention.flex.variants.variant import Problem, Variant


def tanh_gated(gates: Tensor) -> Callable[..., Tensor]:
    """A score_mod: ``score * tanh(gates[h, kv_idx])``.

    Args:
        gates: ``[heads, kv_len]``.
    """

    def gated(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * torch.tanh(gates[h, kv_idx])

    return gated


def example(problem: Problem) -> Variant:
    """Random gates."""
    gates = torch.randn(problem.heads, problem.kv_len, generator=torch.Generator().manual_seed(0))
    gates = gates.to(problem.device, problem.dtype).requires_grad_()
    return Variant(score_mod=tanh_gated(gates), learned=(gates,))
