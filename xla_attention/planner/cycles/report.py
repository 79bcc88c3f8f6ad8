"""What the count of a kernel's cycles says, and the count itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pallas_kernels.hardware import Hardware
from xla_attention.planner.cycles.machine import Machine
from xla_attention.planner.cycles.parse import Bundle, Utilization
from xla_attention.planner.cycles.program import segments_of

_HOT = 12  # segments that a report keeps


@dataclasses.dataclass(frozen=True)
class HotSegment:
    """A straight piece of the program that takes many cycles.

    Attributes:
        start, stop: its bundles, ``stop`` not included.
        depth: loops around it.
        runs: times that it ran, in all calls.
        slots: that one run occupies, by unit.
    """

    start: int
    stop: int
    depth: int
    runs: int
    slots: dict[str, int]

    @property
    def cycles(self) -> int:
        return (self.stop - self.start) * self.runs


@dataclasses.dataclass(frozen=True)
class KernelCycles:
    """Static cycles of one Mosaic kernel on one TensorCore.

    Not counted: latency of HBM, conflicts of VMEM ports, instruction fetch, the launch, and the XLA
    operations around the kernel.

    Attributes:
        name: of the instruction in the optimized HLO.
        op_name: the JAX operation that it comes from.
        calls: times that the kernel runs; all numbers below are of all calls together.
        bundles: length of the program.
        cycles: bundles executed.
        stalls: cycles spent waiting for HBM, if it served one core's share of its bandwidth in one queue.
        capacity: slots of each unit in one cycle.
        slots: slots occupied, by unit.
        hbm_bytes: that the kernel moves from and to HBM.
        unknown: times that a branch or a DMA depended on values that are not known, by bundle; if there are
            any, the count is a guess.
        unsupported: instructions met whose effect is not known here, where a branch or DMA might use it.
        segments: the hottest ones.
    """

    name: str
    op_name: str
    calls: int
    bundles: int
    cycles: int
    stalls: int
    capacity: dict[str, int]
    slots: dict[str, int]
    hbm_bytes: int
    unknown: dict[str, int]
    unsupported: dict[str, int]
    segments: tuple[HotSegment, ...]

    @property
    def total(self) -> int:
        """Cycles with HBM stalls."""
        return self.cycles + self.stalls

    def busy(self, unit: str) -> float:
        """Cycles that ``unit`` would need if all its slots were always full."""
        return self.slots[unit] / self.capacity[unit]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelCycles:
        """The report whose ``dataclasses.asdict`` went through JSON."""
        return cls(**{**data, "segments": tuple(HotSegment(**segment) for segment in data["segments"])})


def count(
    bundles: Sequence[Bundle],
    utilization: Utilization,
    hardware: Hardware,
    calls: Sequence[Mapping[int, np.ndarray]] = ({},),
    *,
    name: str = "",
    op_name: str = "",
) -> KernelCycles:
    """Runs a kernel's program once for each call; on a chip of several cores, the slowest core counts.

    Args:
        bundles: the program.
        utilization: the slots of each bundle.
        hardware: that it was compiled for.
        calls: contents of the integer operands that are known, by index, for each time that the kernel runs.
        name, op_name: of the report.

    Raises:
        ValueError: program and utilization are not of the same length.
    """
    slots = utilization.slots
    missing = len(bundles) - len(slots)
    if not 0 <= missing <= 2:  # the last bundles may have no row
        raise ValueError(f"utilization: got {len(slots)} rows for {len(bundles)} bundles")
    slots = np.pad(slots, ((0, missing), (0, 0)))
    segments = segments_of(bundles, hardware.name)

    runs = np.zeros(len(segments), np.int64)
    time, hbm_bytes = 0.0, 0
    unknown: dict[str, int] = {}
    unsupported: dict[str, int] = {}
    for operands, times in _alike(calls):
        machines = [Machine(segments, hardware, operands, core) for core in range(hardware.cores)]
        for machine in machines:
            machine.run()
        slowest = max(machines, key=lambda machine: machine.time)
        runs += times * np.asarray(slowest.runs)
        time += times * slowest.time
        hbm_bytes += times * slowest.dma.hbm_bytes
        for at, met in slowest.unknown.items():
            unknown[hex(at)] = unknown.get(hex(at), 0) + times * met
        for op, met in slowest.unsupported.items():
            unsupported[op] = unsupported.get(op, 0) + times * met

    lengths = np.array([segment.stop - segment.start for segment in segments])
    cycles = int(lengths @ runs)
    by_segment = np.add.reduceat(slots, [segment.start for segment in segments])
    units = utilization.units
    hottest = sorted(np.flatnonzero(runs), key=lambda n: -lengths[n] * runs[n])[:_HOT]
    return KernelCycles(
        name=name,
        op_name=op_name,
        calls=len(calls),
        bundles=len(bundles),
        cycles=cycles,
        stalls=round(time - cycles),
        capacity=dict(zip(units, utilization.capacity)),
        slots=dict(zip(units, (runs @ by_segment).tolist())),
        hbm_bytes=hbm_bytes,
        unknown=unknown,
        unsupported=unsupported,
        segments=tuple(
            HotSegment(
                start=segments[n].start,
                stop=segments[n].stop,
                depth=segments[n].depth,
                runs=int(runs[n]),
                slots=dict(zip(units, by_segment[n].tolist())),
            )
            for n in hottest
        ),
    )


def _alike(calls: Sequence[Mapping[int, np.ndarray]]) -> list[tuple[Mapping[int, np.ndarray], int]]:
    """Calls with the same operands, once, with their number: a loop over layers makes the same ones."""
    found: dict[tuple[tuple[int, bytes], ...], tuple[Mapping[int, np.ndarray], int]] = {}
    for operands in calls:
        key = tuple((n, operands[n].tobytes()) for n in sorted(operands))
        found[key] = (operands, found[key][1] + 1 if key in found else 1)
    return list(found.values())
