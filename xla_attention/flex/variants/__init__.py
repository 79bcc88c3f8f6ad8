"""The variants of the FlexAttention article (arXiv:2412.05496), each in a file of its own.

A file has the function, or what makes it from sizes and tensors, and ``example``, which sets the sizes for a
given problem: ``VARIANTS`` lists those by name. ``xla-attention show-mask NAME`` draws one.
"""

from collections.abc import Callable

from xla_attention.flex.variants import (
    alibi,
    causal,
    combinations,
    dilated,
    documents,
    full,
    natten,
    padded,
    prefix_lm,
    relative_position,
    sliding_window,
    softcap,
    t5_bias,
    tanh_gated,
)
from xla_attention.flex.variants.variant import Problem, Variant

_FILES = (
    full,
    causal,
    relative_position,
    alibi,
    t5_bias,
    softcap,
    sliding_window,
    prefix_lm,
    documents,
    padded,
    tanh_gated,
    dilated,
    natten,
)
_COMBINATIONS = (
    combinations.gemma_2,
    combinations.packed_alibi,
    combinations.packed_window,
    combinations.sinks_and_window,
    combinations.heads_apart,
    combinations.gated_relative_softcap,
)
VARIANTS: dict[str, Callable[[Problem], Variant]] = {
    **{file.__name__.rpartition(".")[2]: file.example for file in _FILES},
    **{example.__name__: example for example in _COMBINATIONS},
}

__all__ = ["VARIANTS", "Problem", "Variant"]
