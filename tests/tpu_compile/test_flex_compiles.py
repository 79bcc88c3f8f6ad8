"""Every variant of flex_attention compiles for the generations, known ones at the cost of built-in forms."""

import pytest

from xla_attention.benchmarks.flex_kernels import built_in, measure_flex
from xla_attention.flex.variants import VARIANTS
from xla_attention.planner.compile import compile_for_tpu
from xla_attention.planner.flex_kernels import flex_kernels
from xla_attention.planner.topology import parse_topology

pytestmark = pytest.mark.tpu_compile
KNOWN = [name for name in VARIANTS if built_in(name, 1024)]


@pytest.mark.parametrize("name", [pytest.param("v4:2x2x1", marks=pytest.mark.slow), "v5e:2x2"])
def test_a_table_of_distances(name):
    """v4 has no strided roll, and does without."""
    topology = parse_topology(name)
    shape = (1, 2, 512, 128)
    for kernel in flex_kernels(
        VARIANTS["relative_position"], shape, shape, dtype="bfloat16", hardware=topology.hardware
    ):
        limit = 2**20 if kernel.name.startswith("flash") else 2**24  # P of a block of queries
        assert compile_for_tpu(kernel.fn, kernel.avals, topology).temp_bytes < limit


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_variant(name, variant):
    sizes = {"heads": 8, "kv_heads": 2, "seq_len": 8192, "head_dim": 128, "dtype": "bfloat16"}
    for row in measure_flex(parse_topology(name), **sizes, names=[variant], cycles=False):
        assert row.passes, row.error


@pytest.mark.slow
@pytest.mark.parametrize("variant", KNOWN)
@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2"])
def test_cycles_beside_built_in_forms(name, variant):
    sizes = {"heads": 8, "kv_heads": 2, "seq_len": 8192, "head_dim": 128, "dtype": "bfloat16"}
    for row in measure_flex(parse_topology(name), **sizes, names=[variant]):
        assert row.built_in
        assert row.passes, row
