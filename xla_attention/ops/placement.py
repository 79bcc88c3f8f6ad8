"""How the dimensions of attention lie on a mesh of devices.

Nothing need be said where a global mesh (``torch_xla.distributed.spmd.set_global_mesh``) has axes of the
usual names: batch over ``data`` and ``fsdp``, heads over ``tensor``, the sequence over ``context``. Else a
placement is given to :func:`use_attention_placement`, or ``partition_spec=`` and ``mesh=`` to a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from pallas_kernels.context_parallel.layout import (
    ContextMethod,
    SequenceLayout,
    natural_order,
    zigzag_order,
)

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs

BATCH_AXES, HEADS_AXIS, SEQUENCE_AXIS = ("data", "fsdp"), "tensor", "context"


@dataclasses.dataclass(frozen=True)
class AttentionPlacement:
    """Which mesh axes the dimensions of q, k and v are sharded over. Hashable: kernels are lowered for each.

    Attributes:
        axes: name and size of every axis of the mesh, in order.
        batch: the axes that the batch is sharded over.
        heads: the axis that heads are sharded over. Fewer key heads than shards are repeated on them.
        sequence: the axis that the sequence is sharded over.
        method: how queries meet the keys of other shards. ``"ring"`` passes keys and values round (Liu et
            al., 2023, arXiv:2310.01889); ``"all_to_all"`` exchanges heads for sequence around attention of
            whole sequences (Jacobs et al., 2023, arXiv:2309.14509): heads divide over that axis too.
        layout: what each shard holds of the sequence: a ``"contiguous"`` part; or ``"zigzag"``, chunks ``i``
            and ``2 n - 1 - i`` of ``2 n``, with which causal attention is the same work on all ``n`` shards.
            The caller's tensors are in that order (:func:`to_zigzag`); masks speak of true positions.
        device_ids: the device at each place of the mesh, row by row; None for their own order.

    Raises:
        ValueError: an axis that the mesh lacks, or that is used twice; an unknown method or layout; devices
            that are not those of the mesh.
    """

    axes: tuple[tuple[str, int], ...]
    batch: tuple[str, ...] = ()
    heads: str | None = None
    sequence: str | None = None
    method: ContextMethod = "ring"
    layout: SequenceLayout = "contiguous"
    device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = dict(self.axes)
        used = [*self.batch, *(axis for axis in (self.heads, self.sequence) if axis is not None)]
        for axis in used:
            if axis not in sizes:
                raise ValueError(f"placement: axis {axis!r} is not in the mesh, whose axes are {list(sizes)}")
            if used.count(axis) > 1:
                raise ValueError(f"placement: axis {axis!r} is given to two dimensions")
        if self.method not in get_args(ContextMethod):
            raise ValueError(f"method: got {self.method!r}, allowed are {get_args(ContextMethod)}")
        if self.layout not in get_args(SequenceLayout):
            raise ValueError(f"layout: got {self.layout!r}, allowed are {get_args(SequenceLayout)}")
        devices = list(range(math.prod(sizes.values())))
        if self.device_ids is not None and sorted(self.device_ids) != devices:
            raise ValueError(f"device_ids: must be {len(devices)} devices from 0, got {self.device_ids}")
        if self.device_ids is not None and list(self.device_ids) == devices:
            object.__setattr__(self, "device_ids", None)

    @classmethod
    def of_mesh(
        cls,
        mesh: xs.Mesh,
        *,
        method: ContextMethod = "ring",
        layout: SequenceLayout = "contiguous",
    ) -> AttentionPlacement:
        """The axes of the usual names, those of them that the mesh has."""
        names = mesh.axis_names or ()
        has = lambda axis: axis if axis in names else None  # noqa: E731
        return cls(
            **_of_mesh(mesh),
            batch=tuple(axis for axis in BATCH_AXES if axis in names),
            heads=has(HEADS_AXIS),
            sequence=has(SEQUENCE_AXIS),
            method=method,
            layout=layout,
        )

    @classmethod
    def of_partition_spec(
        cls,
        mesh: xs.Mesh,
        partition_spec: Sequence[Any],
        *,
        method: ContextMethod = "ring",
        layout: SequenceLayout = "contiguous",
    ) -> AttentionPlacement:
        """What torch_xla's ``mark_sharding`` would be told of ``q [batch, heads, seq, head_dim]``.

        Raises:
            ValueError: it has not four entries, shards head_dim, or shards heads or the sequence over more
                than one axis.
        """
        if len(partition_spec) != 4 or partition_spec[3] is not None:
            raise ValueError(
                f"partition_spec: got {partition_spec}, needs four entries, for batch, heads, seq and "
                "head_dim, the last None"
            )
        entries = [_axes(entry, mesh) for entry in partition_spec[:3]]
        for name, entry in zip(("heads", "seq"), entries[1:]):
            if len(entry) > 1:
                raise ValueError(f"partition_spec: got axes {entry} for {name}, allowed is one")
        batch, heads, sequence = entries
        return cls(
            **_of_mesh(mesh),
            batch=batch,
            heads=heads[0] if heads else None,
            sequence=sequence[0] if sequence else None,
            method=method,
            layout=layout,
        )

    def size(self, *axes: str | None) -> int:
        """The number of shards over these axes; None is no axis."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in axes if axis is not None)

    @property
    def chunks(self) -> int:
        """Parts that the sequence must divide into."""
        return self.size(self.sequence) * (2 if self.sequence and self.layout == "zigzag" else 1)


