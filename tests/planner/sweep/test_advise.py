"""The search of `advise`, with a rule in the compiler's place; one real search is slow."""

import pytest
from typer.testing import CliRunner

from xla_attention.cli import app
from xla_attention.planner.outcome import Outcome
from xla_attention.planner.sweep.advise import advise, why
from xla_attention.planner.sweep.runner import Row
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import TrainConfig, load_config, save_config

V5E = parse_topology("v5e:2x2")
SETTINGS = {
    "model": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    },
    "data": {"train": ["{stdlib}/**/*.py"], "mask_documents": False},
    "seq_len": 64,
    "batch_size": 8,
    "steps": 1,
    "scan_layers": True,
    "sharding": {"strategy": "fsdp"},
    "out_dir": "unused",
}
CAUSES = ("matmul", "communication")


def config(**changes):
    return TrainConfig.model_validate(SETTINGS | changes)


def rule(most, asked):
    """A chip for `most` sequences; `none` holds half as many, and computes less; 2d sends more."""

    def predict(point):
        batch, remat = point.config.batch_size, point.config.activation_checkpointing
        strategy = point.config.sharding.strategy
        asked.append((strategy, remat, batch))
        held = {"none": most // 2, "selective": most, "full": 2 * most}[remat]
        known = {"topology": "v5e:2x2", "strategy": strategy, "batch_size": batch, "seq_len": 64}
        if batch > held:
            return Row(point, Outcome(**known, memory_bytes=batch, error="out of memory"), cached=False)
        work = {"none": 1.0, "selective": 1.1, "full": 1.3}[remat] * batch
        sent = 5.0 if strategy == "2d" else 2.0  # whatever the batch, so larger ones are better
        causes = dict(zip(CAUSES, (work, sent)))
        fields = {"step_seconds": work + sent, "tokens_per_second": 64 * batch / (work + sent)}
        return Row(point, Outcome(**known, **fields, causes=causes), cached=False)

    return predict


def test_the_best_of_the_rule_is_found_and_the_budget_kept():
    asked = []
    advice = advise(config(), V5E, rule(64, asked), budget=40)
    best = advice.best.point.config
    # 64 / (64 * 1.1 + 2) = 0.884; none at 32: 32 / 34 = 0.941; full at 128: 0.759.
    assert (best.sharding.strategy, best.activation_checkpointing, best.batch_size) == ("fsdp", "none", 32)
    assert len(asked) == len(set(asked)) <= 40
    assert asked[0] == ("fsdp", "none", 8)  # as given
    failed = [row.outcome.error is not None for row in advice.ranking]
    assert failed == sorted(failed)
    rates = [row.outcome.tokens_per_second for row in advice.ranking if row.outcome.error is None]
    assert rates == sorted(rates, reverse=True)
    assert {"2d", "hsdp"} <= {strategy for strategy, _, _ in asked}

    few = []
    small = advise(config(), V5E, rule(64, few), budget=3)
    assert len(few) == 3 and any("the budget of 3" in line for line in small.left_out)


def test_a_batch_that_does_not_fit_shrinks():
    asked = []
    advice = advise(config(batch_size=512), V5E, rule(48, asked), budget=60)
    best = advice.best.point.config
    assert advice.given.outcome.error == "out of memory"
    assert best.batch_size <= 96 and ("fsdp", "selective", 48) in asked  # half way between 32 and 64


def test_nothing_fits():
    advice = advise(config(), V5E, rule(0, []), budget=40)
    assert advice.best is None and all(row.outcome.error for row in advice.ranking)


def test_state_that_alone_is_too_large_is_not_compiled():
    large = SETTINGS["model"] | {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 8}
    asked = []
    advice = advise(config(model=large, sharding={"strategy": "none"}), V5E, rule(64, asked), budget=5)
    assert not asked and advice.given is None
    assert all("optimizer state alone are about" in line for line in advice.left_out)


def test_gain_by_cause():
    asked = []
    predict = rule(64, asked)
    advice = advise(config(), V5E, predict, budget=40)
    first, *rest = why(advice.best, advice.given)
    # 0.8 / 1 -> 32 / 34 sequences a second; what is sent is shared by four times the tokens: 2 s -> 0.5 s.
    assert first.startswith("+17.6% tokens/s")
    assert rest[0] == "  communication: 2,000 ms -> 500 ms"


@pytest.mark.parametrize(
    ("changes", "budget", "message"),
    [({}, 0, "budget: got 0"), ({"grad_accumulation": 2}, 5, "grad_accumulation=2")],
)
def test_what_cannot_be_searched(changes, budget, message):
    with pytest.raises(ValueError, match=message):
        advise(config(**changes), V5E, rule(64, []), budget=budget)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_real_search_writes_what_train_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path / "cache"))
    save_config(config(), tmp_path / "train.yaml")
    arguments = ["advise", str(tmp_path / "train.yaml"), "--topology", "v5e:2x2", "--budget", "2"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "advised.yaml")])
    assert result.exit_code == 0, result.output
    advised = load_config(tmp_path / "advised.yaml")
    assert advised.sharding.strategy == "fsdp"
    assert advised.model_dump(exclude={"sharding", "batch_size", "activation_checkpointing"}) == (
        config().model_dump(exclude={"sharding", "batch_size", "activation_checkpointing"})
    )
