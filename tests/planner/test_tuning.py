"""The search for block sizes, against a compiler whose best choice is known."""

import dataclasses
import json

import pytest

from pallas_kernels.flash_attention import BackwardBlocks, ForwardBlocks
from pallas_kernels.masks import Causal
from xla_attention.planner import tuning
from xla_attention.planner.attention_case import AttentionCase
from xla_attention.planner.compile import CompileError
from xla_attention.planner.topology import parse_topology
from xla_attention.planner.tuning import Trial, changed, default_blocks, key_of, tune, write_winner

V5E = parse_topology("v5e:2x2")
FORWARD = AttentionCase(1, 8, 8, 4096, 128, "bfloat16", Causal(), "forward")
BACKWARD = dataclasses.replace(FORWARD, direction="backward")
BEST = {
    "forward": {"tile_q": 512, "block_kv": 256, "unroll": 2, "border": 256},
    "backward": {"tile_kv": 128, "ahead": 3},
}


@pytest.fixture
def compiler(monkeypatch):
    """A list of what was compiled. Each field that is not the best costs 100 cycles; some are refused."""
    compiled = []

    def measure(case, topology, blocks):
        compiled.append(blocks)
        if blocks.block_q == 512:
            return Trial(blocks, None, "too large")
        wrong = sum(getattr(blocks, name) != value for name, value in BEST[case.direction].items())
        return Trial(blocks, 1000 + 100 * wrong)

    monkeypatch.setattr(tuning, "measure", measure)
    return compiled


@pytest.mark.parametrize("case", [FORWARD, BACKWARD], ids=lambda case: case.direction)
def test_finds_the_best_of_every_field(compiler, case):
    seen = []
    trials = tune(case, V5E, limit=1000, on_trial=lambda done, total, blocks: seen.append((done, total)))
    assert {name: getattr(trials[0].blocks, name) for name in BEST[case.direction]} == BEST[case.direction]
    assert trials[0].cycles == 1000
    assert compiler[0] == default_blocks(case, V5E)
    assert len(set(compiler)) == len(compiler) == len(trials)  # nothing twice
    cycles = [trial.cycles for trial in trials]
    known = [n for n in cycles if n is not None]
    assert cycles == sorted(known) + [None] * (len(cycles) - len(known))
    assert None in cycles
    assert all(changed(case, trial.blocks, {}, default_blocks(case, V5E)) for trial in trials)
    assert all(done < total for done, total in seen)


def test_compiles_no_more_than_allowed(compiler):
    assert len(tune(FORWARD, V5E, limit=4)) == len(compiler) == 4


def test_a_default_that_does_not_compile_is_an_error(monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda case, topology, blocks: Trial(blocks, None, "no room"))
    with pytest.raises(CompileError, match="no room"):
        tune(FORWARD, V5E, limit=4)


@pytest.mark.parametrize(
    ("change", "fit"),
    [
        ({}, True),
        ({"block_q": 512}, True),
        ({"block_q": 768}, False),
        ({"block_kv": 384}, False),
        ({"tile_q": 4096}, False),
        ({"tile_q": 128, "border": 256}, False),
        ({"border": 256, "border_kv": 128}, False),
    ],
)
def test_forward_blocks_that_do_not_divide_are_left_out(change, fit):
    default = default_blocks(FORWARD, V5E)
    assert isinstance(default, ForwardBlocks)
    assert (changed(FORWARD, default, change, default) is not None) == fit


@pytest.mark.parametrize(
    ("change", "fit"),
    [
        ({}, True),
        ({"block_kv": 2048}, True),
        ({"block_q": 384}, False),
        ({"tile_kv": 768}, False),
        ({"tile_q": 384}, False),
    ],
)
def test_backward_blocks_that_do_not_divide_are_left_out(change, fit):
    default = default_blocks(BACKWARD, V5E)
    assert isinstance(default, BackwardBlocks)
    assert (changed(BACKWARD, default, change, default) is not None) == fit


def test_the_winner_goes_into_the_table(compiler, tmp_path):
    path = tmp_path / "table.json"
    for case in (FORWARD, BACKWARD):
        write_winner(path, case, V5E, tune(case, V5E, limit=1000), f"tune {case.direction}")
    table = json.loads(path.read_text())
    assert list(table) == ["v5e/backward/128/4096/bfloat16", "v5e/forward/128/4096/bfloat16"]
    entry = table["v5e/forward/128/4096/bfloat16"]
    assert entry["blocks"].items() >= BEST["forward"].items()
    assert set(entry["blocks"]) == set(tuning.FIELDS["forward"])
    assert ForwardBlocks(**entry["blocks"])
    assert (entry["cycles"], entry["command"]) == (1000, "tune forward")
    assert entry["cycles_before"] > 1000
    assert entry["libtpu"]

    write_winner(path, FORWARD, V5E, tune(FORWARD, V5E, limit=1), "again")
    table = json.loads(path.read_text())
    assert table["v5e/forward/128/4096/bfloat16"]["command"] == "again"
    assert table["v5e/backward/128/4096/bfloat16"]["command"] == "tune backward"


@pytest.mark.parametrize(("length", "bucket"), [(1, 1), (1024, 1024), (1025, 2048), (4000, 4096)])
def test_lengths_are_kept_by_the_power_of_two_above(length, bucket):
    case = dataclasses.replace(FORWARD, seq_len=length)
    assert key_of(case, V5E) == f"v5e/forward/128/{bucket}/bfloat16"
