"""The flash attention kernels as torch operators: registration, shapes, autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import torch
from jax.sharding import PartitionSpec
from torch import Tensor

from pallas_kernels.context_parallel import context_backward, context_forward, context_operand_gradients
from pallas_kernels.flash_attention import (
    AttentionSpec,
    Operands,
    flash_backward,
    flash_forward,
    operand_gradients,
)
from pallas_kernels.hardware import Hardware
from xla_attention.bridge import JaxFunction, intern_static, static_of
from xla_attention.ops.placement import AttentionPlacement
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
        ValueError: the placement does not fit.
    """
    problem = Problem(spec, placement)
    _shards(problem, q, k, operands)  # before anything is traced
    return forward(q, k, v, *operands, intern_static(problem), return_lse)


# In the operators' signatures, ``problem`` is an interned Problem.
_OPERANDS = ", ".join(f"Tensor? {name}" for name in Operands._fields[:-1]) + ", Tensor[] score"
_SAVED = f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? dlse, {_OPERANDS}"


def _operands(arrays: Sequence[Any]) -> Operands:
    """Operands from one sequence, those of the score function last."""
    named = len(Operands._fields) - 1
    return Operands(*arrays[:named], score=tuple(arrays[named:]))


def _shards(
    problem: Problem, q: Tensor, k: Tensor, operands: Operands
) -> tuple[Shards | None, AttentionSpec]:
    """The shards, if there are any, and the spec of what each computes."""
    spec, placement = problem
    if placement is None:
        return None, spec
    *named, score = operands
    shapes = Operands(*(None if x is None else x.shape for x in named), tuple(x.shape for x in score))
    return shards_of(placement, q.shape, k.shape, shapes, spec)


def _forward(
    *arrays: jax.Array | None, spec: AttentionSpec, shards: Shards | None, hardware: Hardware
) -> tuple[jax.Array, ...]:
    q, k, v = arrays[:3]
    operands = _operands(arrays[3:])
    if shards is None:
        return flash_forward(q, k, v, operands, spec=spec, hardware=hardware)
    spec, operands = shards.localize(spec, operands, *q.shape[:2])
    if shards.context is None:
        return flash_forward(q, k, v, operands, spec=spec, hardware=hardware)
    return context_forward(q, k, v, operands, context=shards.context, spec=spec, hardware=hardware)


_kernel_forward = JaxFunction(_forward, "flash_forward")


@torch.library.custom_op(
    "xla_attention::flash_attention_forward",
    mutates_args=(),
    device_types="xla",
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPERANDS}, int problem, bool return_lse) -> (Tensor, Tensor)",
)
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """``o`` and ``lse``."""
    *tensors, score, problem, _ = args
    operands = _operands((*tensors[3:], *score))
    shards, spec = _shards(static_of(problem), *tensors[:2], operands)
    sharding = shards and shards.sharding(
        (shards.q, shards.kv, shards.kv, *_flat(shards.operands(operands))), (shards.q, shards.lse)
    )
    o, lse = _kernel_forward(*tensors, *score, spec=spec, shards=shards, sharding=sharding)
    return o, lse


def _flat(operands: Operands) -> tuple[Any, ...]:
    return *operands[:-1], *operands.score


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    *arrays: jax.Array | None, spec: AttentionSpec, shards: Shards | None, hardware: Hardware
) -> tuple[jax.Array, ...]:
    saved, operands = arrays[:7], _operands(arrays[7:])
    if shards is None:
        return flash_backward(*saved, operands, spec=spec, hardware=hardware)
    spec, operands = shards.localize(spec, operands, *saved[0].shape[:2])
    if shards.context is None:
        return flash_backward(*saved, operands, spec=spec, hardware=hardware)
    return context_backward(*saved, operands=operands, context=shards.context, spec=spec, hardware=hardware)


_kernel_backward = JaxFunction(_backward, "flash_backward")


@torch.library.custom_op(
    "xla_attention::flash_attention_backward",
    mutates_args=(),
    device_types="xla",
    schema=f"({_SAVED}, int problem) -> (Tensor, Tensor, Tensor)",
)
def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``dq``, ``dk`` and ``dv``; ``dlse`` is None where nothing differentiates ``lse``."""
    *tensors, score, problem = args
    operands = _operands((*tensors[7:], *score))
    shards, spec = _shards(static_of(problem), *tensors[:2], operands)
    sharding = shards and shards.sharding(
        _of_saved(shards, tensors, operands), (shards.q, shards.kv, shards.kv)
    )
    dq, dk, dv = _kernel_backward(*tensors, *score, spec=spec, shards=shards, sharding=sharding)
    return dq, dk, dv


def _of_saved(
    shards: Shards, tensors: Sequence[Tensor | None], operands: Operands
) -> tuple[PartitionSpec | None, ...]:
    """How the arguments of the backward operators lie."""
    q, kv, lse = shards.q, shards.kv, shards.lse
    dlse = None if tensors[6] is None else lse
    return q, kv, kv, q, lse, q, dlse, *_flat(shards.operands(operands))


@backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _operand_gradients(
    *arrays: jax.Array | None,
    spec: AttentionSpec,
    shards: Shards | None,
    wanted: tuple[bool, ...],
    hardware: Hardware,
) -> tuple[jax.Array, ...]:
    of_bias, of_sinks, *of_score = wanted
    saved, operands = arrays[:7], _operands(arrays[7:])
    before = len(operands.score)
    if shards is not None:
        spec, operands = shards.localize(spec, operands, *saved[0].shape[:2])
    added = len(operands.score) - before
    of_all = (*[False] * added, *of_score)
    if shards is None or shards.context is None:
        found = operand_gradients(*saved, operands, spec=spec, wanted=of_all)
    else:
        found = context_operand_gradients(
            *saved, operands=operands, context=shards.context, spec=spec, wanted=of_all
        )
    dbias, dsinks, dscore = found
    return _asked((dbias, dsinks, *dscore[added:]), wanted)


def _asked(values: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Those that are wanted; JAX drops what only the others need."""
    return tuple(x for x, needed in zip(values, wanted) if needed)


_kernel_operand_gradients = JaxFunction(_operand_gradients, "flash_operand_gradients")


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
    operands = _operands((*tensors[7:], *score))
    shards, spec = _shards(static_of(problem), *tensors[:2], operands)
    sharding = None
    if shards is not None:
        lie = shards.operands(operands)
        results = _asked((lie.bias, lie.sinks, *lie.score), wanted)
        sharding = shards.sharding(_of_saved(shards, tensors, operands), results)
    return _kernel_operand_gradients(
        *tensors, *score, spec=spec, shards=shards, wanted=wanted, sharding=sharding
    )


@operand_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    operands, (of_bias, of_sinks, of_score) = Operands(*args[7:-4]), args[-3:]
    given = (operands.bias, operands.sinks, *operands.score)
    return [x.new_empty(x.shape) for x in _asked(given, (of_bias, of_sinks, *of_score))]


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
    operands = _operands(rest)
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
