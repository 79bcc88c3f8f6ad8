"""The JAX functions behind the operators: what one device computes of an attention, all of it or a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.context_parallel import context_backward, context_forward, context_operand_gradients
from pallas_kernels.flash_attention import (
    AttentionSpec,
    Operands,
    flash_backward,
    flash_forward,
    operand_gradients,
)
from pallas_kernels.hardware import Hardware
from xla_attention.ops.sharded import Shards


def operands_of(arrays: Sequence[Any]) -> Operands:
    """Operands from one sequence, those of the score function last."""
    named = len(Operands._fields) - 1
    return Operands(*arrays[:named], score=tuple(arrays[named:]))


def forward_of_shard(
    *arrays: jax.Array | None, spec: AttentionSpec, shards: Shards | None, hardware: Hardware
) -> tuple[jax.Array, ...]:
    """``(q, k, v, *operands) -> (o, lse)``."""
    q, k, v = arrays[:3]
    operands = operands_of(arrays[3:])
    if shards is None:
        return flash_forward(q, k, v, operands, spec=spec, hardware=hardware)
    spec, operands = shards.localize(spec, operands, *q.shape[:2])
    if shards.context is None:
        return flash_forward(q, k, v, operands, spec=spec, hardware=hardware)
    return context_forward(q, k, v, operands, context=shards.context, spec=spec, hardware=hardware)


def backward_of_shard(
    *arrays: jax.Array | None, spec: AttentionSpec, shards: Shards | None, hardware: Hardware
) -> tuple[jax.Array, ...]:
    """``(q, k, v, o, lse, do, dlse, *operands) -> (dq, dk, dv)``."""
    saved, operands = arrays[:7], operands_of(arrays[7:])
    if shards is None:
        return flash_backward(*saved, operands, spec=spec, hardware=hardware)
    spec, operands = shards.localize(spec, operands, *saved[0].shape[:2])
    if shards.context is None:
        return flash_backward(*saved, operands, spec=spec, hardware=hardware)
    return context_backward(*saved, operands=operands, context=shards.context, spec=spec, hardware=hardware)


def operand_gradients_of_shard(
    *arrays: jax.Array | None,
    spec: AttentionSpec,
    shards: Shards | None,
    wanted: tuple[bool, ...],
    hardware: Hardware,
) -> tuple[jax.Array, ...]:
    """The gradients wanted by bias, sinks and what the score function reads, from the same arguments.

    Each is of this device's part of the work; the bridge adds them up where devices share an operand.
    """
    _, _, *of_score = wanted
    saved, operands = arrays[:7], operands_of(arrays[7:])
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
    return asked((dbias, dsinks, *dscore[added:]), wanted)


def asked(values: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Those that are wanted; JAX drops what only the others need."""
    return tuple(x for x, needed in zip(values, wanted) if needed)
