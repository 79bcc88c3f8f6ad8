"""A scheduled module of known operations: each counts once, as often as it runs, and waits where it must."""

import pytest

from pallas_kernels.hardware import V5E
from xla_attention.planner.accounting import Network, account
from xla_attention.planner.cycles.hlo import parse_hlo

# Four chips in a square, without rings: each has one link along either axis.
SQUARE = Network("v5e", (2, 2), ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)))
LINK, HBM = 50e9, V5E.hbm_bytes_per_second
FIVE_TIMES = """
%body (state: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %state = (s32[], f32[1024,1024]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %x = f32[1024,1024]{1,0} get-tuple-element(%state), index=1
  %product = f32[1024,1024]{1,0} fusion(%x), calls=%fused, backend_config={"estimated_cycles":"3000"}
  %sum = f32[1024,1024]{1,0} all-reduce(%product), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %out = (s32[], f32[1024,1024]{1,0}) tuple(%next, %sum)
}
%condition (state.1: (s32[], f32[1024,1024])) -> pred[] {
  %state.1 = (s32[], f32[1024,1024]{1,0}) parameter(0)
  %m = s32[] get-tuple-element(%state.1), index=0
  %five = s32[] constant(5)
  ROOT %more = pred[] compare(%m, %five), direction=LT
}
%fused (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  ROOT %dot = f32[1024,1024]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %plus = f32[] add(%l, %r)
}
"""
LOOP = f"""HloModule m, is_scheduled=true
{FIVE_TIMES}
ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {{
  %a = f32[1024,1024]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %copy.1 = f32[1024,1024]{{1,0}} copy(%a), backend_config={{"estimated_cycles":"1500"}}
  %begin = (s32[], f32[1024,1024]{{1,0}}) tuple(%zero, %copy.1)
  %loop = (s32[], f32[1024,1024]{{1,0}}) while(%begin), condition=%condition, body=%body
  ROOT %result = f32[1024,1024]{{1,0}} get-tuple-element(%loop), index=1
}}
"""


def costs(text, kernels=None):
    found = account(parse_hlo(text), V5E, SQUARE, kernels or {})
    return found, {cost.name: cost for cost in found.costs}


def test_a_loop_counts_as_often_as_it_runs():
    found, by_name = costs(LOOP)
    assert {name: cost.times for name, cost in by_name.items()} == {
        "copy.1": 1,
        "product": 5,
        "sum": 5,
        "next": 5,
        "more": 6,  # and once to find that it is over
    }
    assert found.flops == 5 * 2 * 1024**3
    assert by_name["sum"].bytes == 4 * 2**20
    # Three quarters of it reach each chip over two links, once to be summed and once summed.
    hops = 2e-6
    assert by_name["sum"].seconds == pytest.approx(2 * (0.75 * 4 * 2**20 / (2 * LINK) + hops))
    causes = found.by_cause()
    assert causes["matmul"] == pytest.approx(5 * 3000 / V5E.clock_hz)
    assert causes["copy"] == pytest.approx(1500 / V5E.clock_hz)
    assert causes["communication"] == pytest.approx(5 * by_name["sum"].seconds)
    assert sum(causes.values()) == pytest.approx(found.seconds)


def between(work):
    """A gather of 8 MiB over four chips beside so many cycles of work."""
    return f"""HloModule m, is_scheduled=true
ENTRY %main (a: f32[512,1024], b: f32[8]) -> f32[2048,1024] {{
  %a = f32[512,1024]{{1,0}} parameter(0)
  %b = f32[8]{{0}} parameter(1)
  %begun = (f32[512,1024]{{1,0}}, f32[2048,1024]{{1,0}}) all-gather-start(%a), replica_groups=[1,4]<=[4]
  %work = f32[8]{{0}} fusion(%b), calls=%negated, backend_config={{"estimated_cycles":"{work}"}}
  ROOT %done = f32[2048,1024]{{1,0}} all-gather-done(%begun)
}}
%negated (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %n = f32[8]{{0}} negate(%p)
}}
"""


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0, 3.0])
def test_what_runs_beside_other_work_costs_what_is_waited_for(share):
    whole = 0.75 * 8 * 2**20 / (2 * LINK) + 2e-6
    cycles = round(share * whole * V5E.clock_hz)
    found, by_name = costs(between(cycles))
    assert set(by_name) == {"begun", "work"}  # the end is its beginning's
    gather = by_name["begun"]
    assert gather.bytes == 8 * 2**20
    assert gather.seconds == pytest.approx(max(0, 1 - share) * whole, abs=2e-9)
    assert gather.hidden == pytest.approx(min(1, share) * whole, abs=2e-9)
    assert found.seconds == pytest.approx(max(1, share) * whole, abs=2e-9)


