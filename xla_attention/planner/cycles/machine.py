"""Executes the scalar half of a program: which segments run how often, and when DMA makes them wait.

Loop exits, predicates and DMA descriptors are computed exactly, from the constants in the program and the
contents of operands that are known. A value that depends on anything else is None; a branch on it is counted
in ``unknown`` and not taken, which enters a guarded region once and leaves a loop.
"""

from __future__ import annotations

import collections
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_kernels.hardware import Hardware
from xla_attention.planner.cycles.hbm import DmaQueue
from xla_attention.planner.cycles.parse import Instruction, Operand, wrap
from xla_attention.planner.cycles.program import Segment
from xla_attention.planner.cycles.smem import words_of

_ALLOCATION_WORDS = 1 << 18  # apart from each other: more than any scalar memory
_SEGMENT_LIMIT = 50_000_000


def _unsigned(value: int) -> int:
    return value % 2**32


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << b if b < 32 else 0,
    "sshrl": lambda a, b: _unsigned(a) >> b if b < 32 else 0,
    "sshra": lambda a, b: a >> min(b, 31),
    "smin": min,
    "smax": max,
    "smov": lambda a: a,
    "int_to_ptr": lambda a: a,
    "scalar_lea": operator.add,
    "pmov": lambda a: a,
    "pneg": lambda a: 1 - a,
    "pxor": operator.xor,
}
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
# (the value that decides alone, whether the result is negated)
_LOGIC = {"pand": (0, False), "pnand": (0, True), "por": (1, False), "pnor": (1, True)}


@functools.cache
def _function(op: str) -> Callable[..., int] | None:
    """The function of its operands that an instruction is, if it is one."""
    name, *types = op.split(".")
    if name == "scmp":
        compare = _COMPARISONS[types[0]]
        if "u32" in types:
            return lambda a, b: int(compare(_unsigned(a), _unsigned(b)))
        return lambda a, b: int(compare(a, b))
    if name in ("smin", "smax") and "u32" in types:
        return lambda a, b: wrap(_ARITHMETIC[name](_unsigned(a), _unsigned(b)))
    if name in _ARITHMETIC:
        return lambda *values: wrap(_ARITHMETIC[name](*values))
    return None


