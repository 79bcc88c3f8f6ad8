"""A score_mod or mask_mod in torch -> an expression, and the tensors that it captures.

The function runs twice on scalars that hold nothing (fake CPU tensors). The first time finds the captured
tensors, of whatever device, as the function hands them to torch; the second, they are arguments, and
``make_fx`` records the core ATen operators. So nothing is computed, no XLA graph grows, and captured tensors
keep their identity and with it their gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from xla_attention.flex import expression
from xla_attention.flex.expression import DType, Node, constant, node, number
from xla_attention.flex.operators import OPERATORS

Kind = Literal["score_mod", "mask_mod"]
_ARGUMENTS = {"score_mod": ("score", "b", "h", "q", "kv"), "mask_mod": ("b", "h", "q", "kv")}
_CREATED = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_SAME = ("alias", "clone", "detach", "lift_fresh_copy", "lift_fresh", "contiguous")
_FILLED = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_CONSTANTS = ("full", "full_like", "scalar_tensor", "new_full")
_LIMIT = 2000  # characters of an error that is torch's own


class FlexTraceError(ValueError):
    """A score_mod or mask_mod does what cannot run in a kernel; the message says what to write instead."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        result: what it returns.
        captured: the tensors that it captures, by the numbers in the expression.
    """

    result: Node
    captured: tuple[Tensor, ...]


def trace(fn: Callable[..., Tensor], kind: Kind) -> Traced:
    """Traces ``fn(score, b, h, q_idx, kv_idx)``, or ``fn(b, h, q_idx, kv_idx)`` of a mask_mod.

    Raises:
        TypeError: ``fn`` is not callable.
        FlexTraceError: it cannot be traced, or returns something else than one float, or bool of a mask_mod.
    """
    if not callable(fn):
        raise TypeError(f"{kind}: got {type(fn).__name__}, needs a function")
    name = f"{kind} {getattr(fn, '__name__', type(fn).__name__)!r}"
    fakes = FakeTensorMode()

    def scalars() -> list[Tensor]:
        with fakes:
            return [
                torch.empty((), dtype=torch.float32 if argument == "score" else torch.int32)
                for argument in _ARGUMENTS[kind]
            ]

    try:
        with torch.no_grad():
            with fakes, _Captures(fakes) as captures:
                _check_result(fn(*scalars()), kind, name)
            captured = tuple(captures.found)

            def on(*args: Tensor) -> Tensor:
                arguments = len(_ARGUMENTS[kind])
                with _Captures(fakes, dict(zip(map(id, captured), args[arguments:]))):
                    return fn(*args[:arguments])

            stand_ins = [captures.stand_in(x) for x in captured]
            graph = _graph(on, [*scalars(), *stand_ins])
            if any(map(_mutates, graph.nodes)):  # of the function's own tensors, as in `score += x`
                graph = _graph(torch.func.functionalize(on), [*scalars(), *stand_ins])
    except Exception as error:
        raise FlexTraceError(_in_our_words(error, name, kind)) from error
    return Traced(_translate(graph, kind, name, len(captured)), captured)


def _graph(fn: Callable[..., Tensor], args: list[Tensor]) -> torch.fx.Graph:
    return make_fx(fn, tracing_mode="fake", decomposition_table=_decompositions())(*args).graph


def _mutates(n: torch.fx.Node) -> bool:
    schema = getattr(n.target, "_schema", None)  # Python's own functions have none
    return schema is not None and schema.is_mutable


class _Captures(TorchFunctionMode):
    """Swaps captured tensors for stand-ins on the CPU, and indexing by tensors for an operator.

    Without ``known``, every tensor that is not fake is a captured one; with it, those with these ids are.
    """

    def __init__(self, fakes: FakeTensorMode, known: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self.fakes, self.known = fakes, known
        self.found: list[Tensor] = []  # also keeps them alive, so that their ids stay theirs
        self.stand_ins: dict[int, Tensor] = {}

    def stand_in(self, x: Tensor) -> Tensor:
        with self.fakes:
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")

    def swap(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, Tensor):
            return x
        if self.known is not None:
            return self.known.get(id(x), x)
        # torch calls every XLA tensor functional, so that must not be asked here.
        if isinstance(x, FakeTensor):
            return x
        if id(x) not in self.stand_ins:
            self.found.append(x)
            self.stand_ins[id(x)] = self.stand_in(x)
        return self.stand_ins[id(x)]

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if func in _CREATED and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            made = func(*args, **kwargs)
            if made.ndim == 0:  # a literal
                return torch.full((), made.item(), dtype=made.dtype)
            raise FlexTraceError(
                f"it makes a tensor of shape {tuple(made.shape)} at every call; make it outside, and let the "
                "function capture it"
            )
        name = getattr(func, "__name__", "")
        changes = func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
        if changes and self.known is None and not isinstance(args[0], FakeTensor):
            raise FlexTraceError(_MUTATION)
        args, kwargs = pytree.tree_map(self.swap, (args, kwargs))
        if func is Tensor.__getitem__:
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, Tensor | int) for i in index):
                at = [i if isinstance(i, Tensor) else torch.full((), i, dtype=torch.int32) for i in index]
                return torch.ops.aten.index.Tensor(x, at)
        return func(*args, **kwargs)


@functools.cache
def _decompositions() -> dict:
    """torch's, of every operator that is not in our own table."""
    kept = {*OPERATORS, *_SAME, *_FILLED, *_CONSTANTS, "_to_copy", "complex"}
    overloads = {op: fn for op, fn in decomposition_table.items() if isinstance(op, torch._ops.OpOverload)}
    return {op: fn for op, fn in overloads.items() if op.overloadpacket.__name__ not in kept}


