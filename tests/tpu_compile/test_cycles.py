"""Static cycles of kernels that are compiled here, and the commands that print them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from typer.testing import CliRunner

from xla_attention.planner import compile as planner
from xla_attention.planner.compile import CompileError, compile_for_tpu
from xla_attention.planner.topology import parse_topology

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("empty_cache")]
V5E = parse_topology("v5e:2x2")
ROWS = jax.ShapeDtypeStruct((24, 128), jnp.float32)


def powers(x, trips):
    """Each block times itself, as often as a scalar-prefetch operand says."""

    def kernel(trips, x, o):
        o[...] = lax.fori_loop(0, trips[pl.program_id(0)], lambda n, power: power * x[...], x[...])

    block = pl.BlockSpec((8, 128), lambda n, trips: (n, 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(3,), in_specs=[block], out_specs=block)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, grid_spec=grid, out_shape=shape)(jnp.array(trips, jnp.int32), x)


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v6e:2x2"])
def test_loops_run_as_often_as_a_constant_operand_says(name):
    def kernel(trips):
        compiled = compile_for_tpu(
            functools.partial(powers, trips=trips), [ROWS], parse_topology(name), cycles=True
        )
        (kernel,) = compiled.kernels
        assert not kernel.unknown and not kernel.unsupported
        return kernel

    a, b, c = (kernel([3, 0, n]) for n in (5, 6, 15))
    turn = b.cycles - a.cycles
    assert turn > 0
    assert c.cycles - b.cycles == 9 * turn
    assert any(segment.runs == 3 + 5 and segment.stop - segment.start == turn for segment in a.segments)


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_mxu_does_the_flops_of_a_product(name):
    """Two sizes, so that what surrounds a product falls out."""
    topology = parse_topology(name)

    def dot(a, b):
        def kernel(a, b, o):
            o[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32))(
            a, b
        )

    def slots(rows):
        a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 512), (512, 512)))
        (kernel,) = compile_for_tpu(dot, [a, b], topology, cycles=True).kernels
        return kernel.slots["MXU"], kernel.capacity["MXU"]

    (few, capacity), (many, _) = slots(512), slots(1024)
    flops_per_slot = topology.hardware.flops_per_cycle / capacity
    assert (many - few) * flops_per_slot == 2 * 512 * 512 * 512


def test_cycles_are_kept_with_the_compilation(runs):
    fn = functools.partial(powers, trips=[1, 2, 3])
    plain = compile_for_tpu(fn, [ROWS], V5E)
    assert plain.kernels == ()
    counted = compile_for_tpu(fn, [ROWS], V5E, cycles=True)
    assert len(runs) == 2  # the first made no dumps
    again = compile_for_tpu(fn, [ROWS], V5E, cycles=True)
    assert len(runs) == 2
    assert again.cached
    assert again.kernels == counted.kernels
    assert compile_for_tpu(fn, [ROWS], V5E).cached


def test_cycles_counted_by_other_code_are_counted_anew(runs, monkeypatch):
    fn = functools.partial(powers, trips=[1, 2, 3])
    compile_for_tpu(fn, [ROWS], V5E, cycles=True)
    monkeypatch.setattr(planner, "counter_version", lambda: "another")
    assert not compile_for_tpu(fn, [ROWS], V5E, cycles=True).cached
    assert len(runs) == 2


def test_dumps_of_the_callers_choice_are_counted(tmp_path):
    fn = functools.partial(powers, trips=[1, 2, 3])
    compiled = compile_for_tpu(fn, [ROWS], V5E, dump_to=tmp_path / "dump", cycles=True)
    assert compiled.kernels == compile_for_tpu(fn, [ROWS], V5E, cycles=True).kernels
    assert len(compiled.kernels) == 1


def test_a_refusal_is_kept(runs):
    def copy(x):
        def kernel(x, o):
            o[...] = x[...]

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    for _ in range(2):
        with pytest.raises(CompileError, match="vmem"):
            compile_for_tpu(copy, [jax.ShapeDtypeStruct((2**16, 128), jnp.float32)], V5E, cycles=True)
    assert len(runs) == 1


def command(*arguments):
    from xla_attention.cli import app

    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


SMALL = ["--topology", "v5e:2x2", "--heads", "2", "--kv-heads", "1"]


def test_bench_kernels_prints_a_row_for_each_implementation():
    lines = command("bench", "kernels", *SMALL, "--seq-len", "256", "--pass", "forward,backward")
    rows = [line for line in lines if "JAX" in line or "xla_attention" in line]
    names = ["xla_attention", "JAX flash", "JAX splash"]
    names += ["xla_attention", "JAX flash", "JAX splash, two kernels", "JAX splash, fused"]
    assert [name for name, row in zip(names, rows, strict=True) if name in row] == names
    for row in rows:
        assert row.count("%") == 8, row  # seven units, and what is useful
        assert "?" not in row
        assert (row.split()[-1][-1] == "x") != ("xla_attention" in row)


def test_bench_memory_prints_a_row_for_each_length():
    lines = command("bench", "memory", *SMALL, "--seq-len", "256", "--seq-len", "512")
    rows = [line.split() for line in lines if "ward " in line]
    assert [row[:2] for row in rows] == [[d, n] for d in ("forward", "backward") for n in ("256", "512")]
    assert all(row[3] == "(1.00)" for row in rows)  # arguments are linear


def test_tune_ranks_the_choices_and_writes_the_best(monkeypatch, tmp_path):
    from pallas_kernels.flash_attention import blocks

    (tmp_path / "table.json").write_text("{}")
    monkeypatch.setattr(blocks, "TABLE", tmp_path / "table.json")
    arguments = ["tune", *SMALL, "--seq-len", "256", "--pass", "forward", "--limit", "2"]
    lines = command(*arguments)
    assert any("the default" in line and "1.000" in line for line in lines)
    (entry,) = json.loads((tmp_path / "table.json").read_text()).values()
    assert entry["choices"] == 2
    assert entry["cycles"] <= entry["cycles_before"]
    assert entry["command"].startswith("xla-attention tune --topology v5e:2x2 --pass forward --seq-len 256")
    assert np.isfinite(entry["cycles"])
    before = (tmp_path / "table.json").read_text()
    command(*arguments, "--no-write")
    assert (tmp_path / "table.json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "kernels", "--topology", "v9:1"], "topology: got 'v9:1'"),
        (["bench", "kernels", "--topology", "v5e:2x2", "--mask", "half"], "mask: got 'half'"),
        (["bench", "kernels", "--topology", "v5e:2x2", "--pass", "sideways"], "pass: got 'sideways'"),
        (["bench", "memory", "--topology", "v5e:2x2", "--heads", "0"], "heads: got 0"),
        (["tune", "--topology", "v5e:2x2", "--seq-len", "256", "--dtype", "int8"], "dtype: got 'int8'"),
    ],
)
def test_bad_options_are_named(arguments, message):
    from xla_attention.cli import app

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert message in result.output
