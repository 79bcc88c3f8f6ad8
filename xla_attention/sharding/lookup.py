"""Embedding tables that are cut over devices: rows are looked up where their columns lie, then exchanged.

Left to itself XLA makes one dimension of batch and sequence, and where both are sharded gathers all that was
looked up. Here every device looks up, in the columns that it has, the tokens of all that share its place on
the other axes, and an all-to-all brings each device its own tokens whole: `tokens x width` numbers travel,
forward and backward, where gathering the table would send, and hold, `vocabulary x width`. Rows cut over
`tensor` are added up, as in Megatron's vocabulary-parallel embedding (arXiv:1909.08053).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import PartitionSpec
from torch import Tensor, nn

from xla_attention import bridge
from xla_attention.bridge import JaxFunction, intern_static, static_of
from xla_attention.ops.placement import AttentionPlacement
from xla_attention.sharding.mesh import Axis
from xla_attention.sharding.strategy import Spec

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs


@dataclasses.dataclass(frozen=True)
class Lookup:
    """How one table and the ids that are looked up in it lie. Axes with one device are left out.

    Attributes:
        mesh: name and size of each axis.
        device_ids: the device at each place of the mesh; None for their own order.
        vocabulary: rows of the whole table.
        ids: the axes of batch and sequence.
        rows, columns: the axes of the table's dimensions; each of the columns shards at most one dimension of
            ids, and each dimension has at most one of them, its last.
    """

    mesh: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] | None
    vocabulary: int
    ids: tuple[tuple[str, ...], tuple[str, ...]]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def exchanged(self) -> tuple[tuple[str, int | None], ...]:
        """Each axis of the columns, and the dimension of ids that it shards."""
        return tuple((axis, next((d for d in (0, 1) if axis in self.ids[d]), None)) for axis in self.columns)

    def forward_sharding(self) -> bridge.Sharding:
        return self._sharding((self._ids, self._table), (self._rows,), ())

    def backward_sharding(self) -> bridge.Sharding:
        """The table's gradient is added up over what shards ids, but was not exchanged."""
        summed = tuple(axis for axes in self.ids for axis in axes if axis not in self.columns)
        return self._sharding((self._ids, self._rows), (self._table,), summed)

    @property
    def _ids(self) -> PartitionSpec:
        return PartitionSpec(*self.ids)

    @property
    def _rows(self) -> PartitionSpec:
        return PartitionSpec(*self.ids, None)

    @property
    def _table(self) -> PartitionSpec:
        return PartitionSpec(self.rows, self.columns)

    def _sharding(
        self, inputs: tuple[PartitionSpec, ...], outputs: tuple[PartitionSpec, ...], summed: tuple[str, ...]
    ) -> bridge.Sharding:
        return bridge.Sharding(self.mesh, inputs, outputs, (summed,), self.device_ids)


def lookup_of(
    mesh: xs.Mesh, sizes: Mapping[Axis, int], table: Spec, output: Spec, vocabulary: int
) -> Lookup | None:
    """The lookup in a table, or None where XLA has to find its own way.

    Args:
        table: the axes of its dimensions.
        output: those of what is looked up, `[batch, seq, width]`.
        vocabulary: rows of the table.
    """
    rows, columns = (tuple(a for a in axes if sizes[a] > 1) for axes in table)
    batch, seq, width = (tuple(a for a in axes if sizes[a] > 1) for axes in output)
    shared = [[axis for axis in axes if axis in columns] for axes in (batch, seq)]
    last = all(not axes or axes == list(whole[-1:]) for axes, whole in zip(shared, (batch, seq)))
    if width or not last or set(rows) & {*batch, *seq}:
        return None
    placement = AttentionPlacement.of_mesh(mesh)
    return Lookup(placement.axes, placement.device_ids, vocabulary, (batch, seq), rows, columns)


def look_up_sharded(module: nn.Embedding, lookup: Lookup) -> None:
    """Has `module` look up so; its parameter and its name stay."""
    number = intern_static(lookup)
    module.forward = lambda ids: look_up(ids.to(torch.int32), module.weight, number)


