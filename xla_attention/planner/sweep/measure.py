"""Runs steps of a point on the devices that are attached, and times them."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from xla_attention.planner.outcome import Outcome, measured
from xla_attention.planner.topology import Topology
from xla_attention.training.config import ProfileConfig, TrainConfig

_WARM_UP = 2  # the first compiles; the second may, once more, for how its results lie
_TRACED = 2


def measure(config: TrainConfig, topology: Topology, steps: int, profile: Path) -> Outcome:
    """The median step of a run from fresh weights, on its data, over all attached devices.

    The process must be a fresh one, as SPMD is turned on in it.

    Args:
        config: of the run; nothing is written into its `out_dir`.
        topology: the slice that predictions are for: it has as many chips as devices are attached.
        steps: that are timed, after the warm-up and before those that are traced.
        profile: folder for the trace.

    Raises:
        ValueError: another number of devices, or configuration, data and devices do not fit together.
    """
    import torch_xla
    import torch_xla.runtime as xr
    from rich.console import Console

    from xla_attention.device import pick_device
    from xla_attention.sharding.sharding import start_spmd
    from xla_attention.training.loop import train_step
    from xla_attention.training.metrics import peak_of
    from xla_attention.training.optimizer import set_learning_rate
    from xla_attention.training.profiling import StepProfiler
    from xla_attention.training.run import prepare

    start_spmd(config.sharding)
    device, name = pick_device()
    attached = xr.global_runtime_device_count()
    if attached != topology.chips:
        raise ValueError(
            f"topologies: {topology} has {topology.chips} chips, but {attached} devices are attached: "
            f"{name}; name a slice of {attached}, or on a CPU set CPU_NUM_DEVICES={topology.chips}"
        )
    peak = peak_of(device, attached)
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(config.model_copy(update={"out_dir": Path(folder)}), Console(quiet=True))
        set_learning_rate(run.state.optimizer, config.optimizer.lr)
        profiler = StepProfiler(ProfileConfig(start=_WARM_UP + steps, steps=_TRACED), profile, device)
        seconds = []
        with run.attention():
            for _ in range(_WARM_UP + steps + _TRACED):
                start = time.perf_counter()
                train_step(run)
                torch_xla.sync(wait=True)
                seconds.append(time.perf_counter() - start)
                run.state.position += config.sequences_per_step
                profiler.step()
        profiler.stop()
    return measured(
        config,
        topology,
        statistics.median(seconds[_WARM_UP : _WARM_UP + steps]),
        parameters=run.state.model.num_parameters(),
        peak_flops=peak.flops,
        device=f"{name}; MFU against {peak.flops / 1e12:.3g} TFLOP/s, {peak.what}",
    )
