"""Soft-capping: scores are kept between -cap and cap by a tanh (Gemma 2, arXiv:2408.00118)."""

from collections.abc import Callable

import torch
from torch import Tensor

from xla_attention.flex.variants.causal import causal
from xla_attention.flex.variants.variant import Problem, Variant


def softcap(cap: float) -> Callable[..., Tensor]:
    """A score_mod: ``cap * tanh(score / cap)``."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def example(problem: Problem) -> Variant:
    """With the causal mask; the cap is low, so that it shows."""
    return Variant(score_mod=softcap(1.5), mask_mod=causal)
