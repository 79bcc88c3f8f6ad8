"""How paged attention is cut into blocks, by hardware and shapes."""

from __future__ import annotations

import dataclasses

from pallas_kernels.hardware import MIB, Hardware

LANES = 128
_MAX_BLOCK_BYTES = 4 * MIB  # of keys and values in flight at once; HBM is busy long before


@dataclasses.dataclass(frozen=True)
class PagedBlocks:
    """Tiling of the kernel.

    Attributes:
        block_q: queries of one sequence computed together.
        block_kv: keys of one buffer, whole pages.
        depth: buffers, of which one is computed with while the others are filled.
        chunks: steps of the online softmax in a block; logits of one overlap the softmax of the other.
        heads: kv heads in one matrix product, the others' queries being zero there.
        transposed: compute S^T, P^T and O^T, of one head at a time; for rows that fill lanes.
        vmem_bytes: limit given to the compiler.
    """

    block_q: int
    block_kv: int
    depth: int
    chunks: int
    heads: int
    transposed: bool
    vmem_bytes: int


def choose_blocks(
    *,
    queries: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pages_per_seq: int,
    kv_itemsize: int,
    hardware: Hardware,
    block_kv: int | None = None,
    keyed: int = 0,
) -> PagedBlocks:
    """Blocks for sequences of up to ``queries`` queries.

    One query a sequence is bound by HBM: heads share one product, and large buffers keep it busy. Many
    queries are bound by the MXU: each head has products of its own. ``keyed`` operands of a score function
    are fetched for each pair of a query and a key.

    Raises:
        ValueError: VMEM has no room for those.
    """
    group = heads // kv_heads
    small = hardware.vmem_bytes < 32 * MIB
    most = max(8, (256 if small else 1024) // group)
    block_q = min(_power_of_two(queries), most)
    # As many heads as fill a register's rows or lanes, and whole lanes of their keys.
    at_once = next(
        n
        for n in range(1, kv_heads + 1)
        if kv_heads % n == 0
        and (n == kv_heads or (n * block_q * group >= LANES and n * head_dim % LANES == 0))
    )
    context = page_size * pages_per_seq
    token = 2 * kv_heads * head_dim * kv_itemsize
    depth = 3
    budget = min(_MAX_BLOCK_BYTES, hardware.vmem_bytes // (8 if queries == 1 else 16))
    # Of few bytes a token a block is long, or its DMA would be over before its arithmetic.
    block = _power_of_two_below(min(budget // token, 4096 if queries == 1 else 1024))
    rows = at_once * block_q * group
    if queries > 1:
        block = min(block, max(256, _power_of_two_below(2**19 // rows)))
    block = max(min(block, _power_of_two(context)), page_size, LANES)
    # Values for each pair of a query and a key take what is left.
    while (values := keyed * depth * 4 * heads * block_q * block) > hardware.vmem_bytes // 4:
        if block > max(page_size, LANES):
            block //= 2
        elif block_q > 8:
            block_q //= 2
        else:
            raise ValueError(
                f"score: reads {keyed} operands by query and key, of which a block takes {values} bytes, and "
                f"{hardware.name} has room for {hardware.vmem_bytes // 4}"
            )
    block = block_kv or block
    chunks = 2 if block >= 512 else 1
    transposed = at_once == 1 and queries > 1 and block_q * group % LANES == 0
    limit = min(hardware.vmem_bytes * 7 // 8, 64 * MIB)
    return PagedBlocks(block_q, block, depth, chunks, at_once, transposed, limit)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def _power_of_two_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
