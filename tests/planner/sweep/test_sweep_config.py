"""A sweep's file: its grid, and what is wrong with it."""

from pathlib import Path

import pytest
import yaml

from xla_attention.planner.sweep.config import load_sweep
from xla_attention.training.config import ConfigError

BASE = {
    "model": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
    },
    "data": {"train": ["unread"]},
    "seq_len": 32,
    "batch_size": 8,
    "steps": 1,
    "out_dir": "runs/unused",
}
STRATEGIES = [
    {"sharding": {"strategy": "fsdp"}},
    {"label": "2d of 4", "sharding": {"strategy": "2d", "mesh": {"tensor": 4}}},
]


def load(folder, **changes):
    path = folder / "grid.yaml"
    path.write_text(
        yaml.safe_dump({"base": BASE, "topologies": ["v5e-4"], "strategies": STRATEGIES} | changes)
    )
    return load_sweep(path)


def test_every_combination_is_a_point(tmp_path):
    sweep = load(
        tmp_path, topologies=["v5e-4", "v4-8"], batch_sizes=[4, 8], activation_checkpointing=["none", "full"]
    )
    assert sweep.name == "grid"
    found = [
        (str(p.topology), p.label, p.config.activation_checkpointing, p.config.batch_size)
        for p in sweep.points
    ]
    assert len(found) == len(set(found)) == 16
    assert found[:3] == [
        ("v5e:2x2", "fsdp", "none", 4),
        ("v5e:2x2", "fsdp", "none", 8),
        ("v5e:2x2", "fsdp", "full", 4),
    ]
    assert sweep.points[-1].config.sharding.mesh == {"tensor": 4}


def test_lists_that_are_not_given_leave_the_base_as_it_is(tmp_path):
    sweep = load(tmp_path)
    assert [(p.config.batch_size, p.config.seq_len) for p in sweep.points] == [(8, 32)] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batchsizes": [1]}, r"batchsizes: unknown key; allowed here: base, topologies, .*batch_sizes"),
        ({"strategies": [{"shard": {}}]}, r"shard: unknown key; allowed here: label, sharding"),
        ({"topologies": ["v4-7"]}, r"topology: got 'v4-7'"),
        ({"batch_sizes": [0]}, r"batch_sizes.0: .*greater than 0, got 0"),
        ({"strategies": STRATEGIES[:1] * 2}, r"labels must differ, got fsdp, fsdp"),
        ({"published": [{"label": "x", "batch_size": 8, "source": "here"}]}, r"'x' is none of fsdp, 2d of 4"),
        ({"base": BASE | {"steps": 0}}, r"grid.yaml: base cannot be used:\n  steps: .*got 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **changes)


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_sweep(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", sorted(Path("configs/sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_those_of_the_repository_load(path):
    sweep = load_sweep(path)
    for point in sweep.points:
        sizes = point.config.sharding.load().mesh.sizes(point.topology.chips)
        assert all(size >= 1 for size in sizes.values())
