"""Attention of a sharded sequence, compiled for TPU slices: what travels, when, and what a device holds."""

import re

import pytest

from pallas_kernels.flash_attention import AttentionSpec
from pallas_kernels.masks import Causal
from xla_attention.benchmarks.context import context_table, measure_context
from xla_attention.ops.placement import AttentionPlacement
from xla_attention.planner.attention_case import AttentionCase
from xla_attention.planner.compile import compile_for_tpu
from xla_attention.planner.kernels import sharded_kernels
from xla_attention.planner.topology import parse_topology

pytestmark = pytest.mark.tpu_compile
DIRECTIONS = ("forward", "backward")


def kernel(topology, direction, **placement):
    kernels = sharded_kernels(
        (2, 4, 4096, 128),
        (2, 2, 4096, 128),
        dtype="bfloat16",
        spec=AttentionSpec(scale=128**-0.5, mask=Causal()),
        hardware=topology.hardware,
        placement=AttentionPlacement(**placement),
    )
    return kernels[DIRECTIONS.index(direction)]


def schedule(compiled_to):
    """The optimized HLO, whose instructions are in the order in which the TPU issues them."""
    (file,) = compiled_to.glob("*TLP-hlo.txt")
    return file.read_text()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_travels_round_a_ring_does_so_while_the_kernels_run(direction, tmp_path):
    topology = parse_topology("v5e:4x2")
    ring = kernel(
        topology,
        direction,
        axes=(("data", 2), ("context", 4)),
        batch=("data",),
        sequence="context",
        layout="zigzag",
    )
    compile_for_tpu(ring.fn, ring.avals, topology, sharding=ring.sharding, dump_to=tmp_path)
    text = schedule(tmp_path)
    assert not re.search(r" (all-gather|all-reduce|all-to-all|reduce-scatter)", text)
    (body,) = (x for x in text.split("\n\n") if "collective-permute-start(" in x and "ENTRY" not in x)
    order = re.findall(r" (collective-permute-start|collective-permute-done|conditional)\(", body)
    travelling = 2 if direction == "forward" else 4  # k and v; and dk and dv
    expected = ["collective-permute-start"] * travelling + ["conditional"]
    assert order == expected + ["collective-permute-done"] * travelling


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_exchange_is_all_that_it_adds(direction, tmp_path):
    topology = parse_topology("v4:2x2x1")
    exchange = kernel(
        topology,
        direction,
        axes=(("tensor", 2), ("context", 2)),
        heads="tensor",
        sequence="context",
        method="all_to_all",
    )
    compile_for_tpu(exchange.fn, exchange.avals, topology, sharding=exchange.sharding, dump_to=tmp_path)
    kinds = r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
    assert set(re.findall(kinds, schedule(tmp_path))) == {"all-to-all"}


def test_batch_and_heads_need_nothing(tmp_path):
    topology = parse_topology("v4:2x2x2")
    both = kernel(topology, "forward", axes=(("fsdp", 2), ("tensor", 4)), batch=("fsdp",), heads="tensor")
    compile_for_tpu(both.fn, both.avals, topology, sharding=both.sharding, dump_to=tmp_path)
    assert not re.search(r" (all-|reduce-scatter|collective-permute)", schedule(tmp_path))


def test_more_shards_than_chips_are_refused():
    topology = parse_topology("v5e:2x2")
    wide = kernel(topology, "forward", axes=(("context", 8),), sequence="context")
    with pytest.raises(ValueError, match="v5e:2x2 has 4 chips, needs 8"):
        compile_for_tpu(wide.fn, wide.avals, topology, sharding=wide.sharding)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_memory_and_cycles_fall_with_the_shards_and_are_balanced(direction):
    case = AttentionCase(1, 8, 8, 131072, 128, "bfloat16", Causal(), direction)
    alone, *sharded = rows = measure_context([case], parse_topology("v5e:4x2"), (1, 2, 4, 8))
    for row in sharded:
        assert row.memory * row.shards < 1.1 * alone.memory
        assert abs(row.mean * row.shards / alone.mean - 1) < 0.1
        assert row.imbalance < 0.05
    assert context_table(rows, parse_topology("v5e:4x2"), "ring", "zigzag").row_count == 4
