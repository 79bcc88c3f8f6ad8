"""Strategies: which mesh axes every tensor's dimensions are sharded over, as data.

A strategy is a YAML file:

    mesh: {fsdp: -1, tensor: 2}         # sizes unless the run says otherwise
    parameters:                         # pattern: axes of each dimension
      model.layers.*.mlp.up_proj.weight: [tensor, fsdp]
      model.norm.weight: [null]         # null: not sharded
    activations:                        # outputs of modules, [batch, seq, width], and their gradients
      model.layers.*: [[data, fsdp], context, null]
    inputs: [[data, fsdp], context]     # [batch, seq]
    context: {method: ring, layout: zigzag}

A pattern has the dots of the names that it matches: `*`, `?` and `[...]` (as in `fnmatch`) stay between two
dots. The first pattern that matches counts.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from pallas_kernels.context_parallel.layout import ContextMethod, SequenceLayout
from xla_attention.sharding.mesh import AXES, Axis, MeshConfig

# The axes of each dimension, none or several: what torch_xla calls a partition spec, always with tuples.
Spec = tuple[tuple[Axis, ...], ...]

BUILT_IN = Path(__file__).parent / "strategies"


class ShardingError(ValueError):
    """A strategy that cannot be used, or does not fit the model, the mesh or the batch."""


class ContextConfig(BaseModel):
    """How attention crosses the shards of a sequence; see `AttentionPlacement` for both."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: ContextMethod = "ring"
    layout: SequenceLayout = "zigzag"


class Strategy(BaseModel):
    """One description of a sharding; see the module's text.

    Attributes:
        mesh: sizes of the axes unless the run's configuration gives others.
        parameters: pattern of a parameter's name to the axes of each of its dimensions.
        activations: pattern of a module's name to the axes of its output's dimensions.
        inputs: axes of a batch's dimensions, `[batch, seq]`.
        context: what attention does where the sequence is sharded.
        auto: leave all of it to XLA's auto-sharding.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mesh: MeshConfig = MeshConfig()
    parameters: dict[str, Spec] = {}
    activations: dict[str, Spec] = {}
    inputs: Spec = ((), ())
    context: ContextConfig = ContextConfig()
    auto: bool = False

    @field_validator("parameters", "activations", mode="before")
    @classmethod
    def _specs(cls, patterns: Any) -> Any:
        if not isinstance(patterns, Mapping):
            return patterns
        return {str(pattern): _read_spec(spec) for pattern, spec in patterns.items()}

    @field_validator("inputs", mode="before")
    @classmethod
    def _inputs(cls, spec: Any) -> Any:
        return _read_spec(spec)

    @field_validator("inputs")
    @classmethod
    def _of_batches(cls, spec: Spec) -> Spec:
        if len(spec) != 2:
            raise ValueError(f"a batch has two dimensions, got axes for {len(spec)}")
        return spec


def load_strategy(name: str | Path) -> Strategy:
    """A strategy by its name, or from a YAML file.

    Raises:
        ShardingError: no such strategy or file, or it is not as the module's text says.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = BUILT_IN / f"{name}.yaml"
        if not path.is_file():
            raise ShardingError(
                f"sharding.strategy={str(name)!r}: allowed are {', '.join(built_in_strategies())}, and "
                "the path of a YAML file"
            )
    if not path.is_file():
        raise ShardingError(f"sharding.strategy: {path}: no such file")
    try:
        return Strategy.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise ShardingError(f"{path} is not YAML: {error}") from None
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        raise ShardingError("\n  ".join([f"{path} is not a strategy:", *lines])) from None


