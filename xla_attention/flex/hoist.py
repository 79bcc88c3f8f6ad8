"""Which parts of an expression are computed before the kernel, and along what each varies.

What depends on the score stays in the kernel. Of the rest, whatever reads captured tensors, or uses an
operator that kernels do not have, is computed by XLA outside, once, and enters as an operand along no more
than it depends on: a number for each head, a row over queries, one over keys, a table over distances ``q -
kv``, and only where nothing less will do a matrix of queries by keys. A matrix ``bias[b, h, q, kv]`` enters
as it is, without a gather.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.score_function import Along
from xla_attention.flex import expression, operators
from xla_attention.flex.expression import Node, evaluate, node, rebuild
from xla_attention.flex.functions import TracedScore
from xla_attention.flex.trace import FlexTraceError


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """One expression computed outside.

    Attributes:
        value: the expression.
        along: what it varies along, beside batch and head.
    """

    value: Node
    along: Along


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What indices run over."""

    batch: int
    heads: int
    q_len: int
    kv_len: int


def along(n: Node) -> Along:
    """What the value of ``n`` varies along, beside batch and head."""
    varies = n.depends - {"b", "h"}
    if varies == {"distance"}:
        return "distance"
    if not varies:
        return "head"
    return {frozenset(["q"]): "query", frozenset(["kv"]): "key"}.get(varies, "pair")


def split(root: Node, name: str) -> tuple[TracedScore, tuple[Hoisted, ...]]:
    """The function that runs in the kernel, and what it reads.

    Raises:
        FlexTraceError: an operator on the score that kernels do not have.
    """
    hoisted: dict[Node, Node] = {}

    def hoist(n: Node) -> Node:
        if n not in hoisted:
            hoisted[n] = node("operand", len(hoisted), dtype=n.dtype)
        return hoisted[n]

    def change(n: Node) -> Node | None:
        if n.op in ("input", "constant"):
            return n
        scalar = not n.shape and not any(a.shape for a in expression.nodes_in(n.args))
        in_kernel = n.op in operators.ELEMENTWISE and scalar
        if "score" in n.depends:
            if not in_kernel:
                raise FlexTraceError(
                    f"{name}: {n.op} of something that depends on the score has no form in a TPU kernel; "
                    "use the elementwise operators of xla_attention.flex.operators"
                )
            return None
        if not in_kernel or (n.captures and along(n) in ("head", "query", "key")):
            return hoist(n)
        return None

    result = rebuild(root, change)
    alongs = tuple(map(along, hoisted))
    score = TracedScore(operands=alongs, result=result, dtypes=tuple(n.dtype for n in hoisted))
    return score, tuple(map(Hoisted, hoisted, alongs))


def compute(hoisted: Hoisted, captured: tuple[Array, ...], sizes: Sizes) -> Array:
    """The operand, ``[1 or batch, 1 or heads, ...]`` as ``ScoreFunction`` wants it."""
    axes = _axes(hoisted, sizes)
    value = _whole(hoisted.value, captured, axes)
    if value is None:
        value = _indexed(hoisted.value, captured, axes, sizes)
    if value.dtype == jnp.bool_:
        value = value.astype(jnp.bfloat16 if hoisted.along == "pair" else jnp.int32)
    elif value.dtype != jnp.int32 and not (hoisted.along == "pair" and value.dtype == jnp.bfloat16):
        value = value.astype(jnp.float32)
    missing = tuple(n for n, name in enumerate("bh") if name not in axes)
    return jnp.expand_dims(value, missing)


def compute_of_tokens(
    hoisted: Hoisted,
    captured: tuple[Array, ...],
    sequence: Int[Array, " t"],
    position: Int[Array, " t"],
    head: Int[Array, " h"],
    keys: int,
) -> Array:
    """The operand of queries whose batch and index are given one by one, for the first ``keys`` keys.

    Returns:
        ``[1 or t, 1 or h]``, and ``keys`` behind where it varies by key; float32 or int32.
    """
    value = _one_by_one(hoisted.value, joined=("b", "q"))
    depends, by_key = value.depends, hoisted.along in ("key", "distance", "pair")
    fn = _function(value, captured)
    zero = jnp.zeros((1,), jnp.int32)
    if by_key:
        fn = jax.vmap(fn, in_axes=(None, None, None, 0))
    fn = jax.vmap(jax.vmap(fn, in_axes=(None, 0, None, None)), in_axes=(0, None, 0, None))
    if not depends & {"b", "q", "distance"}:
        sequence = position = zero
    x = fn(
        sequence,
        head if "h" in depends else zero,
        position,
        jnp.arange(keys, dtype=jnp.int32) if by_key else 0,
    )
    return x.astype(jnp.int32 if x.dtype in (jnp.bool_, jnp.int32) else jnp.float32)