def _check_result(result: Any, kind: Kind, name: str) -> None:
    if not isinstance(result, Tensor):
        raise FlexTraceError(f"it returns {type(result).__name__}, needs a tensor of shape ()")
    if result.ndim:
        raise FlexTraceError(
            f"it returns a tensor of shape {tuple(result.shape)}, needs shape (): it is called for one pair "
            "of a query and a key; index captured tensors with all of b, h, q_idx and kv_idx that they need"
        )
    if kind == "mask_mod" and result.dtype != torch.bool:
        raise FlexTraceError(f"it returns {result.dtype}, needs torch.bool; compare, as in `x > 0`")
    if kind == "score_mod" and not result.dtype.is_floating_point:
        raise FlexTraceError(f"it returns {result.dtype}, needs a float; for a mask, use mask_mod")


_MUTATION = "it changes a captured tensor in place; compute a new value, as `x + 1` for `x.add_(1)`"


def _in_our_words(error: Exception, name: str, kind: Kind) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FlexTraceError):
        return f"{name}: {error}"
    if (
        "datadependent" in text.lower().replace("-", "").replace(" ", "")
        or "aten._local_scalar_dense" in text
    ):
        return (
            f"{name}: Python asks for the value of a tensor (if, while, and, or, not, int(), .item()), which "
            "has none here: use torch.where for a choice, and &, |, ~ between conditions"
        )
    if "positional argument" in text:
        return f"{name}: needs the arguments ({', '.join(_ARGUMENTS[kind])}): {error}"
    return f"{name}: it cannot be traced on scalars: {text[:_LIMIT]}"


