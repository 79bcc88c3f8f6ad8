"""All-to-all attention: whole sequences of some heads, in place of all heads of a part of the sequence
(DeepSpeed Ulysses; Jacobs et al., 2023, arXiv:2309.14509).

    q, k, v [batch, heads, seq / n, dim]  ->  [batch, heads / n, seq, dim]      by one exchange each,
    attention as on one device, and back.

So everything that the kernels know works unchanged. What varies by head (bias, slopes, sinks, what a score
function reads) comes in as its shard's heads, what varies along the sequence comes in whole. Fewer key heads
than shards are repeated before the exchange, and their gradients added after it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.context_parallel.layout import Context, natural_order, zigzag_order
from pallas_kernels.flash_attention import (
    AttentionSpec,
    Operands,
    flash_backward,
    flash_forward,
    operand_gradients,
)
from pallas_kernels.hardware import Hardware
from pallas_kernels.masks import PerHead


def check(operands: Operands, spec: AttentionSpec, context: Context, heads: int, kv_heads: int) -> None:
    """Refuses what does not divide; the heads are those that the shards of the sequence hold together.

    Raises:
        ValueError: the message names the argument.
    """
    n = context.shards
    if heads % n:
        raise ValueError(f"q: got {heads} heads to exchange over {context.axis}={n}, which must divide them")
    if kv_heads % n and n % kv_heads:
        raise ValueError(
            f"k: got {kv_heads} heads to exchange over {context.axis}={n}; one must divide the other"
        )
    if isinstance(spec.mask, PerHead):
        raise ValueError("mask: no masks of heads where heads are exchanged")
    if context.layout == "zigzag" and operands.bias is not None:
        raise ValueError("bias: not with layout='zigzag'; take layout='contiguous'")


def forward(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    operands: Operands,
    *,
    context: Context,
    spec: AttentionSpec,
    hardware: Hardware,
) -> tuple[Float[Array, "b h m e"], Float[Array, "b h m"]]:
    """``flash_forward`` of the whole sequence, on one shard of it; q, k, v and results are local."""
    q, k, v = (_to_heads(x, context) for x in (q, k, v))
    o, lse = flash_forward(q, k, v, _in_order(operands, context), spec=spec, hardware=hardware)
    return _to_sequence(o, context), _to_sequence(lse, context)


def backward(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    o: Float[Array, "b h m e"],
    lse: Float[Array, "b h m"],
    do: Float[Array, "b h m e"],
    dlse: Float[Array, "b h m"] | None,
    operands: Operands,
    *,
    context: Context,
    spec: AttentionSpec,
    hardware: Hardware,
) -> tuple[Float[Array, "b h m d"], Float[Array, "b g n d"], Float[Array, "b g n e"]]:
    """``flash_backward`` of the whole sequence likewise."""
    saved = (_to_heads(x, context) for x in (q, k, v, o, lse, do, dlse))
    operands = _in_order(operands, context)
    repeats = context.shards > k.shape[1]
    gradients = flash_backward(
        *saved, operands, spec=spec, hardware=hardware, out_dtype=jnp.float32 if repeats else None
    )
    dq, dk, dv = (_to_sequence(x, context) for x in gradients)
    return dq.astype(q.dtype), _added(dk, k), _added(dv, v)


def gradients_of_operands(
    *saved: Array | None,
    operands: Operands,
    context: Context,
    spec: AttentionSpec,
    wanted: tuple[bool, ...],
) -> tuple[Array | None, Array | None, tuple[Array | None, ...]]:
    """``operand_gradients`` by this shard's heads; ``saved`` are the arguments of :func:`backward`."""
    whole = (_to_heads(x, context) for x in saved)
    return operand_gradients(*whole, _in_order(operands, context), spec=spec, wanted=wanted)


def _to_heads(x: Array | None, context: Context) -> Array | None:
    """``[batch, heads, seq / n, ...]`` -> ``[batch, heads / n, seq, ...]``, positions in order."""
    if x is None:
        return None
    if x.shape[1] < context.shards:
        x = jnp.repeat(x, context.shards // x.shape[1], axis=1)
    x = lax.all_to_all(x, context.axis, split_axis=1, concat_axis=2, tiled=True)
    return _reorder(x, natural_order(context.shards), 2) if context.layout == "zigzag" else x


def _to_sequence(x: Array, context: Context) -> Array:
    """The inverse, but that repeated heads stay so."""
    if context.layout == "zigzag":
        x = _reorder(x, zigzag_order(context.shards), 2)
    return lax.all_to_all(x, context.axis, split_axis=2, concat_axis=1, tiled=True)


def _added(x: Array, like: Array) -> Array:
    """Gradients of repeated heads, added up."""
    batch, heads, *rest = like.shape
    return x.reshape(batch, heads, -1, *rest).sum(2).astype(like.dtype) if x.shape != like.shape else x


def _in_order(operands: Operands, context: Context) -> Operands:
    """Segment ids, which come in whole, by position."""
    if context.layout == "contiguous":
        return operands
    order = natural_order(context.shards)
    ids = (None if x is None else _reorder(x, order, 1) for x in operands[:2])
    return Operands(*ids, *operands[2:])


def _reorder(x: Array, order: list[int], axis: int) -> Array:
    chunks = jnp.split(x, len(order), axis)
    return jnp.concatenate([chunks[n] for n in order], axis)
