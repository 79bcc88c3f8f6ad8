"""Walks a scheduled HLO module as a chip would run it, and gives each instruction the time that it takes.

Instructions run one after the other. What has a ``-start`` and a ``-done`` runs beside those between, on the
network or on the copy engine, which serve one after another; waiting for it at its end is what it costs.

- Fusions, matrix products, copies: XLA's own ``estimated_cycles``.
- Pallas kernels: the cycles of their schedules, with waits for HBM.
- Collectives: bytes over the links of their group (:mod:`network`).
- Copies between memories: bytes over the bandwidth of HBM. So is what the compiler gives no estimate for,
  such as gathers, scatters and sorts, for which that is a lower bound.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from pallas_kernels.hardware import Hardware
from xla_attention.planner.accounting.network import Network
from xla_attention.planner.accounting.work import bytes_accessed, matmul_flops
from xla_attention.planner.collectives import KINDS, groups_of
from xla_attention.planner.cycles.hlo import (
    Computation,
    Frame,
    Instruction,
    Module,
    entry_frame,
    shape_bytes,
)

CAUSES = ("matmul", "attention", "compute", "communication", "copy")
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency"),
    *("opt-barrier", "partition-id", "replica-id"),
}
_FREE_CALLS = ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
_COPIES = ("copy", "transpose", "reshape", "concatenate", "pad", "slice", "dynamic-slice")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BODY = re.compile(r'"body":"([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_LAID_OUT = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Cost:
    """One instruction of the module.

    Attributes:
        name, opcode: its own; the end of an asynchronous one is counted with its start.
        cause: of :data:`CAUSES`.
        source: the operation of the program that it comes from.
        times: how often a step runs it.
        seconds: that the chip spends on it, or waiting for it, each time.
        hidden: seconds that it runs beside others, each time.
        flops: of its matrix products, each time; those of kernels are not in the module.
        bytes: of operands and results; of a collective, those of the whole tensor; each time.
        basis: what ``seconds`` are by: ``"compiler"``, ``"schedule"``, ``"network"`` or ``"bytes"``.
    """

    name: str
    opcode: str
    cause: str
    source: str
    times: int
    seconds: float
    hidden: float
    flops: int
    bytes: int
    basis: str

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.times * self.seconds


@dataclasses.dataclass(frozen=True)
class Account:
    """Every instruction that a step runs, once each; those that cost nothing are left out."""

    costs: tuple[Cost, ...]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(cost.total for cost in self.costs)

    @property
    def flops(self) -> int:
        """Of the step's matrix products on one chip, those in kernels not counted."""
        return sum(cost.times * cost.flops for cost in self.costs)

    def by_cause(self) -> dict[str, float]:
        """Seconds of a step."""
        found = dict.fromkeys(CAUSES, 0.0)
        for cost in self.costs:
            found[cost.cause] += cost.total
        return found

    def hidden_communication(self) -> float:
        """Seconds of a step that collectives run beside other work."""
        return sum(cost.times * cost.hidden for cost in self.costs if cost.cause == "communication")


def account(module: Module, hardware: Hardware, network: Network, kernels: Mapping[str, float]) -> Account:
    """Accounts for a step on one chip.

    Args:
        module: optimized, partitioned and scheduled.
        hardware: of a chip.
        network: of the slice; its devices are those of the module.
        kernels: seconds of one run of each Pallas kernel, by the name of its instruction.

    Raises:
        ValueError: a kernel without its time, or a loop whose length depends on data.
    """
    walk = _Walk(module, hardware, network, _of_all_kernels(module, kernels))
    walk.run(module.entry, entry_frame(module), 1)
    return Account(tuple(walk.costs))


@dataclasses.dataclass
class _Clock:
    """Time within one run of a computation: of the chip, and until when its engines are busy."""

    now: float = 0.0
    engines: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    def start(self, engine: str, seconds: float) -> float:
        """When an asynchronous operation that begins now will end."""
        self.engines[engine] = max(self.engines[engine], self.now) + seconds
        return self.engines[engine]


@dataclasses.dataclass(frozen=True)
class _Collective:
    kind: str
    bytes: int  # of the whole tensor
    groups: np.ndarray


