"""The steps of the backward kernel: which borders and runs it meets, and when each block of dq leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels import schedule
from pallas_kernels.flash_attention.blocks import LANES, BackwardBlocks
from pallas_kernels.flash_attention.spec import AttentionSpec, Operands


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the steps of a pass have in common, known when the kernel is compiled.

    Attributes:
        borders: the borders that occur.
        fresh: of those, the ones that always begin their row and reach every key of it: their first tiles
            write what others would add to.
        masked: whether there are tiles under the mask.
        runs: whether there are runs.
    """

    borders: tuple[schedule.Border, ...]
    fresh: tuple[bool, ...]
    masked: bool
    runs: bool


def _columns(
    steps: Sequence[schedule.Step], tiling: schedule.Tiling, origin: int, group: int, width: int
) -> dict[str, list]:
    """The steps of one chunk of queries as columns of a table; ``border`` holds the borders themselves.

    Each block of dq, ``width`` queries, leaves once it is final, at most one a step: ``flush`` says that one
    leaves, ``dq`` which, or which is next to leave.
    """
    in_repeat = tiling.columns // width
    final = [0] * (group * in_repeat)
    for n, step in enumerate(steps):
        for low, high in schedule.visited(step, tiling):
            for block in range(low // width, -(-high // width)):
                final[step.repeat * in_repeat + block] = n
    dq, flush = [], []
    for block in sorted(range(len(final)), key=final.__getitem__):
        waits = max(final[block] - len(dq), 0)
        dq += [block] * (waits + 1)
        flush += [0] * waits + [1]
    columns = {
        "row": [s.row for s in steps],
        "repeat": [s.repeat for s in steps],
        "memory": [s.memory for s in steps],
        "first": [int(s.kind.first) for s in steps],
        "last": [int(s.kind.last) for s in steps],
        "start": [s.start for s in steps],
        "tiles": [s.tiles for s in steps],
        "masked_start": [s.masked_start for s in steps],
        "masked_tiles": [s.masked_tiles for s in steps],
        "border": [s.kind.border for s in steps],
        "border_start": [s.border_start for s in steps],
        "origin": [origin] * len(steps),
        "dq": dq,
        "flush": flush,
    }
    return _lengthen(columns, max(len(steps), len(dq)))


def _lengthen(columns: dict[str, list], n: int) -> dict[str, list]:
    """The same steps, idle ones after them: they fetch nothing new and compute nothing."""
    idle = {"first": 0, "last": 0, "tiles": 0, "masked_tiles": 0, "flush": 0}
    idle |= dict.fromkeys(("start", "masked_start", "border", "border_start"))
    return {
        name: [*values, *[idle.get(name, values[-1])] * (n - len(values))] for name, values in columns.items()
    }


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of queries: how many, each with ``steps`` steps, and the table of each."""

    steps: int
    plan: Plan
    tables: list[schedule.Table]


def plan_chunks(
    spec: AttentionSpec,
    blocks: BackwardBlocks,
    operands: Operands,
    tiling: schedule.Tiling,
    chunks: int,
    group: int,
    width: int,
) -> Chunks:
    every, batched = [], []
    segments = operands.q_segment_ids is not None
    if segments:
        meet = schedule.segments_meet(
            operands.kv_segment_ids, operands.q_segment_ids, blocks.block_kv, blocks.block_q
        )
    for n in range(chunks):
        origin = n * tiling.columns
        steps = schedule.build(spec.mask, tiling, rows_are_queries=False, origin=origin, repeats=group)
        every.append(_columns(steps, tiling, origin, group, width))
        if segments:
            here = slice(origin // tiling.tile, (origin + tiling.columns) // tiling.tile)
            batched.append(schedule.narrow(steps, tiling, *(x[:, :, here] for x in meet)))
    length = max(len(columns["row"]) for columns in every)
    every = [_lengthen(columns, length) for columns in every]
    batched = [
        {name: jnp.pad(x, ((0, 0), (0, length - x.shape[1]))) for name, x in columns.items()}
        for columns in batched
    ]
    borders: dict[schedule.Border, bool] = {}
    for columns in every:
        for border, first in zip(columns["border"], columns["first"]):
            if border is not None:
                whole = all(map(any, zip(*border.states)))
                borders[border] = borders.get(border, whole) and bool(first)
        columns["border"] = [-1 if b is None else list(borders).index(b) for b in columns["border"]]
    runs, masked = (any(any(c[name]) for c in every) for name in ("tiles", "masked_tiles"))
    plan = Plan(tuple(borders), tuple(borders.values()), masked=masked or segments, runs=runs)
    period = length // (tiling.rows // tiling.row_block) if chunks == 1 else 1
    tables = [
        schedule.Table(
            columns, period=max(period, 1), stored=chunks > 1, batched=batched[n] if segments else None
        )
        for n, columns in enumerate(every)
    ]
    return Chunks(length, plan, tables)


def flush_width(blocks: BackwardBlocks) -> int:
    """Queries of dq that leave at a time: on a causal mask, those that one block of keys completes."""
    if blocks.memory_q % blocks.block_kv == 0:
        return blocks.block_kv
    return max(n for n in range(LANES, blocks.memory_q + 1, LANES) if blocks.memory_q % n == 0 and n <= 2048)
