"""A staged training step, compiled for a slice: each strategy sends what it should, and nothing else."""

import json

import pytest
from typer.testing import CliRunner

from xla_attention.cli import app
from xla_attention.planner.collectives import collectives_of
from xla_attention.planner.compile import compile_step
from xla_attention.planner.stage import stage_step
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import TrainConfig

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("empty_cache")]
LAYERS, BATCH, SEQ, HIDDEN, VOCAB = 2, 32, 256, 512, 1024
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 768,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
}
MATRICES = 7 * LAYERS + 1  # q, k, v, o, gate, up, down of each layer, and the head


def step(tmp_path, strategy, topology, **changes):
    """The step's collectives, without those of a few bytes: counts, norms, token ids."""
    settings = {
        "model": MODEL,
        "data": {"train": ["unread"], "mask_documents": False},
        "seq_len": SEQ,
        "batch_size": BATCH,
        "steps": 1,
        "compute_dtype": "bfloat16",
        "sharding": {"strategy": strategy},
        "out_dir": str(tmp_path),
    }
    config = TrainConfig.model_validate(settings | changes)
    slice_ = parse_topology(topology)
    compiled = compile_step(stage_step(config, slice_), slice_)
    mesh = config.sharding.load().mesh.sizes(slice_.chips)
    return [each for each in collectives_of(compiled.hlo, mesh) if each.bytes > 64 * 2**10]


def of_layers(collectives):
    """Those of matrix products; the others are the embedding's, which is looked up."""
    return [each for each in collectives if each.source.startswith("dot") or not each.source]


def count(collectives, kind):
    return sum(each.times for each in collectives if each.kind.startswith(kind))


def is_activation(each):
    """Weights have two dimensions."""
    return each.shapes.split("]")[0].count(",") == 2


@pytest.mark.parametrize("topology", ["v5e:4x2", pytest.param("v4:2x2x2", marks=pytest.mark.slow)])
def test_fsdp_gathers_weights_and_scatters_gradients(tmp_path, topology):
    found = of_layers(step(tmp_path, "fsdp", topology))
    assert {each.axes for each in found} == {("fsdp",)}
    # Each weight once forward and once backward, unless XLA keeps it in between.
    assert MATRICES <= count(found, "all-gather") <= 2 * MATRICES
    assert count(found, "reduce-scatter") == MATRICES
    assert count(found, "all-to-all") == count(found, "collective-permute") == 0
    gathers = [each for each in found if each.kind == "all-gather"]
    assert not any(is_activation(each) for each in gathers)


def test_2d_sums_over_tensor_at_the_ends_of_pairs(tmp_path):
    found = of_layers(step(tmp_path, "2d", "v5e:4x2"))
    over_tensor = [each for each in found if "tensor" in each.axes]
    assert {each.kind for each in over_tensor} == {"all-reduce"}
    assert all(each.axes == ("tensor",) and is_activation(each) for each in over_tensor)
    # Forward, behind o_proj and down_proj; backward, before q, k, v and before gate, up; and before the head.
    assert len(over_tensor) == 4 * LAYERS + 1
    assert not any(is_activation(each) for each in found if each.kind.startswith("all-gather"))


@pytest.mark.slow
def test_a_sharded_sequence_goes_round_in_attention_and_is_gathered_nowhere(tmp_path):
    found = of_layers(step(tmp_path, "fsdp_context", "v5e:4x2"))
    assert not any(is_activation(each) for each in found if each.kind.startswith("all-gather"))


def test_the_command_prints_them(tmp_path):
    config = tmp_path / "train.yaml"
    small = MODEL | {"num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 2}
    settings = {
        "model": small,
        "data": {"train": ["unread"], "mask_documents": False},
        "seq_len": 128,
        "batch_size": 4,
        "steps": 1,
        "out_dir": str(tmp_path),
    }
    config.write_text(json.dumps(settings))
    command = ["collectives", str(config), "--topology", "v5e:2x2", "--strategy", "replicated", "--each"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "replicated on v5e:2x2, data 4" in done.output and "all-reduce" in done.output