class Machine:
    """One core that runs a program.

    Attributes:
        runs: times that each segment ran.
        time: cycles, with what was spent waiting for DMA.
        dma: the transfers.
        unknown: times that a branch, or whether and how much a DMA moves, was not known, by its bundle.
        unsupported: times that an instruction was met that is not known here; its result is None.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        hardware: Hardware,
        operands: Mapping[int, np.ndarray],
        core: int = 0,
    ) -> None:
        """
        Args:
            segments: the program.
            hardware: that it was compiled for.
            operands: contents of the integer operands that are known, by index.
            core: which of the chip's this is.
        """
        self.runs = [0] * len(segments)
        self.time = 0.0
        self.dma = DmaQueue(hardware)
        self.unknown: collections.Counter[int] = collections.Counter()
        self.unsupported: collections.Counter[str] = collections.Counter()
        self._segments = segments
        self._operands = operands
        self._core = core
        self._registers: dict[str, int | None] = {}
        self._memory: dict[int, int | None] = {}
        self._bases: dict[str, int] = {}
        self._operand_at: dict[int, int] = {}
        self._special = {
            "pand": self._logic,
            "pnand": self._logic,
            "por": self._logic,
            "pnor": self._logic,
            "scalar_select": self._select,
            "core_id": lambda i, at: self._core,
            "sld": self._load,
            "sst": self._store,
            "inlined_call_operand": self._operand,
            "dma": self._dma,
        }

    def run(self) -> None:
        """Runs the program from its first segment past its last.

        Raises:
            RuntimeError: it does not end.
        """
        index_of = {segment.start: index for index, segment in enumerate(self._segments)}
        index, looped = 0, False
        while index < len(self._segments):
            segment = self._segments[index]
            self.runs[index] += 1
            if self.runs[index] > _SEGMENT_LIMIT:
                raise RuntimeError(
                    f"bundle {segment.start:#x} ran {_SEGMENT_LIMIT} times: the loop does not end"
                )
            # all at once: one may read what another replaces
            merged = [self._value(i.operands[min(int(looped), len(i.operands) - 1)]) for i in segment.merges]
            self._registers.update(zip([i.result for i in segment.merges], merged))
            for offset, instruction in segment.code:
                self._execute(instruction, segment.start + offset, offset)
            self.time += segment.stop - segment.start
            index, looped = index + 1, False
            if (branch := segment.branch) is not None and self._holds(
                branch.guard, branch.at, if_unknown=False
            ):
                index, looped = index_of[branch.target], branch.target <= branch.at

    def _execute(self, i: Instruction, at: int, offset: int) -> None:
        name = i.op.partition(".")[0]
        if i.guard is not None and name != "dma":
            holds = self._register(i.guard)
            if holds is None and name == "sst":
                self._forget(i)
            if holds is None and i.result:
                self._registers[i.result] = None
            if holds == 0 and i.result and i.otherwise is not None:
                self._registers[i.result] = self._value(i.otherwise)
            if not holds:
                return
        if name in self._special:
            value = self._special[name](i, (at, offset))
        elif function := _function(i.op):
            values = [self._value(operand) for operand in i.operands]
            value = None if None in values else function(*values)
        else:
            self.unsupported[name] += 1
            value = None
        if i.result:
            self._registers[i.result] = value

    def _value(self, operand: Operand) -> int | None:
        if isinstance(operand, int):
            return operand
        if isinstance(operand, str):
            return self._base(operand) if operand.startswith("#") else self._register(operand)
        terms = [self._value(term) for term in operand]
        return None if None in terms else wrap(sum(terms))

    def _base(self, allocation: str) -> int:
        return self._bases.setdefault(allocation, (len(self._bases) + 1) * _ALLOCATION_WORDS)

    def _register(self, name: str) -> int | None:
        """The value of a register, or of a predicate's negation if ``!`` stands before it."""
        value = self._registers.get(name.removeprefix("!"))
        return 1 - value if value is not None and name.startswith("!") else value

    def _holds(self, guard: str | None, at: int, *, if_unknown: bool) -> bool:
        if guard is None:
            return True
        value = self._register(guard)
        if value is None:
            self.unknown[at] += 1
            return if_unknown
        return bool(value)

    def _logic(self, i: Instruction, _: Any) -> int | None:
        decisive, negated = _LOGIC[i.op.partition(".")[0]]
        values = [self._value(operand) for operand in i.operands]
        if decisive in values:
            return decisive ^ negated
        return None if None in values else (1 - decisive) ^ negated

    def _select(self, i: Instruction, _: Any) -> int | None:
        condition = self._value(i.operands[0])
        return None if condition is None else self._value(i.operands[1 if condition else 2])

    def _load(self, i: Instruction, _: Any) -> int | None:
        address = self._value(i.operands[0])
        return None if address is None else self._memory.get(address)

    def _store(self, i: Instruction, _: Any) -> None:
        address = self._value(i.operands[0])
        if address is None:
            self._forget(i)
        else:
            self._memory[address] = self._value(i.operands[1])

    def _forget(self, store: Instruction) -> None:
        """After a store that may or may not have happened, or anywhere, what is there is unknown."""
        address = self._value(store.operands[0])
        for known in [address] if address is not None else list(self._memory):
            self._memory[known] = None

    def _operand(self, i: Instruction, _: Any) -> int | None:
        index = int(re.search(r"index: (\d+), kind: (\w+)", i.text)[1])
        known = self._operands.get(index) if "kind: input" in i.text else None
        if "no memory space" in i.text:  # a scalar, passed by value
            return None if known is None else int(known.ravel()[0])
        base = self._base(i.result)
        if i.op.endswith("smem"):
            self._fill(base, known)
        self._operand_at |= {base: index, wrap(base << 4): index} if "kind: input" in i.text else {}
        return base

    def _fill(self, base: int, array: np.ndarray | None) -> None:
        if array is not None:
            self._memory.update(enumerate(words_of(array).tolist(), base))

    def _dma(self, i: Instruction, place: tuple[int, int]) -> None:
        at, offset = place
        if i.guard is not None and not self._holds(i.guard, at, if_unknown=True):
            return
        values = [self._value(operand) for operand in i.operands]
        if i.op.startswith("dma.done"):
            flag, granules = values[:2]
            self.time += self.dma.wait(self.time + offset, granules or 0, flag)
            return
        source, granules, destination, flag = values[:4]
        if granules is None:
            self.unknown[at] += 1
        if i.op.endswith("_to_smem") and destination is not None:
            self._fill(destination, self._operands.get(self._operand_at.get(source)))
        self.dma.start(self.time + offset, granules or 0, flag, hbm="hbm" in i.op)
