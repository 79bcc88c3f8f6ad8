"""Traced code that says what the kernel core knows: masks, softcap and ALiBi become its own."""

from __future__ import annotations

import functools
import math
from typing import Any

from pallas_kernels.masks import Causal, Chunked, Full, KeyLength, Mask, SlidingWindow
from xla_attention.flex.expression import Node, node, number
from xla_attention.flex.functions import TracedMask

_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_FULL = Full()


def terms(n: Node, word: str) -> list[Node]:
    """The conditions that ``word``, "and" or "or", joins in ``n``."""
    if n.op == f"bitwise_{word}" and n.dtype == "bool":
        return [term for arg in n.args for term in terms(arg, word)]
    return [n]


def as_mask(n: Node) -> Mask:
    """A condition on ``q`` and ``kv`` as a mask; those that the core does not know are interpreted."""
    value = number(n)
    if value is not None:
        return _FULL if value else ~_FULL
    if len(conditions := terms(n, "and")) > 1:
        return _all(list(map(as_mask, conditions)))
    if len(conditions := terms(n, "or")) > 1:
        return functools.reduce(lambda a, b: a | b, map(as_mask, conditions))
    if n.op in ("logical_not", "bitwise_not") and n.args[0].dtype == "bool":
        return ~as_mask(n.args[0])
    if n.op in _SWAPPED:
        known = _of_comparison(n.op, *n.args)
        return TracedMask(n) if known is None else known
    return TracedMask(n)


def _of_comparison(op: str, a: Any, b: Any) -> Mask | None:
    if number(a) is not None:
        return _of_comparison(_SWAPPED[op], b, a)
    if op == "eq" and (size := _chunk(a, "q") or _chunk(a, "kv")):
        pair = {("q", "kv"), ("kv", "q")}
        if any(_chunk(a, x) == _chunk(b, y) == size for x, y in pair):
            return Chunked(size)
    if a.op == "abs" and (width := number(b)) is not None and op in ("le", "lt") and isinstance(width, int):
        inner = a.args[0].linear if isinstance(a.args[0], Node) else None
        if inner in ((1, -1, 0), (-1, 1, 0)):
            width -= op == "lt"
            return SlidingWindow(width, width)
    difference = node("sub", a, b, dtype="int32").linear if isinstance(b, int | Node) else None
    if difference is None:
        return None
    i, j, c = difference
    if op in ("gt", "ge"):  # i q + j kv + c <= 0 from here on
        i, j, c = -i, -j, -c
    if op in ("lt", "gt"):
        c += 1
    if op == "eq" and (i, j) in ((1, -1), (-1, 1)):
        return SlidingWindow(-i * c, i * c)
    if op in ("eq", "ne"):
        return None
    return {
        (-1, 1): Causal(-c),
        (1, -1): SlidingWindow(-c, None),
        (0, 1): KeyLength(1 - c),
    }.get((i, j))


def _chunk(n: Any, name: str) -> int | None:
    """The size of the chunks that ``n`` counts, if it is ``name // size``."""
    floors = isinstance(n, Node) and (
        n.op == "floor_divide" or (n.op == "div" and n.kwargs == (("rounding_mode", "floor"),))
    )
    if not floors or not isinstance(n.args[0], Node) or n.args[0].op != "input" or n.args[0].args[0] != name:
        return None
    size = number(n.args[1])
    return size if isinstance(size, int) and size > 0 and n.dtype == "int32" else None


def _all(masks: list[Mask]) -> Mask:
    """What all masks show; windows among them become one."""
    windows = [m for m in masks if isinstance(m, Causal | SlidingWindow)]
    others = [m for m in masks if not isinstance(m, Causal | SlidingWindow)]
    low, high = -math.inf, math.inf
    for m in windows:
        left, right = (None, 0) if isinstance(m, Causal) else (m.left, m.right)
        low = max(low, -math.inf if left is None else m.offset - left)
        high = min(high, math.inf if right is None else m.offset + right)
    if windows:
        bound = Causal(high) if low == -math.inf else SlidingWindow(-low, None if high == math.inf else high)
        others = [bound, *others]
    return functools.reduce(lambda a, b: a & b, others)


def as_softcap(n: Node) -> float | None:
    """``c`` where ``n`` is ``c * tanh(score / c)``."""
    cap, tanh = _factor(n)
    if cap is None or tanh.op != "tanh":
        return None
    factor, score = _factor(tanh.args[0])
    if factor is None or score.op != "input" or cap <= 0 or not math.isclose(factor * cap, 1, rel_tol=1e-6):
        return None
    return float(cap)


def _factor(n: Node) -> tuple[float | None, Node]:
    """``(c, x)`` where ``n`` is ``c x`` or ``x / (1 / c)``."""
    if n.op == "mul":
        for a, b in (n.args, n.args[::-1]):
            if number(a) is not None and isinstance(b, Node):
                return float(number(a)), b
    if n.op == "div" and not n.kwargs and number(n.args[1]):
        return 1 / number(n.args[1]), n.args[0]
    return None, n


def as_alibi(n: Node, mask: Mask) -> tuple[Node, Node] | None:
    """``(score, slope)`` where ``n`` is ``score - slope * |q - kv|`` on the pairs that ``mask`` may show.

    ``slope * (kv - q)`` is that if no query sees keys behind itself.
    """
    if n.op not in ("add", "sub") or n.kwargs:
        return None
    for score, term in (n.args, n.args[::-1]) if n.op == "add" else (n.args,):
        if not isinstance(term, Node) or not isinstance(score, Node) or "score" in term.depends:
            continue
        if "score" not in score.depends or (found := _slope(term, mask)) is None:
            continue
        slope, sign = found
        sign = sign if n.op == "add" else -sign
        return score, slope if sign < 0 else node("neg", slope, dtype="float32")
    return None


def _slope(term: Node, mask: Mask) -> tuple[Node, int] | None:
    """``(slope, sign)`` where ``term`` is ``sign * slope * |q - kv|``."""
    if term.op == "neg":
        found = _slope(term.args[0], mask)
        return found and (found[0], -found[1])
    if term.op != "mul":
        return None
    for slope, distance in (term.args, term.args[::-1]):
        if not isinstance(slope, Node) or slope.depends - {"h"} or slope.dtype != "float32":
            continue
        distance = _uncast(distance)
        absolute = distance.op == "abs"
        linear = _uncast(distance.args[0] if absolute else distance).linear
        if absolute and linear in ((1, -1, 0), (-1, 1, 0)):
            return slope, 1
        if not absolute and linear in ((1, -1, 0), (-1, 1, 0)) and mask.hides_after(0):
            return slope, linear[0]
    return None


def _uncast(n: Node) -> Node:
    return _uncast(n.args[0]) if n.op == "cast" and n.dtype != "bool" else n
