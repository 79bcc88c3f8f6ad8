"""Document masking: documents packed into a sequence do not see each other (Llama 3, arXiv:2407.21783)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from xla_attention.flex.variants.causal import causal
from xla_attention.flex.variants.variant import Problem, Variant


def documents(ids: Tensor) -> Callable[..., Tensor]:
    """A mask_mod.

    Args:
        ids: ``[seq]`` integers, the document of each position.
    """

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    return same_document


def document_ids(length: int, device: torch.device | str) -> Tensor:
    """The ids of documents of about a fifth of the sequence, for examples."""
    lengths = torch.tensor([0.19, 0.31, 0.08, 0.25]).mul(length).long()
    ends = lengths.cumsum(0)
    return (torch.arange(length)[:, None] >= ends).sum(1).to(device)


def example(problem: Problem) -> Variant:
    """Five documents, causal."""
    ids = document_ids(max(problem.q_len, problem.kv_len), problem.device)
    return Variant(mask_mod=and_masks(causal, documents(ids)))
