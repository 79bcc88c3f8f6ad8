"""Reads two of the text files that libtpu writes for each program it compiles.

* ``*-packed-bundles-post-ra.txt``: the VLIW program after register allocation. One line is one bundle is
  one cycle, and latencies are explicit as empty bundles. (In ``*-final_bundles.txt`` empty bundles are folded
  into delay fields that the text does not show: that file cannot be counted.)
* ``*-pre-delay_hlo-static-per-bundle-utilization.txt``: for each of those bundles, the slots that it
  occupies of each functional unit; a product of 16 rows occupies its MXU for 16 bundles.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

# What versions of libtpu call the units. Those that are not here keep their names.
_UNITS = {
    "MATMUL": "MXU",  # libtpu 0.0.52 counts products and pushes apart
    "VLOAD": "LOAD",
    "VLOAD:FILL": "FILL",
    "VSTORE": "STORE",
    "VSTORE:SPILL": "SPILL",
}

# A number, a register (``%s12``), or an address: the sum of numbers, registers and ``#allocations``.
Operand = int | str | tuple[int | str, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One scalar, predicate, branch or DMA instruction.

    Attributes:
        op: such as ``"sadd.s32"``.
        result: the register that it defines, if any. Registers are in static single assignment form.
        operands: what it reads.
        guard: a predicate register, after ``!`` if negated; where that is false, nothing happens.
        otherwise: value of ``result`` where the guard is false.
        text: all that follows ``op``.
    """

    op: str
    result: str | None
    operands: tuple[Operand, ...]
    guard: str | None
    otherwise: Operand | None
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """The instructions of one cycle, vector instructions left out; ``depth`` counts the loops around it."""

    depth: int
    instructions: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Slots occupied: ``slots[bundle, unit]`` of the ``capacity[unit]`` that each cycle has."""

    units: tuple[str, ...]
    capacity: tuple[int, ...]
    slots: np.ndarray


_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2}\s*)?:([> ]*)\{(.*)\}\s*$")
_INSTRUCTION = re.compile(r"(?:(%[\w.]+) = )?([a-z_][\w.]*)(.*)")
_GUARD = re.compile(r"\(\s*(!?%[\w.]+)\s*(?:,\s*([^()]+?))?\s*\)")
_IGNORED = re.compile(r"\[(?:thread|resolvable):[^\]]*\]")
_OPERAND = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]|[^\s,\[\]]+")
_CORE_ID = re.compile(r"sld \[smem:\[#allocation\d+\]\] /\* [^*]*core id \*/")


def parse_bundles(text: str) -> list[Bundle]:
    """The program in the text of a ``*-packed-bundles-post-ra.txt`` file.

    Raises:
        ValueError: a bundle is missing from the text.
    """
    bundles: list[Bundle] = []
    popped: set[tuple[Operand, ...]] = set()
    # Only a comment says that this load is where a core learns which of its chip's cores it is.
    for line in _without_comments(_CORE_ID.sub("core_id", text)).splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        if int(match[1], 0) != len(bundles):
            raise ValueError(f"bundles: got {match[1]} after {len(bundles) - 1:#x}")
        instructions = [i for part in match[3].split(";;") if (i := _instruction(part.strip()))]
        for n, i in enumerate(instructions):
            if i.op == "spop.drf":  # a division's results are popped from a queue, the quotient first
                op = "remainder" if i.operands in popped else "quotient"
                popped.add(i.operands)
                instructions[n] = dataclasses.replace(i, op=op)
        bundles.append(Bundle(match[2].count(">"), tuple(instructions)))
    return bundles


def parse_utilization(text: str) -> Utilization:
    """The table in the text of a ``*-static-per-bundle-utilization.txt`` file, of any libtpu from 0.0.21 on.

    Raises:
        ValueError: the table is not of that form.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 4 or not lines[0].startswith("==") or not lines[3].startswith("=="):
        raise ValueError(f"utilization: got {lines[:4]}, expected capacities between two titles")
    units = [name.strip() for name in re.split(r"[|,]", lines[1])]
    capacity = tuple(int(n) for n in lines[2].split())
    slots = np.array([line.split() for line in lines[4:]], np.int64).reshape(-1, len(units))
    return Utilization(tuple(_UNITS.get(unit, unit) for unit in units), capacity, slots)


def _without_comments(text: str) -> str:
    """``text`` less ``/* ... */``, which nest in older dumps and may span lines."""
    kept, depth, begin = [], 0, 0
    for mark in re.finditer(r"/\*|\*/", text):
        if mark[0] == "/*":
            if depth == 0:
                kept.append(text[begin : mark.start()])
            depth += 1
        elif depth:
            depth -= 1
            begin = mark.end()
    return "".join([*kept, text[begin:]])


def _instruction(text: str) -> Instruction | None:
    """None for a vector instruction: it decides nothing."""
    match = _INSTRUCTION.match(text)
    if match is None:
        return None
    result, op, rest = match.groups()
    if op.startswith("v") and not (result or "").startswith(("%s", "%p")):
        return None
    rest = _IGNORED.sub("", rest).strip()
    guard = _GUARD.search(rest)
    plain = _GUARD.sub("", rest, count=1) if guard else rest
    operands = ()
    if not op.startswith(("sbr", "inlined_call_operand")):
        operands = tuple(_operand(token) for token in _OPERAND.findall(plain))
    return Instruction(
        op=op,
        result=result,
        operands=operands,
        guard=guard[1] if guard else None,
        otherwise=_operand(guard[2]) if guard and guard[2] else None,
        text=rest,
    )


def _operand(token: str) -> Operand:
    if token.startswith("["):
        terms = token.replace("[", "").replace("]", "").partition("smem:")
        return tuple(_term(term) for term in (terms[2] or terms[0]).split(" + "))
    return _term(token)


def _term(token: str) -> int | str:
    token = token.strip()
    try:
        value = int(token.removeprefix("$"), 0)
    except ValueError:
        return token
    return wrap(value)


def wrap(value: int) -> int:
    """``value`` as a signed 32-bit integer."""
    return (value + 2**31) % 2**32 - 2**31
