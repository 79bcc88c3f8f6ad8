"""Searches strategy, mesh, recomputation and batch for the most predicted tokens a second that fit.

The search is a sweep whose next point depends on those before. A combination of strategy and recomputation
whose weights, gradients and optimizer state alone exceed a chip's HBM is left out by a count; the others are
tried in turn, FSDP and the given recomputation first. Of each, the batch doubles until it no longer fits or a
doubling brings too little, and then lies half way between. Later combinations begin at the best batch so far,
and are left at once where they are much slower there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from xla_attention.models import load_model_config
from xla_attention.planner.outcome import Outcome
from xla_attention.planner.plan import ModelSize
from xla_attention.planner.sweep.config import Point
from xla_attention.planner.sweep.runner import Row
from xla_attention.planner.topology import Topology
from xla_attention.planner.words import milliseconds
from xla_attention.sharding.config import ShardingConfig
from xla_attention.training.config import TrainConfig

_WORTH = 1.01  # a doubling of the batch that brings less is the last
_BEHIND = 0.9  # of the best tokens/s; what is below at the same batch is not followed
_TENSOR = (2, 4, 8)
# AdamW: a parameter, its gradient and two moments, in float32.
_STATE_BYTES = 16

Predict = Callable[[Point], Row]


@dataclasses.dataclass(frozen=True)
class Advice:
    """What a search found.

    Attributes:
        ranking: every point that was predicted, most tokens a second first, those that failed last.
        given: the row of the configuration as it was, if it names a strategy and was predicted.
        left_out: combinations that were not tried, each with its reason.
    """

    ranking: tuple[Row, ...]
    given: Row | None
    left_out: tuple[str, ...]

    @property
    def best(self) -> Row | None:
        """None if nothing fits."""
        first = self.ranking[0] if self.ranking else None
        return first if first and first.outcome.error is None else None


def advise(config: TrainConfig, topology: Topology, predict: Predict, *, budget: int) -> Advice:
    """Searches from `config` on.

    Args:
        config: of the run. Its strategy, mesh, batch size and `activation_checkpointing` are where the search
            begins; the rest stays as it is.
        topology: the slice.
        predict: gives the row of a point.
        budget: points to predict at most.

    Raises:
        ValueError: the budget is below 1, or the configuration accumulates gradients.
    """
    if budget < 1:
        raise ValueError(f"budget: got {budget}, needs at least 1")
    if config.grad_accumulation > 1:
        raise ValueError(
            f"grad_accumulation={config.grad_accumulation}: a step of one micro batch is predicted; set 1"
        )
    search = _Search(topology, predict, budget)
    given = None
    if config.sharding.strategy != "none":
        given = search.row(Point("as given", config, topology))
    combinations, left_out = _combinations(config, topology)
    for n, (label, candidate, shards) in enumerate(combinations):
        if search.spent:
            rest = "; ".join(name for name, *_ in combinations[n:])
            left_out.append(f"{rest}: the budget of {budget} predictions was spent")
            break
        search.climb(label, candidate, shards)
    return Advice(tuple(sorted(search.rows.values(), key=_rank)), given, tuple(left_out))


def why(best: Row, given: Row) -> list[str]:
    """What the best point gains over the configuration as given, by cause; times are for as many tokens."""
    new, old = best.outcome, given.outcome
    if old.error is not None:
        return [f"the configuration as given has no plan: {old.error}"]
    gain = new.tokens_per_second / old.tokens_per_second - 1
    if best is given:
        return ["the configuration as given is the best that was found"]
    tokens = old.batch_size * old.seq_len / (new.batch_size * new.seq_len)
    lines = [f"{gain:+.1%} tokens/s over the configuration as given; for as many tokens as its step has:"]
    changes = {cause: new.causes[cause] * tokens - seconds for cause, seconds in old.causes.items()}
    for cause, change in sorted(changes.items(), key=lambda item: item[1]):
        after = old.causes[cause] + change
        lines.append(f"  {cause}: {milliseconds(old.causes[cause])} -> {milliseconds(after)}")
    return lines


class _Search:
    def __init__(self, topology: Topology, predict: Predict, budget: int) -> None:
        self._topology, self._predict, self._budget = topology, predict, budget
        self.rows: dict[str, Row] = {}

    @property
    def spent(self) -> bool:
        return len(self.rows) >= self._budget

    def row(self, point: Point) -> Row | None:
        """The row of a point, predicted once; None when the budget is spent."""
        key = point.config.model_dump_json()
        if key not in self.rows:
            if self.spent:
                return None
            self.rows[key] = self._predict(point)
        return self.rows[key]

    def best(self) -> Outcome | None:
        """Of all so far."""
        found = [row.outcome for row in self.rows.values() if row.outcome.error is None]
        return max(found, key=lambda outcome: outcome.tokens_per_second, default=None)

    def climb(self, label: str, config: TrainConfig, shards: int) -> None:
        """Tries batches of one combination; they are multiples of `shards`."""

        def at(batch_size: int) -> Outcome | None:
            changed = config.model_copy(update={"batch_size": batch_size})
            row = self.row(Point(label, changed, self._topology))
            return row.outcome if row else None

        leader = self.best()
        batch = _multiple(leader.batch_size if leader else config.batch_size, shards)
        outcome = at(batch)
        too_large = None
        while outcome is not None and outcome.error is not None:  # down to what fits
            if outcome.memory_bytes is None or batch == shards:
                return  # refused for another reason, or at any batch
            too_large, batch = batch, _multiple(batch // 2, shards)
            outcome = at(batch)
        while outcome is not None and too_large is None:  # up to what does not, or is not worth it
            if leader is not None and outcome.tokens_per_second < _BEHIND * leader.tokens_per_second:
                return
            larger = at(2 * batch)
            if larger is None:
                return
            if larger.error is not None:
                too_large = 2 * batch
            elif larger.tokens_per_second < _WORTH * outcome.tokens_per_second:
                return
            else:
                batch, outcome = 2 * batch, larger
        if outcome is not None:
            between = _multiple((batch + too_large) // 2, shards)
            if batch < between < too_large:
                at(between)


def _combinations(
    config: TrainConfig, topology: Topology
) -> tuple[list[tuple[str, TrainConfig, int]], list[str]]:
    """Labels, configurations, and shards of the batch, in the order of the search; and what is left out."""
    size, hbm = ModelSize.of(config).parameters, topology.hardware.hbm_bytes
    found, left_out = [], []
    for (name, sharding), remat in itertools.product(_shardings(config, topology), _recomputation(config)):
        label = f"{name}, remat {remat}"
        sizes = sharding.load().mesh.sizes(topology.chips)
        of_weights = sizes["fsdp"] * sizes["tensor"] * sizes["context"]
        state = _STATE_BYTES * size / of_weights
        if config.optimizer.name == "adamw" and state > hbm:
            left_out.append(
                f"{label}: weights, gradients and optimizer state alone are about "
                f"{state / 2**30:.1f} GiB a chip, of {hbm / 2**30:.0f} GiB"
            )
            continue
        changed = {"sharding": sharding, "activation_checkpointing": remat}
        found.append((label, config.model_copy(update=changed), sizes["data"] * sizes["fsdp"]))
    return found, left_out


def _shardings(config: TrainConfig, topology: Topology) -> Iterator[tuple[str, ShardingConfig]]:
    """`auto` is not among them: XLA calls it experimental, and it leaves nothing to choose."""
    yield "fsdp", ShardingConfig(strategy="fsdp")
    model = load_model_config(config.model)
    divide = math.gcd(model.num_attention_heads, model.num_key_value_heads, model.vocab_size)
    for tensor in _TENSOR:
        if divide % tensor == 0 and topology.chips % tensor == 0:
            yield f"2d, tensor {tensor}", ShardingConfig(strategy="2d", mesh={"tensor": tensor})
    if topology.chips % 2 == 0 and topology.chips > 2:
        yield "hsdp, data 2", ShardingConfig(strategy="hsdp", mesh={"data": 2})


def _recomputation(config: TrainConfig) -> Sequence[str | int]:
    """What the configuration says comes first."""
    given = config.activation_checkpointing
    allowed = ("full", "selective", "none") if config.scan_layers else ("full", "none")
    return [given, *(each for each in allowed if each != given)]


def _multiple(batch: int, shards: int) -> int:
    """The largest multiple of `shards` up to `batch`, at least one."""
    return max(1, batch // shards) * shards


def _rank(row: Row) -> tuple[bool, float]:
    outcome = row.outcome
    if outcome.error is None:
        return False, -outcome.tokens_per_second
    return True, float(outcome.memory_bytes or math.inf)
