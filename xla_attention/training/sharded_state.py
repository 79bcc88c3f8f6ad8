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
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from xla_attention.training.optimizer import named_state
from xla_attention.training.processes import process_count

# What torch says of torch_xla's planners, and of a run on one host, is nothing that a user could change.
for module in (r"torch\.distributed\.checkpoint", r"torch_xla\.distributed\.spmd"):
    warnings.filterwarnings("ignore", category=UserWarning, module=module)

PARAMETERS, STATE = "parameters.", "optimizer."


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


def write(folder: Path, on_host: dict[str, Any]) -> None:
    """Writes what `to_host` gave. All processes call it; it touches no device.

    Raises:
        OSError: the disk is full or refuses.
    """
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    writer = FileSystemWriter(folder)
    try:
        dcp.save(on_host, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=process_count() == 1)
    except dcp.api.CheckpointException as error:
        raise OSError(str(error)) from error


def names_in(folder: Path) -> set[str]:
    """Names of the tensors in a folder."""
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def read_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Reads into sharded XLA tensors, each device its own parts, however they were cut when written."""
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner

    reader = FileSystemReader(folder)
    dcp.load(tensors, storage_reader=reader, planner=SPMDLoadPlanner(), no_dist=process_count() == 1)


def read_whole(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the host, in the shapes and types of `tensors`, wherever those are."""
    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    dcp.load(whole, storage_reader=FileSystemReader(folder), no_dist=True)
    return whole
