"""Gradients of attention by its bias and its sinks, outside the kernels.

With P and dS as in the backward pass, d bias = dS, summed where the bias is broadcast. It is as large as the
bias, so nothing is lost by recomputing P block by block of queries in plain XLA. A sink is a key whose value
is zero: P_sink = exp(sink - lse) and d sink = sum over queries of P_sink (dlse - sum_d O dO).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.flash_attention.spec import AttentionSpec, Operands
from pallas_kernels.masks import of_heads

BLOCK = 512  # queries at a time


def operand_gradients(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    o: Float[Array, "b h m e"],
    lse: Float[Array, "b h m"],
    do: Float[Array, "b h m e"],
    dlse: Float[Array, "b h m"] | None,
    operands: Operands,
    *,
    spec: AttentionSpec,
) -> tuple[Float[Array, "#b #h m n"] | None, Float[Array, " h"] | None]:
    """Gradients by ``operands.bias`` and ``operands.sinks``, None for what is not there.

    Args:
        q, k, v, o, lse, do, dlse, operands, spec: as given to ``flash_backward``.
    """
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    if dlse is not None:
        delta = delta - dlse
    dsinks = None
    if operands.sinks is not None:
        p_sink = jnp.exp(operands.sinks[:, None] - lse)
        dsinks = -jnp.sum(p_sink * delta, axis=(0, 2)).astype(operands.sinks.dtype)
    dbias = None
    if operands.bias is not None:
        dbias = _bias_gradient(q, k, v, lse, do, delta, operands, spec)
    return dbias, dsinks


def _bias_gradient(
    q: Array, k: Array, v: Array, lse: Array, do: Array, delta: Array, operands: Operands, spec: AttentionSpec
) -> Array:
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    f32 = jnp.float32
    columns = jnp.arange(kv_len)
    summed = tuple(axis for axis in (0, 1) if operands.bias.shape[axis] == 1)
    block = min(BLOCK, q_len)
    k, v = k.astype(f32), v.astype(f32)

    def rows_of(start: Array) -> Array:
        """d bias of ``block`` queries from ``start``."""
        cut = lambda x, axis=2: lax.dynamic_slice_in_dim(x, start, block, axis)  # noqa: E731
        grouped = lambda x: x.astype(f32).reshape(batch, kv_heads, group, block, -1)  # noqa: E731
        rows = start + jnp.arange(block)
        s = jnp.einsum("bkgqd,bknd->bkgqn", grouped(cut(q)), k) * spec.scale
        s = s.reshape(batch, heads, block, kv_len)
        if spec.softcap is not None:
            s = spec.softcap * jnp.tanh(s / spec.softcap)
        if operands.alibi_slopes is not None:
            distance = jnp.abs(rows[:, None] + spec.query_offset - columns)
            s = s - operands.alibi_slopes[:, None, None] * distance
        s = s + cut(operands.bias)
        seen = jnp.stack([mask.visible(rows[:, None], columns[None, :]) for mask in of_heads(spec.mask)])
        if operands.q_segment_ids is not None:
            ids = cut(operands.q_segment_ids, 1)[:, :, None] == operands.kv_segment_ids[:, None, :]
            seen = seen & ids[:, None]
        if operands.q_lens is not None:
            seen = seen & (rows[:, None] < operands.q_lens[:, None, None, None])
        if operands.kv_lens is not None:
            seen = seen & (columns < operands.kv_lens[:, None, None, None])
        # A query that sees nothing, be it that the bias hides all, has an lse of -inf.
        seen = seen & (cut(lse)[..., None] > -jnp.inf)
        p = jnp.where(seen, jnp.exp(s - cut(lse)[..., None]), 0.0)
        dp = jnp.einsum("bkgqe,bkne->bkgqn", grouped(cut(do)), v).reshape(s.shape)
        ds = p * (dp - cut(delta)[..., None])
        return ds.sum(axis=summed, keepdims=True).astype(operands.bias.dtype)

    whole = lax.map(rows_of, jnp.arange(0, q_len - block + 1, block))
    gradient = jnp.moveaxis(whole, 0, 2).reshape(*whole.shape[1:3], -1, kv_len)
    if rest := q_len % block:  # the last block overlaps the one before it
        gradient = jnp.concatenate([gradient, rows_of(jnp.array(q_len - block))[:, :, -rest:]], axis=2)
    return gradient
