"""Segments, lengths, biases, ALiBi and sinks in the kernels, against the definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LIMITS, QUICK, Case, relative
from operand_cases import by_definition, make

from pallas_kernels.flash_attention import (
    BackwardBlocks,
    BlockSizes,
    ForwardBlocks,
    Operands,
    flash_attention,
)
from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.masks import Causal, Full, SlidingWindow

# Several blocks of queries, tiles of keys and pieces of a border in sequences of a few hundred.
SMALL = BlockSizes(
    ForwardBlocks(block_q=256, tile_q=128, block_kv=128, border=128, border_kv=128, ahead=1),
    BackwardBlocks(block_kv=256, block_q=128, memory_q=512, tile_kv=128, tile_q=128, border=128),
)
STREAMED = BlockSizes(
    ForwardBlocks(block_q=128, tile_q=128, block_kv=128, memory_kv=256, border=128, border_kv=128, ahead=1),
    BackwardBlocks(
        block_kv=128,
        block_q=128,
        memory_q=128,
        chunk_q=256,
        tile_kv=128,
        tile_q=128,
        border=128,
        transposed=True,
    ),
)
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")


def check(case, operands, lse_limit=LIMITS["float32"][0]):
    """Both passes, by ``jax.vjp`` of the differentiable function; returns the results by name."""
    q, k, v, do, dlse = case.inputs()

    def run(q, k, v, operands, do, dlse):
        def attention(q, k, v, operands):
            return flash_attention(q, k, v, operands, spec=case.spec, hardware=INTERPRETER)

        results, vjp = jax.vjp(attention, q, k, v, operands)
        dq, dk, dv, by_operands = vjp((do, jnp.where(jnp.isinf(results[1]), 0, dlse)))
        return *results, dq, dk, dv, by_operands.bias, by_operands.sinks

    on_device = jax.tree.map(jnp.asarray, operands)
    got = jax.jit(run, compiler_options=QUICK)(q, k, v, on_device, do, dlse)
    want = by_definition(case, q, k, v, do, dlse, operands)
    for name, g, w in zip(NAMES, got, want):
        assert (g is None) == (w is None)
        if g is not None:
            limit = lse_limit if name == "lse" else LIMITS[case.dtype][name.startswith("d")]
            assert relative(g, w) < limit, name
    return dict(zip(NAMES, got))


SOME = [
    (Causal(), {"segments"}, SMALL),
    (Full(), {"shuffled segments", "alibi"}, SMALL),
    (SlidingWindow(150), {"segments", "sinks", "kv_lens"}, STREAMED),
    (Causal(), {"bias", "q_lens", "sinks"}, STREAMED),
]
OTHERS = [
    (mask, wanted, other)
    for mask, wanted, blocks in SOME
    for other in (None, SMALL, STREAMED)
    if other != blocks
]


@pytest.mark.parametrize(
    ("mask", "wanted", "blocks"), [*SOME, *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS)]
)
def test_operands(mask, wanted, blocks):
    case = Case((2, 2, 1, 330, 330, 32), mask, block_sizes=blocks)
    check(case, make(case, wanted))


@pytest.mark.parametrize("shape", [(2, 1), (1, 4)], ids=str)
def test_bias_is_broadcast(shape):
    case = Case((2, 4, 2, 70, 150, 32), Causal(80), softcap=2.0)
    check(case, make(case, {"bias"}, bias_shape=shape))


@pytest.mark.parametrize(("mask", "dtype"), [(Full(), "float32"), (Causal(33), "bfloat16")], ids=str)
def test_alibi_counts_from_the_query_offset(mask, dtype):
    case = Case((1, 4, 1, 130, 163, 32), mask, query_offset=33, dtype=dtype)
    check(case, make(case, {"alibi"}))


def test_far_alibi_in_bfloat16():
    """Only the keys' part of the distance is added there, and it grows along the sequence.

    At 1000, float32 rounds to 6e-5; the log-sum-exp is up to 8.
    """
    case = Case((1, 2, 1, 1200, 1200, 16), Causal(), dtype="bfloat16")
    check(case, Operands(alibi_slopes=np.array([0.5, 0.004], np.float32)), lse_limit=1e-5)


def test_lengths_of_zero():
    """No query, or no key, of a batch: zeros, -inf, zero gradients."""
    case = Case((2, 2, 1, 130, 140, 16), Causal())
    lens = Operands(q_lens=np.array([0, 130], np.int32), kv_lens=np.array([140, 0], np.int32))
    got = check(case, lens)
    assert jnp.isneginf(got["lse"]).all()
    assert not any(got[name].any() for name in ("o", "dq", "dk", "dv"))


def test_a_sink_alone():
    """A query that sees no key gives all its weight to the sink, whose value is zero."""
    case = Case((1, 2, 1, 40, 50, 16), Causal(-20))
    operands = make(case, {"sinks"})
    got = check(case, operands)
    assert not got["o"][:, :, :20].any()
    assert np.allclose(got["lse"][0, :, :20], operands.sinks[:, None], rtol=1e-6)


def test_documents_do_not_see_each_other():
    """A packed document gives what it gives alone, to the rounding of sums in another order."""
    case = Case((1, 2, 1, 300, 300, 32), Causal())
    q, k, v, *_ = case.inputs()
    ids = jnp.asarray(np.repeat([0, 1, 2], [100, 130, 70])[None].astype(np.int32))
    run = jax.jit(
        lambda q, k, v, operands: flash_attention(q, k, v, operands, spec=case.spec, hardware=INTERPRETER),
        compiler_options=QUICK,
    )
    packed = run(q, k, v, Operands(ids, ids))
    for start, end in ((0, 100), (100, 230), (230, 300)):
        alone = run(*(x[:, :, start:end] for x in (q, k, v)), Operands())
        for whole, part in zip(packed, alone):
            assert relative(whole[:, :, start:end], np.asarray(part, np.float64)) < 1e-6
