"""What came of one planned point: a row of a table, and the JSON that is kept of it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from xla_attention.planner.plan import OutOfMemoryError, Plan, PlanError
from xla_attention.planner.topology import Topology
from xla_attention.planner.words import largest_in_words
from xla_attention.training.config import TrainConfig


class Outcome(BaseModel):
    """One point. What is not known is None.

    Attributes:
        topology: the slice.
        strategy: of sharding.
        mesh: sizes of those axes that have more than one device.
        batch_size, seq_len: of a step.
        parameters: of the model.
        step_seconds, tokens_per_second: predicted, of the whole slice.
        mfu: ``6 N`` FLOPs a token, attention not counted; with it in full, and its causal half.
        memory_bytes, capacity_bytes: of one chip's HBM, that the step needs and that there are.
        causes: predicted seconds of a step, by cause.
        hidden_communication: seconds of a step that collectives run beside other work.
        largest: the three largest costs, in words.
        compile_seconds: that the compiler took.
        error: why there is nothing else.
        device: what the step was measured on, and what its MFU is against; None if it was predicted.
        predicted_seconds: of a step that was measured, what was predicted for `topology`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    topology: str
    strategy: str
    mesh: dict[str, int] = {}
    batch_size: int
    seq_len: int
    parameters: int | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_full: float | None = None
    mfu_causal: float | None = None
    memory_bytes: int | None = None
    capacity_bytes: int | None = None
    causes: dict[str, float] = {}
    hidden_communication: float | None = None
    largest: list[str] = []
    compile_seconds: float | None = None
    error: str | None = None
    device: str | None = None
    predicted_seconds: float | None = None


def _of_point(config: TrainConfig, topology: Topology, **fields: Any) -> Outcome:
    """An outcome with what a configuration says."""
    return Outcome(
        topology=str(topology),
        strategy=config.sharding.strategy,
        batch_size=config.sequences_per_step,
        seq_len=config.seq_len,
        **fields,
    )


def of_plan(plan: Plan) -> Outcome:
    """A plan as a row."""
    return _of_point(
        plan.config,
        plan.topology,
        mesh={axis: size for axis, size in plan.mesh.items() if size > 1},
        parameters=plan.size.parameters,
        step_seconds=plan.seconds,
        tokens_per_second=plan.tokens_per_second,
        mfu=plan.mfu,
        mfu_full=plan.mfu_full,
        mfu_causal=plan.mfu_causal,
        memory_bytes=plan.memory,
        capacity_bytes=plan.topology.hardware.hbm_bytes,
        causes=plan.account.by_cause(),
        hidden_communication=plan.account.hidden_communication(),
        largest=largest_in_words(plan.account, plan.topology.hardware.peak_flops),
        compile_seconds=plan.compile_seconds,
    )


def measured(
    config: TrainConfig,
    topology: Topology,
    seconds: float,
    *,
    parameters: int,
    peak_flops: float,
    device: str,
) -> Outcome:
    """A step that was run.

    Args:
        config: of the run.
        topology: the slice that predictions are for.
        seconds: of a step.
        parameters: of the model.
        peak_flops: of all devices, for MFU.
        device: they, and that peak, in words.
    """
    sizes = config.sharding.load().mesh.sizes(topology.chips)
    tokens_per_second = config.tokens_per_step / seconds
    return _of_point(
        config,
        topology,
        mesh={axis: size for axis, size in sizes.items() if size > 1},
        parameters=parameters,
        step_seconds=seconds,
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second * 6 * parameters / peak_flops,
        device=device,
    )


def of_failure(config: TrainConfig, topology: Topology, error: PlanError) -> Outcome:
    """A point without a plan, and why."""
    memory = {}
    if isinstance(error, OutOfMemoryError):
        memory = {"memory_bytes": error.needed, "capacity_bytes": error.capacity}
    return _of_point(config, topology, error=str(error), **memory)


def of_error(config: TrainConfig, topology: Topology, error: str) -> Outcome:
    """A point that was not planned, and why."""
    return _of_point(config, topology, error=error)
