"""Scalar expressions: what a traced score_mod or mask_mod is, as values that are compared and hashed.

A node is an operator of ``operators.py`` applied to nodes and Python constants. Nodes are made by ``node``
alone, which returns the one that there is already: equal expressions are the same object, whoever traced
them, so a kernel that was lowered for one is found again. They hold no tensors: captured ones are numbered.

Three dtypes are enough: narrower and wider floats are computed in float32, integers in int32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

DType = Literal["float32", "int32", "bool"]
INPUTS = ("score", "b", "h", "q", "kv")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class Node:
    """An operator's result.

    Attributes:
        op: a name in ``operators.OPERATORS``, or ``"input"`` (one of ``INPUTS``), ``"captured"`` (by number),
            ``"operand"`` (what a kernel reads, by number) or ``"constant"``.
        args: nodes, constants, and tuples of them.
        kwargs: sorted (name, constant) pairs.
        dtype: of the result.
        shape: of the result; only what is computed from captured tensors alone may be other than ``()``.
        depends: of which inputs it is a function; ``"distance"`` stands for ``q - kv``, if no more enters.
        captures: numbers of the captured tensors that it reads.
        linear: ``(i, j, c)`` if it is the integer ``i q + j kv + c``.
    """

    __slots__ = ("__weakref__", "args", "captures", "depends", "dtype", "kwargs", "linear", "op", "shape")

    def __init__(self, op: str, args: tuple, kwargs: tuple, dtype: DType, shape: tuple[int, ...]) -> None:
        self.op, self.args, self.kwargs, self.dtype, self.shape = op, args, kwargs, dtype, shape
        inner = list(nodes_in(args))
        self.captures = frozenset().union(*(n.captures for n in inner))
        self.linear = _linear(self)
        self.depends = frozenset().union(*(n.depends for n in inner))
        if op == "input":
            self.depends = frozenset(args)
        elif op == "captured":
            self.captures = frozenset(args)
        else:
            linear = _difference(args) if op in _COMPARISONS else self.linear
            if linear and linear[0] == -linear[1] != 0:
                self.depends = frozenset(["distance"])

    def __repr__(self) -> str:
        if self.op in ("input", "constant"):
            return str(self.args[0])
        if self.op in ("captured", "operand"):
            return f"{self.op}{self.args[0]}"
        return f"{self.op}({', '.join(map(repr, self.args))})"


_known: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()


def node(op: str, *args: Any, dtype: DType, shape: tuple[int, ...] = (), kwargs: tuple = ()) -> Node:
    """The node of these parts."""
    # Ids stay valid: while an entry lives, so does its node, and with it the nodes below.
    key = (op, _key(args), _key(kwargs), dtype, shape)
    found = _known.get(key)
    if found is None:
        found = _known[key] = Node(op, args, kwargs, dtype, shape)
    return found


def constant(value: bool | int | float) -> Node:
    """A node that is a Python number."""
    dtype = "bool" if isinstance(value, bool) else "int32" if isinstance(value, int) else "float32"
    return node("constant", value, dtype=dtype)


def inputs() -> dict[str, Node]:
    """The nodes of a function's arguments by name."""
    return {name: node("input", name, dtype="float32" if name == "score" else "int32") for name in INPUTS}


def nodes_in(args: Any) -> Any:
    """The nodes among ``args``."""
    for arg in args:
        if isinstance(arg, Node):
            yield arg
        elif isinstance(arg, tuple):
            yield from nodes_in(arg)


def leaves(root: Node) -> set[Node]:
    """The inputs, captured tensors and operands below ``root``, itself among them."""
    seen: set[Node] = set()
    stack = [root]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack += nodes_in(n.args)
    return {n for n in seen if n.op in ("input", "captured", "operand")}


def number(arg: Any) -> bool | int | float | None:
    """The value of a constant, None of anything else."""
    if isinstance(arg, Node):
        return arg.args[0] if arg.op == "constant" else None
    return arg if isinstance(arg, bool | int | float) else None


def rebuild(root: Node, change: Callable[[Node], Node | None]) -> Node:
    """``root`` with what ``change`` returns in a node's place, where it returns one; from the root down."""
    done: dict[Node, Node] = {}

    def visit(n: Node) -> Node:
        if n not in done:
            other = change(n)
            if other is None:
                args = mapped(n.args, visit)
                other = (
                    n if args == n.args else node(n.op, *args, dtype=n.dtype, shape=n.shape, kwargs=n.kwargs)
                )
            done[n] = other
        return done[n]

    return visit(root)


def evaluate(root: Node, values: Mapping[Node, Any], apply: Callable[[Node, tuple], Any]) -> Any:
    """The value of ``root``.

    Args:
        values: of inputs, captured tensors and operands.
        apply: gives the value of a node from those of its arguments.
    """
    done = dict(values)

    def visit(n: Node) -> Any:
        if n.op == "constant":
            return n.args[0]
        if n not in done:
            done[n] = apply(n, mapped(n.args, visit))
        return done[n]

    return visit(root)


def mapped(args: tuple, fn: Callable[[Node], Any]) -> tuple:
    """``args`` with ``fn`` of each node."""
    return tuple(
        fn(arg) if isinstance(arg, Node) else mapped(arg, fn) if isinstance(arg, tuple) else arg
        for arg in args
    )


def _key(value: Any) -> Any:
    if isinstance(value, Node):
        return id(value)
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return type(value), repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0; nan is not


def _linear_argument(arg: Any) -> tuple[int, int, int] | None:
    value = number(arg)
    if isinstance(value, int) and not isinstance(value, bool):
        return 0, 0, value
    return arg.linear if isinstance(arg, Node) else None


def _difference(args: tuple) -> tuple[int, int, int] | None:
    """What a comparison depends on, of two integers."""
    a, b = map(_linear_argument, args)
    return tuple(x - y for x, y in zip(a, b)) if a and b else None


def _linear(n: Node) -> tuple[int, int, int] | None:
    if n.dtype != "int32" or n.shape or n.kwargs:
        return None
    if n.op == "input":
        return {"q": (1, 0, 0), "kv": (0, 1, 0)}.get(n.args[0])
    if n.op not in ("add", "sub", "rsub", "neg", "mul"):
        return None
    parts = [_linear_argument(arg) for arg in n.args]
    if None in parts:
        return None
    if n.op == "neg":
        return tuple(-x for x in parts[0])
    a, b = parts if n.op != "rsub" else parts[::-1]
    if n.op == "mul":
        a, b = (b, a) if a[:2] == (0, 0) else (a, b)
        return tuple(x * b[2] for x in a) if b[:2] == (0, 0) else None
    return tuple(x + y if n.op == "add" else x - y for x, y in zip(a, b))
