"""What happens to a tile of products q k^T before the softmax, in powers of two, and its derivative.

The kernels take exponentials to base 2 (one multiplication fewer for each element), so log2(e) is folded into
the factor of the logits: 2^(log2(e) x) = e^x.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

LOG2E = math.log2(math.e)


def exp2(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """2^x. As a power it stays one: jax.export, for older compilers' sake, makes ``jnp.exp2`` an exp."""
    return lax.pow(2.0, x)


def logits(products: Float[Array, "m n"], *, scale: float, softcap: float | None) -> Float[Array, "m n"]:
    """log2(e) times the logits: ``scale * products``, softcapped if asked."""
    if softcap is None:
        return products * (scale * LOG2E)
    return jnp.tanh(products * (scale / softcap)) * (softcap * LOG2E)


def alibi(
    slope: Any, place: tuple[Any, Any], query: int, shape: tuple[int, int], linear: bool
) -> Float[Array, "m #n"]:
    """log2(e) times the ALiBi term ``-slope * |q - kv|`` of a (keys, queries) tile.

    ``linear`` is for tiles whose visible keys do not come after their queries. The query's own part of
    ``-slope * (q - kv)`` is then the same for every key of its row and leaves the softmax alone: only the
    keys' part is added, one column, and :func:`alibi_of_queries` comes off the log-sum-exp.

    Args:
        slope: of the head.
        place: positions of the block's first query and of the tile's first key, on one scale.
        query: the tile's first query, counted from the block's.
        shape: of the tile.
        linear: as above.
    """
    slope = slope * LOG2E
    distance = place[1] - place[0] + lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
    if linear:
        return slope * distance.astype(jnp.float32)
    distance = distance - query - lax.broadcasted_iota(jnp.int32, shape, 1)
    return -slope * jnp.abs(distance).astype(jnp.float32)


def alibi_of_queries(slope: Any, query: Any, n: int) -> Float[Array, "1 n"]:
    """What a linear :func:`alibi` left out of ``n`` queries from the block's ``query``-th on."""
    return slope * LOG2E * (query + lax.broadcasted_iota(jnp.int32, (1, n), 1)).astype(jnp.float32)


def products_gradient(
    gradient: Float[Array, "m n"], logits2: Float[Array, "m n"], *, softcap: float | None
) -> Float[Array, "m n"]:
    """Gradient by ``scale * products`` from the gradient by the logits; d tanh(x) = 1 - tanh(x)^2."""
    if softcap is None:
        return gradient
    t = logits2 * (1 / (softcap * LOG2E))
    return gradient * (1 - t * t)
