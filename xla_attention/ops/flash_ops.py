"""The flash attention kernels as torch operators: registration, shapes, autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch_xla.runtime as xr
from torch import Tensor

from pallas_kernels.flash_attention import AttentionSpec, Operands
from xla_attention.bridge import JaxFunction, intern_static, static_of
from xla_attention.ops.placement import AttentionPlacement
from xla_attention.ops.shard_functions import (
    asked,
    backward_of_shard,
    forward_of_shard,
    operand_gradients_of_shard,
    operands_of,
)
from xla_attention.ops.sharded import Shards, shards_of


class Problem(NamedTuple):
    """What an operator is told beside its tensors."""

    spec: AttentionSpec
    placement: AttentionPlacement | None = None


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Operands,
    spec: AttentionSpec,
    return_lse: bool,
    placement: AttentionPlacement | None = None,
) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse`` of XLA tensors; ``return_lse`` makes lse differentiable.

    Raises:
        ValueError: the placement does not fit the tensors, or the devices.
    """
    problem = Problem(spec, placement)
    _shards(problem, q, k, operands)  # before anything is traced
    if placement is not None:
        _check_devices(placement)
    return forward(q, k, v, *operands, intern_static(problem), return_lse)


def _check_devices(placement: AttentionPlacement) -> None:
    devices, places = xr.global_runtime_device_count(), placement.size(*(name for name, _ in placement.axes))
    if not xr.is_spmd():
        raise ValueError("placement: not an SPMD program; call torch_xla.runtime.use_spmd() first")
    if devices != places:
        raise ValueError(f"placement: its mesh has {places} places, but there are {devices} devices")


# In the operators' signatures, ``problem`` is an interned Problem.
_OPERANDS = ", ".join(f"Tensor? {name}" for name in Operands._fields[:-1]) + ", Tensor[] score"
_SAVED = f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? dlse, {_OPERANDS}"


def _shards(
    problem: Problem, q: Tensor, k: Tensor, operands: Operands
) -> tuple[Shards | None, AttentionSpec]:
    """The shards, if there are any, and the spec of what each computes."""
    spec, placement = problem
    if placement is None:
        return None, spec
    *named, score = operands
    shapes = Operands(*(None if x is None else _shape(x) for x in named), tuple(map(_shape, score)))
    return shards_of(placement, _shape(q), _shape(k), shapes, spec)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(map(int, x.shape))


_kernel_forward = JaxFunction(forward_of_shard, "flash_forward")


@torch.library.custom_op(
    "xla_attention::flash_attention_forward",
    mutates_args=(),
    device_types="xla",
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPERANDS}, int problem, bool return_lse) -> (Tensor, Tensor)",
)
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse``."""
    *tensors, score, problem, _ = args
    operands = operands_of((*tensors[3:], *score))
    shards, spec = _shards(static_of(problem), *tensors[:2], operands)
    sharding = shards and shards.of_forward(operands)
    o, lse = _kernel_forward(*tensors, *score, spec=spec, shards=shards, sharding=sharding)
    return o, lse


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


_kernel_backward = JaxFunction(backward_of_shard, "flash_backward")


@torch.library.custom_op(
    "xla_attention::flash_attention_backward",
    mutates_args=(),
    device_types="xla",
    schema=f"({_SAVED}, int problem) -> (Tensor, Tensor, Tensor)",
)
def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``dq``, ``dk`` and ``dv``; ``dlse`` is None where nothing differentiates ``lse``."""
    *tensors, score, problem = args
    operands = operands_of((*tensors[7:], *score))
    shards, spec = _shards(static_of(problem), *tensors[:2], operands)
    sharding = shards and shards.of_backward(operands, tensors[6] is not None)
    dq, dk, dv = _kernel_backward(*tensors, *score, spec=spec, shards=shards, sharding=sharding)
    return dq, dk, dv


@backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_kernel_operand_gradients = JaxFunction(operand_gradients_of_shard, "flash_operand_gradients")


@torch.library.custom_op(
    "xla_attention::flash_attention_operand_gradients",
    mutates_args=(),
    device_types="xla",
    schema=f"({_SAVED}, int problem, bool of_bias, bool of_sinks, bool[] of_score) -> Tensor[]",
)
def operand_backward(*args: Any) -> list[Tensor]:
    """Gradients by bias, sinks and what the score function reads, those that are asked for."""
    *tensors, score, problem, of_bias, of_sinks, of_score = args
    wanted = (of_bias, of_sinks, *of_score)
    operands = operands_of((*tensors[7:], *score))
    shards, spec = _shards(static_of(problem), *tensors[:2], operands)
    sharding = shards and shards.of_operand_gradients(operands, tensors[6] is not None, wanted)
    return _kernel_operand_gradients(
        *tensors, *score, spec=spec, shards=shards, wanted=wanted, sharding=sharding
    )


@operand_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    operands, (of_bias, of_sinks, of_score) = Operands(*args[7:-4]), args[-3:]
    given = (operands.bias, operands.sinks, *operands.score)
    return [x.new_empty(x.shape) for x in asked(given, (of_bias, of_sinks, *of_score))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, score, problem, return_lse = inputs
    o, lse = output
    ctx.set_materialize_grads(False)  # an unused lse then costs the backward nothing
    if not return_lse:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, *score, o, lse)
    ctx.problem = problem


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, *rest, o, lse = ctx.saved_tensors
    operands = operands_of(rest)
    if do is None:
        do = torch.zeros_like(o)
    args = (q, k, v, o, lse, do, dlse, *operands, ctx.problem)
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
