"""Mask -> the tiles to visit: the worklist of a kernel, made once from static shapes.

A kernel walks *rows* (blocks of queries in the forward pass, of keys in the backward) and, for each, the
*columns* that the mask shows. One grid step is one row, one block of columns in fast memory, and in it

* partly visible tiles, computed under the mask;
* a run: consecutive tiles that are visible whole;
* a border: partly visible tiles whose visible sub-tiles are known when the kernel is compiled, so that
  straight-line code computes those and nothing else. A causal diagonal is one border, the same for every row.

Segment ids are known only when the kernel runs: ``narrow`` then shortens runs, batch by batch, to the tiles
that lie in one segment, and leaves to the mask those that more than one segment shares.

Steps that differ only in numbers are of one *kind*, and a kernel has one specialised body for each kind.
Numbers that are a clamped affine function of the step cost nothing; others go to scalar memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.masks import Mask

EMPTY, PARTIAL, FULL = 0, 1, 2
# More borders than this make a program too long to fetch; the rarer ones become masked runs.
MAX_BORDERS = 4


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one pass divides its rows and columns; every number is in elements of the sequence.

    Attributes:
        rows, columns: padded lengths, multiples of ``row_block`` and ``memory``.
        row_block: rows of one grid step.
        memory: columns in fast memory during one grid step.
        tile: columns of one iteration of a run; divides ``memory``.
        sub: side of the sub-tiles in which borders are cut; divides ``row_block`` and ``tile``.
        unroll: tiles that one loop iteration computes.
    """

    rows: int
    columns: int
    row_block: int
    memory: int
    tile: int
    sub: int
    unroll: int = 1

    def __post_init__(self) -> None:
        for whole, part in (
            ("rows", "row_block"),
            ("columns", "memory"),
            ("memory", "tile"),
            ("row_block", "sub"),
            ("tile", "sub"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{part}={getattr(self, part)} must divide {whole}={getattr(self, whole)}")


@dataclasses.dataclass(frozen=True)
class Border:
    """Partly visible tiles of a step, cut in sub-tiles.

    Attributes:
        shift: first column less first row, if that is the same wherever the border occurs and the mask
            depends on nothing else; else None, and the mask is evaluated on absolute positions.
        offsets: where each sub-column begins, counted from the first.
        states: for each sub-column, the state of each strip of rows: EMPTY, PARTIAL or FULL.
    """

    shift: int | None
    offsets: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of a step when the kernel is compiled.

    Attributes:
        first, last: whether the step begins, and ends, its row.
        masked: whether there may be tiles under the mask.
        run: whether there is a run.
        remainder: tiles of the run, less its last, that are left over by the unrolled loop.
        border: the border, if the step has one.
        shared: whether segments meet in the border, so that all of it needs the mask.
    """

    first: bool
    last: bool
    masked: bool
    run: bool
    remainder: int
    border: Border | None
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """One grid step. Starts count columns of one repeat, from its first; None where there is nothing.

    Tiles under the mask are consecutive but for the run, which may lie among them.
    """

    row: int
    repeat: int
    memory: int
    kind: Kind
    start: int | None
    tiles: int
    masked_start: int | None
    masked_tiles: int
    border_start: int | None


def states(mask: Mask, r0: Any, r1: Any, c0: Any, c1: Any, *, rows_are_queries: bool) -> np.ndarray:
    """EMPTY, PARTIAL or FULL of the tiles ``[r0, r1) x [c0, c1)``."""
    some, every = mask.bounds(r0, r1, c0, c1) if rows_are_queries else mask.bounds(c0, c1, r0, r1)
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY))


def _runs(tile_states: np.ndarray, wanted: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first tile, tiles, state) of each maximal run of equal states among those wanted."""
    edges = np.flatnonzero(np.diff(tile_states, prepend=-1, append=-1))
    return [
        (int(a), int(b - a), int(tile_states[a]))
        for a, b in zip(edges[:-1], edges[1:])
        if tile_states[a] in wanted
    ]


def _border(
    mask: Mask, t: Tiling, row0: int, tiles: np.ndarray, rows_are_queries: bool
) -> tuple[int, Border | None]:
    """(first column, border) of the partly visible tiles that begin at the columns ``tiles``."""
    columns = (tiles[:, None] + np.arange(0, t.tile, t.sub)).reshape(-1, 1)
    strips = row0 + np.arange(0, t.row_block, t.sub)[None, :]
    cut = states(mask, strips, strips + t.sub, columns, columns + t.sub, rows_are_queries=rows_are_queries)
    seen = cut.any(axis=1)
    if not seen.any():  # the mask was cautious about a tile that its parts show to be empty
        return 0, None
    columns, cut = columns[seen, 0], cut[seen]
    first = int(columns[0])
    return first, Border(
        shift=first - row0 if mask.shift_invariant else None,
        offsets=tuple(int(c) - first for c in columns),
        states=tuple(tuple(int(s) for s in strip) for strip in cut),
    )


@functools.lru_cache(maxsize=256)
def build(
    mask: Mask, tiling: Tiling, *, rows_are_queries: bool = True, origin: int = 0, repeats: int = 1
) -> tuple[Step, ...]:
    """The steps that show every visible pair once, row after row, each row's columns in order.

    Args:
        mask: what is visible; positions beyond the true lengths must be hidden by it, where they matter.
        tiling: block sizes.
        rows_are_queries: False when rows are keys and columns queries.
        origin: where column 0 lies in the sequence that the mask speaks of.
        repeats: times that each row walks the columns (the query heads of a group, for a block of keys).

    Returns:
        At least one step a row; a row that sees nothing has one without run or border.
    """
    t = tiling
    starts = origin + np.arange(0, t.columns, t.tile)
    cells = []  # (row, memory block, states of its tiles, border start, border)
    for row, row0 in enumerate(range(0, t.rows, t.row_block)):
        every = states(
            mask, row0, row0 + t.row_block, starts, starts + t.tile, rows_are_queries=rows_are_queries
        )
        every = np.broadcast_to(every, starts.shape)
        for memory in range(t.columns // t.memory):
            here = slice(memory * t.memory // t.tile, (memory + 1) * t.memory // t.tile)
            found = every[here]
            partial = starts[here][found == PARTIAL]
            border = _border(mask, t, row0, partial, rows_are_queries) if len(partial) else (0, None)
            cells.append((row, memory, found, *border))

    borders = collections.Counter(border for *_, border in cells if border)
    kept = {border for border, _ in borders.most_common(MAX_BORDERS)}

    by_row: dict[int, list[dict]] = {row: [] for row in range(t.rows // t.row_block)}
    for row, memory, found, border_start, border in cells:
        straight = border in kept
        parts: list[dict] = []
        for first, n, state in _runs(found, (FULL,) if straight or not border else (PARTIAL, FULL)):
            start = memory * t.memory + first * t.tile
            if state == FULL:
                parts.append({"memory": memory, "start": start, "tiles": n})
            else:
                parts.append({"memory": memory, "masked_start": start, "masked_tiles": n})
        if straight:
            if not parts:
                parts.append({"memory": memory})
            parts[-1] |= {"border": border, "border_start": border_start - origin}
        by_row[row] += parts

    steps: list[Step] = []
    for row, parts in by_row.items():
        # A row that sees nothing stays at the memory block that is there already.
        parts = parts or [{"memory": steps[-1].memory if steps else 0}]
        for repeat in range(repeats):
            for n, part in enumerate(parts):
                tiles = part.get("tiles", 0)
                kind = Kind(
                    first=repeat == 0 and n == 0,
                    last=repeat == repeats - 1 and n == len(parts) - 1,
                    masked="masked_tiles" in part,
                    run=tiles > 0,
                    remainder=(tiles - 1) % t.unroll if tiles else 0,
                    border=part.get("border"),
                )
                steps.append(
                    Step(
                        row,
                        repeat,
                        part["memory"],
                        kind,
                        part.get("start"),
                        tiles,
                        part.get("masked_start"),
                        part.get("masked_tiles", 0),
                        part.get("border_start"),
                    )
                )
    return tuple(steps)


def visited(step: Step, tiling: Tiling) -> list[tuple[int, int]]:
    """The spans of columns that a step visits."""
    spans = []
    if step.tiles:
        spans.append((step.start, step.start + step.tiles * tiling.tile))
    if step.masked_tiles:
        spans.append((step.masked_start, step.masked_start + step.masked_tiles * tiling.tile))
    if border := step.kind.border:
        spans.append((step.border_start, step.border_start + border.offsets[-1] + tiling.sub))
    return spans


def masked_tile(n: Any, tile: int, masked_start: Any, start: Any, tiles: Any) -> Any:
    """First column of the ``n``-th tile under the mask: the run, if it lies among them, is passed over."""
    at = masked_start + n * tile
    return jnp.where((tiles > 0) & (at >= start), at + tiles * tile, at)


def segments_meet(
    rows: Int[Array, "b m"], columns: Int[Array, "b n"], row_block: int, tile: int
) -> tuple[Bool[Array, "b r t"], Bool[Array, "b r t"]]:
    """Whether any, and whether every, pair of each (row block, tile) lies in one segment.

    The first is cautious: it compares ranges of ids, which is exact for ids in order.
    """

    def ranges(ids: Array, block: int) -> tuple[Array, Array]:
        blocks = ids.reshape(ids.shape[0], -1, block)
        return blocks.min(axis=-1), blocks.max(axis=-1)

    row_low, row_high = (x[:, :, None] for x in ranges(rows, row_block))
    low, high = (x[:, None, :] for x in ranges(columns, tile))
    return (row_low <= high) & (low <= row_high), (row_low == high) & (low == row_high)


def narrow(
    steps: Sequence[Step], tiling: Tiling, some: Bool[Array, "b r t"], every: Bool[Array, "b r t"]
) -> dict[str, Int[Array, "b s"]]:
    """What segments leave of every step, for each batch.

    Args:
        steps: the steps of the static mask.
        tiling: that they were built with.
        some: of each row and tile of one repeat, whether any pair is in one segment.
        every: whether every pair is.

    Returns:
        ``start``, ``tiles``, ``masked_start`` and ``masked_tiles``, and ``shared``: whether segments meet in
        the step's border, which must then be masked. Such a step has no run: fewer programs are needed. A run
        keeps the remainder of its kind: the tiles that are too many for it go under the mask.
    """
    tile = tiling.tile
    n = np.arange(some.shape[-1])[None, :]

    def spans(start: str, last: Callable[[Step], int]) -> np.ndarray:
        first = np.array([(getattr(s, start) or 0) // tile for s in steps])[:, None]
        return (n >= first) & (n < np.array([last(s) for s in steps])[:, None])

    run = spans("start", lambda s: ((s.start or 0) // tile) + s.tiles)
    masked = spans("masked_start", lambda s: ((s.masked_start or 0) // tile) + s.masked_tiles)
    border = spans("border_start", lambda s: -(-_border_end(s) // tile))
    rows = np.array([s.row for s in steps])
    shared = jnp.any(border & ~every[:, rows], axis=-1)
    some, every = some[:, rows] & (run | masked), every[:, rows] & run & ~shared[..., None]
    first = jnp.argmax(every, axis=-1)
    # The run ends where the first tile after its beginning is shared by segments.
    ends = ~every & (n >= first[..., None])
    end = jnp.where(ends.any(axis=-1), jnp.argmax(ends, axis=-1), n.shape[1])
    tiles = jnp.where(every.any(axis=-1), end - first, 0)
    too_many = (tiles - np.array([s.tiles for s in steps])) % tiling.unroll
    first, tiles = first + too_many, jnp.maximum(tiles - too_many, 0)
    low = jnp.argmax(some, axis=-1)
    high = n.shape[1] - jnp.argmax(some[..., ::-1], axis=-1)
    met = jnp.where(some.any(axis=-1), high - low, 0)
    return {
        "start": first * tile,
        "tiles": tiles,
        "masked_start": low * tile,
        "masked_tiles": met - tiles,
        "shared": shared,
    }


def _border_end(step: Step) -> int:
    """The column that ends the step's border, less at most a sub-tile; 0 without one."""
    return step.border_start + step.kind.border.offsets[-1] + 1 if step.kind.border else 0


def first_meetings(steps: tuple[Step, ...], tiling: Tiling) -> list[tuple[int | None, int]]:
    """(first column, columns) that each step is the first to meet, in whole blocks.

    On a causal mask every row meets one new block. Where the amounts differ much (each would be a kind of its
    own), the first step meets all.
    """
    t = tiling
    block = max(t.row_block, t.tile)
    met: list[tuple[int | None, int]] = []
    reached = 0
    for step in steps:
        end = max((high for _, high in visited(step, t)), default=0)
        end = min(-(-end // block) * block, t.columns)
        met.append((reached, end - reached) if end > reached else (None, 0))
        reached = max(reached, end)
    if len({(step.kind, n) for step, (_, n) in zip(steps, met)}) > len({step.kind for step in steps}) + 1:
        return [(0, t.columns), *[(None, 0)] * (len(steps) - 1)]
    return met


@dataclasses.dataclass(frozen=True)
class _Affine:
    """``clip(outer * (n // period) + inner * (n % period) + constant, low, high)`` of the step ``n``."""

    period: int
    outer: int
    inner: int
    constant: int
    low: int
    high: int

    def __call__(self, n: Any, xp: Any) -> Any:
        if self.low == self.high:
            return self.low
        value = self.constant
        if self.period == 1:
            value += self.outer * n
        else:
            value += self.outer * (n // self.period) + self.inner * (n % self.period)
        return xp.clip(value, self.low, self.high)


def _affine(known: np.ndarray, values: np.ndarray, period: int) -> _Affine | None:
    """The clamped affine function that has ``values`` at the steps ``known``, if there is one."""
    if not len(known):
        return _Affine(period, 0, 0, 0, 0, 0)
    low, high = int(values.min()), int(values.max())
    outer, inner = known // period, known % period

    def slopes(moving: np.ndarray, still: np.ndarray) -> set[int]:
        """Changes of the value from one known step to the next in which only ``moving`` moves, by one."""
        order = np.lexsort((moving, still))
        step = (np.diff(moving[order]) == 1) & (np.diff(still[order]) == 0)
        return {0, *np.unique(np.diff(values[order])[step]).tolist()}

    candidates = [(a, b) for a in slopes(outer, inner) for b in slopes(inner, outer)]
    if len(candidates) > 16:
        return None
    for a, b in sorted(candidates, key=lambda ab: (abs(ab[0]), abs(ab[1]))):
        constants = values - a * outer - b * inner
        inside = (values > low) & (values < high)
        for constant in np.unique(constants[inside] if inside.any() else constants).tolist()[:64]:
            fit = _Affine(period, a, b, constant, low, high)
            if np.array_equal(np.broadcast_to(fit(known, np), values.shape), values):
                return fit
    return None


class Table:
    """Integer columns, read by step inside a kernel and its index maps.

    A column that is a clamped affine function of the step, or of its place in a row of ``period`` steps, is
    computed; the others lie one after the other in a flat int32 operand for scalar prefetch (flat, since a
    two-dimensional one is padded). None stands for a value that is never used.

    Args:
        columns: values by step.
        period: steps of a row, where that is always the same.
        stored: keep every column in the operand, for tables of equal form and different numbers.
        batched: further columns, ``[batch, steps]`` arrays known only when the kernel runs.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[int | None]],
        *,
        period: int = 1,
        stored: bool = False,
        batched: Mapping[str, Int[Array, "b s"]] | None = None,
    ) -> None:
        self._affine: dict[str, _Affine] = {}
        self._at: dict[str, int] = {}
        flat = []
        for name, values in columns.items():
            known = np.array([n for n, value in enumerate(values) if value is not None], np.int64)
            column = np.array([value or 0 for value in values], np.int32)
            if not stored and (fit := _affine(known, column[known].astype(np.int64), period)) is not None:
                self._affine[name] = fit
            else:
                self._at[name] = len(column) * len(flat)
                flat.append(column)
        self.operands: tuple[Any, ...] = (np.concatenate(flat),) if flat else ()
        self._batched = tuple(batched or ())
        if batched:
            self._shape = next(iter(batched.values())).shape
            self.operands += (jnp.stack(list(batched.values())).astype(jnp.int32).reshape(-1),)

    def read(self, name: str, step: Any, batch: Any, refs: tuple[Any, ...]) -> Any:
        """Column ``name`` at ``step``; ``refs`` are the prefetched operands."""
        if name in self._batched:
            batches, steps = self._shape
            return refs[-1][(self._batched.index(name) * batches + batch) * steps + step]
        if name in self._at:
            return refs[0][self._at[name] + step]
        return self._affine[name](step, jnp)


def rectangles(border: Border, sub: int, columns: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """The border as rectangles ``(row0, row1, first, last)`` to compute at once.

    ``first`` and ``last`` (exclusive) index the border's sub-columns, which are contiguous in a rectangle and
    at most ``columns`` elements; neighbouring strips that see the same sub-columns are merged up to ``rows``
    elements. Later strips come first: on a causal diagonal they see the most.
    """
    strips = len(border.states[0])
    n = 0
    while n < len(border.offsets):
        stop = n + 1
        while (
            stop < len(border.offsets)
            and border.offsets[stop] == border.offsets[stop - 1] + sub
            and border.offsets[stop] - border.offsets[n] < columns
        ):
            stop += 1
        spans = []
        for strip in range(strips):
            seen = [c for c in range(n, stop) if border.states[c][strip]]
            spans.append((seen[0], seen[-1] + 1) if seen else None)
        end = strips
        while end:
            begin = end - 1
            seen = [column[begin] for column in border.states[n:stop]]
            while (
                begin
                and (end - begin) * sub < rows
                and [column[begin - 1] for column in border.states[n:stop]] == seen
            ):
                begin -= 1
            if spans[begin]:
                yield begin * sub, end * sub, *spans[begin]
            end = begin
        n = stop
