"""Attention on one shard of a sequence, inside ``jax.shard_map``: the ring, or the exchange of heads.

Arguments are those of ``pallas_kernels.flash_attention``, less what other shards hold:

* q, k, v, o, lse and their gradients: the shard's part of the sequence, all heads;
* segment ids: likewise in a ring; whole where heads are exchanged, in the order in which shards hold them;
* what varies by head: all heads in a ring; where heads are exchanged, those that come to the shard.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from pallas_kernels.context_parallel import all_to_all, ring
from pallas_kernels.context_parallel.layout import Context
from pallas_kernels.flash_attention import AttentionSpec, Operands, operand_gradients
from pallas_kernels.hardware import Hardware

_METHODS = {"ring": ring, "all_to_all": all_to_all}


def check_context(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    operands: Operands,
    spec: AttentionSpec,
    context: Context,
) -> None:
    """Checks that this attention can be sharded so; shapes are those of whole sequences.

    Raises:
        ValueError: a length or heads that do not divide, or something that the method cannot do; the message
            names the argument.
    """
    parts = context.shards * (2 if context.layout == "zigzag" else 1)
    for name, shape in (("q", q_shape), ("k", k_shape)):
        if shape[2] % parts:
            raise ValueError(
                f"{name}: got length {shape[2]}, which must divide over axis {context.axis!r} into {parts} "
                f"parts ({context.shards} shards, {context.layout})"
            )
    if context.method == "ring":
        lengths = (shape[2] // context.shards for shape in (q_shape, k_shape))
        ring.check(operands, spec, context, *lengths)
    else:
        all_to_all.check(operands, spec, context, q_shape[1], k_shape[1])


def context_forward(
    q: Array,
    k: Array,
    v: Array,
    operands: Operands,
    *,
    context: Context,
    spec: AttentionSpec,
    hardware: Hardware,
) -> tuple[Array, Array]:
    """The shard's part of ``flash_forward``'s results."""
    run = _METHODS[context.method].forward
    return run(q, k, v, operands, context=context, spec=spec, hardware=hardware)


def context_backward(
    *saved: Array | None, operands: Operands, context: Context, spec: AttentionSpec, hardware: Hardware
) -> tuple[Array, Array, Array]:
    """The shard's part of ``flash_backward``'s results; ``saved`` are q, k, v, o, lse, do, dlse."""
    run = _METHODS[context.method].backward
    return run(*saved, operands, context=context, spec=spec, hardware=hardware)


def context_operand_gradients(
    *saved: Array | None,
    operands: Operands,
    context: Context,
    spec: AttentionSpec,
    wanted: tuple[bool, ...],
) -> Any:
    """``operand_gradients`` by what the shard has, to be summed over the shards that share an operand."""
    if context.method == "ring":  # it has no other operands with gradients than sinks
        return operand_gradients(*saved, operands, spec=spec, wanted=wanted)
    return all_to_all.gradients_of_operands(
        *saved, operands=operands, context=context, spec=spec, wanted=wanted
    )
