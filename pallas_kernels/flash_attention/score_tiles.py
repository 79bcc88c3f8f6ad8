"""The operands of a score function: how they enter a kernel, and their values on a tile of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.flash_attention.blocks import LANES
from pallas_kernels.flash_attention.tiles import as_column
from pallas_kernels.hardware import Hardware
from pallas_kernels.score_function import Along, ScoreFunction

SUBLANES = 8  # rows of a register of 32 bits


def pad_operands(
    function: ScoreFunction | None,
    arrays: Sequence[Array],
    lengths: tuple[int, int],
    padded: tuple[int, int],
) -> tuple[Array, ...]:
    """The arrays as kernels read them: padded with zeros from ``(q_len, kv_len)`` to ``padded``.

    Distances begin at ``-kv_padded``, so that every tile's lie in a window of whole registers.
    """
    if function is None:
        return ()
    after = padded[0] - lengths[0], padded[1] - lengths[1]
    pads = {
        "query": (0, after[0]),
        "key": (0, after[1]),
        "distance": (after[1] + 1, after[0]),
    }

    def of(along: Along, x: Array) -> Array:
        if along == "head":
            return x
        if along == "pair":
            return jnp.pad(x, ((0, 0), (0, 0), (0, after[0]), (0, after[1])))
        return jnp.pad(x, ((0, 0), (0, 0), pads[along]))[:, :, None, :]

    return tuple(of(along, x) for along, x in zip(function.operands, arrays, strict=True))


def block_specs(
    function: ScoreFunction | None,
    arrays: Sequence[Array],
    *,
    batch: Callable[..., Any],
    head: Callable[..., Any],
    query: Callable[..., Any],
    key: Callable[..., Any],
    queries: int,
    keys: int,
) -> list[pl.BlockSpec]:
    """Which part of each operand a grid step reads.

    Args:
        batch, head, query, key: the step's batch, query head, block of queries and block of keys, as
            functions of what an index map is called with.
        queries, keys: sizes of those blocks.
    """

    def zero(*grid: Any) -> int:
        return 0

    def of(along: Along, x: Array) -> pl.BlockSpec:
        def at(*place: Callable[..., Any]) -> Callable[..., tuple]:
            first = [index if n > 1 else zero for index, n in zip((batch, head), x.shape)]
            return lambda *grid: tuple(index(*grid) for index in (*first, *place))

        if along == "head":
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        if along == "query":
            return pl.BlockSpec((1, 1, 1, queries), at(zero, query))
        if along == "key":
            return pl.BlockSpec((1, 1, 1, keys), at(zero, key))
        if along == "distance":
            return pl.BlockSpec((1, 1, 1, x.shape[-1]), at(zero, zero))
        return pl.BlockSpec((1, 1, queries, keys), at(query, key))

    return [of(along, x) for along, x in zip(function.operands, arrays, strict=True)] if function else []


def as_inputs(function: ScoreFunction | None, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The arrays as the kernel's inputs: scalars flat, since scalar memory pads a minor dimension."""
    alongs = function.operands if function else ()
    return tuple(x.reshape(-1) if along == "head" else x for along, x in zip(alongs, arrays, strict=True))


@dataclasses.dataclass(frozen=True)
class ScoreTiles:
    """A score function inside a kernel, with the references to its operands.

    Attributes:
        function: the function.
        refs: references to the operands' blocks.
        shapes: the operands' shapes, padded.
        batch, head: of the queries at hand.
        kv_padded: padded length of the keys.
        strided_roll: whether the hardware rolls each row of a tile by its own amount.
    """

    function: ScoreFunction
    refs: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    batch: Any
    head: Any
    kv_padded: int
    strided_roll: bool

    @classmethod
    def of(
        cls, function: ScoreFunction | None, arrays: Sequence[Array], kv_padded: int, hardware: Hardware
    ) -> Callable[..., ScoreTiles] | None:
        """All but ``refs``, ``batch`` and ``head``; None without a function."""
        if function is None:
            return None
        return functools.partial(
            cls,
            function=function,
            shapes=tuple(x.shape for x in arrays),
            kv_padded=kv_padded,
            strided_roll=hardware.strided_roll,
        )

    def apply(
        self, score: Float[Array, "n m"], place: tuple[Any, Any], queries: Any, keys: Any
    ) -> Float[Array, "n m"]:
        """The function of a (keys, queries) tile.

        Args:
            score: ``scale * k q^T``.
            place: positions of the tile's first query and first key.
            queries, keys: slices of the tile in the blocks of queries and of keys.
        """
        return self._function(place, queries, keys, score.shape)(score)

    def differentiate(
        self, score: Float[Array, "n m"], place: tuple[Any, Any], queries: Any, keys: Any
    ) -> tuple[Float[Array, "n m"], Callable[[Array], Array]]:
        """As :meth:`apply`, and the function from a gradient by the result to that by ``score``.

        Where the first is zero, so is the second: a slope may be infinite where a pair is hidden.
        """
        result, pull = jax.vjp(self._function(place, queries, keys, score.shape), score)
        return result, lambda gradient: jnp.where(gradient == 0, 0.0, pull(gradient)[0])

    def _function(
        self, place: tuple[Any, Any], queries: Any, keys: Any, shape: tuple[int, int]
    ) -> Callable[[Array], Array]:
        values = tuple(
            self._value(along, ref, n, place, queries, keys, shape)
            for along, ref, n in zip(self.function.operands, self.refs, self.shapes, strict=True)
        )
        q = place[0] + lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
        kv = place[1] + lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
        return lambda score: jnp.broadcast_to(
            self.function(score, self.batch, self.head, q, kv, values), score.shape
        )

    def _value(
        self,
        along: Along,
        ref: Any,
        of: tuple[int, ...],
        place: tuple[Any, Any],
        queries: Any,
        keys: Any,
        shape: tuple[int, int],
    ) -> Array:
        if along == "head":
            batches, heads = of
            return ref[(self.batch * heads if batches > 1 else 0) + (self.head if heads > 1 else 0)]
        if along == "query":
            return ref[0, 0, :, queries]
        if along == "key":
            return as_column(ref[0, 0, :, keys])
        if along == "distance":
            return self._by_distance(ref, place, shape)
        x = ref[0, 0, queries, keys]
        return (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x).T

    def _by_distance(self, ref: Any, place: tuple[Any, Any], shape: tuple[int, int]) -> Array:
        """Piece by piece of keys, so that no piece needs many more registers than the tile has."""
        pieces = []
        for key in range(0, shape[0], LANES):
            start = pl.multiple_of(self.kv_padded + place[0] - place[1] - key - LANES, LANES)
            window = ref[0, 0, :, pl.ds(start, LANES + shape[1])]
            pieces.append(by_distance(window, LANES, self.strided_roll))
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)


