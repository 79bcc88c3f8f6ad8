"""Traced expressions as what the kernels take: a function of scores, and masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.masks import Answer, Index, Mask
from pallas_kernels.score_function import ScoreFunction
from xla_attention.flex import expression, operators
from xla_attention.flex.bounds import bounds
from xla_attention.flex.expression import Node, evaluate, node


@dataclasses.dataclass(frozen=True)
class TracedScore(ScoreFunction):
    """A score_mod, less what is computed before the kernel.

    Attributes:
        result: an expression of the five inputs and of operands, of elementwise operators.
        dtypes: of the operands in the expression; conditions are stored as numbers.
    """

    result: Node
    dtypes: tuple[str, ...]

    def __call__(self, score: Any, batch: Any, head: Any, q: Any, kv: Any, operands: tuple[Any, ...]) -> Any:
        given = expression.inputs()
        values = dict(zip(given.values(), (score, batch, head, q, kv)))
        for n, (dtype, x) in enumerate(zip(self.dtypes, operands, strict=True)):
            values[node("operand", n, dtype=dtype)] = x != 0 if dtype == "bool" else x
        return jnp.asarray(evaluate(self.result, values, operators.apply), jnp.float32)


@dataclasses.dataclass(frozen=True)
class TracedMask(Mask):
    """A condition on ``q`` and ``kv`` alone.

    Attributes:
        result: the condition.
    """

    result: Node

    def visible(self, q: Index, kv: Index) -> Any:
        given = expression.inputs()
        on_host = not any(isinstance(x, jax.Array) for x in (q, kv))
        if on_host:  # NumPy's, torch's and Python's
            q, kv = (jnp.asarray(np.asarray(x), jnp.int32) for x in (q, kv))
        seen = evaluate(self.result, {given["q"]: q, given["kv"]: kv}, operators.apply)
        seen = jnp.broadcast_to(seen, jnp.broadcast_shapes(jnp.shape(q), jnp.shape(kv)))
        return np.asarray(seen) if on_host else seen

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        return _any_and_every(self.result, q0, q1, kv0, kv1)

    @property
    def shift_invariant(self) -> bool:
        return self.result.depends <= {"distance"}


@dataclasses.dataclass(frozen=True)
class Reach(Mask):
    """What a condition on data, batches or heads may show at all; the score function hides the rest.

    Attributes:
        result: the condition.
        batch, heads: how many there are.
    """

    result: Node
    batch: int
    heads: int

    def visible(self, q: Index, kv: Index) -> Any:
        return (q == q) & (kv == kv)

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        some, _ = _any_and_every(self.result, q0, q1, kv0, kv1, b=(0, self.batch - 1), h=(0, self.heads - 1))
        return some, some

    @property
    def shift_invariant(self) -> bool:
        return self.result.depends <= {"distance", "b", "h"}


def _any_and_every(root: Node, q0: Index, q1: Index, kv0: Index, kv1: Index, **others: Any) -> Answer:
    q, kv = (np.asarray(q0), np.asarray(q1) - 1), (np.asarray(kv0), np.asarray(kv1) - 1)
    every, some = bounds(root, {"q": q, "kv": kv, **others})
    shape = np.broadcast_shapes(np.shape(q0), np.shape(q1), np.shape(kv0), np.shape(kv1))
    return tuple(np.broadcast_to(np.asarray(x, bool), shape) for x in (some, every))
