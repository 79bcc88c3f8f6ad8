"""The flash attention kernels as torch operators: registration, shapes, autograd."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch import Tensor

from pallas_kernels.flash_attention import (
    AttentionSpec,
    Operands,
    flash_backward,
    flash_forward,
    operand_gradients,
)
from pallas_kernels.hardware import Hardware
from xla_attention.bridge import JaxFunction, intern_static, static_of


def kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, spec: AttentionSpec, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse`` of XLA tensors; ``return_lse`` makes lse differentiable."""
    return forward(q, k, v, *operands, intern_static(spec), return_lse)


# In the operators' signatures, ``spec`` is an interned AttentionSpec.
_OPERANDS = ", ".join(f"Tensor? {name}" for name in Operands._fields)
_SAVED = f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? dlse, {_OPERANDS}"


def _forward(*arrays: jax.Array | None, spec: AttentionSpec, hardware: Hardware) -> tuple[jax.Array, ...]:
    q, k, v, *operands = arrays
    return flash_forward(q, k, v, Operands(*operands), spec=spec, hardware=hardware)


_kernel_forward = JaxFunction(_forward, "flash_forward")


@torch.library.custom_op(
    "xla_attention::flash_attention_forward",
    mutates_args=(),
    device_types="xla",
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPERANDS}, int spec, bool return_lse) -> (Tensor, Tensor)",
)
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse``."""
    *tensors, spec, _ = args
    o, lse = _kernel_forward(*tensors, spec=static_of(spec))
    return o, lse


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(*arrays: jax.Array | None, spec: AttentionSpec, hardware: Hardware) -> tuple[jax.Array, ...]:
    *saved, operands = *arrays[:7], Operands(*arrays[7:])
    return flash_backward(*saved, operands, spec=spec, hardware=hardware)


_kernel_backward = JaxFunction(_backward, "flash_backward")


@torch.library.custom_op(
    "xla_attention::flash_attention_backward",
    mutates_args=(),
    device_types="xla",
    schema=f"({_SAVED}, int spec) -> (Tensor, Tensor, Tensor)",
)
def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``dq``, ``dk`` and ``dv``; ``dlse`` is None where nothing differentiates ``lse``."""
    *tensors, spec = args
    dq, dk, dv = _kernel_backward(*tensors, spec=static_of(spec))
    return dq, dk, dv


@backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _operand_gradients(
    *arrays: jax.Array | None, spec: AttentionSpec, wanted: tuple[bool, bool], hardware: Hardware
) -> tuple[jax.Array, ...]:
    *saved, operands = *arrays[:7], Operands(*arrays[7:])
    gradients = operand_gradients(*saved, operands, spec=spec)
    return tuple(x for x, needed in zip(gradients, wanted) if needed)  # JAX drops what only the other needs


_kernel_operand_gradients = JaxFunction(_operand_gradients, "flash_operand_gradients")


@torch.library.custom_op(
    "xla_attention::flash_attention_operand_gradients",
    mutates_args=(),
    device_types="xla",
    schema=f"({_SAVED}, int spec, bool of_bias, bool of_sinks) -> Tensor[]",
)
def operand_backward(*args: Any) -> list[Tensor]:
    """Gradients by bias and sinks, those that are asked for."""
    *tensors, spec, of_bias, of_sinks = args
    return _kernel_operand_gradients(*tensors, spec=static_of(spec), wanted=(of_bias, of_sinks))


@operand_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    operands, (of_bias, of_sinks) = Operands(*args[7:-3]), args[-2:]
    return [
        x.new_empty(x.shape) for x, needed in ((operands.bias, of_bias), (operands.sinks, of_sinks)) if needed
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, spec, return_lse = inputs
    o, lse = output
    ctx.set_materialize_grads(False)  # an unused lse then costs the backward nothing
    if not return_lse:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, o, lse)
    ctx.spec = spec


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *operands, o, lse = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    args = (q, k, v, o, lse, do, dlse, *operands, ctx.spec)
    of_q, of_k, of_v, *of_operands = ctx.needs_input_grad[:-2]
    by_qkv, by_operands = (None, None, None), Operands()
    if of_q or of_k or of_v:
        by_qkv = backward(*args)
    needs = Operands(*of_operands)
    if needs.bias or needs.sinks:
        found = iter(operand_backward(*args, needs.bias, needs.sinks))
        by_operands = Operands(
            bias=next(found) if needs.bias else None, sinks=next(found) if needs.sinks else None
        )
    wanted = (x if needed else None for x, needed in zip(by_qkv, (of_q, of_k, of_v)))
    return *wanted, *by_operands, None, None


forward.register_autograd(_differentiate, setup_context=_save)
