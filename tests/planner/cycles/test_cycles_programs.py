"""Small programs written by hand: the cycles are counted in the comments."""

import numpy as np
import pytest

from pallas_kernels.hardware import V4, V5E, V5P
from xla_attention.planner.cycles.parse import Utilization, parse_bundles
from xla_attention.planner.cycles.report import count

OPERAND = "%s0_s0 = inlined_call_operand.hbm [shape: s32[4], index: 0, kind: input, shape index: {}]"
# What a kernel begins with if it has a scalar-prefetch operand: 4 bundles.
PREFETCH = [
    f"%s1_s1 = smov [#allocation3] ;; {OPERAND}",
    "%s2_s2 = sshll.u32 %s0_s0, 4",
    "%9 = dma.hbm_to_smem %s2_s2, 16, %s1_s1, [#allocation2]",
    "%8 = dma.done.wait [#allocation2], 16",
]


def program(*lines):
    return parse_bundles("\n".join(f"   {hex(n)}   : > {{ {line} }}" for n, line in enumerate(lines)))


def cycles(lines, hardware=V5E, operands=None):
    """Each bundle occupies one slot of the only unit."""
    bundles = program(*lines)
    slots = np.ones((len(bundles), 1), np.int64)
    return count(bundles, Utilization(("VALU",), (4,), slots), hardware, [operands or {}])


def loop(limit):
    """A loop of 7 bundles, with the 4 that still run after its branch, that runs ``limit`` times."""
    return [
        "%s10_s1 = smov 0",
        "%s11_s2 = sphi %s10_s1, %s12_s3  ;;  %s12_s3 = sadd.s32 1, %s11_s2",
        f"%p13_p0 = scmp.ge.s32.totalorder %s12_s3, {limit}",
        "%14 = sbr.rel (!%p13_p0) target bundleno = 1 (0x1), region = 5",
        *[""] * 4,
    ]


def test_a_loop_runs_its_branch_delay():
    report = cycles([*loop(3), ""])
    assert report.cycles == 1 + 3 * 7 + 1
    assert report.bundles == 9
    assert report.slots == {"VALU": 23}
    assert report.busy("VALU") == 23 / 4
    assert report.total == report.cycles
    assert not report.unknown and not report.unsupported
    (hottest, *_) = report.segments
    assert (hottest.start, hottest.stop, hottest.runs, hottest.cycles) == (1, 8, 3, 21)
    assert hottest.slots == {"VALU": 7}


def test_v4_has_a_branch_delay_of_one():
    """The last three empty bundles come after the loop: it is of 4 bundles."""
    assert cycles(loop(3), V4).cycles == 1 + 3 * 4 + 3


@pytest.mark.parametrize(("operand", "expected"), [([0, 7, 0, 0], 4 + 8 + 2), ([0, 0, 0, 0], 4 + 8 + 1)])
def test_a_predicated_region_is_entered_or_skipped(operand, expected):
    lines = [
        *PREFETCH,
        "%s20_s4 = sld [smem:[#allocation3 + $0x1]]",
        "%p21_p0 = scmp.eq.s32.totalorder %s20_s4, 0",
        "",
        "%22 = sbr.rel (%p21_p0) target bundleno = 13 (0xd), region = 7",
        *[""] * 4,
        "%v1_v0 = vadd.f32 %v0_v0, %v0_v0",  # 0xc: the region
        "",
    ]
    report = cycles(lines, operands={0: np.array(operand, np.int32)})
    assert report.cycles == expected
    assert not report.unknown


def test_what_is_not_known_is_reported():
    lines = [*PREFETCH, "%s20_s4 = sld [smem:[#allocation3]]", *shifted(loop("%s20_s4"), 5)]
    known = cycles(lines, operands={0: np.array([3, 0, 0, 0], np.int32)})
    assert known.cycles == 5 + 1 + 3 * 7
    assert not known.unknown
    unknown = cycles(lines)
    assert unknown.cycles == 5 + 1 + 7  # an unknown loop is left after one turn
    assert unknown.unknown == {hex(8): 1}


