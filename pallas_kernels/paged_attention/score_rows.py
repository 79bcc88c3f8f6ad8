"""A score function on blocks of queries: what it reads, outside of the kernel, and its values inside.

What varies by query and head is a value for each row of a block. All of those lie in one array, as bits: a
column of lanes each, or of a kernel that computes transposed a row of sublanes. What varies by key follows
the keys through a ring of buffers, whole blocks at a time: one row for each of the queries' rows, or a single
one where all of them read the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.tiles import as_column
from pallas_kernels.paged_attention.blocks import LANES, PagedBlocks
from pallas_kernels.paged_attention.by_key import room
from pallas_kernels.paged_attention.spec import PagedOperands, PagedSpec
from pallas_kernels.score_function import ScoreFunction

SUBLANES = 8


class ScoreInputs(NamedTuple):
    """What a score function reads, by block of queries.

    Attributes:
        rows: ``[n, sets, rows, LANES]`` int32, or transposed ``[n, sets, 8 m, rows]``: values of what varies
            by row; None if nothing does.
        keyed: of what varies by key ``[n, sets, rows, keys]``, or ``[n, 1, 1, keys]``; 32 bits.
        dtypes: of each operand, in the function's order.
        by_key: which of them are in ``keyed``.
    """

    rows: Int[Array, "n sets r c"] | None
    keyed: tuple[Array, ...]
    dtypes: tuple[str, ...]
    by_key: tuple[bool, ...]


def score_inputs(
    operands: PagedOperands,
    spec: PagedSpec,
    sequence: Int[Array, " n"],
    position: Int[Array, " n"],
    blocks: PagedBlocks,
    shape: tuple[int, int, int],
    context: int,
) -> ScoreInputs | None:
    """The inputs for blocks of queries; None without a score function.

    Args:
        operands, spec: of the attention.
        sequence, position: of each block: its row of the page table, and where its first query is.
        blocks: how queries are cut.
        shape: ``(sets, kv heads of a set, group)``.
        context: keys that the page table has room for.
    """
    if spec.score is None:
        return None
    n, block_q = len(sequence), blocks.block_q
    sets, of_set, group = shape
    token = (position[:, None] + jnp.arange(block_q, dtype=jnp.int32)).reshape(-1)
    of_tokens = operands.score(jnp.repeat(sequence, block_q), token)
    of_blocks = operands.score(sequence, position)  # where queries do not differ; XLA drops what is not used
    keys = room(context, blocks.block_kv)

    def by_row(x: Array) -> Array:
        x = jnp.broadcast_to(x, (n * block_q, sets * of_set * group, *x.shape[2:]))
        x = x.reshape(n, block_q, sets, of_set, group, *x.shape[2:])
        return jnp.moveaxis(x, 1, 3).reshape(n, sets, of_set * block_q * group, *x.shape[5:])

    rows, keyed = [], []
    for along, of_token, of_block in zip(spec.score.operands, of_tokens, of_blocks, strict=True):
        if of_token.ndim == 2:
            rows.append(lax.bitcast_convert_type(by_row(of_token), jnp.int32))
            continue
        x = by_row(of_token)
        if along == "key" and of_block.shape[1] == 1:
            x = jnp.broadcast_to(of_block[:, :, None], (n, 1, 1, of_block.shape[2]))
        keyed.append(jnp.pad(x, ((0, 0),) * 3 + ((0, keys - x.shape[3]),)))
    packed = None
    if rows:
        axis, size = (2, SUBLANES) if blocks.transposed else (3, LANES)
        packed = jnp.stack(rows, axis)
        pad = [(0, 0)] * 4
        pad[axis] = (0, -len(rows) % size)
        packed = jnp.pad(packed, pad)
    return ScoreInputs(
        packed, tuple(keyed), tuple(x.dtype.name for x in of_tokens), tuple(x.ndim == 3 for x in of_tokens)
    )


@dataclasses.dataclass(frozen=True)
class PagedScore:
    """The function inside a kernel.

    Attributes:
        function: of scores.
        dtypes, by_key: as of :class:`ScoreInputs`.
        rows: reference to this block's.
        buffers: of each of ``keyed``, ``[depth, sets, rows, block_kv]`` or ``[depth, 1, 1, block_kv]``.
        transposed: whether rows lie along lanes.
    """

    function: ScoreFunction
    dtypes: tuple[str, ...]
    by_key: tuple[bool, ...]
    rows: Any
    buffers: tuple[Any, ...]
    transposed: bool

    def apply(
        self,
        score: Float[Array, "r k"],
        slot: Any,
        set_: Any,
        batch: Any,
        head: Array,
        q: Array,
        kv: Array,
        keys: slice,
    ) -> Float[Array, "r k"]:
        """The function of a tile, ``(rows, keys)`` or transposed.

        Args:
            score: ``scale * q k^T``.
            slot: of the buffers.
            set_: of kv heads.
            batch, head, q, kv: indices, broadcastable to ``score``.
            keys: of the tile, in the buffers.
        """
        rows, keyed = iter(range(len(self.dtypes))), iter(self.buffers)
        values = tuple(
            self._by_key(next(keyed), slot, set_, keys) if by_key else self._by_row(next(rows), set_, dtype)
            for by_key, dtype in zip(self.by_key, self.dtypes)
        )
        return jnp.broadcast_to(self.function(score, batch, head, q, kv, values), score.shape)

    def _by_row(self, n: int, set_: Any, dtype: str) -> Array:
        x = self.rows[0, set_, n : n + 1, :] if self.transposed else self.rows[0, set_, :, n : n + 1]
        return x if dtype == "int32" else lax.bitcast_convert_type(x, jnp.dtype(dtype))

    def _by_key(self, buffer: Any, slot: Any, set_: Any, keys: slice) -> Array:
        alike = buffer.shape[1:3] == (1, 1)
        x = buffer[slot, 0 if alike else set_, :, keys]
        if not self.transposed:
            return x
        return as_column(x) if alike else x.T
