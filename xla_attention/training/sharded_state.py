"""Parameters and optimizer state in parts, with torch.distributed.checkpoint and torch_xla's planners.

The files say where each part lies in its whole tensor, so that any other mesh, or one device, can read them.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from xla_attention.remote import is_url
from xla_attention.training.optimizer import named_state
from xla_attention.training.processes import process_count

# What torch says of torch_xla's planners, and of a run on one host, is nothing that a user could change.
for module in (r"torch\.distributed\.checkpoint", r"torch_xla\.distributed\.spmd"):
    warnings.filterwarnings("ignore", category=UserWarning, module=module)

PARAMETERS, STATE = "parameters.", "optimizer."
FOLDER = "state"
ELSEWHERE = "state.url"  # instead of the folder: where in a bucket it is


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters and optimizer state by name, not copied."""
    parameters = {PARAMETERS + name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | {STATE + name: value for name, value in named_state(model, optimizer).items()}


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """This process's parts of sharded tensors, copied to the host; each part once, whoever else has it."""
    from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards, _sharded_cpu_state_dict

    # torch_xla's planner removes every copy of a part that one process holds twice: it must see one.
    return {
        name: dataclasses.replace(value, shards=[shard for shard in value.shards if shard.replica_id == 0])
        if isinstance(value, _CpuShards)
        else value
        for name, value in _sharded_cpu_state_dict(dict(tensors)).items()
    }


def place_of(checkpoint: Path) -> Path | str | None:
    """The folder of a checkpoint's parts, or its URL; None if it is not in parts."""
    if (checkpoint / ELSEWHERE).is_file():
        return (checkpoint / ELSEWHERE).read_text(encoding="utf-8")
    return checkpoint / FOLDER if (checkpoint / FOLDER).is_dir() else None


def _reader(place: Path | str) -> FileSystemReader:
    return FsspecReader(place) if is_url(place) else FileSystemReader(place)


def write(place: Path | str, on_host: dict[str, Any]) -> None:
    """Writes what `to_host` gave to a folder or a URL. All processes call it; it touches no device.

    Raises:
        OSError: the disk is full or refuses.
    """
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    writer = FsspecWriter(place) if is_url(place) else FileSystemWriter(place)
    try:
        dcp.save(on_host, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=process_count() == 1)
    except dcp.api.CheckpointException as error:
        raise OSError(str(error)) from error


def names_in(place: Path | str) -> set[str]:
    """Names of the tensors there."""
    return set(_reader(place).read_metadata().state_dict_metadata)


def read_sharded(place: Path | str, tensors: dict[str, Tensor]) -> None:
    """Reads into sharded XLA tensors, each device its own parts, however they were cut when written."""
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner

    reader = _reader(place)
    dcp.load(tensors, storage_reader=reader, planner=SPMDLoadPlanner(), no_dist=process_count() == 1)


def read_whole(place: Path | str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the host, in the shapes and types of `tensors`, wherever those are."""
    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    dcp.load(whole, storage_reader=_reader(place), no_dist=True)
    return whole