def test_an_instruction_that_is_not_known_is_reported():
    report = cycles(["%s1_s0 = sfuture.s32 2, 3", *shifted(loop("%s1_s0"), 1)])
    assert report.unsupported == {"sfuture": 1}
    assert sum(report.unknown.values()) == 1


def test_vector_instructions_decide_nothing():
    """A scalar that comes from a vector is unknown, but nothing depends on it."""
    report = cycles(["%s1_s0 = vtos %v0_v0", "%v1_v1 = vadd.f32 %v0_v0, %s1_s0"])
    assert (report.cycles, report.unknown, report.unsupported) == (2, {}, {})


def test_spilled_scalars_come_back():
    lines = [
        "%s3_s0 = smov 4",
        "%9 = sst [smem:[#allocation7_spill]] %s3_s0",
        "%s4_s1 = sld [smem:[#allocation7_spill]]",
    ]
    assert cycles([*lines, *shifted(loop("%s4_s1"), 3)]).cycles == 3 + 1 + 4 * 7


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (["%s3_s0 = sadd.s32 4294967295, 6"], 5),
        (["%s3_s0 = ssub.s32 2, 7", "%s3_s9 = ssub.s32 0, %s3_s0"], 5),
        (["%s3_s0 = sshll.u32 3, 2"], 12),
        (["%s3_s0 = sshrl.u32 4294967295, 29"], 7),
        (["%s3_s0 = sshra.s32 4294967280, 2", "%s3_s9 = ssub.s32 0, %s3_s0"], 4),
        (["%s3_s0 = sand.u32 13, 7"], 5),
        (["%s3_s0 = smin.u32 4294967295, 6"], 6),
        (["%p4_p0 = scmp.lt.u32.totalorder 4294967295, 1", "%s3_s0 = scalar_select %p4_p0, 9, 2"], 2),
        (["%p4_p0 = scmp.lt.s32.totalorder 4294967295, 1", "%s3_s0 = scalar_select %p4_p0, 9, 2"], 9),
        (["%p4_p0 = scmp.eq.s32.totalorder 1, 1", "%s3_s0 = smov (!%p4_p0, 3), 8"], 3),
        (["%p4_p0 = scmp.eq.s32.totalorder 1, 1", "%s3_s0 = smov (%p4_p0, 3), 8"], 8),
        (
            [
                "%p4_p0 = scmp.eq.s32.totalorder 1, 1",
                "%p5_p1 = pneg %p4_p0",
                "%p6_p2 = pnand %p4_p0, %p5_p1",
                "%p7_p3 = por %p5_p1, %p6_p2",
                "%s3_s0 = scalar_select %p7_p3, 4, 6",
            ],
            4,
        ),
        (["%7 = sdivrem.u32 17, 5", "%s3_s0 = spop.drf %7", "%s4_s1 = spop.drf %7"], 3),
        (["%7 = sdivrem.u32 17, 5", "%s4_s1 = spop.drf %7", "%s3_s0 = spop.drf %7"], 2),
        # in one bundle, what is used may stand behind its use
        (["%s3_s0 = sadd.s32 %s4_s1, 1 ;; %s4_s1 = smov 5"], 6),
    ],
)
def test_scalar_instructions(code, expected):
    """A loop of 7 bundles that runs as often as the code says."""
    result = "%s3_s9" if any("%s3_s9" in line for line in code) else "%s3_s0"
    report = cycles([*code, *shifted(loop(result), len(code))])
    assert report.cycles == len(code) + 1 + 7 * expected
    assert not report.unknown


def test_nested_comments_over_lines_are_not_code():
    (bundle,) = parse_bundles("   0   :  { %1 = sfence /* a /* b */ ;; %s2_s0 = smov 1\n second line */ }")
    assert [i.op for i in bundle.instructions] == ["sfence"]