def test_kernels_that_are_alike_have_one_schedule():
    call = 'custom-call(%q), custom_call_target="tpu_custom_call", backend_config={"body":"BODY"}'
    text = """HloModule m, is_scheduled=true
ENTRY %main (q: bf16[8,128]) -> bf16[8,128] {
  %q = bf16[8,128]{1,0} parameter(0)
""" + "".join(
        f"  {root}%k{n} = bf16[8,128]{{1,0}} {call.replace('BODY', body)}\n"
        for n, (root, body) in enumerate([("", "one"), ("", "one"), ("ROOT ", "two")])
    )
    found, by_name = costs(text + "}\n", {"k0": 1e-3, "k2": 5e-3})
    assert found.by_cause()["attention"] == pytest.approx(7e-3)
    with pytest.raises(ValueError, match="no time for k2"):
        costs(text + "}\n", {"k0": 1e-3})


def test_without_an_estimate_bytes_bound_it():
    text = """HloModule m, is_scheduled=true
ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  %fetch = (f32[1024,1024]{1,0:S(1)}, f32[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %fetched = f32[1024,1024]{1,0:S(1)} copy-done(%fetch)
  ROOT %sorted = f32[1024,1024]{1,0} sort(%fetched), dimensions={1}
}
"""
    _, by_name = costs(text)
    assert by_name["sorted"].basis == "bytes"
    assert by_name["sorted"].seconds == pytest.approx(8 * 2**20 / HBM)
    # Into VMEM it leaves HBM once, and nothing runs beside it.
    assert by_name["fetch"].seconds == pytest.approx(4 * 2**20 / HBM)
    assert by_name["fetch"].cause == "copy"


def test_a_loop_that_depends_on_data_is_refused():
    text = LOOP.replace("%zero = s32[] constant(0)", '%zero = s32[] custom-call(%a), custom_call_target="X"')
    with pytest.raises(ValueError, match="not known how often loop loop runs"):
        costs(text)


LINE = Network("v5e", (2, 4), tuple((x, y, 0) for y in range(4) for x in range(2)))
POD = Network("v5e", (16, 16), tuple((x, y, 0) for y in range(16) for x in range(16)))


@pytest.mark.parametrize(
    ("network", "group", "links"),
    [
        (SQUARE, [0, 1], 1),  # neighbours
        (SQUARE, [0, 1, 2, 3], 2),
        (LINE, [0, 2, 4, 6], 1),  # a line: its end receives over one link
        (LINE, [0, 4], 1 / 2),  # two steps apart: the chips between are another group's, on the same links
        (POD, list(range(16)), 2),  # a ring
        (POD, list(range(256)), 4),
        (POD, list(range(0, 16, 2)), 1),  # every other chip of a ring, which two groups share
    ],
)
def test_a_gather_is_bound_by_the_links_into_a_chip(network, group, links):
    size = 2**30
    seconds = network.seconds("all-gather", [group], size)
    n = len(group)
    assert seconds == pytest.approx(size * (n - 1) / n / (links * LINK), rel=2e-2)  # hops aside
    assert network.seconds("reduce-scatter", [group], size) == seconds
    assert network.seconds("all-reduce", [group], size) == pytest.approx(2 * seconds)


def test_an_exchange_is_bound_by_the_middle():
    """Of 16 chips in a ring each sends half of its bytes across, 8 chips' over two links each way."""
    seconds = POD.seconds("all-to-all", [list(range(16))], 2**30)
    assert seconds == pytest.approx(8 * 2**30 / 2 / (2 * LINK), rel=1e-2)


def test_a_permute_shares_the_links_it_passes():
    ring = [(n, (n + 1) % 16) for n in range(16)]
    assert POD.seconds("collective-permute", ring, 2**20) == pytest.approx(2**20 / LINK + 1e-6)
    assert LINE.seconds("collective-permute", [(0, 6)], 2**20) == pytest.approx(3 * (2**20 / LINK + 1e-6))
    with pytest.raises(ValueError, match="no collective"):
        POD.seconds("broadcast", [[0, 1]], 1)
