"""Collectives in the text of a module: kinds, axes, bytes, and how often they run."""

import pytest

from xla_attention.planner.collectives import Collective, Total, collectives_of, totals

MESH = {"data": 1, "fsdp": 4, "tensor": 2, "context": 1}


def module(*instructions, before=""):
    lines = ("%p0 = bf16[8,16]{1,0} parameter(0)", *instructions)
    body = "\n".join(f"  {line}" for line in lines)
    return f"{before}\nENTRY %main (p0: bf16[8,16]) -> bf16[8,16] {{\n{body}\n}}\n"


def only(text):
    (found,) = collectives_of(text, MESH)
    return found


GATHER = "%g = bf16[32,16]{1,0:T(8,128)} all-gather(%p0), channel_id=1, "


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("fsdp",)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("fsdp",)),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[1,8]<=[8]", ("fsdp", "tensor")),
        ("replica_groups={}", ("fsdp", "tensor")),
    ],
)
def test_groups_of_devices_are_axes_of_the_mesh(groups, axes):
    line = GATHER + groups + ', dimensions={0}, metadata={op_name="dot.7"}'
    assert only(module(line)) == Collective("all-gather", axes, 1, 32 * 16 * 2, "bf16[32,16]", "dot.7")


def test_a_collective_in_pieces_is_counted_once_and_a_sum_that_is_cut_is_a_scatter():
    before = (
        "%all-reduce-scatter.1 (p: f32[8,16]) -> f32[2,16] {\n  %p = f32[8,16]{1,0} parameter(0)\n"
        "  %r = f32[8,16]{1,0} all-reduce(%p), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0)\n"
        "  ROOT %s = f32[2,16]{1,0} slice(%r)\n}\n"
    )
    pieces = [GATHER.replace("%g", f"%g{n}") + "replica_groups=[4,2]<=[8]" for n in range(3)]
    found = collectives_of(module(*pieces, before=before), MESH)
    assert totals(found) == [
        Total("all-gather", ("tensor",), 1, 1024),
        Total("reduce-scatter", ("fsdp",), 1, 512),
    ]


def test_collectives_of_two_computations_with_one_channel_are_two():
    names = ("call.1/all_to_all", "call.2/all_to_all", "call.2/all_to_all")
    lines = [
        f'%a{n} = bf16[8,16]{{1,0}} all-to-all(%p0), channel_id=1, metadata={{op_name="{name}"}}'
        for n, name in enumerate(names)
    ]
    found = collectives_of(module(*lines), MESH)
    assert totals(found) == [Total("all-to-all", ("fsdp", "tensor"), 2, 2 * 256)]


def test_permutes_beside_a_product_are_one_ring():
    """Zeros go round and gather sums: a reduce-scatter. A piece that only goes round: a gather. Both in a
    row, as XLA leaves short rings; and a permute that no product asked for."""
    pairs = "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}"
    shape = "(bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[], u32[])"

    def permute(name, operand, source):
        metadata = f'metadata={{op_name="{source}"}}'
        return (
            f"%{name} = {shape} collective-permute-start(%{operand}), {pairs}, {metadata}",
            f"%{name}-done = bf16[8,16]{{1,0}} collective-permute-done(%{name})",
        )

    added = (
        "%adds (a: bf16[8,16]) -> bf16[8,16] {\n  %a = bf16[8,16]{1,0} parameter(0)\n"
        "  ROOT %b = bf16[8,16]{1,0} add(%a, %a)\n}\n"
    )
    found = collectives_of(
        module(
            "%zero = bf16[] constant(0)",
            "%zeros = bf16[8,16]{1,0} broadcast(%zero), dimensions={}",
            *permute("s1", "zeros", "dot.1"),
            "%sum = bf16[8,16]{1,0} fusion(%s1-done), kind=kLoop, calls=%adds",
            *permute("s2", "sum", "dot.1"),
            *permute("g1", "p0", "dot.2"),
            *permute("g2", "g1-done", "dot.2"),
            *permute("x", "p0", "ppermute"),
            before=added,
        ),
        MESH,
    )
    assert totals(found) == [
        Total("reduce-scatter in a product", ("fsdp",), 1, 512),
        Total("all-gather in a product", ("fsdp",), 1, 512),
        Total("collective-permute", ("fsdp",), 1, 256),
    ]


def test_a_collective_in_a_loop_runs_as_often_as_the_loop():
    before = """
%body (s: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %s = (s32[], bf16[8,16]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %r = bf16[8,16]{1,0} all-reduce(%x), channel_id=5, replica_groups=[4,2]<=[8]
  ROOT %t = (s32[], bf16[8,16]{1,0}) tuple(%next, %r)
}

%condition (s: (s32[], bf16[8,16])) -> pred[] {
  %s = (s32[], bf16[8,16]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant(5)
  ROOT %more = pred[] compare(%n, %end), direction=LT
}
"""
    text = module(
        "%start = s32[] constant(0)",
        "%state = (s32[], bf16[8,16]{1,0}) tuple(%start, %p0)",
        "%loop = (s32[], bf16[8,16]{1,0}) while(%state), condition=%condition, body=%body",
        before=before,
    )
    assert totals([only(text)]) == [Total("all-reduce", ("tensor",), 5, 5 * 256)]
