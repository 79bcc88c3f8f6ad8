"""T5's bias, learned for each head and bucket of distances, far ones wider (arXiv:1910.10683)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from xla_attention.flex.variants.variant import Problem, Variant


def t5_bias(table: Tensor, max_distance: int = 128) -> Callable[..., Tensor]:
    """A score_mod of an encoder, which tells keys before the query from those behind it.

    Args:
        table: ``[buckets, heads]``: half of the buckets for each direction, and half of those for one
            distance each.
        max_distance: from where on all distances are in the last bucket.
    """
    half = table.shape[0] // 2
    exact = half // 2

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (kv_idx - q_idx).abs()
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact)
        far = (exact + (ratio * (half - exact)).int()).clamp(max=half - 1)
        bucket = torch.where(distance < exact, distance, far)
        return score + table[bucket + torch.where(kv_idx > q_idx, half, 0), h]

    return add_bias


def example(problem: Problem) -> Variant:
    """T5's 32 buckets."""
    table = torch.randn(32, problem.heads, generator=torch.Generator().manual_seed(0))
    table = table.to(problem.device, problem.dtype).requires_grad_()
    return Variant(score_mod=t5_bias(table), learned=(table,))
