"""Names of TPU slices, against libtpu's own description of them."""

import math

import pytest
from jax.experimental import topologies

from xla_attention.device import hardware_of_kind
from xla_attention.planner.topology import Topology, parse_topology


@pytest.mark.parametrize(
    ("name", "slice_"),
    [
        ("v4:2x2x1", Topology("v4", (2, 2, 1))),
        ("v4-8", Topology("v4", (2, 2, 1))),
        ("v4-32", Topology("v4", (2, 2, 4))),
        ("v5e:4x2", Topology("v5e", (4, 2))),
        ("v5e-1", Topology("v5e", (1, 1))),
        ("v5litepod-16", Topology("v5e", (4, 4))),
        ("v5p-8", Topology("v5p", (2, 2, 1))),
        ("v6e-8", Topology("v6e", (2, 4))),
        ("v6e:16x16", Topology("v6e", (16, 16))),
    ],
)
@pytest.mark.tpu_compile
def test_names(name, slice_):
    assert parse_topology(name) == slice_
    assert parse_topology(str(slice_)) == slice_
    devices = topologies.get_topology_desc(**slice_.jax_options()).devices
    assert len(devices) == math.prod(slice_.shape)
    assert hardware_of_kind(devices[0].device_kind) == slice_.hardware
    assert devices[0].num_cores == slice_.hardware.cores


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "got 'v9:2x2', allowed are slices of v4, v5e, v5p, v6e, such as v4:2x2x1 or v4-8"),
        ("4 chips", "got '4 chips', allowed are"),
        ("v5e", "got 'v5e', allowed are"),
        ("v5e-5", "got 'v5e-5', allowed for v5e are v5e-1, v5e-4"),
        ("v4-4", "got 'v4-4', allowed for v4 are v4-8, v4-16"),
        ("v4:2x2", "v4 slices have 3 axes, the first two even: v4:2x2x1"),
        ("v5e:2x2x1", "v5e slices have 2 axes"),
        ("v5e:3x2", "v5e slices have 2 axes, the first two even: v5e:1x1, v5e:2x2"),
        ("v6e:0x2", "v6e slices have 2 axes"),
        ("v4:1x1x1", "v4 slices have 3 axes"),
    ],
)
def test_unknown_names_say_what_is_allowed(name, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(name)
