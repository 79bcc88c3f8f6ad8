"""What a training step on a TPU slice would take, by the compiler, on a machine without one."""

from __future__ import annotations

import dataclasses
import re

from xla_attention.models import build_model, load_model_config
from xla_attention.planner.accounting import Account, Network, account
from xla_attention.planner.compile import CompileError, compile_step
from xla_attention.planner.cycles.hlo import parse_hlo
from xla_attention.planner.stage import stage_step
from xla_attention.planner.topology import Topology
from xla_attention.training.config import TrainConfig

# With them collectives run beside computation; to train with them too, set them in LIBTPU_INIT_ARGS.
OVERLAP_FLAGS = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)


class PlanError(ValueError):
    """There is no plan: the step does not fit on the chips, or the configuration not on the slice."""


class OutOfMemoryError(PlanError):
    """A chip's HBM is too small for the step.

    Attributes:
        needed, capacity: bytes of HBM that the program needs, or one tensor of it alone; and that there are.
    """

    def __init__(self, needed: int, capacity: int) -> None:
        self.needed, self.capacity = needed, capacity
        super().__init__(
            f"out of memory: needs {needed / 2**30:.2f} GiB of a chip's HBM, which has "
            f"{capacity / 2**30:.2f} GiB for it: {(needed - capacity) / 2**30:.2f} GiB too much"
        )


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """What MFU is reckoned with.

    Attributes:
        parameters: of the model, all of them.
        flops_per_token: of training, as ``CausalLM.flops_per_token`` counts them: attention in full.
        attention_per_token: the part of those that is attention's.
    """

    parameters: int
    flops_per_token: int
    attention_per_token: int

    @classmethod
    def of(cls, config: TrainConfig) -> ModelSize:
        """The model of a run."""
        model = build_model(load_model_config(config.model), device="meta")
        whole = model.flops_per_token(config.seq_len)
        return cls(model.num_parameters(), whole, whole - model.flops_per_token(0))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step on a slice.

    Attributes:
        config: of the run.
        topology: the slice.
        mesh: the size of each axis.
        size: of the model.
        account: the time of every instruction on one chip.
        memory: bytes of one chip's HBM that the step needs.
        compile_seconds: that the compiler took.
    """

    config: TrainConfig
    topology: Topology
    mesh: dict[str, int]
    size: ModelSize
    account: Account
    memory: int
    compile_seconds: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.account.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the whole slice."""
        return self.config.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        """``6 N`` FLOPs a token over the peak of the slice, N all parameters, attention not counted: what
        PyTorch/XLA publishes."""
        return self._utilisation(6 * self.size.parameters)

    @property
    def mfu_full(self) -> float:
        """With attention, as if every token saw all others."""
        return self._utilisation(self.size.flops_per_token)

    @property
    def mfu_causal(self) -> float:
        """With attention of the half that the causal mask shows."""
        return self._utilisation(self.size.flops_per_token - self.size.attention_per_token / 2)

    def _utilisation(self, flops_per_token: float) -> float:
        peak = self.topology.chips * self.topology.hardware.peak_flops
        return self.tokens_per_second * flops_per_token / peak


def plan(config: TrainConfig, topology: Topology, *, flags: tuple[str, ...] = OVERLAP_FLAGS) -> Plan:
    """Stages and compiles the step of `config` on `topology`, and accounts for every instruction.

    Args:
        config: of the run; its strategy may not be `none`. The data are not read.
        topology: the slice.
        flags: of libtpu, behind those of ``$LIBTPU_INIT_ARGS``.

    Raises:
        OutOfMemoryError: a chip has too little memory.
        PlanError: configuration, strategy and slice do not fit together, or the compiler refused.
    """
    try:
        strategy = config.sharding.load()
        mesh = strategy.mesh.sizes(topology.chips)
        module = stage_step(config, topology)
        auto_mesh = tuple(mesh.values()) if strategy.auto else ()
        step = compile_step(module, topology, cycles=True, flags=flags, auto_mesh=auto_mesh)
    except (ValueError, CompileError) as error:
        raise _in_words(error) from error
    hardware = topology.hardware
    kernels = {k.name: k.total / k.calls / hardware.clock_hz for k in step.compiled.kernels}
    network = Network(topology.generation, topology.shape, step.places)
    costs = account(parse_hlo(step.hlo), hardware, network, kernels)
    return Plan(
        config=config,
        topology=topology,
        mesh=mesh,
        size=ModelSize.of(config),
        account=costs,
        memory=step.compiled.peak_bytes,
        compile_seconds=step.compiled.seconds,
    )


_TOO_LARGE = re.compile(r"memory space hbm\. Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
# A single tensor that is larger than the HBM is refused before the sum is made.
_ONE_TOO_LARGE = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _in_words(error: Exception) -> PlanError:
    """Why there is no plan. Of the compiler's message, which goes on for pages, the first line is kept."""
    if too_large := _TOO_LARGE.search(str(error)):
        used, unit, capacity, of = too_large.groups()
        return OutOfMemoryError(int(float(used) * _UNITS[unit]), int(float(capacity) * _UNITS[of]))
    if one := _ONE_TOO_LARGE.search(str(error)):
        return OutOfMemoryError(int(one[1]), int(one[2]))
    return PlanError(str(error) if isinstance(error, ValueError) else str(error).splitlines()[0])