def _translate(graph: torch.fx.Graph, kind: Kind, name: str, captured: int) -> Node:
    given = expression.inputs()
    names = [*(given[argument] for argument in _ARGUMENTS[kind]), *range(captured)]
    own = list(itertools.islice(graph.nodes, len(_ARGUMENTS[kind])))
    for n in graph.nodes:
        if _mutates(n) and n.args[0] not in own:
            raise FlexTraceError(f"{name}: {_MUTATION}")
        if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
            raise FlexTraceError(
                f"{name}: {n.target} is random, and the backward pass would draw again; capture a tensor "
                "that is drawn before the call"
            )
    done: dict[torch.fx.Node, Node] = {}
    arguments = iter(names)
    for n in graph.nodes:
        if n.op == "placeholder":
            argument = next(arguments)
            if isinstance(argument, int):
                value = n.meta["val"]
                argument = node(
                    "captured", argument, dtype=_dtype(value.dtype, name), shape=tuple(value.shape)
                )
            done[n] = argument
        elif n.op == "call_function" and not _mutates(n):
            done[n] = _call(n, done, name)
        elif n.op == "output":
            (result,) = n.args if not isinstance(n.args[0], tuple) else n.args[0]
            return done[result]
        elif n.op == "get_attr":
            raise FlexTraceError(f"{name}: {n.op} {n.target} is a tensor that is made inside; capture it")
    raise AssertionError("a graph has an output")


def _call(n: torch.fx.Node, done: dict[torch.fx.Node, Node], name: str) -> Node:
    if not isinstance(n.target, torch._ops.OpOverload):
        raise FlexTraceError(f"{name}: {n.target} has no form on TPU; use operators that return one tensor")
    op, value = n.target.overloadpacket.__name__, n.meta["val"]
    if not isinstance(value, Tensor):
        raise FlexTraceError(f"{name}: {n.target} does not return a tensor")
    args = _arguments(n.args, done)
    dtype, shape = _dtype(value.dtype, name), tuple(value.shape)
    if op in _SAME:
        return args[0]
    if op == "_to_copy":
        return args[0] if args[0].dtype == dtype else node("cast", args[0], dtype=dtype, shape=shape)
    if op in _CONSTANTS or op in _FILLED:
        filled = _FILLED[op] if op in _FILLED else args[0] if op == "scalar_tensor" else args[-1]
        filled = {"float32": float, "int32": int, "bool": bool}[dtype](filled)
        return node("filled", shape, filled, dtype=dtype, shape=shape) if shape else constant(filled)
    if op == "arange":
        start, end = (0, args[0]) if len(args) == 1 else args[:2]
        return node("arange", start, end, *args[2:], dtype=dtype, shape=shape)
    if op not in OPERATORS:
        raise FlexTraceError(
            f"{name}: {n.target} has no form on TPU; write it with operators of "
            "xla_attention.flex.operators, or compute it before the call and capture the result"
        )
    kwargs = tuple(sorted((key, x) for key, x in n.kwargs.items() if key in ("alpha", "rounding_mode")))
    if op in ("logical_and", "bitwise_and", "logical_or", "bitwise_or") and dtype == "bool":
        return connect("and" if "and" in op else "or", *args)
    return node(op, *args, dtype=dtype, shape=shape, kwargs=kwargs)


def connect(word: Literal["and", "or"], *conditions: Node) -> Node:
    """Conditions joined, constants among them resolved."""
    decides = word == "or"
    left, right = (
        n if n.dtype == "bool" else node("ne", n, 0, dtype="bool", shape=n.shape) for n in conditions
    )
    for a, b in ((left, right), (right, left)):
        if number(a) is not None:
            return a if number(a) == decides else b
    return node(f"bitwise_{word}", left, right, dtype="bool", shape=left.shape or right.shape)


def _arguments(args: Any, done: dict[torch.fx.Node, Node]) -> tuple:
    def of(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return done[arg]
        return tuple(map(of, arg)) if isinstance(arg, list | tuple) else arg

    return tuple(map(of, args))


def _dtype(dtype: torch.dtype, name: str) -> DType:
    if dtype.is_complex:
        raise FlexTraceError(f"{name}: {dtype} has no form on TPU; compute with real numbers")
    return dtype_of(dtype)


def dtype_of(dtype: torch.dtype) -> DType:
    """The dtype in which an expression computes with a real ``dtype`` of torch's."""
    if dtype == torch.bool:
        return "bool"
    return "float32" if dtype.is_floating_point else "int32"
