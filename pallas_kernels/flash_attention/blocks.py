"""Block sizes of the flash attention kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tiling of one forward and backward pass."""

    block_q: int | None = None
    block_kv: int | None = None
