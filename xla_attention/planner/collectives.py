"""What the devices of a compiled step send each other: collectives by kind, mesh axis and bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from xla_attention.planner.cycles.hlo import (
    Computation,
    Instruction,
    Module,
    executions,
    parse_hlo,
    shape_bytes,
)

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# XLA turns a collective beside a matrix product into a ring of permutes, so that one piece travels while
# another is multiplied: in loops whose bodies are called so, or, on a short ring, in a row.
_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
_IN_PRODUCT = {"ag": "all-gather in a product", "rs": "reduce-scatter in a product"}
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the compiled step.

    Attributes:
        kind: ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"``,
            ``"collective-permute"``; or ``"all-gather in a product"``, ``"reduce-scatter in a product"``: a
            ring of permutes beside a matrix product, which is one collective here.
        axes: of the mesh, over which it goes.
        times: how often a step runs it.
        bytes: of the whole tensor on one device, each time: the result of a gather, what is summed, what is
            exchanged or passed on.
        shapes: of that tensor.
        source: the operation that asked for it, as the program names it.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    bytes: int
    shapes: str
    source: str


@dataclasses.dataclass(frozen=True)
class Total:
    """Collectives of one kind over the same axes: how many a step runs, and their bytes."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


def collectives_of(hlo: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of an optimized module, in the order of its text.

    Args:
        hlo: its text, partitioned over the devices of the mesh in order.
        mesh: the size of each axis.
    """
    module = parse_hlo(hlo)
    looped = _in_loops(module)
    found: dict[str, Collective] = {}
    rings: dict[str, list[Collective]] = defaultdict(list)
    ring_kinds: dict[str, str] = {}
    for where, i in _collectives(module):
        times = max(1, len(executions(module, i.name))) if where in looped else 1
        source = _match(r'op_name="([^"]*)"', i)
        kind, shape = i.opcode.removesuffix("-start"), i.shape
        if i.opcode.endswith("-start"):  # a tuple of operand, result and more
            shape = f"{_ARRAY.search(shape)[0]}"
        if where.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        one = Collective(kind, _axes(i, mesh), times, shape_bytes(shape), _shapes(shape), source)
        if kind == "collective-permute":
            rings[source].append(one)
            windowed = _WINDOWED.search(where)
            if windowed:
                ring_kinds[source] = windowed[1]
            elif source.startswith("dot.") and ring_kinds.get(source) != "rs":
                ring_kinds[source] = "rs" if _sends_sums(module, where, i) else "ag"
        else:  # a collective that runs in pieces beside other work has one channel; so may those of two
            channel = _match(r"(channel_id=\d+)", i)  # computations, for which the program has two names
            found.setdefault(f"{kind} {channel} {source}" if channel else i.name, one)
    for source, permutes in rings.items():
        if source not in ring_kinds:
            found |= {f"{source} {n}": permute for n, permute in enumerate(permutes)}
            continue
        moved = sum(permute.bytes * permute.times for permute in permutes)
        axes = tuple(axis for axis in mesh if any(axis in permute.axes for permute in permutes))
        found[source] = Collective(
            _IN_PRODUCT[ring_kinds[source]], axes, 1, moved, permutes[0].shapes, source
        )
    return list(found.values())


def totals(collectives: Iterable[Collective]) -> list[Total]:
    """By kind and axes, most bytes first."""
    counts: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(lambda: [0, 0])
    for each in collectives:
        entry = counts[each.kind, each.axes]
        entry[0] += each.times
        entry[1] += each.times * each.bytes
    found = [Total(kind, axes, count, size) for (kind, axes), (count, size) in counts.items()]
    return sorted(found, key=lambda total: -total.bytes)


def _collectives(module: Module) -> list[tuple[str, Instruction]]:
    opcodes = {kind + suffix for kind in KINDS for suffix in ("", "-start")}
    return [
        (name, i)
        for name, computation in module.computations.items()
        for i in computation.instructions.values()
        if i.opcode in opcodes
    ]


def _sends_sums(module: Module, where: str, permute: Instruction) -> bool:
    """Whether a permute passes on a partial sum of a matrix product, or the zeros that one begins with."""
    instructions = module.computations[where].instructions
    sent = instructions[permute.operands[0]]
    while sent.opcode in ("get-tuple-element", "bitcast", "copy"):
        sent = instructions[sent.operands[0]]
    inner = module.computations.get(sent.attribute("calls") or "")
    sums = ("convolution", "dot", "add")
    return sent.opcode in ("broadcast", *sums) or inner is not None and _holds_any(module, inner, sums)


def _holds_any(module: Module, computation: Computation, opcodes: tuple[str, ...]) -> bool:
    return any(
        i.opcode in opcodes
        or (inner := module.computations.get(i.attribute("calls") or "")) is not None
        and _holds_any(module, inner, opcodes)
        for i in computation.instructions.values()
    )


def _in_loops(module: Module) -> set[str]:
    """Names of the computations that loops run, directly or through others."""
    reached: set[str] = set()

    def reach(name: str) -> None:
        if name in reached or name not in module.computations:
            return
        reached.add(name)
        for i in module.computations[name].instructions.values():
            for inner in ("body", "calls", "to_apply"):
                reach(i.attribute(inner) or "")

    for computation in module.computations.values():
        for i in computation.instructions.values():
            if i.opcode == "while":
                reach(i.attribute("body"))
    return reached


def _axes(i: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which members of one group differ."""
    sizes = tuple(mesh.values())
    differ = np.zeros(len(sizes), bool)
    for group in groups_of(i, math.prod(sizes)):
        places = np.array(np.unravel_index(group, sizes))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, differs in zip(mesh, differ) if differs)


def groups_of(i: Instruction, devices: int) -> np.ndarray:
    """Groups of devices, or pairs of a source and a target: `[groups, members]`."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", i.attributes):
        return np.array([[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])])
    # [groups,members]<=[sizes]T(order): all devices, reshaped, transposed, and reshaped again.
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", i.attributes)
    if iota is None:  # none named: all of them
        return np.arange(devices)[None]
    shape, sizes, order = (tuple(map(int, part.split(","))) if part else None for part in iota.groups())
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids.transpose(order) if order else ids).reshape(shape)


def _shapes(shape: str) -> str:
    arrays = [f"{dtype}[{dims}]" for dtype, dims in _ARRAY.findall(shape)]
    return arrays[0] if len(arrays) == 1 else f"{arrays[0]} and {len(arrays) - 1} more"


def _match(pattern: str, i: Instruction) -> str:
    match = re.search(pattern, i.attributes)
    return match[1] if match else ""
