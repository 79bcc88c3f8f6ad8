"""A placement, made concrete for one attention: what each device has of every tensor, and computes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.context_parallel import Context, check_context
from pallas_kernels.flash_attention import AttentionSpec, Operands
from pallas_kernels.masks import Mask, PerHead
from pallas_kernels.score_function import OfShard
from xla_attention.bridge import Sharding
from xla_attention.ops.placement import AttentionPlacement

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The axes of each dimension, of one attention.

    Where there are fewer key heads than shards of the heads, their axis counts as two: key heads lie on the
    first, and are the same along the second. So each device has the one key head that it reads, and the
    gradients by it are added up over the second.

    Attributes:
        axes: name and size of each axis of that mesh.
        batch, heads, kv_heads: the axes of the dimensions.
        by_head: the axes of what varies by head, but not along the sequence.
        context: the axis of the sequence, if there is one.
        device_ids: as in the placement.
    """

    axes: tuple[tuple[str, int], ...]
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    kv_heads: tuple[str, ...]
    by_head: tuple[str, ...]
    context: Context | None
    device_ids: tuple[int, ...] | None

    @property
    def q(self) -> PartitionSpec:
        """Of q, o and their gradients; less its last entry, of lse."""
        return PartitionSpec(self.batch, self.heads, self._sequence, None)

    @property
    def kv(self) -> PartitionSpec:
        return PartitionSpec(self.batch, self.kv_heads, self._sequence, None)

    @property
    def lse(self) -> PartitionSpec:
        return PartitionSpec(self.batch, self.heads, self._sequence)

    @property
    def _sequence(self) -> str | None:
        return self.context.axis if self.context else None

    def operands(self, operands: Operands) -> Operands:
        """Of each operand that is there; None for the others."""
        in_ring = self.context is not None and self.context.method == "ring"
        ids = PartitionSpec(self.batch, self._sequence if in_ring else None)
        named = Operands(
            q_segment_ids=ids,
            kv_segment_ids=ids,
            bias=None if operands.bias is None else self._by_shape(operands.bias.shape),
            alibi_slopes=PartitionSpec(self.by_head),
            sinks=PartitionSpec(self.by_head),
            q_lens=PartitionSpec(self.batch),
            kv_lens=PartitionSpec(self.batch),
        )
        there = (None if x is None else spec for x, spec in zip(operands[:-1], named))
        return Operands(*there, score=tuple(self._by_shape(x.shape) for x in operands.score))

    def _by_shape(self, shape: Shape) -> PartitionSpec:
        """Of ``[1 or batch, 1 or heads, ...]``."""
        leading = (axes if n > 1 else None for axes, n in zip((self.batch, self.by_head), shape))
        return PartitionSpec(*leading, *[None] * (len(shape) - 2))

    def of_forward(self, operands: Operands) -> Sharding:
        """Of ``(q, k, v, *operands) -> (o, lse)``."""
        inputs = (self.q, self.kv, self.kv, *_flat(self.operands(operands)))
        return self._sharding(inputs, (self.q, self.lse))

    def of_backward(self, operands: Operands, has_dlse: bool) -> Sharding:
        """Of ``(q, k, v, o, lse, do, dlse, *operands) -> (dq, dk, dv)``."""
        return self._sharding(self._saved(operands, has_dlse), (self.q, self.kv, self.kv))

    def of_operand_gradients(self, operands: Operands, has_dlse: bool, wanted: tuple[bool, ...]) -> Sharding:
        """Of the same arguments; the results are the gradients wanted by bias, sinks and ``score``."""
        lie = self.operands(operands)
        results = itertools.compress((lie.bias, lie.sinks, *lie.score), wanted)
        return self._sharding(self._saved(operands, has_dlse), tuple(results))

    def _saved(self, operands: Operands, has_dlse: bool) -> tuple[PartitionSpec | None, ...]:
        dlse = self.lse if has_dlse else None
        return self.q, self.kv, self.kv, self.q, self.lse, self.q, dlse, *_flat(self.operands(operands))

    def _sharding(
        self, inputs: Sequence[PartitionSpec | None], outputs: tuple[PartitionSpec, ...]
    ) -> Sharding:
        """For the bridge; each result is added up over the axes that split the work, but not the result."""
        work = (*self.batch, *self.heads, *((self.context.axis,) if self.context else ()))
        return Sharding(
            self.axes,
            tuple(spec for spec in inputs if spec is not None),
            outputs,
            tuple(tuple(axis for axis in work if axis not in _named(spec)) for spec in outputs),
            self.device_ids,
        )

    def localize(
        self, spec: AttentionSpec, operands: Operands, batch: int, heads: int
    ) -> tuple[AttentionSpec, Operands]:
        """What one device computes on the operands that it has, inside the sharded function.

        Args:
            spec: its attention.
            operands: its own.
            batch, heads: of its q, as it holds them.
        """
        if spec.score is None:
            return spec, operands
        if self.context is not None:
            heads //= self.context.shards
        batches, heads_ = true_indices(self.batch, batch), true_indices(self.by_head, heads)
        score = (batches[:, None], heads_[None, :], *operands.score)
        return dataclasses.replace(spec, score=OfShard.of(spec.score)), operands._replace(score=score)


