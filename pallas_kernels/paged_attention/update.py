"""Writes new keys and values into the pages, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.hardware import Hardware

_TILE_BYTES = 32  # rows of a packed register, times the bytes of an element


def update_kv_pages(kv_pages: Array, kv: Array, slots: Int[Array, " t"], *, hardware: Hardware) -> Array:
    """The pages with the row of each token replaced, in the memory of ``kv_pages`` where that is donated.

    Rows are packed several to a register, so what is read, changed and written back is a tile of them. Tokens
    are visited by slot: those of one tile follow each other, and it stays in VMEM meanwhile.

    It is not fused with attention, as there is no pass over the pages to save: it reads and writes one tile a
    token, 128 KB at 8 kv heads of 128 in bfloat16, beside the 32 MB that a query at 8k reads.

    Args:
        kv_pages: ``[num_pages, page_size, 2 * kv_heads * head_dim]``.
        kv: ``[tokens, 2 * kv_heads * head_dim]`` in the dtype of the pages: K of all heads, then V.
        slots: ``[tokens]`` int32: ``page * page_size + row`` of each token; outside the pool, negative ones
            included, a token is dropped. Of equal ones the last token is kept.
        hardware: what to compile for.

    Returns:
        The pages.

    Raises:
        ValueError, TypeError: shapes or types do not fit; the message names the argument.
    """
    num_pages, page_size, width = kv_pages.shape
    if kv.shape != (*slots.shape, width):
        raise ValueError(f"kv: got shape {kv.shape}, needs [{slots.shape[0]}, {width}]")
    if kv.dtype != kv_pages.dtype:
        raise TypeError(f"kv: got {kv.dtype}, kv_pages is {kv_pages.dtype}")
    rows = num_pages * page_size
    tile = min(_TILE_BYTES // kv_pages.dtype.itemsize, page_size)
    slots = jnp.where((slots >= 0) & (slots < rows), slots, rows)
    order = jnp.argsort(slots, stable=True)
    slots, kv = slots[order], kv[order]
    # Tokens that are dropped come last, and stay at the last tile that was visited.
    most = jnp.max(jnp.where(slots < rows, slots, 0))
    tiles = jnp.minimum(slots, most) // tile
    row = jnp.where(slots < rows, slots % tile, -1)

    def kernel(tiles: Any, row: Any, kv: Any, pages: Any, o: Any) -> None:
        n = pl.program_id(0)

        @pl.when((n == 0) | (tiles[n] != tiles[jnp.maximum(n - 1, 0)]))
        def _() -> None:
            o[...] = pages[...]

        here = lax.broadcasted_iota(jnp.int32, (tile, width), 0) == row[n]
        o[0] = _narrow(jnp.where(here, _wide(kv[0]), _wide(o[0])), o.dtype)

    whole = pl.BlockSpec((1, tile, width), lambda n, tiles, row: (tiles[n], 0, 0))
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows // tile, tile, width), kv_pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(slots),),
            in_specs=[pl.BlockSpec((1, 1, width), lambda n, tiles, row: (n, 0, 0)), whole],
            out_specs=whole,
        ),
        input_output_aliases={3: 0},
        interpret=hardware.interpret,
        name="update_kv_pages",
    )(tiles, row, kv[:, None], kv_pages.reshape(rows // tile, tile, width))
    return out.reshape(kv_pages.shape)


def _wide(x: Array) -> Array:
    """Elements of 8 bits as int32, which every TPU can select by; others as they are."""
    return lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32) if x.dtype.itemsize == 1 else x


def _narrow(x: Array, dtype: jnp.dtype) -> Array:
    """The inverse of :func:`_wide`."""
    return lax.bitcast_convert_type(x.astype(jnp.int8), dtype) if x.dtype != dtype else x
