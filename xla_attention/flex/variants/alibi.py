"""ALiBi: scores fall with distance, in each head by a slope of its own (Press et al., arXiv:2108.12409)."""

from collections.abc import Callable

import torch
from torch import Tensor

from xla_attention.flex.variants.causal import causal
from xla_attention.flex.variants.variant import Problem, Variant


def alibi(heads: int) -> Callable[..., Tensor]:
    """A score_mod with the paper's slopes: ``2 ** (-8 (h + 1) / heads)``."""

    def add_distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.exp2(-((h + 1) * 8.0 / heads)) * (kv_idx - q_idx)

    return add_distance


def example(problem: Problem) -> Variant:
    """With the causal mask, as in the paper."""
    return Variant(score_mod=alibi(problem.heads), mask_mod=causal)
