"""Causal attention: a query sees the keys up to its own position, as in language models."""

from torch import Tensor

from xla_attention.flex.variants.variant import Problem, Variant


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The mask_mod."""
    return q_idx >= kv_idx


def example(problem: Problem) -> Variant:
    """The mask alone."""
    return Variant(mask_mod=causal)
