"""Compiling for a TPU that is not here: memory, cache, errors and dumps."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from xla_attention.planner.compile import CompileError, compile_for_tpu
from xla_attention.planner.topology import parse_topology

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("empty_cache")]
V5E = parse_topology("v5e:2x2")
ROWS = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-8", "v6e-4"])
def test_every_generation_reports_its_memory(name):
    compiled = compile_for_tpu(double, [ROWS], parse_topology(name))
    assert compiled.argument_bytes == compiled.output_bytes == 64 * 128 * 4
    assert compiled.temp_bytes == 0
    assert not compiled.cached


def test_same_content_is_compiled_once(runs):
    def compiled():
        return compile_for_tpu(functools.partial(double), [ROWS], V5E)

    first = compiled()
    second = compiled()  # from another line
    assert len(runs) == 1
    assert second.cached
    assert second.seconds == first.seconds


def test_any_other_content_is_compiled_anew(runs, monkeypatch):
    compile_for_tpu(double, [ROWS], V5E)
    compile_for_tpu(lambda x: double(x) + 1, [ROWS], V5E)
    compile_for_tpu(double, [jax.ShapeDtypeStruct((128, 128), jnp.float32)], V5E)
    compile_for_tpu(double, [ROWS], parse_topology("v6e:2x2"))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_latency_hiding_scheduler=true")
    assert not compile_for_tpu(double, [ROWS], V5E).cached
    assert len(runs) == 5


def test_vmem_overflow_names_the_sizes():
    with pytest.raises(
        CompileError, match=r"v5e:2x2 failed: .*memory space vmem.*size 64.00M and limit 16.00M"
    ):
        compile_for_tpu(double, [jax.ShapeDtypeStruct((2**16, 128), jnp.float32)], V5E)


def test_a_compiler_that_dies_is_an_error(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
    with pytest.raises(CompileError, match="no_such_flag"):
        compile_for_tpu(double, [ROWS], V5E)


def test_dump_holds_the_kernels_bundles(tmp_path):
    compile_for_tpu(double, [ROWS], V5E)
    compiled = compile_for_tpu(double, [ROWS], V5E, dump_to=tmp_path / "dump")
    assert not compiled.cached
    assert list((tmp_path / "dump").glob("*packed-bundles-post-ra.txt"))
