"""Finds, in an optimized HLO module, how often each kernel runs and what its integer operands hold.

Kernels that walk a schedule carry it as an integer operand: a constant, or in a loop one row of a constant
for each iteration. A small evaluator of integer HLO follows operands back to constants; what depends on
anything else is None.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"(pred|[su]\d+)\[([\d,]*)\]")
_ARRAY = re.compile(r"\b(pred|token|bf16|[suf]\d+(?:e\dm\d\w*)?|c\d+)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0, "bf16": 16}
_DTYPES = {
    "pred": "bool",
    **{f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_TRIP_LIMIT = 100_000


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """``%name = shape opcode(operands), attributes``; a constant's operand is its text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, name: str) -> str | None:
        match = re.search(rf"\b{name}=%?([\w.\-]+|\{{[^}}]*\}})", self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """``instructions`` by name, in the order in which they run."""

    instructions: dict[str, Instruction]
    root: Instruction
    parameters: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, and the one that is run."""

    computations: dict[str, Computation]
    entry: Computation


def parse_hlo(text: str) -> Module:
    """The module in the text of libtpu's ``*-TLP-hlo.txt``.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = name = None
    instructions: list[Instruction] = []
    root = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, instructions = header[2], []
            entry = name if header[1] else entry
        elif line.strip() == "}" and name:
            parameters = sorted(
                (i for i in instructions if i.opcode == "parameter"), key=lambda i: int(i.operands[0])
            )
            computations[name] = Computation({i.name: i for i in instructions}, root, tuple(parameters))
        elif match := _INSTRUCTION.match(line):
            instructions.append(_instruction(match[2], match[3]))
            root = instructions[-1] if match[1] else root
    if entry is None:
        raise ValueError("HLO: got a text without an entry computation")
    return Module(computations, computations[entry])


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing(rest, -1)
    inside, attributes = rest[: end - 1], rest[end:]
    literal = opcode in ("constant", "parameter")
    operands = [inside] if literal else re.findall(r"%([\w.\-]+)", inside)
    return Instruction(name, shape, opcode, tuple(operands), attributes)


def _closing(text: str, begin: int) -> int:
    """Behind the parenthesis that closes the one at ``begin`` (-1: one that stands before the text)."""
    depth = 0 if begin >= 0 else 1
    for at in range(max(begin, 0), len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple; padding of layouts is not counted."""
    return sum(math.prod(dims) * bits for bits, dims in _arrays(shape)) // 8


def dimensions(shape: str) -> tuple[int, ...]:
    """Of an array, or of the first of a tuple."""
    arrays = _arrays(shape)
    return arrays[0][1] if arrays else ()


def _arrays(shape: str) -> list[tuple[int, tuple[int, ...]]]:
    """Bits of an element, and dimensions, of each array."""
    found = []
    for kind, sizes in _ARRAY.findall(shape):
        bits = _BITS[kind] if kind in _BITS else int(re.search(r"\d+", kind)[0])
        found.append((bits, tuple(int(n) for n in sizes.split(",") if n)))
    return found


# An integer array, a tuple of values, or None for what is not known.
Value = Any


class Frame:
    """One run of a computation: its instructions, evaluated when they are asked for."""

    def __init__(
        self, module: Module, computation: Computation, arguments: Sequence[Callable[[], Value]]
    ) -> None:
        self._module = module
        self._computation = computation
        self._arguments = arguments
        self._known: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        if name not in self._known:
            self._known[name] = self._evaluate(self._computation.instructions[name])
        return self._known[name]

    @property
    def root(self) -> Value:
        return self[self._computation.root.name]

    def call(self, i: Instruction) -> Frame:
        """The run of the computation that a fusion or call names."""
        callee = self._module.computations[i.attribute("calls") or i.attribute("to_apply")]
        return Frame(self._module, callee, [functools.partial(self.__getitem__, name) for name in i.operands])

    def iterations(self, i: Instruction) -> Iterator[Frame]:
        """The runs of the body of a loop; one, if it is not known how many there are."""
        body, condition = (self._module.computations[i.attribute(name)] for name in ("body", "condition"))
        state = self[i.operands[0]]
        for n in range(_TRIP_LIMIT):
            value = [functools.partial(lambda x: x, state)]
            more = Frame(self._module, condition, value).root
            if more is not None and not more or more is None and n:
                return
            frame = Frame(self._module, body, value)
            yield frame
            state = frame.root

    def trips(self, i: Instruction) -> tuple[int, Frame]:
        """How often a loop runs, and the run of its body that comes first.

        Raises:
            ValueError: the number depends on what is not known.
        """
        first, count = None, 0
        for frame in self.iterations(i):
            first, count = first or frame, count + 1
        body, condition = (self._module.computations[i.attribute(name)] for name in ("body", "condition"))
        if count == 1 and Frame(self._module, condition, [lambda: first.root]).root is None:
            raise ValueError(f"HLO: it is not known how often loop {i.name} runs")
        return count, first or Frame(self._module, body, [lambda: None])

    def _evaluate(self, i: Instruction) -> Value:
        match i.opcode:
            case "parameter":
                return self._arguments[int(i.operands[0])]()
            case "constant":
                return _constant(i)
            case "tuple":
                return tuple(self[name] for name in i.operands)
            case "get-tuple-element":
                whole = self[i.operands[0]]
                return None if whole is None else whole[int(i.attribute("index"))]
            case "fusion" | "call":
                return self.call(i).root
            case "while":
                return None
        function = _OPERATIONS.get(i.opcode)
        if function is None or not _SHAPE.search(i.shape):
            return None
        values = [self[name] for name in i.operands]
        return None if any(value is None for value in values) else function(i, *values)


def executions(module: Module, kernel: str) -> list[dict[int, np.ndarray]]:
    """The integer operands that are known, by index, for each time that an instruction runs.

    Args:
        module: the optimized HLO.
        kernel: name of a custom call, or of a fusion around one.
    """
    holds = functools.cache(lambda name: _holds(module, module.computations[name], kernel))

    def runs(computation: Computation, frame: Frame) -> Iterator[dict[int, np.ndarray]]:
        for i in computation.instructions.values():
            inner = i.attribute("body") or i.attribute("calls") or i.attribute("to_apply")
            if i.name == kernel:
                values = {n: frame[name] for n, name in enumerate(i.operands)}
                yield {n: value for n, value in values.items() if isinstance(value, np.ndarray)}
            elif i.opcode == "while" and holds(inner):
                for iteration in frame.iterations(i):
                    yield from runs(module.computations[inner], iteration)
            elif i.opcode in ("fusion", "call") and holds(inner):
                yield from runs(module.computations[inner], frame.call(i))

    return list(runs(module.entry, entry_frame(module)))


def entry_frame(module: Module) -> Frame:
    """The run of a module, of whose arguments nothing is known."""
    return Frame(module, module.entry, [lambda: None] * len(module.entry.parameters))


def operand_sizes(module: Module, kernel: str) -> list[int]:
    """Elements of each integer operand of an instruction, 0 for other operands; empty if it is not there."""
    for computation in module.computations.values():
        if kernel in computation.instructions:
            names = computation.instructions[kernel].operands
            shapes = [_SHAPE.match(computation.instructions[name].shape) for name in names]
            return [math.prod(_dimensions(shape[2])) if shape else 0 for shape in shapes]
    return []


def _holds(module: Module, computation: Computation, kernel: str) -> bool:
    """Whether running ``computation`` may run ``kernel``."""
    return kernel in computation.instructions or any(
        _holds(module, module.computations[inner], kernel)
        for i in computation.instructions.values()
        for inner in (i.attribute("body"), i.attribute("calls"))
        if inner in module.computations
    )


def _constant(i: Instruction) -> Value:
    shape = _SHAPE.match(i.shape)
    if shape is None or "..." in i.operands[0]:
        return None
    numbers = i.operands[0].replace("true", "1").replace("false", "0")
    flat = np.array([int(n) for n in re.findall(r"-?\d+", numbers)], np.int64)
    dimensions = _dimensions(shape[2])
    if flat.size != np.prod(dimensions, dtype=int):
        return None
    return flat.reshape(dimensions).astype(_DTYPES[shape[1]])


def _dtype(i: Instruction) -> np.dtype:
    return np.dtype(_DTYPES[_SHAPE.match(i.shape)[1]])


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _reshaped(i: Instruction, x: np.ndarray) -> np.ndarray:
    return x.reshape(_dimensions(_SHAPE.match(i.shape)[2]))


def _dynamic_slice(i: Instruction, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = _dimensions(i.attribute("dynamic_slice_sizes").strip("{}"))
    begin = [int(np.clip(start, 0, n - size)) for start, n, size in zip(starts, x.shape, sizes)]
    return x[tuple(slice(at, at + size) for at, size in zip(begin, sizes))]


def _sum(i: Instruction, x: np.ndarray, _: np.ndarray) -> np.ndarray | None:
    """A reduction over dimensions of size one, which is what is left of a row that was sliced."""
    axes = _dimensions(i.attribute("dimensions").strip("{}"))
    return x.squeeze(axes) if all(x.shape[axis] == 1 for axis in axes) else None


def _compare(i: Instruction, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return getattr(operator, i.attribute("direction").lower())(x, y)


_OPERATIONS: Mapping[str, Callable[..., Value]] = {
    "copy": lambda i, x: x,
    "copy-start": lambda i, x: (x, x, None),
    "copy-done": lambda i, x: x[0],
    "bitcast": _reshaped,
    "bitcast-convert": lambda i, x: x.view(_dtype(i)) if x.itemsize == _dtype(i).itemsize else None,
    "convert": lambda i, x: x.astype(_dtype(i)),
    "and": lambda i, x, y: x & y,
    "or": lambda i, x, y: x | y,
    "select": lambda i, where, x, y: np.where(where, x, y),
    "reshape": _reshaped,
    "add": lambda i, x, y: x + y,
    "subtract": lambda i, x, y: x - y,
    "multiply": lambda i, x, y: x * y,
    "compare": _compare,
    "dynamic-slice": _dynamic_slice,
    "reduce": _sum,
}