def _axes(hoisted: Hoisted, sizes: Sizes) -> dict[str, int]:
    """The axes of an operand and their lengths, but for those of length 1."""
    distances = sizes.q_len + sizes.kv_len - 1
    every = {"b": sizes.batch, "h": sizes.heads}
    every |= {
        "head": {},
        "query": {"q": sizes.q_len},
        "key": {"kv": sizes.kv_len},
        "distance": {"distance": distances},
        "pair": {"q": sizes.q_len, "kv": sizes.kv_len},
    }[hoisted.along]
    return {name: n for name, n in every.items() if name not in "bh" or name in hoisted.value.depends}


def _whole(n: Node, captured: tuple[Array, ...], axes: dict[str, int]) -> Array | None:
    """A captured tensor that is indexed by each axis once, as a view of it."""
    names: list[str] = []

    def base(n: Node) -> Node | None:
        if n.op == "captured":
            return n
        if n.op != "index" or not isinstance(n.args[0], Node):
            return None
        below = base(n.args[0])
        for i in n.args[1]:
            if not isinstance(i, Node) or i.op != "input":
                return None
            names.append(i.args[0])
        return below

    found = base(n)
    if found is None or sorted(names) != sorted(axes) or len(names) != len(found.shape):
        return None
    x = captured[found.args[0]]
    if any(size < axes[name] for size, name in zip(x.shape, names)):
        return None
    x = x[tuple(slice(axes[name]) for name in names)]
    return x.transpose([names.index(name) for name in axes])


def _one_by_one(root: Node, joined: tuple[str, ...] = ()) -> Node:
    """``x[i, j]`` as ``x[i][j]`` where no axis enters both: else XLA would write down every pair (i, j).

    The inputs in ``joined`` vary along one axis.
    """

    def enters(indices: tuple) -> set[str]:
        names = frozenset().union(*(i.depends for i in expression.nodes_in(indices)))
        names = names - {"distance"} | ({"q", "kv"} if "distance" in names else set())
        return names | set(joined) if names & set(joined) else names

    def index(n: Node) -> Node | None:
        if n.op != "index":
            return None
        x, indices = expression.mapped(n.args, functools.partial(_one_by_one, joined=joined))
        for k in range(1, len(indices)):
            if not enters(indices[:k]) & enters(indices[k:]):
                x = node("index", x, indices[:k], dtype=n.dtype, shape=x.shape[k:])
                return _one_by_one(node("index", x, indices[k:], dtype=n.dtype, shape=n.shape), joined)
        return node("index", x, indices, dtype=n.dtype, shape=n.shape)

    return rebuild(root, index)


def _function(value: Node, captured: tuple[Array, ...]) -> Callable[..., Array]:
    """The value at indices ``(b, h, q, kv)``."""
    given = expression.inputs()
    read = {
        n: captured[n.args[0]].astype(operators.DTYPES[n.dtype])
        for n in expression.leaves(value)
        if n.op == "captured"
    }

    def at(b: Any, h: Any, q: Any, kv: Any) -> Array:
        values = {given[name]: i for name, i in zip(("b", "h", "q", "kv"), (b, h, q, kv))}
        return jnp.asarray(evaluate(value, values | read, operators.apply))

    return at


def _indexed(value: Node, captured: tuple[Array, ...], axes: dict[str, int], sizes: Sizes) -> Array:
    fn = _function(_one_by_one(value), captured)

    def one(*indices: Any) -> Array:
        at = dict(zip(axes, indices))
        q = at.get("distance", at.get("q", 0))  # any pair at that distance
        return fn(at.get("b", 0), at.get("h", 0), q, at.get("kv", 0))

    mapped = one
    for n in reversed(range(len(axes))):
        mapped = jax.vmap(mapped, in_axes=[0 if i == n else None for i in range(len(axes))])
    first = {"distance": 1 - sizes.kv_len}
    return mapped(*(first.get(name, 0) + lax.iota(jnp.int32, n) for name, n in axes.items()))
