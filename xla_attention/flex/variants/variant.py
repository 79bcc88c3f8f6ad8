"""What a variant of attention is: a score_mod, a mask_mod, or both, and the tensors learned for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Variant:
    """Functions for ``flex_attention``.

    Attributes:
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, or None.
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, for ``create_block_mask``, or None.
        learned: captured tensors that want gradients.
    """

    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    learned: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Problem:
    """The attention that an example of a variant is made for; ``dtype`` is that of what is learned."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    device: Any = "cpu"
    dtype: torch.dtype = torch.float32
