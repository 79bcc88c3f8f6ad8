"""Sizes of the mesh from a configuration."""

import pytest
from pydantic import ValidationError

from xla_attention.sharding.mesh import MeshConfig


@pytest.mark.parametrize(
    ("given", "devices", "sizes"),
    [
        ({"fsdp": -1}, 8, (1, 8, 1, 1)),
        ({"fsdp": -1, "tensor": 2}, 8, (1, 4, 2, 1)),
        ({"data": 2, "fsdp": 2, "context": 2}, 8, (2, 2, 1, 2)),
        ({"data": -1, "fsdp": 4, "slices": 2}, 16, (4, 4, 1, 1)),
        ({}, 1, (1, 1, 1, 1)),
        ({"fsdp": -1, "tensor": 8}, 8, (1, 1, 8, 1)),
    ],
)
def test_sizes(given, devices, sizes):
    assert tuple(MeshConfig(**given).sizes(devices).values()) == sizes


@pytest.mark.parametrize(
    ("given", "devices", "message"),
    [
        ({"fsdp": 3}, 8, r"fsdp=3, .* make 3 devices, but there are 8; set one axis to -1"),
        ({"fsdp": -1, "tensor": 3}, 8, r"the 8 devices are not a multiple of 3, so nothing fits fsdp=-1"),
        ({"fsdp": -1, "data": -1}, 8, r"only one axis may be -1"),
        ({"fsdp": 0}, 8, r"an axis has at least one device"),
        ({"data": 3, "fsdp": 2, "slices": 2}, 6, r"slices=2 must divide data=3"),
    ],
)
def test_sizes_that_do_not_fit(given, devices, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**given).sizes(devices)


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValidationError, match="expert"):
        MeshConfig(expert=2)


def test_a_run_changes_only_what_it_names():
    strategy = MeshConfig(fsdp=-1, tensor=2)
    assert strategy.updated({"tensor": 4}) == MeshConfig(fsdp=-1, tensor=4)
    assert strategy.updated({"tensor": 1, "data": 2}) == MeshConfig(data=2, fsdp=-1)
