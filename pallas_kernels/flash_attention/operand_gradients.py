"""Gradients of attention by its bias, its sinks and what its score function reads, outside the kernels.

With P and dS as in the backward pass, d bias = dS, summed where the bias is broadcast. P is recomputed in
plain XLA, block by block of queries, each as many as fit a fixed amount of memory. A score function is
differentiated with ``jax.vjp`` on each block. A sink is a key whose value is zero: P_sink = exp(sink - lse)
and d sink = sum over queries of P_sink (dlse - sum_d O dO).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.flash_attention.score_tiles import apply_to_block, by_block
from pallas_kernels.flash_attention.spec import HIDDEN, AttentionSpec, Operands
from pallas_kernels.masks import of_heads

BLOCK = 512  # most queries at a time
PAIRS = 2**24  # most pairs of a query and a key at a time, over all heads


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
    wanted: tuple[bool, ...] | None = None,
) -> tuple[Float[Array, "#b #h m n"] | None, Float[Array, " h"] | None, tuple[Array | None, ...]]:
    """Gradients by ``operands.bias``, ``sinks`` and each of ``score``; None for what is not there.

    Args:
        q, k, v, o, lse, do, dlse, operands, spec: as given to ``flash_backward``.
        wanted: for which of ``operands.score`` a gradient is computed; None takes all that are floats.
    """
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    if dlse is not None:
        delta = delta - dlse
    dsinks = None
    if operands.sinks is not None:
        p_sink = jnp.exp(operands.sinks[:, None] - lse)
        dsinks = -jnp.sum(p_sink * delta, axis=(0, 2)).astype(operands.sinks.dtype)
    if wanted is None:
        wanted = tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in operands.score)
    if operands.bias is None and not any(wanted):
        return None, dsinks, (None,) * len(operands.score)
    dbias, dscore = _by_blocks(q, k, v, do, dlse, operands, spec, wanted)
    return dbias, dsinks, dscore


def _by_blocks(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    dlse: Array | None,
    operands: Operands,
    spec: AttentionSpec,
    wanted: tuple[bool, ...],
) -> tuple[Array | None, tuple[Array | None, ...]]:
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    f32 = jnp.float32
    columns = jnp.arange(kv_len)
    block = min(BLOCK, q_len, max(PAIRS // (batch * heads * kv_len), 8))
    exact = lax.Precision.HIGHEST if q.dtype == f32 else None
    k, v = k.astype(f32), v.astype(f32)
    alongs = spec.score.operands if spec.score else ()
    # The bias comes last: what is learned of it is dS, on the block's own queries.
    learned = tuple(n for n, needed in enumerate(wanted) if needed)
    of_bias = () if operands.bias is None else (operands.bias,)
    zeros = tuple(jnp.zeros(x.shape, f32) for x in (*(operands.score[n] for n in learned), *of_bias))

    def rows_of(sums: tuple[Array, ...], n: Array) -> tuple[tuple[Array, ...], None]:
        """Adds the gradients of the ``n``-th block of queries; the last may overlap the one before it."""
        start = jnp.minimum(n * block, q_len - block)
        rows = start + jnp.arange(block)
        cut = lambda x, axis=2: lax.dynamic_slice_in_dim(x, start, block, axis)  # noqa: E731
        grouped = lambda x: x.astype(f32).reshape(batch, kv_heads, group, block, -1)  # noqa: E731
        products = jnp.einsum("bkgqd,bknd->bkgqn", grouped(cut(q)), k, precision=exact) * spec.scale
        products = products.reshape(batch, heads, block, kv_len)
        blocks = [by_block(a, x, start, block, kv_len) for a, x in zip(alongs, operands.score, strict=True)]
        read, places = [x for x, _ in blocks], [place for _, place in blocks]

        def logits(learned_parts: tuple[Array, ...], bias: tuple[Array, ...]) -> Array:
            s = products
            if spec.softcap is not None:
                s = spec.softcap * jnp.tanh(s / spec.softcap)
            if spec.score is not None:
                parts = list(read)
                for n, part in zip(learned, learned_parts):
                    parts[n] = part
                s = apply_to_block(spec.score, s, parts, rows, kv_len)
            if operands.alibi_slopes is not None:
                distance = jnp.abs(rows[:, None] + spec.query_offset - columns)
                s = s - operands.alibi_slopes[:, None, None] * distance
            return s + bias[0] if bias else s

        s, pull = jax.vjp(logits, tuple(read[n] for n in learned), tuple(map(cut, of_bias)))
        seen = _visible(rows, columns, operands, spec, cut) & (s > HIDDEN) & (rows >= n * block)[:, None]
        p = _softmax(s, seen, operands.sinks)
        dp = jnp.einsum("bkgqe,bkne->bkgqn", grouped(cut(do)), v, precision=exact)
        dp = dp.reshape(s.shape)
        # delta anew, of these very P: what is summed over whole rows cancels, and must cancel exactly.
        rows_delta = jnp.sum(p * dp, axis=-1, keepdims=True)
        ds = p * (dp - rows_delta + (0.0 if dlse is None else cut(dlse)[..., None]))
        # Apart from the sums over it, which XLA for TPU would fuse with the products beyond its VMEM.
        parts, bias = pull(lax.optimization_barrier(ds))
        at = (*(places[n] for n in learned), *((start, block) for _ in of_bias))
        return tuple(map(_add, sums, (*parts, *bias), at)), None

    sums, _ = lax.scan(rows_of, zeros, jnp.arange(-(-q_len // block)))
    dscore: list[Array | None] = [None] * len(operands.score)
    for n, gradient in zip(learned, sums):
        dscore[n] = gradient.astype(operands.score[n].dtype)
    dbias = sums[-1].astype(operands.bias.dtype) if of_bias else None
    return dbias, tuple(dscore)


def _softmax(s: Array, seen: Array, sinks: Array | None) -> Array:
    """P of whole rows, normalized anew: dS of a row adds up to zero only as well as P adds up to one, and
    the rounding of an lse of 10 would leave 1e-6."""
    s = jnp.where(seen, s, -jnp.inf)
    highest = jnp.max(s, axis=-1, keepdims=True)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[:, None, None])
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    p = jnp.exp(s - highest)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None, None] - highest)
    return p / jnp.where(total > 0, total, 1.0)


def _add(total: Array, part: Array, place: tuple[Array, int] | None) -> Array:
    """``part`` added to ``total``, on axis 2 at ``place`` (start, size) or everywhere."""
    if place is None:
        return total + part
    start, size = place
    here = lax.dynamic_slice_in_dim(total, start, size, 2)
    return lax.dynamic_update_slice_in_dim(total, here + part.astype(total.dtype), start, 2)


def _visible(rows: Array, columns: Array, operands: Operands, spec: AttentionSpec, cut: Any) -> Array:
    """Which keys the queries ``rows`` see, broadcastable to ``[batch, heads, rows, columns]``."""
    seen = jnp.stack([mask.visible(rows[:, None], columns[None, :]) for mask in of_heads(spec.mask)])
    if operands.q_segment_ids is not None:
        ids = cut(operands.q_segment_ids, 1)[:, :, None] == operands.kv_segment_ids[:, None, :]
        seen = seen & ids[:, None]
    if operands.q_lens is not None:
        seen = seen & (rows[:, None] < operands.q_lens[:, None, None, None])
    if operands.kv_lens is not None:
        seen = seen & (columns < operands.kv_lens[:, None, None, None])
    return seen
