"""What scalar instructions compute: functions of 32-bit integers, of which None is one that is not known."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from xla_attention.planner.cycles.parse import wrap

Values = Sequence[int | None]


def unsigned(value: int) -> int:
    """``value`` as an unsigned 32-bit integer."""
    return value % 2**32


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << b if b < 32 else 0,
    "sshrl": lambda a, b: unsigned(a) >> b if b < 32 else 0,
    "sshra": lambda a, b: a >> min(b, 31),
    "smin": min,
    "smax": max,
    "smov": lambda a: a,
    "int_to_ptr": lambda a: a,
    "scalar_lea": lambda *parts: sum(parts),
    "pmov": lambda a: a,
    "pneg": lambda a: 1 - a,
    "pxor": operator.xor,
}
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
# (the value that decides alone, whether the result is negated)
_LOGIC = {"pand": (0, False), "pnand": (0, True), "por": (1, False), "pnor": (1, True)}


@functools.cache
def operation(op: str) -> Callable[[Values], int | None] | None:
    """The function of its operands that an instruction is; None for one that is not known here."""
    name, *types = op.split(".")
    if name in _LOGIC:
        return functools.partial(_logic, *_LOGIC[name])
    if name == "scalar_select":
        return _select
    is_unsigned = "u32" in types
    if name == "scmp":
        compare = _COMPARISONS[types[0]]
        function = lambda *values: int(compare(*values))  # noqa: E731
    elif name in _ARITHMETIC:
        function = _ARITHMETIC[name]
    else:
        return None

    def known(values: Values) -> int | None:
        if None in values:
            return None
        return wrap(function(*(map(unsigned, values) if is_unsigned else values)))

    return known


def _logic(decisive: int, negated: bool, values: Values) -> int | None:
    if decisive in values:
        return decisive ^ negated
    return None if None in values else (1 - decisive) ^ negated


def _select(values: Values) -> int | None:
    condition, if_true, if_false = values
    return None if condition is None else if_true if condition else if_false
