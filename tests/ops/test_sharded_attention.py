"""Kernels under sharding: the same results, and no tensor moved that lies where it is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sharded_cases import CASES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """In a process of its own: SPMD and the number of devices are set once."""
    dumps = tmp_path_factory.mktemp("hlo")
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": f"--xla_backend_optimization_level=0 --xla_dump_to={dumps} --xla_dump_hlo_as_text",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, HERE / "sharded_cases.py", dumps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_equals_unsharded_attention(name, results):
    # Relative to the largest element: float32 by two implementations, sums of up to 64 terms.
    assert max(results[name]["errors"]) < 1e-5


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("batch and heads", {}),
        ("batch over two axes", {}),
        ("two key heads on four shards", {"all-reduce"}),  # of dk and dv over the shards of one head
        ("ring", {"collective-permute"}),
        ("exchange of heads", {"all-to-all"}),
    ],
)
def test_only_the_collectives_that_the_method_is_made_of(name, kinds, results):
    assert set(results[name]["collectives"]) == set(kinds)


def test_results_lie_as_queries_do(results):
    assert results["batch and heads"]["sharding"] == "{devices=[2,4,1,1]<=[8]}"
    assert results["ring"]["sharding"] == "{devices=[2,1,4,1]0,4,2,6,1,3,5,7}"


def test_heads_are_split_and_merged_where_they_lie(results):
    found = results["heads"]
    assert max(found["errors"]) < 1e-5
    assert found["collectives"] == {}
    assert found["sharding"] == ["{devices=[2,2,2,1]<=[8]}", "{devices=[2,2,2]<=[2,2,2]T(0,2,1)}"]


def test_placed_by_global_mesh_or_partition_spec(results):
    found = results["by arguments"]
    assert found["equal"]
    of_mesh, of_spec, unplaced = found["collectives"]
    assert of_mesh == of_spec == {}
    assert "all-gather" in unplaced  # what happens without


def test_a_mesh_of_other_devices_is_refused(results):
    assert "4 places, but there are 8 devices" in results["by arguments"]["another mesh"]
