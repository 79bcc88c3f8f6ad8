"""A module of loops in loops, calls, fusions and collectives: FLOPs and bytes equal the count by hand."""

from collections import Counter

from pallas_kernels.hardware import V5E
from xla_attention.planner.accounting import Network, account
from xla_attention.planner.cycles.hlo import parse_hlo

PAIR = Network("v5e", (2, 2), ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)))
ROWS, INNER, OUTER = 64, 3, 4
BLOCK, WHOLE = f"f32[{ROWS},{ROWS}]", f"f32[{4 * ROWS},{ROWS}]"
STATE = f"(s32[], {BLOCK})"
PRODUCT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def loop(name, trips, work):
    """The body and the condition of a loop that does ``work`` on ``%x.NAME``, to ``%y.NAME``."""
    return f"""
%body.{name} (s.{name}: {STATE}) -> {STATE} {{
  %s.{name} = {STATE} parameter(0)
  %n.{name} = s32[] get-tuple-element(%s.{name}), index=0
  %x.{name} = {BLOCK} get-tuple-element(%s.{name}), index=1
  %one.{name} = s32[] constant(1)
  %next.{name} = s32[] add(%n.{name}, %one.{name})
{work}
  ROOT %out.{name} = {STATE} tuple(%next.{name}, %y.{name})
}}
%more.{name} (t.{name}: {STATE}) -> pred[] {{
  %t.{name} = {STATE} parameter(0)
  %m.{name} = s32[] get-tuple-element(%t.{name}), index=0
  %end.{name} = s32[] constant({trips})
  ROOT %less.{name} = pred[] compare(%m.{name}, %end.{name}), direction=LT
}}
"""


# A product in a fusion, then its gather over all four chips, a product of that, and a scatter of its sum.
INNER_WORK = f"""
  %product = {BLOCK} fusion(%x.inner), kind=kOutput, calls=%fused
  %gathered = {WHOLE} all-gather(%product), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  %large = {WHOLE} dot(%gathered, %product), {PRODUCT}
  %y.inner = {BLOCK} reduce-scatter(%large), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, to_apply=%add
"""
OUTER_WORK = f"""
  %zero.inner = s32[] constant(0)
  %begin.inner = {STATE} tuple(%zero.inner, %x.outer)
  %loop.inner = {STATE} while(%begin.inner), condition=%more.inner, body=%body.inner
  %z.outer = {BLOCK} get-tuple-element(%loop.inner), index=1
  %y.outer = {BLOCK} all-reduce(%z.outer), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add
"""
MODULE = f"""HloModule m, is_scheduled=true
%fused (p: {BLOCK}) -> {BLOCK} {{
  %p = {BLOCK} parameter(0)
  ROOT %inside = {BLOCK} dot(%p, %p), {PRODUCT}
}}
%add (l: f32[], r: f32[]) -> f32[] {{
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %plus = f32[] add(%l, %r)
}}
%called (c: {BLOCK}) -> {BLOCK} {{
  %c = {BLOCK} parameter(0)
  ROOT %in_call = {BLOCK} dot(%c, %c), {PRODUCT}
}}
{loop("inner", INNER, INNER_WORK)}
{loop("outer", OUTER, OUTER_WORK)}
ENTRY %main (a: {BLOCK}) -> {BLOCK} {{
  %a = {BLOCK} parameter(0)
  %zero.outer = s32[] constant(0)
  %begin.outer = {STATE} tuple(%zero.outer, %a)
  %loop.outer = {STATE} while(%begin.outer), condition=%more.outer, body=%body.outer
  %result = {BLOCK} get-tuple-element(%loop.outer), index=1
  ROOT %last = {BLOCK} call(%result), to_apply=%called
}}
"""


def test_flops_and_bytes_are_those_of_a_count_by_hand():
    found = account(parse_hlo(MODULE), V5E, PAIR, {})
    times = Counter({cost.name: cost.times for cost in found.costs})
    assert len(found.costs) == len(times)  # no instruction twice
    assert times == {
        **dict.fromkeys(("product", "gathered", "large", "y.inner", "next.inner"), OUTER * INNER),
        **dict.fromkeys(("y.outer", "next.outer"), OUTER),
        "less.inner": OUTER * (INNER + 1),  # and once each time to find that it is over
        "less.outer": OUTER + 1,
        "in_call": 1,
    }
    product = 2 * ROWS**3
    assert found.flops == OUTER * INNER * (product + 4 * product) + product

    block, word = 4 * ROWS**2, 4
    expected = {
        "product": 2 * block,
        "gathered": 4 * block,  # the whole tensor
        "large": 4 * block + block + 4 * block,
        "y.inner": 4 * block,  # what is summed, of which a quarter stays
        "y.outer": block,
        "in_call": 3 * block,  # its operand is read as both
        **dict.fromkeys(("next.inner", "next.outer"), 3 * word),
        **dict.fromkeys(("less.inner", "less.outer"), 2 * word + 1),
    }
    assert {cost.name: cost.bytes for cost in found.costs} == expected
    assert sum(cost.times * cost.bytes for cost in found.costs) == (
        OUTER * INNER * (19 * block + 3 * word)
        + OUTER * (block + 3 * word)
        + (OUTER * (INNER + 1) + OUTER + 1) * (2 * word + 1)
        + 3 * block
    )