def built_in_strategies() -> list[str]:
    """Names of the strategies that come with the package."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def match(patterns: Mapping[str, Spec], name: str) -> Spec | None:
    """The axes that the first matching pattern gives."""
    parts = name.split(".")
    for pattern, spec in patterns.items():
        wanted = pattern.split(".")
        if len(wanted) == len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted)):
            return spec
    return None


def parameter_specs(
    strategy: Strategy, shapes: Mapping[str, Sequence[int]], sizes: Mapping[Axis, int]
) -> dict[str, Spec]:
    """The axes of every parameter.

    Args:
        shapes: of every parameter, by name.
        sizes: of the mesh's axes.

    Raises:
        ShardingError: lists every parameter that no pattern matches, that has another number of dimensions
            than its pattern, or whose dimension is no multiple of the shards it is cut into.
    """
    specs, problems = {}, []
    for name, shape in shapes.items():
        spec = match(strategy.parameters, name)
        if spec is None:
            problems.append(f"{name} {list(shape)}: no pattern matches; add one, [null, ...] to replicate it")
        else:
            specs[name] = spec
            problems += _misfits(name, shape, spec, sizes)
    if problems:
        raise ShardingError("\n  ".join(["sharding: parameters do not fit the strategy:", *problems]))
    return specs


def activation_specs(strategy: Strategy, modules: Iterable[str]) -> dict[str, Spec]:
    """The axes of the outputs of those modules that a pattern names.

    Raises:
        ShardingError: a pattern begins as the model's modules do, and matches none.
    """
    names = [name for name in modules if name]
    roots = {name.split(".")[0] for name in names}
    for pattern in strategy.activations:
        if pattern.split(".")[0] in roots and not any(match({pattern: ()}, name) == () for name in names):
            raise ShardingError(f"sharding: activations.{pattern} matches no module of the model")
    found = {name: match(strategy.activations, name) for name in names}
    return {name: spec for name, spec in found.items() if spec is not None}


def check_batch(strategy: Strategy, batch_size: int, seq_len: int, sizes: Mapping[Axis, int]) -> None:
    """Raises ShardingError if a batch `[batch_size, seq_len]` does not divide over the mesh."""
    problems = _misfits("batch_size, seq_len", (batch_size, seq_len), strategy.inputs, sizes)
    if not problems and zigzag_shards(strategy, sizes) and seq_len % (2 * zigzag_shards(strategy, sizes)):
        problems = [
            f"seq_len={seq_len} must be a multiple of {2 * zigzag_shards(strategy, sizes)}: with "
            "context.layout=zigzag each of the shards has two chunks"
        ]
    if problems:
        raise ShardingError("\n  ".join(["sharding: a batch does not fit the mesh:", *problems]))


def zigzag_shards(strategy: Strategy, sizes: Mapping[Axis, int]) -> int:
    """Shards of the sequence where they hold it in zig-zag order; else 0."""
    shards = math.prod(sizes[axis] for axis in strategy.inputs[1])
    return shards if shards > 1 and strategy.context.layout == "zigzag" else 0


def _misfits(name: str, shape: Sequence[int], spec: Spec, sizes: Mapping[Axis, int]) -> list[str]:
    if len(shape) != len(spec):
        return [f"{name} {list(shape)}: {len(shape)} dimensions, but its pattern gives axes for {len(spec)}"]
    problems = []
    for dim, (length, axes) in enumerate(zip(shape, spec)):
        shards = math.prod(sizes[axis] for axis in axes)
        if length % shards:
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            problems.append(
                f"{name} {list(shape)}: dimension {dim} of {length} does not divide by {over}; "
                f"the next that does is {-(-length // shards) * shards}"
            )
    return problems


def _read_spec(spec: Any) -> Any:
    """YAML's `[tensor, [data, fsdp], null]` as tuples of axes."""
    if not isinstance(spec, list | tuple):
        raise ValueError("expected a list with the axes of each dimension, as in [fsdp, null]")
    read = tuple(
        () if entry is None else tuple(entry) if isinstance(entry, list | tuple) else (entry,)
        for entry in spec
    )
    used = [axis for entry in read for axis in entry]
    for axis in used:
        if axis not in AXES:
            raise ValueError(f"axis {axis!r}: allowed are {', '.join(AXES)} and null")
        if used.count(axis) > 1:
            raise ValueError(f"axis {axis!r} shards two dimensions of one tensor")
    return read
