"""Batches: which rows a process loads, and their way onto the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from xla_attention.sharding.strategy import Spec

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs
    from torch import Tensor


def rows_of_process(
    batch_size: int, devices: Sequence[int], mesh: np.ndarray, axes: Sequence[str], batch_axes: Sequence[str]
) -> np.ndarray:
    """The rows of a batch that a process's devices hold, sorted.

    Where `tensor` and `context` stay within a process, every row is one process's alone. Where they do not,
    the processes that share a row all load it.

    Args:
        batch_size: rows of the whole batch, a multiple of the shards over `batch_axes`.
        devices: ids of the process's devices.
        mesh: ids of all devices, one dimension an axis.
        axes: names of its dimensions.
        batch_axes: those that the batch is sharded over, the outermost first.
    """
    sizes = dict(zip(axes, mesh.shape))
    places = dict(zip(axes, np.nonzero(np.isin(mesh, devices))))
    shards = 1
    shard = np.zeros(len(devices), int)
    for axis in batch_axes:
        shard = shard * sizes[axis] + places[axis]
        shards *= sizes[axis]
    return np.unique(np.arange(batch_size).reshape(shards, -1)[shard])


def local_devices() -> list[int]:
    """Ids of this process's devices, as meshes number them."""
    import torch_xla

    everywhere = torch_xla._XLAC._xla_get_all_runtime_devices()
    return [everywhere.index(device) for device in torch_xla._XLAC._xla_get_runtime_devices()]


def to_devices(
    array: np.ndarray, mesh: xs.Mesh, spec: Spec | None, rows: np.ndarray, batch_size: int
) -> Tensor:
    """A batch as one sharded tensor, of the rows that this process has.

    Each device is sent its own part alone. The other processes' rows are left zero here: they never leave the
    host, and the tensor's shape is that of the whole batch in every process.

    Args:
        array: `[len(rows), ...]`.
        spec: the axes of its dimensions; None lets XLA choose.
        rows: their places in the batch.
        batch_size: rows of the whole batch.
    """
    import torch
    import torch_xla

    from xla_attention.sharding.annotate import mark

    whole = np.zeros((batch_size, *array.shape[1:]), array.dtype)
    whole[rows] = array
    tensor = torch.from_numpy(whole).to(torch_xla.device())
    if spec is not None:
        mark(tensor, mesh, spec)  # nothing is sent before it
    return tensor