def by_distance(window: Array, n: int, strided_roll: bool) -> Array:
    """The ``(n, m)`` tile ``[i, j] -> window[0, n + j - i]`` of a window ``(1, n + m)``.

    Without a strided roll, the rows of one register are rolled in as many steps as their numbers have bits,
    and then register by register as a whole.
    """
    m = window.shape[1] - n
    if strided_roll:
        return pltpu.roll(jnp.broadcast_to(window, (n, n + m)), m, 1, stride=1, stride_axis=0)[:, :m]
    rows = jnp.broadcast_to(window, (SUBLANES, n + m))
    number = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    for bit in (1, 2, 4):
        rows = jnp.where(number & bit != 0, pltpu.roll(rows, bit, 1), rows)
    return jnp.concatenate([pltpu.roll(rows, m + at, 1)[:, :m] for at in range(0, n, SUBLANES)], axis=0)


def by_block(
    along: Along, x: Array, start: Any, block: int, kv_len: int
) -> tuple[Array, tuple[Any, int] | None]:
    """What ``block`` queries from ``start`` read of an operand, unpadded, and where that lies on axis 2."""
    if along in ("head", "key"):
        return x, None
    size = block + kv_len - 1 if along == "distance" else block
    return lax.dynamic_slice_in_dim(x, start, size, 2), (start, size)


def apply_to_block(
    function: ScoreFunction, score: Array, operands: Sequence[Array], rows: Array, kv_len: int
) -> Array:
    """The function of ``score [batch, heads, rows, kv_len]``, outside of kernels.

    Args:
        operands: as :func:`by_block` gives them.
        rows: indices of the queries.
    """
    batch, heads, block, _ = score.shape
    values = tuple(_broadcast(a, x, block, kv_len) for a, x in zip(function.operands, operands, strict=True))
    index = [jnp.arange(n, dtype=jnp.int32) for n in (batch, heads, kv_len)]
    b, h, kv = index[0][:, None, None, None], index[1][:, None, None], index[2]
    return jnp.broadcast_to(function(score, b, h, rows.astype(jnp.int32)[:, None], kv, values), score.shape)


def _broadcast(along: Along, x: Array, block: int, kv_len: int) -> Array:
    """The values of ``by_block`` as ``[batch, heads, block, kv_len]``, or broadcastable to it."""
    if along == "head":
        # By rows, and kept so: its gradient is then a sum of rows' sums, which rounds less than one long sum.
        rows = jnp.broadcast_to(x[:, :, None, None], (*x.shape, block, 1))
        return lax.optimization_barrier(rows)
    if along == "query":
        return x[:, :, :, None]
    if along == "key":
        return x[:, :, None, :]
    if along == "distance":
        return _skew(x, block, kv_len)
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _skew(x: Array, block: int, kv_len: int) -> Array:
    """``[..., i, j] -> x[..., i - j + kv_len - 1]`` without a gather.

    Copies of the table, end to end, are read in rows one element longer: each begins one element further on.
    """
    size = x.shape[-1]
    copies = jnp.broadcast_to(x[..., None, ::-1], (*x.shape[:-1], block + 1, size))
    flat = copies.reshape(*x.shape[:-1], -1)[..., : block * (size + 1)]
    return flat.reshape(*x.shape[:-1], block, size + 1)[..., ::-1, :kv_len]