def _forward(ids: jax.Array, table: jax.Array, *, lookup: Lookup, hardware: Any) -> jax.Array:
    """One device's ids `[batch, seq]` and part of the table -> its rows `[batch, seq, width]`."""
    found = table[_own_rows(_gathered(ids, lookup), table.shape[0], lookup)]
    if lookup.rows:
        inside = _inside(_gathered(ids, lookup), table.shape[0], lookup)
        found = lax.psum(jnp.where(inside[..., None], found, 0), lookup.rows)
    for axis, dim in reversed(lookup.exchanged):  # the last axis cuts the columns finest
        if dim is None:
            found = lax.all_gather(found, axis, axis=2, tiled=True)
        else:
            found = lax.all_to_all(found, axis, split_axis=dim, concat_axis=2, tiled=True)
    return found


def _backward(ids: jax.Array, grad: jax.Array, *, lookup: Lookup, hardware: Any) -> jax.Array:
    """One device's ids and gradients `[batch, seq, width]` -> of its part of the table, in float32."""
    for axis, dim in lookup.exchanged:
        if dim is None:
            width = grad.shape[2] // lax.axis_size(axis)
            grad = lax.dynamic_slice_in_dim(grad, lax.axis_index(axis) * width, width, axis=2)
        else:
            grad = lax.all_to_all(grad, axis, split_axis=2, concat_axis=dim, tiled=True)
    shards = 1
    for axis in lookup.rows:
        shards *= lax.axis_size(axis)
    rows, ids = lookup.vocabulary // shards, _gathered(ids, lookup)
    grad = grad.astype(jnp.float32)
    if lookup.rows:
        grad = jnp.where(_inside(ids, rows, lookup)[..., None], grad, 0)
    table = jnp.zeros((rows, grad.shape[2]), jnp.float32)
    return table.at[_own_rows(ids, rows, lookup)].add(grad)


def _gathered(ids: jax.Array, lookup: Lookup) -> jax.Array:
    """The ids of all devices that share the columns of each."""
    for axis, dim in lookup.exchanged:
        if dim is not None:
            ids = lax.all_gather(ids, axis, axis=dim, tiled=True)
    return ids


def _first_row(rows: int, lookup: Lookup) -> jax.Array | int:
    return lax.axis_index(lookup.rows) * rows if lookup.rows else 0


def _own_rows(ids: jax.Array, rows: int, lookup: Lookup) -> jax.Array:
    """Places of ids in this device's part of the table; any place for those in another's."""
    return jnp.clip(ids - _first_row(rows, lookup), 0, rows - 1)


def _inside(ids: jax.Array, rows: int, lookup: Lookup) -> jax.Array:
    """Which ids are in this device's part of the table."""
    own = ids - _first_row(rows, lookup)
    return (own >= 0) & (own < rows)


_compute = JaxFunction(_forward, "look_up")
_differentiate = JaxFunction(_backward, "look_up_backward")


@torch.library.custom_op("xla_attention::look_up", mutates_args=(), device_types="xla")
def look_up(ids: Tensor, table: Tensor, lookup: int) -> Tensor:
    """Rows of `table` for `ids [batch, seq]`, int32; `lookup` is an interned Lookup."""
    how = static_of(lookup)
    return _compute(ids, table, lookup=how, sharding=how.forward_sharding())[0]


@look_up.register_fake
def _(ids: Tensor, table: Tensor, lookup: int) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


@torch.library.custom_op("xla_attention::look_up_backward", mutates_args=(), device_types="xla")
def _look_up_backward(ids: Tensor, grad: Tensor, lookup: int) -> Tensor:
    how = static_of(lookup)
    return _differentiate(ids, grad, lookup=how, sharding=how.backward_sharding())[0]


@_look_up_backward.register_fake
def _(ids: Tensor, grad: Tensor, lookup: int) -> Tensor:
    return grad.new_empty((static_of(lookup).vocabulary, grad.shape[2]), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ids, table, ctx.lookup = inputs
    ctx.save_for_backward(ids)
    ctx.dtype = table.dtype


def _by_table(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
    (ids,) = ctx.saved_tensors
    return None, _look_up_backward(ids, grad, ctx.lookup).to(ctx.dtype), None


look_up.register_autograd(_by_table, setup_context=_save)
