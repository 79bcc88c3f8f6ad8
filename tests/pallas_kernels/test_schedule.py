"""Schedules, written out pair by pair: each visible pair is computed once, and nothing unmasked is hidden."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_masks import masks

from pallas_kernels import schedule
from pallas_kernels.flash_attention.backward_steps import _columns
from pallas_kernels.masks import Causal, Full, KeyLength
from pallas_kernels.schedule import EMPTY, FULL, PARTIAL, Kind, Table, Tiling


@st.composite
def tilings(draw):
    """Small, but with every freedom: blocks of rows smaller and larger than tiles, several memory blocks."""
    few = st.integers(1, 4)
    sub = draw(st.sampled_from([2, 3, 4]))
    row_block, tile = sub * draw(few), sub * draw(few)
    memory = tile * draw(few)
    rows, columns = row_block * draw(few), memory * draw(st.integers(1, 3))
    return Tiling(rows, columns, row_block, memory, tile, sub, unroll=draw(st.integers(1, 3)))


def visible(mask, t, rows_are_queries=True, origin=0):
    """The mask written out, rows by columns."""
    rows, columns = np.arange(t.rows)[:, None], origin + np.arange(t.columns)[None, :]
    return np.asarray(mask.visible(rows, columns) if rows_are_queries else mask.visible(columns, rows))


def spans(step, t, shared=False):
    """(rows, columns, whether the kernel masks them) of the rectangles that a step computes."""
    rows = slice(step.row * t.row_block, (step.row + 1) * t.row_block)
    if step.tiles:
        yield rows, slice(step.start, step.start + step.tiles * t.tile), False
    for n in range(step.masked_tiles):
        column = int(schedule.masked_tile(n, t.tile, step.masked_start, step.start or 0, step.tiles))
        yield rows, slice(column, column + t.tile), True
    if (border := step.kind.border) is not None:
        for offset, states in zip(border.offsets, border.states):
            column = step.border_start + offset
            for n, state in enumerate(states):
                if state != EMPTY:
                    row = rows.start + n * t.sub
                    yield slice(row, row + t.sub), slice(column, column + t.sub), shared or state == PARTIAL


@settings(max_examples=300)
@given(masks, tilings(), st.booleans(), st.integers(0, 40), st.integers(1, 3))
def test_each_visible_pair_is_computed_once(mask, t, rows_are_queries, origin, repeats):
    shown = visible(mask, t, rows_are_queries, origin)
    steps = schedule.build(mask, t, rows_are_queries=rows_are_queries, origin=origin, repeats=repeats)
    for repeat in range(repeats):
        computed = np.zeros(shown.shape, int)
        for step in (s for s in steps if s.repeat == repeat):
            for rows, columns, masked in spans(step, t):
                assert masked or shown[rows, columns].all()
                computed[rows, columns] += shown[rows, columns]
        assert np.array_equal(computed, shown)


@settings(max_examples=200)
@given(masks, tilings(), st.booleans(), st.integers(0, 40), st.integers(1, 3))
def test_steps_are_well_formed(mask, t, rows_are_queries, origin, repeats):
    steps = schedule.build(mask, t, rows_are_queries=rows_are_queries, origin=origin, repeats=repeats)
    assert steps == tuple(sorted(steps, key=lambda s: (s.row, s.repeat)))
    rows = {row: list(group) for row, group in itertools.groupby(steps, lambda s: s.row)}
    assert list(rows) == list(range(t.rows // t.row_block))
    for group in rows.values():
        assert [s.kind.first for s in group] == [True] + [False] * (len(group) - 1)
        assert [s.kind.last for s in group] == [False] * (len(group) - 1) + [True]
    for step in steps:
        assert step.kind.run == (step.tiles > 0) == (step.start is not None)
        assert step.kind.masked == (step.masked_tiles > 0) == (step.masked_start is not None)
        assert (step.border_start is not None) == (step.kind.border is not None)
        assert step.kind.remainder == ((step.tiles - 1) % t.unroll if step.tiles else 0)
        for _, columns, _ in spans(step, t):  # all in the one memory block that the step has
            assert step.memory * t.memory <= columns.start
            assert columns.stop <= (step.memory + 1) * t.memory
        assert (step.start or 0) % t.tile == (step.masked_start or 0) % t.tile == 0
        if (border := step.kind.border) and border.shift is not None:
            assert mask.shift_invariant
            assert border.shift == origin + step.border_start - step.row * t.row_block
    assert len({s.kind.border for s in steps} - {None}) <= schedule.MAX_BORDERS


def test_causal_schedule_is_the_known_one():
    """Square blocks: one border for all rows, and one run of full tiles before it that grows by one."""
    t = Tiling(rows=32, columns=32, row_block=8, memory=32, tile=8, sub=4)
    diagonal = schedule.Border(shift=0, offsets=(0, 4), states=((PARTIAL, FULL), (EMPTY, PARTIAL)))
    steps = schedule.build(Causal(), t)
    assert [(s.row, s.start, s.tiles, s.border_start) for s in steps] == [
        (0, None, 0, 0), (1, 0, 1, 8), (2, 0, 2, 16), (3, 0, 3, 24),
    ]  # fmt: skip
    kind = Kind(first=True, last=True, masked=False, run=False, remainder=0, border=diagonal)
    assert steps[0].kind == kind
    assert {s.kind for s in steps[1:]} == {dataclasses.replace(kind, run=True)}


def test_rare_borders_become_masked_tiles():
    """Rows of 10 and tiles of 14 meet the diagonal at 7 different shifts."""
    t = Tiling(rows=140, columns=140, row_block=10, memory=140, tile=14, sub=2)
    steps = schedule.build(Causal(), t)
    assert len({s.kind.border for s in steps} - {None}) == schedule.MAX_BORDERS
    assert any(s.kind.masked for s in steps)


@pytest.mark.parametrize("rows_are_queries", [True, False])
def test_a_mask_that_shows_nothing_costs_one_empty_step_a_row(rows_are_queries):
    t = Tiling(rows=16, columns=24, row_block=4, memory=8, tile=4, sub=4)
    steps = schedule.build(KeyLength(0), t, rows_are_queries=rows_are_queries)
    assert [s.row for s in steps] == [0, 1, 2, 3]
    assert {s.kind for s in steps} == {
        Kind(first=True, last=True, masked=False, run=False, remainder=0, border=None)
    }


def test_empty_tiles_are_not_visited():
    t = Tiling(rows=1024, columns=1024, row_block=32, memory=256, tile=32, sub=8)
    window = Causal() & ~Causal(-64)
    steps = schedule.build(window, t)
    area = sum((r.stop - r.start) * (c.stop - c.start) for s in steps for r, c, _ in spans(s, t))
    assert area < 1.3 * visible(window, t).sum()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("row_block=8 must divide rows=20", {"rows": 20}),
        ("memory=16 must divide columns=24", {"columns": 24}),
        ("tile=6 must divide memory=16", {"tile": 6}),
        ("sub=4 must divide row_block=2", {"row_block": 2}),
        ("sub=4 must divide tile=2", {"tile": 2}),
    ],
)
def test_tiling_refuses_what_does_not_divide(message, changes):
    sizes = {"rows": 16, "columns": 32, "row_block": 8, "memory": 16, "tile": 8, "sub": 4}
    Tiling(**sizes)
    with pytest.raises(ValueError, match=message):
        Tiling(**sizes | changes)


@settings(max_examples=200)
@given(masks, tilings(), st.booleans(), st.integers(1, 12), st.integers(1, 12))
def test_rectangles_tile_the_border(mask, t, rows_are_queries, columns, rows):
    borders = {s.kind.border for s in schedule.build(mask, t, rows_are_queries=rows_are_queries)} - {None}
    for border in borders:
        states = np.array(border.states)
        computed = np.zeros(states.shape, int)
        for r0, r1, first, last in schedule.rectangles(border, t.sub, columns, rows):
            strips = slice(r0 // t.sub, r1 // t.sub)
            computed[first:last, strips] += 1
            assert (last - first) * t.sub <= max(columns + t.sub - 1, t.sub)
            assert (r1 - r0) <= max(rows + t.sub - 1, t.sub)
            assert border.offsets[last - 1] - border.offsets[first] == (last - 1 - first) * t.sub
            assert (states[first:last, strips] == states[first:last, strips][:, :1]).all()  # strips are alike
        assert (computed <= 1).all()
        assert (computed[states != EMPTY] == 1).all()


@settings(max_examples=200)
@given(masks, tilings())
def test_first_meetings_come_in_time_and_once(mask, t):
    steps = schedule.build(mask, t)
    met = np.zeros(t.columns, int)
    for step, (start, n) in zip(steps, schedule.first_meetings(steps, t), strict=True):
        assert (start is None) == (n == 0)
        if n:
            assert 0 <= start < start + n <= t.columns
            met[start : start + n] += 1
        for _, columns, _ in spans(step, t):
            assert (met[columns] == 1).all()
    assert (met <= 1).all()


@settings(max_examples=200)
@given(masks, tilings(), st.integers(0, 40), st.integers(1, 3), st.data())
def test_dq_leaves_once_and_final(mask, t, origin, group, data):
    """Blocks of dq leave the chip one a step, each once, after the last step that adds to it."""
    divisors = [n for n in range(1, t.columns + 1) if t.columns % n == 0]
    width = data.draw(st.sampled_from(divisors))
    steps = schedule.build(mask, t, rows_are_queries=False, origin=origin, repeats=group)
    made = _columns(steps, t, origin, group, width)
    assert len({len(values) for values in made.values()}) == 1
    leaves = {}
    for n, (block, flush) in enumerate(zip(made["dq"], made["flush"])):
        if flush:
            assert block not in leaves
            leaves[block] = n
        # An output block is written back when the next one comes: it must not come back.
        assert n == 0 or made["dq"][n - 1] == block or block not in made["dq"][:n]
    assert sorted(leaves) == list(range(group * t.columns // width))
    for n, step in enumerate(steps):
        for _, columns, _ in spans(step, t):
            for column in range(columns.start, columns.stop):
                assert leaves[(step.repeat * t.columns + column) // width] >= n


@st.composite
def segment_ids(draw, length):
    """Ids in order, as packing makes them, or in any order."""
    ids = draw(st.lists(st.integers(0, 4), min_size=length, max_size=length))
    return sorted(ids) if draw(st.booleans()) else ids


# JAX compiles for each shape, so there are few.
FEW_TILINGS = st.sampled_from(
    [Tiling(24, 32, 8, 16, 4, 2), Tiling(24, 32, 4, 32, 8, 4), Tiling(24, 32, 12, 32, 4, 4, unroll=2)]
)


@settings(max_examples=60)
@given(masks, FEW_TILINGS, st.booleans(), st.integers(1, 2), st.data())
def test_narrowed_steps_compute_each_pair_of_a_segment_once(mask, t, rows_are_queries, repeats, data):
    """What is not masked holds no pair of two segments; a border that segments share is masked whole."""
    row_ids, column_ids = (
        np.array([data.draw(segment_ids(n)) for _ in range(2)]) for n in (t.rows, t.columns)
    )
    same = row_ids[:, :, None] == column_ids[:, None, :]
    shown = visible(mask, t, rows_are_queries) & same
    steps = schedule.build(mask, t, rows_are_queries=rows_are_queries, repeats=repeats)
    meet = schedule.segments_meet(jnp.asarray(row_ids), jnp.asarray(column_ids), t.row_block, t.tile)
    narrowed = {name: np.asarray(x) for name, x in schedule.narrow(steps, t, *meet).items()}
    for batch, repeat in np.ndindex(2, repeats):
        computed = np.zeros(shown.shape[1:], int)
        for n, step in enumerate(steps):
            if step.repeat == repeat:
                numbers = {name: int(x[batch, n]) for name, x in narrowed.items()}
                shared = bool(numbers.pop("shared"))
                assert not (shared and numbers["tiles"])
                if numbers["tiles"]:
                    assert (numbers["tiles"] - 1) % t.unroll == step.kind.remainder
                for rows, columns, masked in spans(dataclasses.replace(step, **numbers), t, shared):
                    assert masked or shown[batch, rows, columns].all()
                    computed[rows, columns] += shown[batch, rows, columns]
        assert np.array_equal(computed, shown[batch])


@st.composite
def columns(draw):
    """Table columns of one length: affine, clamped, constant or irregular, with some values missing."""
    length = draw(st.integers(1, 12))
    made = {}
    for n in range(draw(st.integers(1, 5))):
        slope, constant = draw(st.integers(-3, 3)), draw(st.integers(-9, 9))
        low, extent = draw(st.integers(-20, 5)), draw(st.integers(0, 30))
        values = np.clip(slope * np.arange(length) + constant, low, low + extent).tolist()
        if draw(st.booleans()):
            values = draw(st.lists(st.integers(-99, 99), min_size=length, max_size=length))
        missing = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        made[f"column {n}"] = [None if gone else value for gone, value in zip(missing, values)]
    return made


def read_back(table, name, length, refs):
    """Column ``name``, by a plain int for each step and for all steps at once; both must agree."""
    each = [int(table.read(name, n, 0, refs)) for n in range(length)]
    assert each == np.broadcast_to(table.read(name, np.arange(length), 0, refs), (length,)).tolist()
    return each


@given(columns(), st.integers(1, 5), st.booleans())
def test_table_reads_back(made, period, stored):
    table = Table(made, period=period, stored=stored)
    assert all(x.dtype == np.int32 and x.ndim == 1 for x in table.operands)
    for name, values in made.items():
        read = read_back(table, name, len(values), table.operands)
        assert [r for r, v in zip(read, values) if v is not None] == [v for v in values if v is not None]


def test_table_stores_what_is_not_affine_and_nothing_else():
    irregular, affine = [3, 1, 4, 1, 5, 9], [2, 4, 6, 8, 8, 8]
    in_rows = [0, 1, 2, 10, 11, 12]  # affine in the row, and in the place within it
    assert Table({"a": affine, "b": [7] * 6, "c": [None] * 6}).operands == ()
    assert Table({"a": in_rows, "b": [7] * 6}, period=3).operands == ()
    (operand,) = Table({"a": irregular, "b": affine, "c": in_rows}, period=3).operands
    assert operand.tolist() == irregular


def test_stored_tables_of_one_form_read_each_others_numbers():
    """Chunks of queries share one program, so the program may hold no number of its own chunk."""
    first = {"a": [0, 0, 0], "b": [0, 1, 2], "c": [5, 3, 9]}
    second = {"a": [8, 8, 8], "b": [2, 2, 1], "c": [1, 2, 3]}
    program, other = (Table(x, stored=True) for x in (first, second))
    assert len(program.operands[0]) == 9
    for name, values in second.items():
        assert read_back(program, name, 3, other.operands) == values
        assert read_back(program, name, 3, (jnp.asarray(other.operands[0]),)) == values


@pytest.mark.parametrize("stored", [False, True])
def test_batched_columns(stored):
    """Columns that differ between batches, one of which replaces a static one."""
    static = {"a": [1, 2, 3], "b": [3, 1, 2], "c": [0, 0, 0]}
    batched = {"c": jnp.array([[4, 5, 6], [7, 8, 9]]), "d": jnp.array([[1, 0, 1], [0, 1, 0]])}
    table = Table(static, stored=stored, batched=batched)
    for batch, n in np.ndindex(2, 3):
        for name in ("a", "b"):
            assert table.read(name, n, batch, table.operands) == static[name][n]
        for name in ("c", "d"):
            assert table.read(name, n, batch, table.operands) == batched[name][batch, n]


def test_schedules_are_cached_by_value():
    t = Tiling(rows=16, columns=16, row_block=8, memory=16, tile=8, sub=4)
    assert schedule.build(Causal() & KeyLength(9), t) is schedule.build(Causal() & KeyLength(9), t)
    assert schedule.build(Full(), t) != schedule.build(Causal(), t)
