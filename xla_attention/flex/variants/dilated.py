"""Dilated sliding window: every n-th of the last keys (Longformer, arXiv:2004.05150)."""

from collections.abc import Callable

from torch import Tensor

from xla_attention.flex.variants.variant import Problem, Variant


def dilated(size: int, dilation: int) -> Callable[..., Tensor]:
    """A mask_mod that shows ``size`` keys, ``dilation`` apart, the query's own among them."""

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < size * dilation) & (distance % dilation == 0)

    return window


def example(problem: Problem) -> Variant:
    """Every third key of half of the sequence."""
    return Variant(mask_mod=dilated(max(problem.q_len // 6, 1), 3))
