"""What the forward and the backward kernel share: products, masks, and the optional operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.flash_attention.spec import Operands
from pallas_kernels.masks import Mask

# Finite, so that a difference of two masked values is no NaN; no true logit is below it.
MASKED = -1e30
NT = (((1,), (1,)), ((), ()))  # a @ b.T
NN = (((1,), (0,)), ((), ()))  # a @ b
TN = (((0,), (0,)), ((), ()))  # a.T @ b


def dot(a: Array, b: Array, dims: Any) -> Array:
    """A product accumulated in float32; float32 operands are not rounded to bfloat16 on the MXU."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


class Extra(NamedTuple):
    """References to the optional operands, or None; names as in :class:`Operands`."""

    q_segment_ids: Any  # (1, 1, queries) int32
    kv_segment_ids: Any  # (1, 1, keys) int32
    bias: Any  # (1, 1, queries, keys)
    alibi_slopes: Any  # (heads,) float32 in SMEM
    sinks: Any  # (heads,) float32 in SMEM


def as_column(row: Array) -> Array:
    """A row of lanes ``(1, n)`` as a column of sublanes ``(n, 1)``, through one whole register."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def hide(
    s: Float[Array, "n m"], mask: Mask, place: tuple[Any, Any], ids: tuple[Array, Array] | None
) -> Float[Array, "n m"]:
    """A (keys, queries) tile of logits with MASKED where the query does not see the key.

    Args:
        s: logits.
        mask: what is visible.
        place: positions of the tile's first query and first key.
        ids: segment ids of its queries and of its keys, each ``[1, n]``, or None without segments.
    """
    q = place[0] + lax.broadcasted_iota(jnp.int32, s.shape, 1)
    kv = place[1] + lax.broadcasted_iota(jnp.int32, s.shape, 0)
    seen = mask.visible(q, kv)
    if ids is not None:
        seen = seen & (ids[0] == as_column(ids[1]))
    return jnp.where(seen, s, MASKED)


def in_kernel(operands: Operands) -> Extra:
    """The operands that kernels read, in the form in which they do; lengths have become segments before."""
    row = lambda ids: None if ids is None else ids[:, None]  # noqa: E731
    q_ids, kv_ids, bias, slopes, sinks, *_ = operands
    return Extra(row(q_ids), row(kv_ids), bias, slopes, sinks)
