"""Paged attention compiles for every TPU generation, and decoding keeps up with HBM by the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from pallas_kernels.paged_attention import (
    PagedOperands,
    PagedSpec,
    paged_attention,
    ragged_paged_attention,
    update_kv_pages,
)
from pallas_kernels.score_function import ScoreFunction
from xla_attention.benchmarks.kernels import Row
from xla_attention.benchmarks.paged_kernels import PagedCase, candidates, share_of_floor
from xla_attention.planner.compile import compile_for_tpu
from xla_attention.planner.topology import parse_topology

pytestmark = pytest.mark.tpu_compile
TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"]


def aval(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("page_size", [16, pytest.param(32, marks=pytest.mark.slow), 64])
def test_decoding_is_within_3_percent_of_hbm(name, page_size):
    """The model of HBM is an ideal queue: this says that the kernel does not stand in its way."""
    topology = parse_topology(name)
    case = PagedCase(16, 1, 4096, 32, 8, 128, page_size)
    ours = next(candidates(case, topology))
    row = Row(ours, compile_for_tpu(ours.fn, ours.avals, topology, cycles=True).kernels, 1)
    assert not any(kernel.unknown for kernel in row.kernels)
    assert share_of_floor(case, topology, row) > 0.97


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(("seqs", "heads", "page_size"), [(256, 32, 128), (512, 64, 16)])
def test_large_tables(name, seqs, heads, page_size):
    """256 sequences of 8k, and the table of a 70B model: more entries than SMEM holds."""
    topology = parse_topology(name)
    integers = aval((seqs,), "int32"), aval((seqs, 8192 // page_size), "int32")
    pages = aval((40000 * 16 // page_size, page_size, 2048))

    def decode(q, pages, lens, tables):
        spec = PagedSpec(128**-0.5)
        return paged_attention(q, pages, lens, tables, spec=spec, hardware=topology.hardware)

    compiled = compile_for_tpu(decode, [aval((seqs, heads, 128)), pages, *integers], topology)
    assert compiled.temp_bytes < 2**24  # no copy of the pages


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ragged_and_update(name):
    topology = parse_topology(name)
    pages = aval((1024, 16, 2048))
    integers = [aval(shape, "int32") for shape in ((8,), (8, 128), (9,), (1,))]

    def ragged(q, pages, *tables):
        spec = PagedSpec(128**-0.5, softcap=30.0, sliding_window=1024)
        return ragged_paged_attention(q, pages, *tables, spec=spec, hardware=topology.hardware)

    compile_for_tpu(ragged, [aval((2048, 32, 128)), pages, *integers], topology)

    def update(pages, kv, slots):
        return update_kv_pages(pages, kv, slots, hardware=topology.hardware)

    compile_for_tpu(update, [pages, aval((64, 2048)), aval((64,), "int32")], topology)


class _Gated(ScoreFunction):
    """Of a head's gate, a query's factor, and the document of each key."""

    def __call__(self, score, batch, head, q, kv, operands):
        gate, factor, document = operands
        return jnp.where(document == batch % 3, score * factor + gate * head, -jnp.inf)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_function_of_scores(name):
    """What it reads by row and by key, in kernels of one query and of many."""
    topology = parse_topology(name)
    integers = [aval(shape, "int32") for shape in ((8,), (8, 128), (9,), (1,))]
    spec = PagedSpec(128**-0.5, score=_Gated(("head", "query", "key")))

    def read(sequence, position):
        keys = jnp.arange(128 * 16, dtype=jnp.int32)
        gate = jnp.linspace(0, 1, 32, dtype=jnp.float32)[None]
        return (
            gate,
            jnp.cos(position.astype(jnp.float32))[:, None],
            (keys // 100 + sequence[:, None])[:, None],
        )

    def ragged(q, pages, *tables):
        operands = PagedOperands(score=read)
        return ragged_paged_attention(q, pages, *tables, operands, spec=spec, hardware=topology.hardware)

    compile_for_tpu(ragged, [aval((512, 32, 128)), aval((1024, 16, 2048)), *integers], topology)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_scales_by_page(name):
    topology = parse_topology(name)
    integers = [aval(shape, "int32") for shape in ((8,), (8, 64), (9,), (1,))]
    scales = [aval((1024, 8), "float32")] * 2

    def ragged(q, pages, k_scale, v_scale, *tables):
        operands = PagedOperands(k_scale=k_scale, v_scale=v_scale)
        spec = PagedSpec(128**-0.5)
        return ragged_paged_attention(q, pages, *tables, operands, spec=spec, hardware=topology.hardware)

    compile_for_tpu(
        ragged, [aval((512, 32, 128)), aval((1024, 32, 2048), "int8"), *scales, *integers], topology
    )


def test_bench_paged_prints_a_row_for_each_implementation():
    from xla_attention.cli import app

    options = ["--topology", "v5e:2x2", "--batch", "2", "--context", "512"]
    result = CliRunner().invoke(app, ["bench", "paged", *options], env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    for kernel in ("xla_attention", "JAX paged", "torch_xla multi", "JAX ragged", "torch_xla ragged"):
        assert any(kernel in line for line in result.output.splitlines())


def test_known_lengths_are_followed():
    """Half the tokens, half the bytes."""
    topology = parse_topology("v5e:2x2")
    counts = []
    for context in (2048, 4096):
        tables = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
        lens = np.full(4, context, np.int32)

        def decode(q, pages, lens=lens, tables=tables):
            spec = PagedSpec(128**-0.5)
            return paged_attention(q, pages, lens, tables, spec=spec, hardware=topology.hardware)

        avals = [aval((4, 32, 128)), aval((4 * 64, 64, 2048))]
        (kernel,) = compile_for_tpu(decode, avals, topology, cycles=True).kernels
        counts.append(kernel.hbm_bytes)
    assert counts[1] - counts[0] == 4 * 2048 * 4096
