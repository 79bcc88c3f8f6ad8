"""The flash attention kernels as torch operators: registration, shapes, autograd."""

from __future__ import annotations

from collections.abc import Sequence
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
_OPERANDS = ", ".join(f"Tensor? {name}" for name in Operands._fields[:-1]) + ", Tensor[] score"
_SAVED = f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? dlse, {_OPERANDS}"


def _operands(arrays: tuple[Any, ...]) -> Operands:
    """Operands from one sequence, those of the score function last."""
    named = len(Operands._fields) - 1
    return Operands(*arrays[:named], score=tuple(arrays[named:]))


def _forward(*arrays: jax.Array | None, spec: AttentionSpec, hardware: Hardware) -> tuple[jax.Array, ...]:
    q, k, v = arrays[:3]
    return flash_forward(q, k, v, _operands(arrays[3:]), spec=spec, hardware=hardware)


_kernel_forward = JaxFunction(_forward, "flash_forward")


@torch.library.custom_op(
    "xla_attention::flash_attention_forward",
    mutates_args=(),
    device_types="xla",
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPERANDS}, int spec, bool return_lse) -> (Tensor, Tensor)",
)
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse``."""
    *tensors, score, spec, _ = args
    o, lse = _kernel_forward(*tensors, *score, spec=static_of(spec))
    return o, lse


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(*arrays: jax.Array | None, spec: AttentionSpec, hardware: Hardware) -> tuple[jax.Array, ...]:
    return flash_backward(*arrays[:7], _operands(arrays[7:]), spec=spec, hardware=hardware)


_kernel_backward = JaxFunction(_backward, "flash_backward")


@torch.library.custom_op(
    "xla_attention::flash_attention_backward",
    mutates_args=(),
    device_types="xla",
    schema=f"({_SAVED}, int spec) -> (Tensor, Tensor, Tensor)",
)
def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``dq``, ``dk`` and ``dv``; ``dlse`` is None where nothing differentiates ``lse``."""
    *tensors, score, spec = args
    dq, dk, dv = _kernel_backward(*tensors, *score, spec=static_of(spec))
    return dq, dk, dv


@backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _operand_gradients(
    *arrays: jax.Array | None, spec: AttentionSpec, wanted: tuple[bool, ...], hardware: Hardware
) -> tuple[jax.Array, ...]:
    of_bias, of_sinks, *of_score = wanted
    saved, operands = arrays[:7], _operands(arrays[7:])
    dbias, dsinks, dscore = operand_gradients(*saved, operands, spec=spec, wanted=tuple(of_score))
    return _asked((dbias, dsinks, *dscore), (of_bias, of_sinks, *of_score))


def _asked(values: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Those that are wanted; JAX drops what only the others need."""
    return tuple(x for x, needed in zip(values, wanted) if needed)


_kernel_operand_gradients = JaxFunction(_operand_gradients, "flash_operand_gradients")


@torch.library.custom_op(
    "xla_attention::flash_attention_operand_gradients",
    mutates_args=(),
    device_types="xla",
    schema=f"({_SAVED}, int spec, bool of_bias, bool of_sinks, bool[] of_score) -> Tensor[]",
)
def operand_backward(*args: Any) -> list[Tensor]:
    """Gradients by bias, sinks and what the score function reads, those that are asked for."""
    *tensors, score, spec, of_bias, of_sinks, of_score = args
    wanted = (of_bias, of_sinks, *of_score)
    return _kernel_operand_gradients(*tensors, *score, spec=static_of(spec), wanted=wanted)


@operand_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    operands, (of_bias, of_sinks, of_score) = Operands(*args[7:-4]), args[-3:]
    given = (operands.bias, operands.sinks, *operands.score)
    return [x.new_empty(x.shape) for x in _asked(given, (of_bias, of_sinks, *of_score))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, score, spec, return_lse = inputs
    o, lse = output
    ctx.set_materialize_grads(False)  # an unused lse then costs the backward nothing
    if not return_lse:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, *score, o, lse)
    ctx.spec = spec


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, *rest, o, lse = ctx.saved_tensors
    operands = _operands(rest)
    if do is None:
        do = torch.zeros_like(o)
    args = (q, k, v, o, lse, do, dlse, *operands, ctx.spec)
    of_q, of_k, of_v, *of_operands = ctx.needs_input_grad[:-2]
    by_qkv, by_operands = (None, None, None), Operands()
    if of_q or of_k or of_v:
        by_qkv = backward(*args)
    needs = Operands(*of_operands)
    of_score = list(needs.score or ())
    if needs.bias or needs.sinks or any(of_score):
        found = iter(operand_backward(*args, needs.bias, needs.sinks, of_score))
        bias, sinks, *score = (
            next(found) if needed else None for needed in (needs.bias, needs.sinks, *of_score)
        )
        by_operands = Operands(bias=bias, sinks=sinks, score=tuple(score))
    wanted = (x if needed else None for x, needed in zip(by_qkv, (of_q, of_k, of_v)))
    score = list(by_operands.score) or [None] * len(operands.score)
    return *wanted, *by_operands[:-1], score, None, None


forward.register_autograd(_differentiate, setup_context=_save)
