"""Interval arithmetic: between what values an expression lies on whole tiles of queries and keys.

A mask's expression evaluated on the intervals of a tile says whether any, and whether every, pair is visible,
in closed form: a schedule for 131072 x 131072 needs no array larger than the number of its tiles. Intervals
are cautious where a variable occurs more than once, and unknown where an operator has no rule or data is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xla_attention.flex.expression import Node, evaluate, leaves

Interval = tuple[Any, Any]  # lowest and highest value, arrays of tiles; of bools, every and any
UNKNOWN: Interval = (-np.inf, np.inf)
UNDECIDED: Interval = (False, True)


def bounds(root: Node, inputs: Mapping[str, Interval]) -> Interval:
    """The interval of ``root`` from those of its inputs; (every, any) of a condition."""
    values = {n: inputs.get(n.args[0], _unknown(n)) for n in leaves(root)}

    def apply(n: Node, args: tuple) -> Interval:
        rule = _RULES.get(n.op)
        if rule is None or n.kwargs or n.shape:
            return _unknown(n)
        if n.linear is not None:
            return _of_linear(n.linear, inputs)
        found = rule(n, *map(_interval, args)) if n.op == "cast" else rule(*map(_interval, args))
        if found is None:
            return _unknown(n)
        return _widen(found) if n.dtype == "float32" and n.op not in _EXACT else found

    with np.errstate(invalid="ignore", divide="ignore"):
        return _interval(evaluate(root, values, apply))


def _unknown(n: Node) -> Interval:
    return UNDECIDED if n.dtype == "bool" else UNKNOWN


def _widen(x: Interval) -> Interval:
    """Kernels round to float32, at 6e-8."""
    low, high = (np.asarray(end, np.float64) for end in x)
    return low - 1e-6 * np.abs(low), high + 1e-6 * np.abs(high)


def _interval(x: Any) -> Interval:
    return x if isinstance(x, tuple) else (x, x)


def _of_linear(linear: tuple[int, int, int], inputs: Mapping[str, Interval]) -> Interval:
    low = high = linear[2]
    for factor, name in zip(linear, ("q", "kv")):
        if factor:
            ends = [factor * np.asarray(end) for end in inputs[name]]
            low, high = low + min_(*ends), high + max_(*ends)
    return low, high


def min_(*xs: Any) -> Any:
    out = xs[0]
    for x in xs[1:]:
        out = np.minimum(out, x)
    return out


def max_(*xs: Any) -> Any:
    out = xs[0]
    for x in xs[1:]:
        out = np.maximum(out, x)
    return out


def _products(a: Interval, b: Interval) -> Interval:
    ends = [np.multiply(x, y, dtype=np.float64) for x in a for y in b]
    ends = [np.where(np.isnan(e), 0.0, e) for e in ends]  # 0 * inf
    return min_(*ends), max_(*ends)


def _floor_divide(a: Interval, b: Interval) -> Interval | None:
    divisor = _one(b)
    if divisor is None or divisor == 0:
        return None
    ends = [np.floor_divide(end, divisor) for end in a]
    return min_(*ends), max_(*ends)


def _divide(a: Interval, b: Interval) -> Interval | None:
    divisor = _one(b)
    if divisor is None or divisor == 0:
        return None
    ends = [np.true_divide(end, divisor) for end in a]
    return min_(*ends), max_(*ends)


def _remainder(a: Interval, b: Interval) -> Interval | None:
    divisor = _one(b)
    if divisor is None or divisor <= 0 or not all(np.all(np.isfinite(end)) for end in a):
        return None
    low, high = a
    within = np.floor_divide(low, divisor) == np.floor_divide(high, divisor)
    top = divisor - 1 if isinstance(divisor, int) else divisor
    return np.where(within, np.remainder(low, divisor), 0), np.where(within, np.remainder(high, divisor), top)


def _one(x: Interval) -> Any:
    return x[0] if x[0] is x[1] and np.ndim(x[0]) == 0 and np.isfinite(x[0]) else None


def _abs(a: Interval) -> Interval:
    low, high = a
    least = np.where((np.asarray(low) <= 0) & (np.asarray(high) >= 0), 0, min_(np.abs(low), np.abs(high)))
    return least, max_(np.abs(low), np.abs(high))


def _clamp(x: Interval, low: Any = (None, None), high: Any = (None, None)) -> Interval:
    if low[0] is not None:
        x = max_(x[0], low[0]), max_(x[1], low[1])
    if high[0] is not None:
        x = min_(x[0], high[0]), min_(x[1], high[1])
    return x


def _less(a: Interval, b: Interval) -> Interval:
    return np.less(a[1], b[0]), np.less(a[0], b[1])


def _less_equal(a: Interval, b: Interval) -> Interval:
    return np.less_equal(a[1], b[0]), np.less_equal(a[0], b[1])


def _equal(a: Interval, b: Interval) -> Interval:
    meet = np.less_equal(a[0], b[1]) & np.less_equal(b[0], a[1])
    return np.equal(a[0], b[1]) & np.equal(a[1], b[0]) & np.isfinite(np.asarray(a[0], np.float64)), meet


def _not(a: Interval) -> Interval:
    return np.logical_not(a[1]), np.logical_not(a[0])


def _where(c: Interval, a: Interval, b: Interval) -> Interval:
    low = np.where(c[0], a[0], np.where(c[1], min_(a[0], b[0]), b[0]))
    high = np.where(c[0], a[1], np.where(c[1], max_(a[1], b[1]), b[1]))
    return low, high


def _cast(n: Node, a: Interval) -> Interval | None:
    if n.dtype == "bool":
        return None
    if n.dtype == "int32" and n.args[0].dtype == "float32":
        return np.trunc(a[0]), np.trunc(a[1])
    return tuple(np.asarray(end, int) if np.asarray(end).dtype == bool else end for end in a)


def _of_conditions(rule: Callable[..., Interval]) -> Callable[..., Interval | None]:
    """The rule where its arguments are conditions; of integers, these operators act on bits."""

    def applied(*args: Interval) -> Interval | None:
        return rule(*args) if all(np.asarray(x).dtype == bool for arg in args for x in arg) else None

    return applied


@_of_conditions
def _and(a: Interval, b: Interval) -> Interval:
    return np.logical_and(a[0], b[0]), np.logical_and(a[1], b[1])


@_of_conditions
def _or(a: Interval, b: Interval) -> Interval:
    return np.logical_or(a[0], b[0]), np.logical_or(a[1], b[1])


@_of_conditions
def _xor(a: Interval, b: Interval) -> Interval:
    known = np.equal(a[0], a[1]) & np.equal(b[0], b[1])
    value = np.not_equal(a[0], b[0])
    return np.logical_and(known, value), np.logical_or(np.logical_not(known), value)


_EXACT = ("cast", "neg", "abs", "floor", "minimum", "maximum", "clamp", "clamp_min", "clamp_max", "where")
_RULES: dict[str, Callable[..., Interval | None]] = {
    "add": lambda a, b: (np.add(a[0], b[0]), np.add(a[1], b[1])),
    "sub": lambda a, b: (np.subtract(a[0], b[1]), np.subtract(a[1], b[0])),
    "rsub": lambda a, b: (np.subtract(b[0], a[1]), np.subtract(b[1], a[0])),
    "mul": _products,
    "neg": lambda a: (np.negative(a[1]), np.negative(a[0])),
    "abs": _abs,
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "floor": lambda a: (np.floor(a[0]), np.floor(a[1])),
    "minimum": lambda a, b: (min_(a[0], b[0]), min_(a[1], b[1])),
    "maximum": lambda a, b: (max_(a[0], b[0]), max_(a[1], b[1])),
    "clamp": _clamp,
    "clamp_min": lambda a, b: (max_(a[0], b[0]), max_(a[1], b[1])),
    "clamp_max": lambda a, b: (min_(a[0], b[0]), min_(a[1], b[1])),
    "lt": _less,
    "le": _less_equal,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _less_equal(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "logical_not": _of_conditions(_not),
    "bitwise_not": _of_conditions(_not),
    "bitwise_and": _and,
    "bitwise_or": _or,
    "logical_and": _and,
    "logical_or": _or,
    "bitwise_xor": _xor,
    "logical_xor": _xor,
    "where": _where,
    "cast": _cast,
}
