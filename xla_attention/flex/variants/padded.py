"""Jagged batches: sequences of different lengths, padded at the end."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from xla_attention.flex.variants.causal import causal
from xla_attention.flex.variants.variant import Problem, Variant


def padded(lengths: Tensor) -> Callable[..., Tensor]:
    """A mask_mod: padding sees nothing and is not seen; its output is zero.

    Args:
        lengths: ``[batch]`` integers, of the sequences.
    """

    def inside(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx < lengths[b]) & (kv_idx < lengths[b])

    return inside


def example(problem: Problem) -> Variant:
    """Two thirds of the sequence and less, causal."""
    lengths = 2 * problem.q_len // torch.arange(3, 3 + problem.batch)
    return Variant(mask_mod=and_masks(padded(lengths.to(problem.device)), causal))
