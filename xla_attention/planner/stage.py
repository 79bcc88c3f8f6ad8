"""The training step of a configuration, as the HLO that torch_xla compiles, without memory or a TPU.

Parameters, optimizer state and batches are placeholders, which have a shape and a sharding and no data; the
step itself is the one that training runs. Staging needs a process of its own with virtual CPU devices, and
SPMD on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from xla_attention.planner.topology import Topology
from xla_attention.training.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from xla_attention.sharding.sharding import Sharding
    from xla_attention.sharding.strategy import Spec
    from xla_attention.training.run import DeviceBatch


# torch counts the devices that autograd runs on in eight signed bits.
_MOST_DEVICES = 64


def stage_step(config: TrainConfig, topology: Topology) -> bytes:
    """The serialized HLO module of one optimizer step over all chips of `topology`, not yet partitioned.

    Args:
        config: of the run; its strategy may not be `none`, nor its `grad_accumulation` above 1. The data are
            not read.

    Raises:
        ValueError: the configuration, its strategy, and the slice do not fit together.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "step.pb"
        request = {"config": config.model_dump(mode="json"), "topology": str(topology), "out": str(module)}
        environment = {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(min(topology.chips, _MOST_DEVICES)),
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        process = subprocess.run(
            [sys.executable, "-m", "xla_attention.planner.stage", json.dumps(request)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        if process.returncode:
            answer = process.stdout.splitlines()[-1:]
            if answer and answer[0].startswith("error: "):
                raise ValueError(json.loads(answer[0].removeprefix("error: ")))
            raise RuntimeError(f"staging the step for {topology} failed:\n{process.stderr[-4000:]}")
        return module.read_bytes()


def _stage(config: TrainConfig, topology: Topology) -> bytes:
    """What `stage_step` returns, in this process."""
    import torch
    import torch_xla

    from xla_attention.device import stage_for, use_exact_float32
    from xla_attention.models import build_model, load_model_config
    from xla_attention.sharding.sharding import Sharding, ShardingError, start_spmd
    from xla_attention.text import load_tokenizer
    from xla_attention.training.data import document_end
    from xla_attention.training.loop import record_step
    from xla_attention.training.optimizer import build_optimizer
    from xla_attention.training.run import Run, arrange, arrange_on_host
    from xla_attention.training.state import TrainState

    if config.grad_accumulation > 1:  # whose micro batches are programs of their own
        raise ValueError(
            f"grad_accumulation={config.grad_accumulation}: a step of one micro batch is staged; set it to 1"
        )
    strategy = start_spmd(config.sharding, staging=True)
    if strategy is None:
        raise ShardingError(
            f"sharding.strategy={config.sharding.strategy}: a step is staged under a strategy"
        )
    torch_xla.runtime.global_runtime_device_count = lambda: topology.chips  # annotations name all of them
    sharding = Sharding(strategy)
    stage_for(topology.hardware)
    device = torch_xla.device()
    if config.compute_dtype == "float32":
        use_exact_float32()
    model = build_model(load_model_config(config.model), device="meta")
    arrange_on_host(model, config, sharding)
    _fill_with_placeholders(model, sharding, device)
    arrange(model, config, sharding)
    optimizer = build_optimizer(model, config.optimizer, stacked=config.scan_layers)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        state.update({name: _placeholder(value.shape, value.dtype) for name, value in state.items()})
    optimizer.param_groups[0]["lr"].copy_(_placeholder((), torch.float32))
    sharding.mark_state(model, optimizer)

    tokenizer = load_tokenizer(config.tokenizer)
    end_id = document_end(config.data, tokenizer)
    run = Run(config, TrainState(model, optimizer), tokenizer, None, None, end_id, device, None, sharding)
    with sharding.attention():
        loss, grad_norm = record_step(run, [_batch(config, sharding, end_id is not None)])
    outputs = [loss, grad_norm, *model.parameters()]
    outputs += [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return torch_xla._XLAC._get_xla_tensors_hlo_proto(outputs)


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without data. It is multiplied by one, as what has data or should have is not annotated."""
    import torch_xla.core.xla_builder as xb

    return xb.create_placeholder_tensor(tuple(shape), dtype) * 1


def _fill_with_placeholders(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    """Puts placeholders in the place of parameters; buffers are computed."""
    from torch import nn

    for module in list(model.modules()):
        if module._buffers:
            module.to_empty(device=device)
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_placeholder(parameter.shape, parameter.dtype)))


def _batch(config: TrainConfig, sharding: Sharding, segments: bool) -> DeviceBatch:
    """A micro batch without data."""
    import torch

    from xla_attention.sharding.annotate import mark
    from xla_attention.training.run import DeviceBatch

    spec: Spec = sharding.strategy.inputs

    def ids(dtype: torch.dtype) -> Tensor:
        tensor = _placeholder((config.batch_size, config.seq_len), dtype)
        if not sharding.strategy.auto:
            mark(tensor, sharding.mesh, spec)
        return tensor

    return DeviceBatch(
        input_ids=ids(torch.int64),
        labels=ids(torch.int64),
        segment_ids=ids(torch.int32) if segments else None,
        position_ids=ids(torch.int32) if sharding.zigzag_shards else None,
    )


if __name__ == "__main__":
    from xla_attention.planner.topology import parse_topology

    request = json.loads(sys.argv[1])
    try:
        module = _stage(TrainConfig.model_validate(request["config"]), parse_topology(request["topology"]))
    except ValueError as error:
        print("error: " + json.dumps(str(error)))
        sys.exit(1)
    Path(request["out"]).write_bytes(module)
