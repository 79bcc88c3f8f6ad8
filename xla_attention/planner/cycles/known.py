"""What the integer operands of a function's kernels hold, as far as constants in the function decide it.

Kernels whose loops follow data, such as lengths of sequences, can be counted for given data: close the
function over them as constants. What is computed from constants alone is computed here, with JAX; the rest is
unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

_CALLS = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


def kernel_operands(
    fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct]
) -> list[dict[int, np.ndarray]]:
    """Of each ``pallas_call`` that ``fn`` makes outside loops, in order: known integer operands by index."""
    closed = jax.make_jaxpr(fn)(*avals)
    found: list[dict[int, np.ndarray]] = []
    _walk(closed, [None] * len(avals), found)
    return found


def _walk(closed: Any, arguments: Sequence[Any], found: list[dict[int, np.ndarray]]) -> list[Any]:
    """Results of a jaxpr, None where unknown."""
    jaxpr = closed.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments]))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        results: list[Any] | None = None
        if name == "pallas_call":
            found.append(dict(_integers(values)))
        elif name in _CALLS:
            results = _walk(eqn.params[_CALLS[name]], values, found)
        elif all(value is not None for value in values) and not eqn.effects:
            out = eqn.primitive.bind(*values, **eqn.params)
            results = list(out) if eqn.primitive.multiple_results else [out]
        known.update(zip(eqn.outvars, results or [None] * len(eqn.outvars)))
    return [read(atom) for atom in jaxpr.outvars]


def _integers(values: Sequence[Any]) -> Iterator[tuple[int, np.ndarray]]:
    for index, value in enumerate(values):
        if value is not None and np.issubdtype(np.asarray(value).dtype, np.integer):
            yield index, np.asarray(value)
