"""What attention is computed: the static description that kernels, references and operators share."""

from __future__ import annotations

import dataclasses

from pallas_kernels.flash_attention.blocks import BlockSizes
from pallas_kernels.masks import Full, Mask


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Attention, less its tensors. Hashable: a kernel is compiled once for each.

    Attributes:
        scale: factor of the logits ``q k^T``.
        mask: which keys each query sees.
        softcap: if given, logits become ``softcap * tanh(logits / softcap)`` before the mask (Gemma 2).
        block_sizes: tiling of the kernels; None lets the kernel choose for its hardware and shapes.
    """

    scale: float
    mask: Mask = Full()
    softcap: float | None = None
    block_sizes: BlockSizes | None = None
