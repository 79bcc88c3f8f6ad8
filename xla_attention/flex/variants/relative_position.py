"""A learned bias for each head and distance of query and key (after Shaw et al., arXiv:1803.02155)."""

from collections.abc import Callable

import torch
from torch import Tensor

from xla_attention.flex.variants.variant import Problem, Variant


def relative_position(table: Tensor) -> Callable[..., Tensor]:
    """A score_mod that adds ``table[h, q_idx - kv_idx + n]``.

    Args:
        table: ``[heads, 2 n + 1]``; distances beyond ``n`` share its ends.
    """
    n = table.shape[1] // 2

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx).clamp(-n, n) + n]

    return add_bias


def example(problem: Problem) -> Variant:
    """Distances up to 64."""
    table = torch.randn(problem.heads, 129, generator=torch.Generator().manual_seed(0))
    table = table.to(problem.device, problem.dtype).requires_grad_()
    return Variant(score_mod=relative_position(table), learned=(table,))
