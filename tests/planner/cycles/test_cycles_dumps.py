"""Recorded dumps of one kernel, from two versions of libtpu, and the layouts and constants that it reads.

The kernel multiplies its block by itself ``TRIPS[n]`` times in the grid step ``n``:

    o[...] = lax.fori_loop(0, trips[pl.program_id(0)], lambda n, x: x * block[...], block[...])

with ``TRIPS`` a scalar-prefetch operand. The pipeline around it turns grid + 2 times.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.hardware import V5E, V5P
from xla_attention.planner.cycles import KernelCycles, count_cycles
from xla_attention.planner.cycles.parse import parse_utilization

DATA = Path(__file__).parent / "data"
OLD = DATA / "powers_v5e_libtpu_0.0.21"
NEW = DATA / "powers_v5p_libtpu_0.0.52"
TRIPS = [3, 0, 5]


def expected_old(trips):
    """By hand, from the addresses of the branches and their targets."""
    grid, turns = len(trips), len(trips) + 2
    around = 11 + turns * (45 - 11) + turns * (97 - 83) + 4
    steps = grid * (59 - 45) + grid * (83 - 68)
    return around + steps + sum(n > 0 for n in trips) * 1 + sum(trips) * (68 - 60)


def expected_new(trips):
    grid, turns = len(trips), len(trips) + 2
    around = 29 + turns * (77 - 29) + turns * (140 - 125) + 5
    steps = grid * (91 - 77) + grid * (125 - 100)
    return around + steps + sum(n > 0 for n in trips) * 1 + sum(trips) * (100 - 92)


@pytest.mark.parametrize(
    ("folder", "hardware", "expected", "bundles"),
    [(OLD, V5E, expected_old, 101), (NEW, V5P, expected_new, 145)],
    ids=["0.0.21", "0.0.52"],
)
class TestRecorded:
    def test_operands_are_read_from_the_hlo(self, folder, hardware, expected, bundles):
        (report,) = count_cycles(folder, hardware)
        assert (report.name, report.op_name, report.calls) == ("f.1", "jit(f)/pallas_call", 1)
        assert report.bundles == bundles
        assert report.cycles == expected(TRIPS)
        assert not report.unknown and not report.unsupported
        # three blocks in, three out, and the table: 16 granules of 32 bytes
        assert report.hbm_bytes == 6 * 8 * 128 * 4 + 16 * 32
        # one product of one register each time
        assert report.slots["VALU"] >= sum(TRIPS)
        assert report.slots["MXU"] == 0

    def test_operands_can_be_given(self, folder, hardware, expected, bundles):
        for trips in ([0, 0, 0], [1, 1, 1], [100, 0, 7]):
            (report,) = count_cycles(folder, hardware, [{0: np.array(trips, np.int32)}])
            assert report.cycles == expected(trips)

    def test_without_the_operand_the_count_says_so(self, folder, hardware, expected, bundles, tmp_path):
        for path in folder.iterdir():
            if not path.name.endswith("hlo.txt"):
                (tmp_path / path.name).write_bytes(path.read_bytes())
        (report,) = count_cycles(tmp_path, hardware)
        assert sum(report.unknown.values()) == 6  # whether to enter each loop, and whether to leave it
        assert report.cycles == expected([1, 1, 1])

    def test_reports_go_through_json(self, folder, hardware, expected, bundles):
        (report,) = count_cycles(folder, hardware)
        assert KernelCycles.from_json(json.loads(json.dumps(asdict(report)))) == report


def test_units_have_one_name_in_every_version():
    old, new = (parse_utilization(next(folder.glob("*utilization.txt")).read_text()) for folder in (OLD, NEW))
    assert old.units == ("MXU", "XLU", "VALU", "EUP", "LOAD", "STORE", "SALU")
    assert set(new.units) == {*old.units, "MATPUSH", "VPOP", "FILL", "SPILL"}
    assert old.capacity == (4, 3, 4, 1, 3, 1, 2)
    assert dict(zip(new.units, new.capacity)).items() >= dict(zip(old.units, old.capacity)).items()
    assert len(old.slots) == 101


def test_another_table_is_refused():
    with pytest.raises(ValueError, match="utilization"):
        parse_utilization("1 2 3")


def test_a_folder_without_kernels_gives_none(tmp_path):
    assert count_cycles(tmp_path, V5E) == []