_AMBIENT = "ambient"
_current: ContextVar[AttentionPlacement | None | str] = ContextVar("attention_placement", default=_AMBIENT)


@contextlib.contextmanager
def use_attention_placement(placement: AttentionPlacement | None) -> Iterator[None]:
    """Places every attention inside the block; None says that none is sharded, whatever the global mesh."""
    before = _current.set(placement)
    try:
        yield
    finally:
        _current.reset(before)


def current_placement() -> AttentionPlacement | None:
    """That of :func:`use_attention_placement`, else of the global mesh where SPMD is on; None for neither."""
    placement = _current.get()
    if placement is not _AMBIENT:
        return placement
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    mesh = xs.get_global_mesh() if xr.is_spmd() else None
    return None if mesh is None else AttentionPlacement.of_mesh(mesh)


def placement_of_call(
    partition_spec: Sequence[Any] | None, mesh: xs.Mesh | None
) -> AttentionPlacement | None:
    """The placement of one call from its own arguments, else :func:`current_placement`.

    Raises:
        ValueError: as the placement does, or a ``partition_spec`` without a mesh.
    """
    if partition_spec is None and mesh is None:
        return current_placement()
    ambient = current_placement()
    how = {"method": ambient.method, "layout": ambient.layout} if ambient else {}
    if mesh is None:
        import torch_xla.distributed.spmd as xs

        mesh = xs.get_global_mesh()
        if mesh is None:
            raise ValueError("mesh: partition_spec is given, but neither mesh nor a global mesh")
    if partition_spec is None:
        return AttentionPlacement.of_mesh(mesh, **how)
    return AttentionPlacement.of_partition_spec(mesh, partition_spec, **how)


def to_zigzag(x: Tensor, shards: int, dim: int = -1) -> Tensor:
    """A sequence in the order in which ``layout="zigzag"`` shards hold it (Brandon et al., 2023,
    arXiv:2311.09431): shard ``i`` of ``n`` has chunks ``i`` and ``2 n - 1 - i``.

    For whatever has a place in the sequence: tokens, targets, positions, segment ids. It moves data between
    devices where ``x`` is sharded; call it where batches are made, on the CPU.

    Args:
        x: any tensor.
        shards: of the sequence.
        dim: the dimension of the sequence.

    Raises:
        ValueError: the sequence does not divide into ``2 * shards`` chunks.
    """
    return _reorder(x, zigzag_order(shards), dim)


def from_zigzag(x: Tensor, shards: int, dim: int = -1) -> Tensor:
    """The inverse of :func:`to_zigzag`."""
    return _reorder(x, natural_order(shards), dim)


def _reorder(x: Tensor, order: list[int], dim: int) -> Tensor:
    if x.shape[dim] % len(order):
        raise ValueError(
            f"x: got length {x.shape[dim]}, must be a multiple of {len(order)}, two chunks a shard"
        )

    chunks = x.chunk(len(order), dim)
    return torch.cat([chunks[n] for n in order], dim)


def _of_mesh(mesh: xs.Mesh) -> dict[str, Any]:
    names = mesh.axis_names or tuple(f"axis{n}" for n in range(len(mesh.mesh_shape)))
    return {
        "axes": tuple(zip(names, map(int, mesh.mesh_shape))),
        "device_ids": tuple(int(n) for n in mesh.device_ids.flat),
    }


def _axes(entry: Any, mesh: xs.Mesh) -> tuple[str, ...]:
    """One entry of a partition spec, as ``mark_sharding`` takes it, by names."""
    names = [name for name, _ in _of_mesh(mesh)["axes"]]
    entries = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return tuple(names[axis] if isinstance(axis, int) else axis for axis in entries)
