"""The mesh of devices: four named axes, and their sizes from a configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs

Axis = Literal["data", "fsdp", "tensor", "context"]
# In the order of the mesh: the last axis talks most, so its devices are neighbours.
AXES: tuple[Axis, ...] = ("data", "fsdp", "tensor", "context")


class MeshConfig(BaseModel):
    """How many devices lie along each axis.

    Attributes:
        data: replicas of the weights, each with its part of the batch.
        fsdp: shards of the weights, each with its part of the batch.
        tensor: shards of heads and of hidden channels.
        context: shards of the sequence.
        slices: TPU slices, joined by the data-center network; they divide `data`.

    One of the axes may be -1: what the others leave of the devices.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: int = Field(default=1, ge=-1)
    fsdp: int = Field(default=1, ge=-1)
    tensor: int = Field(default=1, ge=-1)
    context: int = Field(default=1, ge=-1)
    slices: int = Field(default=1, ge=1)

    def updated(self, sizes: dict[str, int]) -> MeshConfig:
        """This one, with other sizes for some of its fields."""
        return MeshConfig(**{**self.model_dump(), **sizes})

    def sizes(self, devices: int) -> dict[Axis, int]:
        """The size of every axis, in order.

        Args:
            devices: of all slices.

        Raises:
            ValueError: the sizes do not multiply to `devices`, more than one is -1, one is 0, or the slices
                do not divide `data`; the message says which sizes were asked for.
        """
        sizes: dict[Axis, int] = {axis: getattr(self, axis) for axis in AXES}
        asked = "sharding.mesh: " + ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if fixed == 0:
            raise ValueError(f"{asked}: an axis has at least one device, or is -1 for what is left")
        if len(open_axes) > 1:
            raise ValueError(f"{asked}: only one axis may be -1")
        if open_axes:
            if devices % fixed:
                raise ValueError(
                    f"{asked}: the {devices} devices are not a multiple of {fixed}, so nothing fits "
                    f"{open_axes[0]}=-1"
                )
            sizes[open_axes[0]] = devices // fixed
        elif fixed != devices:
            raise ValueError(f"{asked} make {fixed} devices, but there are {devices}; set one axis to -1")
        if sizes["data"] % self.slices:
            raise ValueError(
                f"{asked}: slices={self.slices} must divide data={sizes['data']}, as slices hold whole "
                "replicas of the weights"
            )
        return sizes


def build_mesh(config: MeshConfig) -> xs.Mesh:
    """The mesh of this process's runtime, in which SPMD is on.

    On TPUs, neighbours on the mesh are neighbours on the interconnect, and `data` crosses slices.

    Raises:
        ValueError: the sizes do not fit the devices.
    """
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    devices = xr.global_runtime_device_count()
    shape = tuple(config.sizes(devices).values())
    if xr.device_type() != "TPU":  # no torus to follow
        return xs.Mesh(np.arange(devices), shape, AXES)
    within = (shape[0] // config.slices, *shape[1:])
    return xs.HybridMesh(ici_mesh_shape=within, dcn_mesh_shape=(config.slices, 1, 1, 1), axis_names=AXES)
