"""Values that follow the keys: a slice of each array for every block of keys, in a ring beside the pages'."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.blocks import LANES


def room(context: int, block_kv: int) -> int:
    """Keys that the arrays have: a block may begin at any register of the context."""
    return -(-context // LANES) * LANES + block_kv


def scales_of_pages(
    scale: Float[Array, "pages g"] | None,
    tables: Int[Array, "s p"],
    kv_lens: Int[Array, " s"],
    page_size: int,
    heads: int,
    keys: int,
) -> Float[Array, "s sets heads keys"] | None:
    """Factors by page as factors by key, for ``heads`` kv heads of each set.

    Args:
        scale: of each page and kv head; None, and factors by head alone, give None.
        tables: pages of each sequence, all of them in the pool.
        kv_lens: behind them the factor is 1, whatever is in pages that nothing was written to.
        page_size: tokens of a page.
        heads: of a set.
        keys: padded with factors of 1.
    """
    if scale is None or scale.ndim == 1:
        return None
    by_key = jnp.repeat(scale.astype(jnp.float32)[tables], page_size, axis=1)
    there = jnp.arange(by_key.shape[1]) < kv_lens[:, None]
    by_key = jnp.where(there[..., None], by_key, 1.0).transpose(0, 2, 1)
    by_key = jnp.pad(by_key, ((0, 0), (0, 0), (0, keys - by_key.shape[2])), constant_values=1.0)
    return by_key.reshape(len(tables), -1, heads, keys)


@dataclasses.dataclass(frozen=True)
class ByKey:
    """The arrays inside a kernel.

    Attributes:
        arrays: references to ``[n, ..., keys]`` in HBM.
        by_sequence: of each, whether ``n`` counts sequences, not blocks of queries.
        buffers: of each, ``[depth, ..., block_kv]``.
        arrived: DMA semaphores, one a buffer; those of the pages, since a semaphore counts bytes.
        block_kv: keys of a buffer.
    """

    arrays: tuple[Any, ...]
    by_sequence: tuple[bool, ...]
    buffers: tuple[Any, ...]
    arrived: Any
    block_kv: int

    def _copies(self, slot: Any, block: Any, sequence: Any, start: Any) -> list[Any]:
        keys = pl.ds(pl.multiple_of(start, LANES), self.block_kv)
        return [
            pltpu.make_async_copy(
                x.at[sequence if of_sequence else block, :, :, keys], buffer.at[slot], self.arrived.at[slot]
            )
            for x, of_sequence, buffer in zip(self.arrays, self.by_sequence, self.buffers, strict=True)
        ]

    def start(self, slot: Any, block: Any, sequence: Any, start: Any) -> None:
        """Asks for a block of queries' slices of keys from ``start``."""
        for copy in self._copies(slot, block, sequence, start):
            copy.start()

    def wait(self, slot: Any) -> None:
        """Until what was asked for into a buffer is there."""
        for copy in self._copies(slot, 0, 0, 0):
            copy.wait()
