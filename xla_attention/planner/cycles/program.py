"""A program as straight segments of bundles, each with the scalar code that branches and DMA depend on."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from xla_attention.planner.cycles.parse import Bundle, Instruction

# Bundles that still run after a branch before it is taken.
BRANCH_DELAY = {"v4": 1, "v5e": 4, "v5p": 4, "v6e": 4}


@dataclasses.dataclass(frozen=True)
class Branch:
    """A jump from the end of a segment, always taken if ``guard`` is None; ``at`` is the bundle it is in."""

    at: int
    target: int
    guard: str | None


@dataclasses.dataclass(frozen=True)
class Segment:
    """The bundles ``[start, stop)``: entered at the first, left after the last.

    Attributes:
        depth: loops around it.
        branch: where it may continue instead of at ``stop``.
        merges: ``sphi`` instructions: on entry, the value from before the loop, or that came around it.
        code: (bundle less ``start``, instruction) in an order that computes what is used before its use.
    """

    start: int
    stop: int
    depth: int
    branch: Branch | None
    merges: tuple[Instruction, ...]
    code: tuple[tuple[int, Instruction], ...]


def segments_of(bundles: Sequence[Bundle], generation: str) -> list[Segment]:
    """The program's segments, in the order of their addresses.

    Raises:
        ValueError: a branch whose target the text does not show.
    """
    leaders, branches = {0}, {}
    for at, bundle in enumerate(bundles):
        for instruction in bundle.instructions:
            if instruction.op.startswith("sbr"):
                target = re.search(r"target bundleno = (\d+)", instruction.text)
                if target is None:
                    raise ValueError(f"bundle {at:#x}: got a branch to {instruction.text!r}, not to a bundle")
                end = at + BRANCH_DELAY[generation] + 1
                leaders |= {int(target[1]), end}
                branches[end] = Branch(at, int(target[1]), instruction.guard)
    needed = _needed(bundles)
    starts = sorted(leader for leader in leaders if leader < len(bundles))
    segments = []
    for start, stop in zip(starts, [*starts[1:], len(bundles)]):
        merges, code = [], []
        for offset, bundle in enumerate(bundles[start:stop]):
            wanted = [i for i in bundle.instructions if i in needed]
            merges += [i for i in wanted if i.op == "sphi"]
            code += [(offset, i) for i in _in_order([i for i in wanted if i.op != "sphi"])]
        segments.append(
            Segment(start, stop, bundles[start].depth, branches.get(stop), tuple(merges), tuple(code))
        )
    return segments


def registers(instruction: Instruction) -> Iterator[str]:
    """The registers that an instruction reads."""
    if instruction.guard:
        yield instruction.guard.removeprefix("!")
    operands = (*instruction.operands, instruction.otherwise)
    for operand in operands:
        for term in operand if isinstance(operand, tuple) else (operand,):
            if isinstance(term, str) and term.startswith(("%", "!%")):
                yield term.removeprefix("!")


def _in_order(instructions: list[Instruction]) -> list[Instruction]:
    """Instructions of one bundle, definitions before uses: in the text they stand by slot."""
    defined_here = {i.result for i in instructions}
    ordered, done = [], set()
    while instructions:
        free = [i for i in instructions if not defined_here & {*registers(i)} - done - {i.result}]
        now = (free or instructions)[0]
        instructions.remove(now)
        ordered.append(now)
        done.add(now.result)
    return ordered


def _needed(bundles: Sequence[Bundle]) -> set[Instruction]:
    """What branches and DMAs depend on, backwards through registers and scalar memory."""
    every = [i for bundle in bundles for i in bundle.instructions]
    definitions, stores = collections.defaultdict(list), collections.defaultdict(list)
    for instruction in every:
        if instruction.result:
            definitions[instruction.result].append(instruction)
        if instruction.op == "sst":
            stores[_allocation(instruction)].append(instruction)

    needed: set[Instruction] = set()
    loaded: set[str | None] = set()
    work = [i for i in every if i.op.startswith(("sbr", "dma", "inlined_call_operand"))]
    while work:
        instruction = work.pop()
        if instruction in needed:
            continue
        needed.add(instruction)
        for register in registers(instruction):
            work += definitions[register]
        if instruction.op == "sld" and (allocation := _allocation(instruction)) not in loaded:
            loaded.add(allocation)
            # an address that is computed may be of any allocation
            for stored, found in stores.items():
                if allocation is None or stored in (allocation, None):
                    work += found
    return {i for i in needed if not i.op.startswith("sbr")}


def _allocation(access: Instruction) -> str | None:
    """The allocation that a load or store of scalar memory names, if it does."""
    address = access.operands[0]
    terms = address if isinstance(address, tuple) else (address,)
    return next((term for term in terms if isinstance(term, str) and term.startswith("#")), None)