def test_a_missing_bundle_is_an_error():
    with pytest.raises(ValueError, match="0x2 after 0x0"):
        parse_bundles("   0   :  { %1 = sfence }\n   0x2   :  { %1 = sfence }")


def test_a_program_that_does_not_fit_its_utilization_is_an_error():
    with pytest.raises(ValueError, match="1 rows for 9 bundles"):
        count(program(*loop(3), ""), Utilization(("VALU",), (4,), np.ones((1, 1), np.int64)), V5E)


def transfer(granules, flag, guard=""):
    target = f"[#allocation4], [#allocation6 + {flag}]"
    return f"%5 = dma.hbm_to_vmem [thread:$0] {guard} %s2_s2, {granules}, {target}"


def test_a_wait_stalls_until_hbm_has_served_what_came_before():
    """v5e moves 819e9 / 1.5e9 = 546 bytes a cycle; a granule is 32 bytes."""
    starts = [*PREFETCH[:2], transfer(1 << 15, "$0x0"), transfer(1 << 14, "$0x1")]
    waits = ["%7 = dma.done.wait [#allocation6 + $0x1], 16384", "%7 = dma.done.wait [#allocation6], 32768"]
    lines = [*starts, "", "", *waits]
    report = cycles(lines)
    megabytes = 1.5 * 2**20
    assert report.cycles == 8
    assert report.hbm_bytes == megabytes
    # the first starts in cycle 2, both are there megabytes / 546 cycles later; the wait began in cycle 6
    assert report.stalls == round(2 + megabytes / 546 - 6)


def test_half_of_a_transfer_can_be_waited_for():
    lines = [*PREFETCH[:2], transfer(1 << 15, "$0x0")]
    waits = ["%7 = dma.done.wait [#allocation6], 16384"] * 2
    assert cycles([*lines, *waits]).stalls == cycles([*lines, *waits[:1]]).stalls > 0


def test_transfers_on_the_chip_do_not_wait_for_hbm():
    lines = [
        line.replace("hbm_to_vmem", "cmem_to_vmem") for line in [*PREFETCH[:2], transfer(1 << 15, "$0x0")]
    ]
    report = cycles([*lines, "%7 = dma.done.wait [#allocation6], 32768"])
    assert (report.stalls, report.hbm_bytes) == (0, 0)


def test_a_guarded_transfer_that_does_not_start_moves_nothing():
    lines = [
        "%p4_p0 = scmp.eq.s32.totalorder 1, 2",
        transfer(64, "$0x0", "(%p4_p0),"),
        transfer(64, "$0x0", "(!%p4_p0),"),
    ]
    assert cycles(lines).hbm_bytes == 64 * 32


def test_the_slower_core_counts():
    """Core 0 runs the loop once, core 1 twice."""
    core = "%s5_s0 = sld [smem:[#allocation0]] /* megacore core id :: core id */"
    lines = [core, "%s6_s1 = sadd.s32 %s5_s0, 1", *shifted(loop("%s6_s1"), 2)]
    assert cycles(lines, V5P).cycles == 2 + 1 + 2 * 7
    assert cycles(lines, V5E).cycles == 2 + 1 + 1 * 7  # it has one core


def test_all_calls_are_added_up():
    lines = [*PREFETCH, "%s20_s4 = sld [smem:[#allocation3]]", *shifted(loop("%s20_s4"), 5)]
    bundles = program(*lines)
    utilization = Utilization(("VALU",), (4,), np.ones((len(bundles), 1), np.int64))
    calls = [{0: np.array([n], np.int32)} for n in (2, 5)]
    report = count(bundles, utilization, V5E, calls)
    assert report.calls == 2
    assert report.cycles == 2 * 6 + (2 + 5) * 7


def shifted(lines, by):
    """A loop that begins ``by`` bundles later."""
    return [line.replace("bundleno = 1 (0x1)", f"bundleno = {by + 1} ({hex(by + 1)})") for line in lines]
