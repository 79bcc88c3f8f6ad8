"""Which rows of a batch each process loads."""

import numpy as np
import pytest

from xla_attention.sharding.inputs import rows_of_process
from xla_attention.sharding.mesh import AXES, MeshConfig
from xla_attention.training.data import PackedTokens, training_batch

BATCH_AXES = ("data", "fsdp")


def rows_of_each(processes, mesh, batch_size=16):
    """Rows of each of some processes, of 8 devices in order."""
    ids = np.arange(8).reshape(tuple(MeshConfig(**mesh).sizes(8).values()))
    return [
        rows_of_process(batch_size, devices, ids, AXES, BATCH_AXES)
        for devices in np.arange(8).reshape(processes, -1)
    ]


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize(
    "mesh", [{"fsdp": -1}, {"data": 2, "fsdp": -1}, {"fsdp": -1, "tensor": 2}, {"fsdp": -1, "context": 2}]
)
def test_processes_load_disjoint_parts_that_make_the_whole_batch(processes, mesh):
    data = PackedTokens(np.arange(1000, dtype=np.uint16), seq_len=8, vocab_size=1000, name="data")
    rows = rows_of_each(processes, mesh)
    assert sorted(np.concatenate(rows)) == list(range(16))
    whole = training_batch(data, 16, position=40, seed=3)
    for mine in rows:
        assert len(mine) == 16 // processes
        np.testing.assert_array_equal(training_batch(data, 16, 40, 3, mine), whole[mine])


def test_processes_that_share_the_tensor_axis_load_the_same_rows():
    """Two processes of 4 devices, and 8 shards of each head: both need every row."""
    first, second = rows_of_each(2, {"tensor": 8})
    assert list(first) == list(second) == list(range(16))
    quarters = rows_of_each(4, {"fsdp": 2, "tensor": 4})
    assert [list(rows) for rows in quarters] == [list(range(8))] * 2 + [list(range(8, 16))] * 2


def test_devices_in_another_order():
    """Rows follow the places of the devices on the mesh, not their numbers."""
    ids = np.array([3, 1, 0, 2]).reshape(1, 4, 1, 1)
    assert list(rows_of_process(8, [0, 1], ids, AXES, BATCH_AXES)) == [2, 3, 4, 5]
