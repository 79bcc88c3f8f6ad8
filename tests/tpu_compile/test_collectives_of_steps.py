"""A staged training step, compiled for a slice: each strategy sends what it should, and nothing else."""

import json
import re

import pytest
from typer.testing import CliRunner

from xla_attention.cli import app
from xla_attention.planner.collectives import collectives_of
from xla_attention.planner.compile import compile_step
from xla_attention.planner.stage import stage_step
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import TrainConfig

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("empty_cache")]
LAYERS, BATCH, SEQ, HIDDEN, INTERMEDIATE, VOCAB = 2, 32, 256, 512, 768, 1024
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
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
    """Those of matrix products and of their gradients; the others are the embedding's and attention's."""
    return [each for each in collectives if each.source.startswith("dot") or not each.source]


def of_lookup(collectives):
    """Kinds, axes and bytes of the embedding's, forward and backward."""
    ours = [each for each in collectives if re.search("shard_map/(all|psum)", each.source)]
    return sorted((each.kind, each.axes, each.bytes) for each in ours)


def count(collectives, kind):
    return sum(each.times for each in collectives if each.kind.startswith(kind))


def size(collectives, kind):
    return sum(each.times * each.bytes for each in collectives if each.kind.startswith(kind))


def is_activation(each):
    """Weights have two dimensions."""
    return each.shapes.split("]")[0].count(",") == 2


def check_weights_are_gathered(found, axes):
    """Each once forward and once backward, unless XLA keeps it in between; and nothing else."""
    gathers = [each for each in found if each.kind.startswith("all-gather")]
    assert {each.axes for each in gathers} == {axes}
    assert MATRICES <= count(found, "all-gather") <= 2 * MATRICES
    assert not any(is_activation(each) for each in gathers)


def weights_bytes(size_of_element):
    """Of the matrices of the layers, and of the head, which has as many elements as the embedding."""
    layer = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * INTERMEDIATE)
    return size_of_element * (LAYERS * layer + VOCAB * HIDDEN)


TOPOLOGIES = ["v5e:4x2", pytest.param("v4:2x2x2", marks=pytest.mark.slow)]
SLOW_TOPOLOGIES = [pytest.param(name, marks=pytest.mark.slow) for name in ("v5e:4x2", "v4:2x2x2")]
TOKENS = BATCH * SEQ * HIDDEN // 8  # elements: of the tokens of one device, all columns
# What was looked up goes in bfloat16, as the residual stream is; its gradient in float32, as the table is.
EXCHANGES = [("all-to-all", ("fsdp",), 2 * TOKENS), ("all-to-all", ("fsdp",), 4 * TOKENS)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fsdp_gathers_weights_and_scatters_gradients(tmp_path, topology):
    found = step(tmp_path, "fsdp", topology)
    assert {each.axes for each in found} == {("fsdp",)}
    # Tokens are looked up where the columns of the table lie, and exchanged; the table is never whole.
    assert of_lookup(found) == EXCHANGES
    layers = of_layers(found)
    assert len(found) == len(layers) + 2  # attention sends nothing
    check_weights_are_gathered(layers, ("fsdp",))
    assert count(layers, "reduce-scatter") == MATRICES
    assert count(layers, "all-to-all") == count(layers, "collective-permute") == 0


@pytest.mark.parametrize("topology", SLOW_TOPOLOGIES)
def test_replicas_send_gradients_alone(tmp_path, topology):
    found = step(tmp_path, "replicated", topology)
    assert {(each.kind, each.axes) for each in found} == {("all-reduce", ("data",))}
    # Gradients of matrices in bfloat16, as they are computed; of the embedding in float32. Norms' are small.
    whole = weights_bytes(2) + VOCAB * HIDDEN * 4
    assert whole <= size(found, "all-reduce") < 1.01 * whole


@pytest.mark.parametrize("topology", SLOW_TOPOLOGIES)
def test_hsdp_sends_between_groups_no_more_than_shards_of_gradients(tmp_path, topology):
    found = step(tmp_path, "hsdp", topology)
    check_weights_are_gathered(of_layers(found), ("fsdp",))
    # data 2 x fsdp 4: a quarter of each gradient goes to the other group.
    between = [each for each in found if "data" in each.axes]
    assert {(each.kind, each.axes) for each in between} == {("all-reduce", ("data",))}
    quarter = (weights_bytes(2) + VOCAB * HIDDEN * 4) / 4
    assert quarter <= size(between, "all-reduce") < 1.01 * quarter
    exchanges = [each for each in of_lookup(found) if each[1] == ("fsdp",)]
    assert exchanges == EXCHANGES
    # Within a group gradients are scattered; but for the head's, whose columns are cut, XLA sums them all.
    assert size(found, "reduce-scatter") >= weights_bytes(2) - VOCAB * HIDDEN * 2


@pytest.mark.parametrize("topology", SLOW_TOPOLOGIES)
def test_2d_sums_over_tensor_at_the_ends_of_pairs(tmp_path, topology):
    found = step(tmp_path, "2d", topology)
    # Rows of the table are cut over tensor, columns over fsdp: a sum, and an exchange.
    exchanges = [("all-reduce", ("tensor",)), ("all-to-all", ("fsdp",)), ("all-to-all", ("fsdp",))]
    assert [each[:2] for each in of_lookup(found)] == exchanges
    layers = of_layers(found)
    over_tensor = [each for each in layers if "tensor" in each.axes]
    assert {each.kind for each in over_tensor} == {"all-reduce"}
    assert all(each.axes == ("tensor",) and is_activation(each) for each in over_tensor)
    # Forward, behind o_proj and down_proj; backward, before q, k, v and before gate, up; and before the head.
    assert len(over_tensor) == 4 * LAYERS + 1
    check_weights_are_gathered(layers, ("fsdp",))


@pytest.mark.parametrize("topology", SLOW_TOPOLOGIES)
def test_a_sharded_sequence_goes_round_in_attention_and_is_gathered_nowhere(tmp_path, topology):
    found = step(tmp_path, "fsdp_context", topology)
    assert {kind for kind, _, _ in of_lookup(found)} == {"all-to-all"}
    check_weights_are_gathered(of_layers(found), ("fsdp", "context"))
    assert not any(is_activation(each) for each in found if each.kind.startswith("all-gather"))
    ring = [each for each in found if "ppermute" in each.source]
    assert {(each.kind, each.axes) for each in ring} == {("collective-permute", ("context",))}
    # Two shards: k and v once forward; backward k and v once, and dk and dv once and home.
    assert len(ring) == 6 * LAYERS


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
