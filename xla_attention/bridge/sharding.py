"""How the arrays of a JAX function lie on the devices of an SPMD program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh, and how each argument and result lies on it. The function is called on one device's parts.

    Attributes:
        axes: name and size of each axis of the mesh.
        inputs: of each array argument; those that are None have none.
        outputs: of each result.
        sums: for each result, the axes over which the devices' results are added up.
        device_ids: the device at each place of the mesh, row by row; None for their own order.
    """

    axes: tuple[tuple[str, int], ...]
    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]
    sums: tuple[tuple[str, ...], ...]
    device_ids: tuple[int, ...] | None = None

    @property
    def mesh(self) -> AbstractMesh:
        names, sizes = zip(*self.axes)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def place(self, avals: list[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """The arguments, sharded."""
        mesh = self.mesh
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(avals, self.inputs, strict=True)
        ]

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, which is given one device's parts of the arrays, as a function of whole arrays.

        Needs no device: an abstract mesh is enough to lower the function with its own manual region and
        collectives.
        """

        def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            results = fn(*arrays)
            results = results if isinstance(results, tuple | list) else (results,)
            return tuple(map(_add, results, self.sums))

        return jax.shard_map(
            local, mesh=self.mesh, in_specs=self.inputs, out_specs=self.outputs, check_vma=False
        )


def _add(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Added up in float32."""
    return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x
