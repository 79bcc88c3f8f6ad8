"""Block sizes of the flash attention kernels, and the choice of them where the caller makes none."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ForwardBlocks:
    """Tiling of the forward pass; numbers are elements of the sequence.

    Attributes:
        block_q: queries of one grid step.
        tile_q: queries whose softmax is computed at once; divides ``block_q``.
        block_kv: keys of one step of the online softmax.
        memory_kv: keys in VMEM at a time; None keeps all of a head there.
        unroll: key blocks that one loop iteration computes.
        border: side of the sub-tiles in which partly visible tiles are cut; empty ones are never computed.
        border_kv: most keys of one softmax on a border.
        ahead: rectangles of the border whose logits are issued before they are needed.
        mxu_row_sums: sum the probabilities on the MXU, by rows of ones beside V^T. They are then summed as
            rounded to V's type.
    """

    block_q: int = 1024
    tile_q: int = 256
    block_kv: int = 512
    memory_kv: int | None = None
    unroll: int = 1
    border: int = 128
    border_kv: int = 256
    ahead: int = 4
    mxu_row_sums: bool = False


@dataclasses.dataclass(frozen=True)
class BackwardBlocks:
    """Tiling of the backward pass; numbers are elements of the sequence.

    Attributes:
        block_kv: keys of one grid step.
        block_q: queries of one iteration of its inner loop.
        memory_q: queries in VMEM at a time; a multiple of ``block_q``.
        chunk_q: queries whose dq is summed in VMEM; None takes all. Several chunks are several passes over
            the keys.
        tile_kv, tile_q: sides of the tiles whose probabilities are computed at once.
        border: side of the sub-tiles in which partly visible tiles are cut; empty ones are never computed.
        ahead: tiles by which the exponentials run ahead of the products.
        transposed: keep the gradients transposed. P and dS are then the stationary operands and fill a
            256-wide MXU, where an operand that is head_dim = 128 wide would fill half.
    """

    block_kv: int = 1024
    block_q: int = 1024
    memory_q: int = 4096
    chunk_q: int | None = None
    tile_kv: int = 256
    tile_q: int = 512
    border: int = 128
    ahead: int = 1
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tiling of both passes; None lets the kernel choose."""

    forward: ForwardBlocks | None = None
    backward: BackwardBlocks | None = None


FORWARD = {
    "v4": ForwardBlocks(tile_q=512, block_kv=256, unroll=2, mxu_row_sums=True),
    "v5e": ForwardBlocks(),
    "v5p": ForwardBlocks(),
    "v6e": ForwardBlocks(tile_q=512, unroll=2, border=256, border_kv=512, mxu_row_sums=True),
}

BACKWARD = {
    "v4": BackwardBlocks(),
    "v5e": BackwardBlocks(),
    "v5p": BackwardBlocks(),
    "v6e": BackwardBlocks(block_kv=2048, tile_q=256, border=256, ahead=3, transposed=True),
}
