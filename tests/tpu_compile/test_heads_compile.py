"""Splitting and merging heads compiles for every generation, and takes the time of its bytes."""

import jax
import pytest

from pallas_kernels.heads import merge_heads, split_heads
from xla_attention.planner.compile import compile_for_tpu
from xla_attention.planner.topology import parse_topology

pytestmark = pytest.mark.tpu_compile


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("way", ["split", "merge"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [(20, 128, "bfloat16"), *(pytest.param(*c, marks=pytest.mark.slow) for c in (
        (12, 64, "bfloat16"), (8, 256, "float32"), (8, 96, "bfloat16"), (4, 32, "float32")
    ))],
)  # fmt: skip
def test_turned(name, way, heads, head_dim, dtype):
    topology = parse_topology(name)
    hardware = topology.hardware
    angle = jax.ShapeDtypeStruct((1, 1000, head_dim // 2), "float32")
    shape = (2, 1000, heads * head_dim) if way == "split" else (2, heads, 1000, head_dim)
    x = jax.ShapeDtypeStruct(shape, dtype)

    def turn(x, cos, sin):
        if way == "split":
            return split_heads(x, cos, sin, head_dim=head_dim, hardware=hardware)
        return merge_heads(x, cos, sin, hardware=hardware)

    compiled = compile_for_tpu(turn, (x, angle, angle), topology, cycles=True)
    (kernel,) = compiled.kernels
    if head_dim % 128 == 0:
        # Both ways over HBM, and a tenth for tables and for what the first and last block wait.
        floor = 2 * x.size * x.dtype.itemsize / hardware.hbm_bytes_per_second * hardware.clock_hz
        assert kernel.total < 1.1 * floor
