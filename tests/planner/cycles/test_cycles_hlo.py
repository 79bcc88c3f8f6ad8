"""What integer operands hold: constants followed through an HLO module, and their layout in scalar memory."""

import numpy as np
import pytest

from xla_attention.planner.cycles.hlo import executions, parse_hlo
from xla_attention.planner.cycles.smem import words_of

KERNEL = 'custom-call(%{table}, %q), custom_call_target="tpu_custom_call", metadata={{op_name="a, b(c)"}}'


def module(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return parse_hlo(
        f"HloModule m\n\nENTRY %main (q: f32[8]) -> f32[8] {{\n  %q = f32[8]{{0}} parameter(0)\n{body}\n}}\n"
    )


def test_constants_are_followed_through_copies():
    (operands,) = executions(
        module(
            "%t = s8[1,2,2]{2,1,0:T(4,128)(4,1)} constant({ { { 1, 0 }, { -2, 1 } } })",
            "%start = (s8[1,2,2]{2,1,0}, s8[1,2,2]{2,1,0}, u32[]{:S(2)}) copy-start(%t)",
            "%done = s8[1,2,2]{2,1,0} copy-done(%start)",
            "%flat = s8[4]{0} bitcast(%done)",
            f"ROOT %k = f32[8]{{0}} {KERNEL.format(table='flat')}",
        ),
        "k",
    )
    assert list(operands) == [0]
    assert operands[0].dtype == np.int8
    np.testing.assert_array_equal(operands[0], [1, 0, -2, 1])


def test_data_is_not_known():
    calls = executions(
        module("%t = s32[2]{0} convert(%q)", f"ROOT %k = f32[8] {KERNEL.format(table='t')}"), "k"
    )
    assert calls == [{}]


def test_a_constant_that_was_left_out_of_the_text_is_not_known():
    calls = executions(
        module("%t = s32[99]{0} constant({...})", f"ROOT %k = f32[8] {KERNEL.format(table='t')}"), "k"
    )
    assert calls == [{}]


LOOP = """HloModule m

%fused (p0: s32[3,2], p1: s32[]) -> s32[2] {
  %p0 = s32[3,2]{1,0:T(4,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  %row = s32[1,2]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,2}
  ROOT %sum = s32[2]{0} reduce(%row, %zero), dimensions={0}, to_apply=%add
}

%body (state: (s32[], f32[8], s32[3,2])) -> (s32[], f32[8], s32[3,2]) {
  %state = (s32[], f32[8]{0}, s32[3,2]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %rows = s32[3,2]{1,0} get-tuple-element(%state), index=2
  %table = s32[2]{0} fusion(%rows, %n), kind=kLoop, calls=%fused
  %k = f32[8]{0} custom-call(%table, %x), custom_call_target="tpu_custom_call"
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  ROOT %new = (s32[], f32[8]{0}, s32[3,2]{1,0}) tuple(%next, %k, %rows)
}

%condition (state: (s32[], f32[8], s32[3,2])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}, s32[3,2]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%state.1), index=0
  %three = s32[] LIMIT
  ROOT %less = pred[] compare(%n.1, %three), direction=LT
}

ENTRY %main (q: f32[8], m: s32[]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %m = s32[] parameter(1)
  %begin = s32[] constant(0)
  %numbers = s32[3,2]{1,0} constant({ { 1, 2 }, { 3, 4 }, { 5, 6 } })
  %initial = (s32[], f32[8]{0}, s32[3,2]{1,0}) tuple(%begin, %q, %numbers)
  %loop = (s32[], f32[8]{0}, s32[3,2]{1,0}) while(%initial), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_each_iteration_of_a_loop_reads_its_row():
    calls = executions(parse_hlo(LOOP.replace("LIMIT", "constant(3)")), "k")
    assert [call[0].tolist() for call in calls] == [[1, 2], [3, 4], [5, 6]]


def test_a_loop_of_unknown_length_counts_once():
    calls = executions(parse_hlo(LOOP.replace("LIMIT", 'custom-call(), custom_call_target="random"')), "k")
    assert [call[0].tolist() for call in calls] == [[1, 2]]


def test_a_kernel_that_is_not_in_the_module_never_runs():
    assert executions(parse_hlo(LOOP.replace("LIMIT", "constant(3)")), "other") == []


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="entry computation"):
        parse_hlo("HloModule m\n")


def test_one_dimension_is_linear():
    np.testing.assert_array_equal(words_of(np.array([5, -1, 7], np.int32)), [5, -1, 7])


def test_bytes_of_one_dimension_fill_a_row_of_words_at_a_time():
    words = words_of(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(words, [n | (n + 128) << 8 for n in range(128)])


def test_rows_are_tiled_by_eight():
    array = np.arange(10 * 130, dtype=np.int32).reshape(10, 130)
    words = words_of(array)
    # tiles of 8 x 128: (rows 0-7, columns 0-127), (rows 0-7, columns 128-), (rows 8-, ...)
    for row, column in [(0, 0), (7, 127), (3, 129), (8, 0), (9, 129)]:
        tile = row // 8 * 2 + column // 128
        assert words[tile * 1024 + row % 8 * 128 + column % 128] == array[row, column]


def test_few_rows_make_a_smaller_tile():
    array = np.arange(2 * 200, dtype=np.int32).reshape(2, 200)
    assert words_of(array)[2 * 128 + 128 + 5] == array[1, 128 + 5]


def test_neighbouring_rows_of_bytes_share_a_word():
    array = np.array([[[1, 2], [3, 4], [5, 6], [-1, 8], [9, 10]]], np.int8)
    words = words_of(array)
    assert words[0] == np.array([1, 3, 5, -1], np.int8).view(np.int32)
    assert words[1] == np.array([2, 4, 6, 8], np.int8).view(np.int32)
    assert words[128] == 9
