"""Attention written for reading: the definition that the kernels are tested against.

    s = softcap(scale * q k^T) - slope * |q - kv| + bias      where mask and bias show the pair
    lse = log(exp(sink) + sum_kv exp(s))       natural logarithm, -inf for a row that sees nothing
    o = sum_kv exp(s - lse) v      zero for a row that sees nothing

A score function takes the place of the softcap.

One text for NumPy, JAX and torch: ``xp`` is the library's namespace. Differentiable where the library is.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.flash_attention.score_tiles import apply_to_block
from pallas_kernels.flash_attention.spec import HIDDEN, NO_OPERANDS, AttentionSpec, Operands
from pallas_kernels.masks import of_heads


def attention_reference(
    q: Any, k: Any, v: Any, operands: Operands = NO_OPERANDS, *, spec: AttentionSpec, xp: Any
) -> tuple[Any, Any]:
    """Softmax attention by its definition, in O(q_len * kv_len) memory and the type of its inputs.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, float32 or float64; callers widen narrower types.
        k: ``[batch, kv_heads, kv_len, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, kv_heads, kv_len, value_dim]``.
        operands: optional tensors, of the same library.
        spec: mask, scale and score changes.
        xp: the namespace of the arrays: ``numpy``, ``jax.numpy`` or ``torch``; of a spec with a score
            function, which is JAX's, ``jax.numpy``.

    Returns:
        ``o`` like ``q``, and ``lse [batch, heads, q_len]``.

    Raises:
        TypeError: the inputs are narrower than float32.
    """
    if q.dtype not in (xp.float32, xp.float64):
        raise TypeError(f"q: got {q.dtype}, the reference computes in float32 or float64")
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    grouped = xp.reshape(q, (batch, kv_heads, heads // kv_heads, q_len, dim))
    s = xp.einsum("bkgqd,bknd->bkgqn", grouped, k) * spec.scale
    if spec.softcap is not None:
        s = spec.softcap * xp.tanh(s / spec.softcap)
    if spec.score is not None:
        s = xp.reshape(s, (batch, heads, q_len, kv_len))
        s = apply_to_block(spec.score, s, operands.score, xp.arange(q_len), kv_len)
        s = xp.reshape(s, (batch, kv_heads, heads // kv_heads, q_len, kv_len))

    device = getattr(q, "device", None)  # a JAX tracer has none
    rows = xp.arange(q_len, device=device)[:, None]
    columns = xp.arange(kv_len, device=device)[None, :]

    def per_head(x: Any) -> Any:
        """``[..., heads, m, n]`` or ``[..., 1, m, n]`` in groups, as the logits are."""
        shape = (kv_heads, heads // kv_heads) if x.shape[-3] == heads else (1, 1)
        return xp.reshape(x, (*x.shape[:-3], *shape, *x.shape[-2:]))

    if operands.alibi_slopes is not None:
        distance = xp.abs(rows + spec.query_offset - columns)
        s = s - per_head(operands.alibi_slopes[:, None, None] * distance)
    seen = per_head(xp.stack([mask.visible(rows, columns) for mask in of_heads(spec.mask)]))
    if spec.score is not None:
        seen = seen & (s > HIDDEN)
    if operands.bias is not None:
        bias = per_head(operands.bias)
        s = s + bias
        seen = seen & (bias > HIDDEN)
    if operands.q_segment_ids is not None:
        same = operands.q_segment_ids[:, :, None] == operands.kv_segment_ids[:, None, :]
        seen = seen & same[:, None, None]
    if operands.q_lens is not None:
        seen = seen & (rows < operands.q_lens[:, None, None])[:, None, None]
    if operands.kv_lens is not None:
        seen = seen & (columns < operands.kv_lens[:, None, None])[:, None, None]
    s = xp.where(seen, s, -xp.inf)
    top = xp.amax(s, axis=-1, keepdims=True)
    if operands.sinks is not None:
        sink = per_head(operands.sinks[:, None, None])
        top = xp.maximum(top, sink)
    shift = xp.where(top == -xp.inf, 0.0, top)
    p = xp.exp(s - shift)
    total = xp.sum(p, axis=-1, keepdims=True)
    if operands.sinks is not None:
        total = total + xp.exp(sink - shift)
    sees_nothing = total == 0
    safe = xp.where(sees_nothing, 1.0, total)  # keeps log and division, and their gradients, finite
    o = xp.einsum("bkgqn,bknd->bkgqd", p / safe, v)
    lse = xp.where(sees_nothing, -xp.inf, shift + xp.log(safe))
    return xp.reshape(o, (batch, heads, q_len, v.shape[-1])), xp.reshape(lse, (batch, heads, q_len))