class _Walk:
    def __init__(
        self, module: Module, hardware: Hardware, network: Network, kernels: Mapping[str, float]
    ) -> None:
        self._module, self._hardware = module, hardware
        self._network, self._kernels = network, kernels
        self.costs: list[Cost] = []

    def run(self, computation: Computation, frame: Frame, times: int) -> float:
        """Adds the costs of a computation that a step runs so many times; returns the seconds of one run."""
        clock = _Clock()
        flights: dict[str, tuple[Instruction, float, float]] = {}
        for i in computation.instructions.values():
            if i.opcode in _FREE or _target(i) in _FREE_CALLS:
                continue
            if i.opcode == "while":
                trips, first = frame.trips(i)
                body, condition = (self._module.computations[i.attribute(k)] for k in ("body", "condition"))
                clock.now += trips * self.run(body, first, times * trips)
                clock.now += (trips + 1) * self.run(condition, first, times * (trips + 1))
            elif i.opcode == "call":
                clock.now += self.run(
                    self._module.computations[i.attribute("to_apply")], frame.call(i), times
                )
            elif i.opcode == "conditional":
                raise ValueError(f"HLO: conditional {i.name}: which branch a step takes is not known")
            elif _begins(i):
                engine, seconds = self._transfer(computation, i)
                flights[_flight(self._module, i)] = (i, clock.start(engine, seconds), seconds)
            elif _ends(i):
                start, end, seconds = flights.pop(_flight(self._module, i, done=True))
                waited = max(0.0, end - clock.now)
                clock.now += waited
                self._add(computation, start, times, waited, seconds - min(waited, seconds))
            else:
                clock.now += self._add(computation, i, times, self._seconds(computation, i))
        if flights:
            raise ValueError(f"HLO: {', '.join(flights)} never end")
        return clock.now

    def _add(
        self, computation: Computation, i: Instruction, times: int, seconds: float, hidden: float = 0.0
    ) -> float:
        flops = matmul_flops(self._module, computation, i)
        collective = self._collective(i)
        self.costs.append(
            Cost(
                name=i.name,
                opcode=i.opcode,
                cause=self._cause(i, collective, flops),
                source=_source(i),
                times=times,
                seconds=seconds,
                hidden=hidden,
                flops=flops,
                bytes=collective.bytes if collective else bytes_accessed(computation, i),
                basis=self._basis(i, collective),
            )
        )
        return seconds

    def _seconds(self, computation: Computation, i: Instruction) -> float:
        """Of what runs by itself."""
        cycles = _estimate(i)
        if collective := self._collective(i):
            return self._sent(collective)
        if cycles is not None:
            return cycles / self._hardware.clock_hz
        if _target(i) == "tpu_custom_call":
            return self._kernels[i.name]
        return bytes_accessed(computation, i) / self._hardware.hbm_bytes_per_second

    def _transfer(self, computation: Computation, i: Instruction) -> tuple[str, float]:
        """The engine that an asynchronous instruction occupies, and how long."""
        if collective := self._collective(i):
            return "network", self._sent(collective)
        ends = sorted(_LAID_OUT.findall(i.shape), key=shape_bytes)[
            -2:
        ]  # source and target; the rest are flags
        in_hbm = sum("S(" not in end for end in ends)
        return "copies", in_hbm * shape_bytes(ends[0]) / self._hardware.hbm_bytes_per_second

    def _collective(self, i: Instruction) -> _Collective | None:
        """The collective that an instruction is, or is made for; not one that passes beside a product."""
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            return self._described(i, kind)
        if i.opcode != "fusion" or _estimate(i) is not None:
            return None
        inner = _inner_collective(self._module, i)
        if inner is None:
            return None
        scatters = i.attribute("calls").startswith("all-reduce-scatter")
        return self._described(inner, "reduce-scatter" if scatters else inner.opcode)

    def _described(self, i: Instruction, kind: str) -> _Collective:
        groups = groups_of(i, len(self._network.places))
        sizes = [shape_bytes(array) for array in _LAID_OUT.findall(i.shape)]
        # One that is begun has its operands and its results in its shape.
        size = max(sizes) if i.opcode.endswith("-start") else sum(sizes)
        if i.opcode == "reduce-scatter":  # whose result is a part
            size *= groups.shape[1]
        return _Collective(kind, size, groups)

    def _sent(self, collective: _Collective) -> float:
        return self._network.seconds(collective.kind, collective.groups, collective.bytes)

    def _cause(self, i: Instruction, collective: _Collective | None, flops: int) -> str:
        if collective is not None:
            return "communication"
        if _target(i) == "tpu_custom_call":
            return "attention"
        if flops:
            return "matmul"
        return "copy" if i.opcode.removesuffix("-start") in _COPIES else "compute"

    def _basis(self, i: Instruction, collective: _Collective | None) -> str:
        if collective is not None:
            return "network"
        if _estimate(i) is not None:
            return "compiler"
        return "schedule" if _target(i) == "tpu_custom_call" else "bytes"


def _of_all_kernels(module: Module, seconds: Mapping[str, float]) -> dict[str, float]:
    """The compiler keeps what it made of a kernel: of those that are alike, one has a schedule."""
    alike: dict[str, list[str]] = defaultdict(list)
    for computation in module.computations.values():
        for i in computation.instructions.values():
            if _target(i) == "tpu_custom_call":
                shapes = [computation.instructions[name].shape for name in i.operands]
                alike[f"{i.shape} {shapes} {_match(_BODY, i)}"].append(i.name)
    found = {}
    for names in alike.values():
        known = next((name for name in names if name in seconds), None)
        if known is None:
            raise ValueError(f"kernels: no time for {names[0]}; known are {sorted(seconds)}")
        found |= dict.fromkeys(names, seconds[known])
    return found


def _begins(i: Instruction) -> bool:
    return i.opcode.endswith("-start") or i.name.startswith("async-collective-start")


def _ends(i: Instruction) -> bool:
    return i.opcode.endswith("-done") or i.name.startswith("async-collective-done")


def _flight(module: Module, i: Instruction, done: bool = False) -> str:
    """What the start and the end of an asynchronous operation have in common."""
    if i.opcode == "fusion":  # a collective in pieces, which have one channel
        return _match(_CHANNEL, _inner_collective(module, i))
    return i.operands[0] if done else i.name


def _inner_collective(module: Module, i: Instruction) -> Instruction | None:
    inner = module.computations[i.attribute("calls")].instructions.values()
    return next((each for each in inner if each.opcode in KINDS), None)


def _estimate(i: Instruction) -> int | None:
    cycles = _match(_CYCLES, i)
    return int(cycles) if cycles else None


def _source(i: Instruction) -> str:
    return _match(_OP_NAME, i)


def _target(i: Instruction) -> str:
    return _match(_TARGET, i) if i.opcode == "custom-call" else ""


def _match(pattern: re.Pattern[str], i: Instruction) -> str:
    match = pattern.search(i.attributes)
    return match[1] if match else ""
