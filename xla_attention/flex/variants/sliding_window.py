"""Sliding window: a query sees the last keys up to its own position (Mistral, arXiv:2310.06825)."""

from collections.abc import Callable

from torch import Tensor

from xla_attention.flex.variants.variant import Problem, Variant


def sliding_window(size: int) -> Callable[..., Tensor]:
    """A mask_mod that shows ``size`` keys, the query's own among them."""

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    return window


def example(problem: Problem) -> Variant:
    """A quarter of the sequence."""
    return Variant(mask_mod=sliding_window(max(problem.q_len // 4, 1)))
