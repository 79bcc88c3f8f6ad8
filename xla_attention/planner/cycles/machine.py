"""Executes the scalar half of a program: which segments run how often, and when DMA makes them wait.

Loop exits, predicates and DMA descriptors are computed exactly, from the constants in the program and the
contents of operands that are known. A value that depends on anything else is None; a branch on it is counted
in ``unknown`` and not taken, which enters a guarded region once and leaves a loop.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pallas_kernels.hardware import Hardware
from xla_attention.planner.cycles.hbm import DmaQueue
from xla_attention.planner.cycles.operations import Values, operation, unsigned
from xla_attention.planner.cycles.parse import Instruction, Operand, wrap
from xla_attention.planner.cycles.program import Segment
from xla_attention.planner.cycles.smem import words_of

_ALLOCATION_WORDS = 1 << 18  # apart from each other: more than any scalar memory
_SEGMENT_LIMIT = 50_000_000

Reader = Callable[[], int | None]


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
        self._operands = operands
        self._core = core
        self._registers: dict[str | None, int | None] = {}
        self._divisions: dict[str | None, tuple[int, int] | None] = {}
        self._memory: dict[int, int | None] = {}
        self._bases: dict[str, int] = {}
        self._operand_at: dict[int | None, int] = {}
        self._special = {
            "sdivrem": self._divide,
            "quotient": functools.partial(self._divided, 0),
            "remainder": functools.partial(self._divided, 1),
            "core_id": lambda i, values: self._core,
            "sld": self._load,
            "sst": self._store,
            "inlined_call_operand": self._operand,
        }
        self._segments = segments
        self._code = [[self._step(i, s.start + offset, offset) for offset, i in s.code] for s in segments]

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
                raise RuntimeError(f"bundle {segment.start:#x} ran {_SEGMENT_LIMIT} times: an endless loop")
            if segment.merges:  # all at once: one may read what another replaces
                chosen = [i.operands[min(int(looped), len(i.operands) - 1)] for i in segment.merges]
                merged = [self._reader(operand)() for operand in chosen]
                self._registers.update(zip([i.result for i in segment.merges], merged))
            for step in self._code[index]:
                step()
            self.time += segment.stop - segment.start
            branch = segment.branch
            if branch is not None and self._taken(branch.guard, branch.at):
                index, looped = index_of[branch.target], branch.target <= branch.at
            else:
                index, looped = index + 1, False

    def _taken(self, guard: str | None, at: int) -> bool:
        if guard is None:
            return True
        value = self._reader(guard)()
        if value is None:
            self.unknown[at] += 1
        return bool(value)

    def _reader(self, operand: Operand) -> Reader:
        """A function that reads an operand."""
        if isinstance(operand, int):
            return lambda: operand
        if isinstance(operand, tuple):
            readers = [self._reader(term) for term in operand]

            def address() -> int | None:
                terms = [read() for read in readers]
                return None if None in terms else wrap(sum(terms))

            return address if len(readers) > 1 else readers[0]
        if operand.startswith("#"):
            base = self._base(operand)
            return lambda: base
        read = functools.partial(self._registers.get, operand.removeprefix("!"))
        return (lambda: None if (value := read()) is None else 1 - value) if operand[0] == "!" else read

    def _base(self, allocation: str) -> int:
        return self._bases.setdefault(allocation, (len(self._bases) + 1) * _ALLOCATION_WORDS)

    def _step(self, i: Instruction, at: int, offset: int) -> Callable[[], None]:
        """An instruction as a function, so that what never changes is looked up once."""
        name = i.op.partition(".")[0]
        readers = [self._reader(operand) for operand in i.operands]
        guard = self._reader(i.guard) if i.guard else None
        if name == "dma":
            return functools.partial(self._dma, i, readers, guard, at, offset)
        if name in self._special:
            compute = functools.partial(self._special[name], i)
        else:
            compute = operation(i.op) or functools.partial(self._not_supported, name)
        registers, result = self._registers, i.result

        def step() -> None:
            registers[result] = compute([read() for read in readers])

        if guard is None:
            return step
        otherwise = self._reader(i.otherwise) if i.otherwise is not None else None

        def guarded() -> None:
            holds = guard()
            if holds:
                step()
            elif holds is None:
                registers[result] = None
                if name == "sst":
                    self._forget(readers[0]())
            elif otherwise:
                registers[result] = otherwise()

        return guarded

    def _not_supported(self, name: str, values: Values) -> None:
        self.unsupported[name] += 1

    def _divide(self, i: Instruction, values: Values) -> None:
        known = None not in values and values[1] != 0 and i.op.endswith(".u32")
        self._divisions[i.result] = divmod(*map(unsigned, values)) if known else None

    def _divided(self, part: int, i: Instruction, values: Values) -> int | None:
        results = self._divisions.get(i.operands[0])
        return None if results is None else wrap(results[part])

    def _load(self, i: Instruction, values: Values) -> int | None:
        return self._memory.get(values[0])

    def _store(self, i: Instruction, values: Values) -> None:
        if values[0] is None:
            self._forget(None)
        else:
            self._memory[values[0]] = values[1]

    def _forget(self, address: int | None) -> None:
        """What is at an address that may have been written, or anywhere if that is None, is unknown."""
        for known in [address] if address is not None else list(self._memory):
            self._memory[known] = None

    def _operand(self, i: Instruction, values: Values) -> int | None:
        index, kind = re.search(r"index: (\d+), kind: (\w+)", i.text).groups()
        known = self._operands.get(int(index)) if kind == "input" else None
        if "no memory space" in i.text:  # a scalar, passed by value
            return None if known is None else int(known.ravel()[0])
        base = self._base(i.result)
        if i.op.endswith("smem"):
            self._fill(base, known)
        if known is not None:
            self._operand_at |= {base: int(index), wrap(base << 4): int(index)}
        return base

    def _fill(self, base: int, array: np.ndarray | None) -> None:
        if array is not None:
            self._memory.update(enumerate(words_of(array).tolist(), base))

    def _dma(
        self, i: Instruction, readers: Sequence[Reader], guard: Reader | None, at: int, offset: int
    ) -> None:
        """Starts a transfer, or waits for one; it does so too where it is not known whether."""
        holds = guard() if guard else 1
        if holds == 0:
            return
        values = [read() for read in readers]
        granules = values[1]
        if holds is None or granules is None:
            self.unknown[at] += 1
        now = self.time + offset
        if i.op.startswith("dma.done"):
            self.time += self.dma.wait(now, granules or 0, values[0])
            return
        source, _, destination, flag = values[:4]
        if i.op.endswith("_to_smem") and destination is not None:
            self._fill(destination, self._operands.get(self._operand_at.get(source)))
        self.dma.start(now, granules or 0, flag, hbm="hbm" in i.op)
