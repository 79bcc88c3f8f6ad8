"""Flash attention of any lengths and head dims: pads to the blocks, masks the padding, cuts it off."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.flash_attention import backward as _backward
from pallas_kernels.flash_attention import forward as _forward
from pallas_kernels.flash_attention import per_head
from pallas_kernels.flash_attention.blocks import BlockSizes, choose_backward, choose_forward, round_up
from pallas_kernels.flash_attention.operand_gradients import operand_gradients
from pallas_kernels.flash_attention.score_tiles import pad_operands
from pallas_kernels.flash_attention.spec import NO_OPERANDS, AttentionSpec, Operands
from pallas_kernels.hardware import Hardware
from pallas_kernels.masks import Causal, Full, KeyLength, PerHead

SUBLANES = 16  # rows of a packed register of bfloat16: head_dim is a row count once transposed


def _check(q: Array, k: Array, v: Array, spec: AttentionSpec) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}, expected [batch, heads, seq, head_dim]")
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise TypeError(f"{name}: got {x.dtype}, allowed are float32 and bfloat16")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, but q is {q.dtype}; they must be equal")
        if 0 in x.shape:
            raise ValueError(f"{name}: got shape {x.shape}, every dimension must be positive")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v: got shape {v.shape}, its batch, heads and length must be those of k, {k.shape}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k: got shape {k.shape}, its batch and head_dim must be those of q, {q.shape}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: got {k.shape[1]} heads, which must divide the {q.shape[1]} heads of q")
    if isinstance(spec.mask, PerHead) and len(spec.mask.masks) != q.shape[1]:
        raise ValueError(f"mask: got masks of {len(spec.mask.masks)} heads, q has {q.shape[1]}")
    if isinstance(spec.mask, PerHead) and spec.score is not None:
        raise ValueError("mask: got masks of heads beside a score function, whose heads they would renumber")


def _heads(x: Array, length: int) -> Array:
    """``[batch, heads, seq, dim]`` -> ``[batch * heads, length, dim rounded up]``, padded with zeros."""
    batch, heads, seq, dim = x.shape
    x = x.reshape(batch * heads, seq, dim)
    pad = ((0, 0), (0, length - seq), (0, round_up(dim, SUBLANES) - dim))
    return jnp.pad(x, pad) if any(after for _, after in pad) else x


def _hide_padding(spec: AttentionSpec, q_len: int, kv_len: int, padded: int) -> AttentionSpec:
    """The same attention, with padded keys masked if a true query would see them."""
    if padded == kv_len or not spec.mask.bounds(0, q_len, kv_len, padded)[0]:
        return spec
    return dataclasses.replace(spec, mask=spec.mask & KeyLength(kv_len))


def _prepare(
    operands: Operands, spec: AttentionSpec, q_len: int, kv_len: int, q_padded: int, kv_padded: int
) -> Operands:
    """Pads, and turns lengths into segments: what lies beyond a length is in a segment of its own."""
    q_ids, kv_ids, q_lens, kv_lens = (
        getattr(operands, name) for name in ("q_segment_ids", "kv_segment_ids", "q_lens", "kv_lens")
    )
    if not all(x is None for x in (q_ids, kv_ids, q_lens, kv_lens)):
        batch = next(len(x) for x in (q_ids, q_lens, kv_lens) if x is not None)
        q_ids = _segments(q_ids, q_lens, batch, q_len, q_padded, outside=-1)
        kv_ids = _segments(kv_ids, kv_lens, batch, kv_len, kv_padded, outside=-2)
    bias = operands.bias
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, q_padded - q_len), (0, kv_padded - kv_len)))
    score = pad_operands(spec.score, operands.score, (q_len, kv_len), (q_padded, kv_padded))
    return Operands(q_ids, kv_ids, bias, operands.alibi_slopes, operands.sinks, score=score)


def _segments(
    ids: Array | None, lens: Array | None, batch: int, length: int, padded: int, outside: int
) -> Array:
    ids = jnp.zeros((batch, length), jnp.int32) if ids is None else ids.astype(jnp.int32)
    if lens is not None:
        ids = jnp.where(jnp.arange(length)[None, :] < lens[:, None], ids, outside)
    return jnp.pad(ids, ((0, 0), (0, padded - length)), constant_values=outside)


def flash_forward(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    operands: Operands = NO_OPERANDS,
    *,
    spec: AttentionSpec,
    hardware: Hardware,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "b h m e"], Float[Array, "b h m"]]:
    """Attention and its log-sum-exp.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, float32 or bfloat16.
        k: ``[batch, kv_heads, kv_len, head_dim]``; ``kv_heads`` divides ``heads`` (GQA, MQA).
        v: ``[batch, kv_heads, kv_len, value_dim]``.
        operands: optional tensors.
        spec: mask, scale, score changes and, if wanted, block sizes.
        hardware: what to compile for.
        out_dtype: of ``o``, if not that of ``q``: float32, where results over parts of the keys are merged.

    Returns:
        ``o [batch, heads, q_len, value_dim]``, and ``lse [batch, heads, q_len]`` float32, natural
        logarithm. A query that sees nothing gives zeros and -inf.

    Raises:
        ValueError, TypeError: shapes or types do not fit together; the message names the argument.
    """
    _check(q, k, v, spec)
    if isinstance(spec.mask, PerHead):
        run = functools.partial(flash_forward, hardware=hardware, out_dtype=out_dtype)
        return per_head.forward(run, q, k, v, operands, spec)
    batch, heads, q_len, dim = q.shape
    kv_len, value_dim = v.shape[2:]
    # Results that are merged come of several such programs side by side.
    alone = spec.score is None and out_dtype is None and all(x is None for x in operands[:-1])
    blocks = (spec.block_sizes or BlockSizes()).forward or choose_forward(
        q_len,
        kv_len,
        dim,
        value_dim,
        q.dtype.itemsize,
        hardware,
        _pair_bytes(operands, spec),
        jnp.dtype(out_dtype or q.dtype).itemsize,
        simple=alone and isinstance(spec.mask, Causal | Full),
    )
    q_padded, kv_padded = (
        round_up(q_len, blocks.block_q),
        round_up(kv_len, blocks.memory_kv or blocks.block_kv),
    )
    o, lse = _forward.forward(
        _heads(q, q_padded),
        _heads(k, kv_padded),
        _heads(v, kv_padded),
        _prepare(operands, spec, q_len, kv_len, q_padded, kv_padded),
        batch=batch,
        spec=_hide_padding(spec, q_len, kv_len, kv_padded),
        blocks=blocks,
        hardware=hardware,
        out_dtype=out_dtype,
    )
    o = o[:, :q_len, :value_dim].reshape(batch, heads, q_len, value_dim)
    return o, lse[:, :q_len].reshape(batch, heads, q_len)


def flash_backward(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    o: Float[Array, "b h m e"],
    lse: Float[Array, "b h m"],
    do: Float[Array, "b h m e"],
    dlse: Float[Array, "b h m"] | None = None,
    operands: Operands = NO_OPERANDS,
    *,
    spec: AttentionSpec,
    hardware: Hardware,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "b h m d"], Float[Array, "b g n d"], Float[Array, "b g n e"]]:
    """Gradients by q, k and v; those by the operands are :func:`operand_gradients`.

    Args:
        q, k, v: as given to :func:`flash_forward`.
        o, lse: what it returned.
        do: gradient of ``o``.
        dlse: gradient of ``lse``, float32; None stands for zero.
        operands: as given to :func:`flash_forward`.
        spec, hardware: as given to :func:`flash_forward`.
        out_dtype: of the gradients, if not that of ``q``: float32, where they are to be added up.

    Returns:
        ``dq``, ``dk``, ``dv`` of the shapes of ``q``, ``k``, ``v``.

    Raises:
        ValueError, TypeError: as :func:`flash_forward`.
    """
    _check(q, k, v, spec)
    if isinstance(spec.mask, PerHead):
        run = functools.partial(flash_backward, hardware=hardware, out_dtype=out_dtype)
        return per_head.backward(run, q, k, v, o, lse, do, dlse, operands, spec)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    blocks = (spec.block_sizes or BlockSizes()).backward or choose_backward(
        q_len,
        kv_len,
        dim,
        value_dim,
        heads // kv_heads,
        q.dtype.itemsize,
        hardware,
        _pair_bytes(operands, spec),
        jnp.dtype(out_dtype or q.dtype).itemsize,
    )
    q_padded, kv_padded = (
        round_up(q_len, blocks.chunk_q or blocks.memory_q),
        round_up(kv_len, blocks.block_kv),
    )

    def statistic(x: Array, fill: float) -> Array:
        x = x.reshape(batch * heads, q_len)
        return jnp.pad(x, ((0, 0), (0, q_padded - q_len)), constant_values=fill) if q_padded > q_len else x

    dq, dk, dv = _backward.backward(
        _heads(q, q_padded),
        _heads(k, kv_padded),
        _heads(v, kv_padded),
        _heads(o, q_padded),
        statistic(lse, -jnp.inf),  # padded queries see nothing, whatever the mask says
        _heads(do, q_padded),
        None if dlse is None else statistic(dlse, 0.0),
        _prepare(operands, spec, q_len, kv_len, q_padded, kv_padded),
        batch=batch,
        spec=_hide_padding(spec, q_len, kv_len, kv_padded),
        blocks=blocks,
        hardware=hardware,
        out_dtype=out_dtype,
    )
    cut = lambda x, like: x[:, : like.shape[2], : like.shape[3]].reshape(like.shape)  # noqa: E731
    return cut(dq, q), cut(dk, k), cut(dv, v)


def _pair_bytes(operands: Operands, spec: AttentionSpec) -> int:
    """Bytes that the operands take for each pair of a query and a key."""
    pairs = [
        x for along, x in zip(spec.score.operands if spec.score else (), operands.score) if along == "pair"
    ]
    return sum(x.dtype.itemsize for x in (operands.bias, *pairs) if x is not None)


def flash_attention(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    operands: Operands = NO_OPERANDS,
    *,
    spec: AttentionSpec,
    hardware: Hardware,
) -> tuple[Float[Array, "b h m e"], Float[Array, "b h m"]]:
    """:func:`flash_forward`, both results differentiable in JAX by q, k, v, bias, sinks and what the score
    function reads."""
    return _attention(q, k, v, operands, spec, hardware)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(
    q: Array, k: Array, v: Array, operands: Operands, spec: AttentionSpec, hardware: Hardware
) -> tuple[Array, Array]:
    return flash_forward(q, k, v, operands, spec=spec, hardware=hardware)


def _attention_forward(
    q: Array, k: Array, v: Array, operands: Operands, spec: AttentionSpec, hardware: Hardware
) -> tuple[tuple[Array, Array], tuple]:
    o, lse = flash_forward(q, k, v, operands, spec=spec, hardware=hardware)
    return (o, lse), (q, k, v, o, lse, operands)


def _attention_backward(
    spec: AttentionSpec, hardware: Hardware, saved: tuple, gradients: tuple[Array, Array]
) -> tuple:
    *tensors, operands = saved
    do, dlse = gradients
    by_tensors = flash_backward(*tensors, do, dlse, operands, spec=spec, hardware=hardware)
    dbias, dsinks, dscore = operand_gradients(*tensors, do, dlse, operands, spec=spec)
    zero = lambda x: None if x is None else np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    slopes = operands.alibi_slopes
    by_operands = Operands(
        *(zero(ids) for ids in operands[:2]),
        bias=dbias,
        alibi_slopes=None if slopes is None else jnp.zeros_like(slopes),
        sinks=dsinks,
        q_lens=zero(operands.q_lens),
        kv_lens=zero(operands.kv_lens),
        score=tuple(zero(x) if g is None else g for x, g in zip(operands.score, dscore)),
    )
    return *by_tensors, by_operands


_attention.defvjp(_attention_forward, _attention_backward)
