"""Flash attention for torch: the Pallas kernels on XLA tensors, plain torch elsewhere."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pallas_kernels.flash_attention import (
    AttentionSpec,
    BlockSizes,
    attention_reference,
    flash_backward,
    flash_forward,
)
from pallas_kernels.masks import Causal, Full, Mask
from xla_attention.bridge import JaxFunction, intern_static, static_of
from xla_attention.ops.checks import check_finite, check_qkv

_ALIGNMENTS = ("top_left", "bottom_right")

_kernel_forward = JaxFunction(flash_forward, "flash_forward")
_kernel_backward = JaxFunction(flash_backward, "flash_backward")


# Dynamo puts the call into its graph as it stands; followed line by line, it would guard on every static
# argument ever interned, and compile again after each new one.
@torch.compiler.allow_in_graph
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    block_sizes: BlockSizes | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in memory linear in the sequence, differentiable in ``q``, ``k`` and ``v``.

    On XLA tensors it runs FlashAttention-2 (Dao, 2023, arXiv:2307.08691) as Pallas kernels, in lazy mode and
    under ``torch.compile(backend="openxla")``. On other tensors it runs the definition in float32 (float64
    for float64), in memory quadratic in the sequence: the same model runs in eager torch.

    Under ``torch.autocast`` of the tensors' device, floating inputs other than float64 are cast to its dtype
    first, as ``scaled_dot_product_attention`` does on CPU and CUDA.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, float32 or bfloat16; off XLA also float16 or float64. A
            ``head_dim`` of 16 to 256.
        k: ``[batch, kv_heads, kv_len, head_dim]`` in ``q``'s dtype; ``kv_heads`` divides ``heads``, and
            query head ``h`` reads key head ``h // (heads // kv_heads)``.
        v: like ``k``.
        is_causal: query ``i`` sees keys up to ``i``, or as ``causal_alignment`` says.
        causal_alignment: where the diagonal lies when ``q_len`` and ``kv_len`` differ. ``"top_left"``: query
            ``i`` sees keys up to ``i``, as in ``scaled_dot_product_attention``. ``"bottom_right"``: the last
            query sees every key, as in decoding and FlashAttention; needs ``is_causal``.
        scale: factor of the logits, default ``head_dim ** -0.5``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before the mask, as in Gemma 2.
        return_lse: also return the logarithm of the softmax denominator.
        block_sizes: tiling of the kernels, default chosen by hardware and shapes; ignored off XLA.

    Returns:
        ``[batch, heads, q_len, head_dim]`` in ``q``'s dtype; zeros, with zero gradients, in a row that sees
        no key. With ``return_lse`` also ``lse [batch, heads, q_len]``: natural logarithm, float32 (float64
        for float64), differentiable; ``-inf`` in a row that sees no key.

    Raises:
        TypeError: an argument's type, or a dtype that does not fit the device or the other tensors.
        ValueError: a shape, device or value that does not fit; the message names the argument.
    """
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v)
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise TypeError(f"block_sizes: got {type(block_sizes).__name__}, needs BlockSizes or None")
    spec = AttentionSpec(
        scale=int(q.shape[-1]) ** -0.5 if scale is None else check_finite("scale", scale),
        mask=_mask(is_causal, causal_alignment, int(q.shape[2]), int(k.shape[2])),
        softcap=None if softcap is None else check_finite("softcap", softcap, positive=True),
        block_sizes=block_sizes,
    )
    if q.device.type == "xla":
        o, lse = _forward(q, k, v, intern_static(spec), return_lse)
    else:
        o, lse = _eager(q, k, v, spec)
    return (o, lse) if return_lse else o


def _mask(is_causal: bool, alignment: str, q_len: int, kv_len: int) -> Mask:
    if alignment not in _ALIGNMENTS:
        raise ValueError(f"causal_alignment: got {alignment!r}, allowed are {_ALIGNMENTS}")
    if not is_causal:
        if alignment == "bottom_right":
            raise ValueError("causal_alignment: 'bottom_right' needs is_causal=True")
        return Full()
    return Causal(kv_len - q_len if alignment == "bottom_right" else 0)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    kinds = {x.device.type for x in tensors if isinstance(x, Tensor)}
    if len(kinds) != 1 or not _autocasts(*kinds):
        return tensors
    dtype = torch.get_autocast_dtype(*kinds)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in eligible else x for x in tensors)


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _eager(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    if dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    kind = q.device.type
    with torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext():
        o, lse = attention_reference(q, k, v, spec=spec, xp=torch)
    return o.to(dtype), lse


@torch.library.custom_op("xla_attention::flash_attention_forward", mutates_args=(), device_types="xla")
def _forward(q: Tensor, k: Tensor, v: Tensor, spec: int, return_lse: bool) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse``; ``spec`` is an interned AttentionSpec, ``return_lse`` makes lse differentiable."""
    o, lse = _kernel_forward(q, k, v, spec=static_of(spec))
    return o, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, spec: int, return_lse: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("xla_attention::flash_attention_backward", mutates_args=(), device_types="xla")
def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, spec: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq``, ``dk`` and ``dv``; ``dlse`` is None where nothing differentiates ``lse``."""
    dq, dk, dv = _kernel_backward(q, k, v, o, lse, do, dlse, spec=static_of(spec))
    return dq, dk, dv


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, spec, return_lse = inputs
    o, lse = output
    ctx.set_materialize_grads(False)  # an unused lse then costs the backward nothing
    if not return_lse:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.spec = spec


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    grads = _backward(q, k, v, o, lse, do, dlse, ctx.spec)
    wanted = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))
    return *wanted, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
