"""Attention written for reading: the definition that the kernels are tested against.

    s = scale * q k^T              where the mask shows the pair
    lse = log(sum_kv exp(s))       natural logarithm, -inf for a row that sees nothing
    o = sum_kv exp(s - lse) v      zero for a row that sees nothing

One text for NumPy, JAX and torch: ``xp`` is the library's namespace. Differentiable where the library is.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.flash_attention.spec import AttentionSpec


def attention_reference(q: Any, k: Any, v: Any, *, spec: AttentionSpec, xp: Any) -> tuple[Any, Any]:
    """Softmax attention by its definition, in O(q_len * kv_len) memory and the type of its inputs.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, float32 or float64; callers widen narrower types.
        k: ``[batch, kv_heads, kv_len, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, kv_heads, kv_len, head_dim]``.
        spec: mask, scale and score changes.
        xp: the namespace of the arrays: ``numpy``, ``jax.numpy`` or ``torch``.

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

    device = getattr(q, "device", None)  # a JAX tracer has none
    rows = xp.arange(q_len, device=device)[:, None]
    columns = xp.arange(kv_len, device=device)[None, :]
    s = xp.where(spec.mask.visible(rows, columns), s, -xp.inf)
    top = xp.amax(s, axis=-1, keepdims=True)
    p = xp.exp(s - xp.where(top == -xp.inf, 0.0, top))
    total = xp.sum(p, axis=-1, keepdims=True)
    sees_nothing = total == 0
    safe = xp.where(sees_nothing, 1.0, total)  # keeps log and division, and their gradients, finite
    o = xp.einsum("bkgqn,bknd->bkgqd", p / safe, v)
    lse = xp.where(sees_nothing, -xp.inf, xp.where(sees_nothing, 0.0, top) + xp.log(safe))
    return xp.reshape(o, (batch, heads, q_len, v.shape[-1])), xp.reshape(lse, (batch, heads, q_len))
