"""Prefix LM: the prefix sees all of itself, what follows is causal (T5, arXiv:1910.10683; PaliGemma)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import or_masks

from xla_attention.flex.variants.causal import causal
from xla_attention.flex.variants.variant import Problem, Variant


def prefix_lm(lengths: Tensor) -> Callable[..., Tensor]:
    """A mask_mod.

    Args:
        lengths: ``[batch]`` integers, of the prefixes.
    """

    def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    return or_masks(prefix, causal)


def example(problem: Problem) -> Variant:
    """Prefixes of a third of the sequence and less."""
    lengths = problem.kv_len // torch.arange(3, 3 + problem.batch)
    return Variant(mask_mod=prefix_lm(lengths.to(problem.device)))