def true_indices(axes: tuple[str, ...], count: int) -> jax.Array:
    """Of what this device has ``count`` of, sharded over ``axes``."""
    first = lax.axis_index(axes) * count if axes else 0
    return first + jnp.arange(count, dtype=jnp.int32)


def _flat(operands: Operands) -> tuple[Any, ...]:
    return *operands[:-1], *operands.score


def _named(spec: PartitionSpec) -> set[str]:
    entries = (() if x is None else x if isinstance(x, tuple) else (x,) for x in spec)
    return set(itertools.chain(*entries))


@functools.cache
def shards_of(
    placement: AttentionPlacement, q_shape: Shape, k_shape: Shape, operands: Operands, spec: AttentionSpec
) -> tuple[Shards, AttentionSpec]:
    """The shards of an attention, and the spec of what each computes.

    Args:
        placement: where its dimensions lie.
        q_shape, k_shape: of q and k.
        operands: shapes of the optional tensors.
        spec: what is computed.

    Raises:
        ValueError: a dimension that does not divide, or something that cannot be sharded so; the message
            names the tensor, the dimension and the axis.
    """
    (batch, heads, *_), kv_heads = q_shape, k_shape[1]
    if batch % placement.size(*placement.batch):
        raise ValueError(
            f"q: got batch {batch}, which must divide over {_sizes(placement, *placement.batch)}"
        )
    shards = placement.size(placement.heads)
    if heads % shards:
        raise ValueError(f"q: got {heads} heads, which must divide over {_sizes(placement, placement.heads)}")
    if kv_heads % shards and shards % kv_heads:
        raise ValueError(
            f"k: got {kv_heads} heads over {_sizes(placement, placement.heads)}; one must divide the other"
        )
    axes, of_heads, of_kv_heads = placement.axes, (), ()
    if placement.heads is not None:
        of_heads = of_kv_heads = (placement.heads,)
        if kv_heads < shards:
            copies = f"copies of {placement.heads}"
            of_heads = (placement.heads, copies)
            split = ((placement.heads, kv_heads), (copies, shards // kv_heads))
            axes = tuple(itertools.chain(*(split if name in of_heads else ((name, n),) for name, n in axes)))

    spec = dataclasses.replace(spec, mask=_mask_of_shard(spec.mask, shards, placement))
    context, by_head = None, of_heads
    if placement.sequence is not None and placement.size(placement.sequence) > 1:
        axis = placement.sequence
        context = Context(axis, placement.size(axis), placement.method, placement.layout)
        per_device = (batch, heads // shards, q_shape[2]), (batch, max(kv_heads // shards, 1), k_shape[2])
        check_context(*per_device, operands, spec, context)
        by_head = (*of_heads, axis) if placement.method == "all_to_all" else of_heads
    found = Shards(axes, placement.batch, of_heads, of_kv_heads, by_head, context, placement.device_ids)
    return found, spec


def _mask_of_shard(mask: Mask | PerHead, shards: int, placement: AttentionPlacement) -> Mask | PerHead:
    """One mask for each head of a shard, if all shards have the same."""
    if not isinstance(mask, PerHead) or shards == 1:
        return mask
    each = len(mask.masks) // shards
    parts = {mask.masks[n * each : (n + 1) * each] for n in range(shards)}
    if len(parts) > 1:
        raise ValueError(
            f"mask: got masks of heads that differ between shards of {_sizes(placement, placement.heads)}; "
            "one program runs on all of them"
        )
    return PerHead(parts.pop())


def _sizes(placement: AttentionPlacement, *axes: str | None) -> str:
    return "mesh axes " + ", ".join(f"{axis}={placement.size(axis)}" for axis in axes)
