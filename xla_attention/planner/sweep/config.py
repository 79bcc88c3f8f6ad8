"""The sweep's configuration: a YAML file with a training configuration and a grid around it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from xla_attention.planner.topology import Topology, parse_topology
from xla_attention.sharding.config import ShardingConfig
from xla_attention.training.config import (
    ConfigError,
    Section,
    TrainConfig,
    explain,
    parse_config,
    read_yaml,
)


class StrategyConfig(Section):
    """A line of the charts.

    Attributes:
        label: its name there, else that of the strategy; also what `published` rows refer to.
        sharding: as in a training configuration.
    """

    label: str | None = None
    sharding: ShardingConfig

    @property
    def name(self) -> str:
        return self.label or self.sharding.strategy


class Published(Section):
    """A figure that others measured, shown beside the prediction and used for nothing else.

    Attributes:
        label: of the strategy.
        batch_size: of the step.
        step_seconds, mfu: as published; MFU as a share of 1, by ``6 N`` FLOPs a token.
        source: where.
    """

    label: str
    batch_size: PositiveInt
    step_seconds: PositiveFloat | None = None
    mfu: float | None = Field(default=None, gt=0, lt=1)
    source: str


class SweepConfig(Section):
    """A grid: every combination of what is listed is a point.

    Attributes:
        base: a training configuration; what the lists say is put in its place.
        topologies: TPU slices, such as `v4-8`.
        strategies: of sharding.
        batch_sizes, seq_lens, activation_checkpointing: as in `base`; empty: as it says.
        published: figures to be shown beside.
        notes: what readers of the results should know, such as what is assumed.
    """

    base: dict[str, Any]
    topologies: list[str] = Field(min_length=1)
    strategies: list[StrategyConfig] = Field(min_length=1)
    batch_sizes: list[PositiveInt] = []
    seq_lens: list[PositiveInt] = []
    activation_checkpointing: list[Literal["none", "full", "selective"] | PositiveInt] = []
    published: list[Published] = []
    notes: list[str] = []


@dataclasses.dataclass(frozen=True)
class Point:
    """One step of the grid.

    Attributes:
        label: of its strategy.
        config: of the run.
        topology: the slice.
    """

    label: str
    config: TrainConfig
    topology: Topology


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep that can be run.

    Attributes:
        name: of its file.
        points: in the order of the grid; batch sizes change fastest.
        published: figures to be shown beside.
        notes: for readers.
    """

    name: str
    points: tuple[Point, ...]
    published: tuple[Published, ...]
    notes: tuple[str, ...]


def load_sweep(path: str | Path) -> Sweep:
    """Reads a sweep; paths in it are relative to it.

    Raises:
        ConfigError: no such file, an unknown key, a value that is not allowed, two strategies of one label,
            or a published figure of a label that there is not.
    """
    path = Path(path)
    try:
        sweep = SweepConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(explain(error, str(path), SweepConfig)) from None
    base = parse_config(dict(sweep.base), path.parent, source=f"{path}: base")
    labels = [each.name for each in sweep.strategies]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"{path}: strategies: labels must differ, got {', '.join(labels)}")
    for row in sweep.published:
        if row.label not in labels:
            raise ConfigError(f"{path}: published: label {row.label!r} is none of {', '.join(labels)}")
    points = [
        Point(strategy.name, _changed(base, path, strategy, remat, seq_len, batch_size), parse_topology(name))
        for name, strategy, remat, seq_len, batch_size in itertools.product(
            sweep.topologies,
            sweep.strategies,
            sweep.activation_checkpointing or [base.activation_checkpointing],
            sweep.seq_lens or [base.seq_len],
            sweep.batch_sizes or [base.batch_size],
        )
    ]
    return Sweep(path.stem, tuple(points), tuple(sweep.published), tuple(sweep.notes))


def _changed(
    base: TrainConfig, path: Path, strategy: StrategyConfig, remat: str | int, seq_len: int, batch_size: int
) -> TrainConfig:
    raw = base.model_dump(mode="json") | {
        "sharding": strategy.sharding.model_dump(mode="json"),
        "activation_checkpointing": remat,
        "seq_len": seq_len,
        "batch_size": batch_size,
    }
    return parse_config(raw, path.parent, source=f"{path}: a point of the grid")
