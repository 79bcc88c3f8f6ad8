"""A score function with an operand of every kind in the kernels, against the definition in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LIMITS, QUICK, Case, relative
from jax._src import config as jax_config
from test_flash_operands import SMALL, STREAMED

from pallas_kernels.flash_attention import AttentionSpec, Operands, attention_reference, flash_attention
from pallas_kernels.flash_attention.score_tiles import apply_to_block, by_distance
from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.masks import Causal, Full
from pallas_kernels.score_function import ScoreFunction


@dataclasses.dataclass(frozen=True)
class Everything(ScoreFunction):
    operands: tuple = ("head", "query", "key", "distance", "pair", "query")

    def __call__(self, score, batch, head, q, kv, operands):
        gain, row, column, table, pair, hides = operands
        score = jnp.tanh(score * gain + row * column) * 2 + table * pair + 0.01 * (q - kv) * (head + batch)
        return jnp.where((hides + kv) % 5 == 0, -jnp.inf, score)


def make_operands(case, whole=(True, False)):
    """``whole``: whether batches, and whether heads, have values of their own."""
    batch, heads, _, q_len, kv_len, _ = case.shape
    lead = tuple(n if own else 1 for n, own in zip((batch, heads), whole))
    rng = np.random.default_rng(3)
    shapes = ((), (q_len,), (kv_len,), (q_len + kv_len - 1,), (q_len, kv_len))
    floats = [rng.standard_normal((*lead, *shape)).astype(np.float32) for shape in shapes]
    return [*floats, rng.integers(0, 9, (1, heads, q_len)).astype(np.int32)]


def gradients(fn, case, score, q, k, v, do, dlse):
    """o, lse and the gradients by q, k, v and the floats among the operands."""

    def run(q, k, v, floats):
        return fn(q, k, v, Operands(score=(*floats, score[-1])), spec=spec)

    spec = AttentionSpec(case.spec.scale, case.mask, block_sizes=case.block_sizes, score=Everything())
    (o, lse), pull = jax.vjp(run, q, k, v, tuple(score[:-1]))
    dq, dk, dv, floats = pull((do, jnp.where(jnp.isinf(lse), 0, dlse).astype(lse.dtype)))
    return o, lse, dq, dk, dv, *floats


@pytest.mark.parametrize(
    ("blocks", "mask", "whole"),
    [
        (None, Causal(7), (True, True)),
        (SMALL, Causal(), (False, True)),
        (STREAMED, Full(), (True, False)),
        pytest.param(STREAMED, Causal(), (False, False), marks=pytest.mark.slow),
        pytest.param(SMALL, Full(), (True, True), marks=pytest.mark.slow),
    ],
)
def test_every_operand(blocks, mask, whole):
    case = Case((2, 4, 2, 330, 390, 32), mask, block_sizes=blocks)
    inputs, score = case.inputs(), make_operands(case, whole)

    def kernels(q, k, v, operands, spec):
        return flash_attention(q, k, v, operands, spec=spec, hardware=INTERPRETER)

    got = jax.jit(lambda score, *inputs: gradients(kernels, case, score, *inputs), compiler_options=QUICK)(
        list(map(jnp.asarray, score)), *inputs
    )
    with jax_config.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
        wide_score = [jnp.asarray(x if x.dtype == np.int32 else x.astype(np.float64)) for x in score]

        def definition(q, k, v, operands, spec):
            return attention_reference(q, k, v, operands, spec=spec, xp=jnp)

        want = [np.asarray(x) for x in gradients(definition, case, wide_score, *wide)]
    names = ("o", "lse", "dq", "dk", "dv", *Everything.operands[:-1])
    for name, g, w in zip(names, got, want, strict=True):
        limit = LIMITS["float32"][name not in ("o", "lse")]
        assert relative(g, w) < limit, name


def test_a_row_that_the_function_hides():
    """Zeros, -inf and zero gradients, as of a mask."""

    @dataclasses.dataclass(frozen=True)
    class Hides(ScoreFunction):
        operands: tuple = ()

        def __call__(self, score, batch, head, q, kv, operands):
            return jnp.where(q < 5, -jnp.inf, jnp.sqrt(jnp.abs(score)))  # of infinite slope at padding

    case = Case((1, 2, 1, 30, 40, 16))
    q, k, v, do, _ = case.inputs()
    spec = AttentionSpec(0.25, score=Hides())
    (o, lse), pull = jax.vjp(lambda *qkv: flash_attention(*qkv, spec=spec, hardware=INTERPRETER), q, k, v)
    gradients = pull((do, jnp.zeros_like(lse)))
    assert not o[:, :, :5].any()
    assert jnp.isneginf(lse[:, :, :5]).all()
    assert jnp.isfinite(lse[:, :, 5:]).all()
    assert all(jnp.isfinite(g).all() for g in gradients)
    assert not gradients[0][:, :, :5].any()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("n", "m"), [(128, 128), (16, 40)])
def test_a_tile_by_distance(strided, n, m):
    window = np.arange(n + m, dtype=np.float32)[None]
    tile = jax.jit(lambda w: by_distance(w, n, strided), compiler_options=QUICK)(window)
    i, j = np.indices((n, m))
    assert np.array_equal(tile, window[0, n + j - i])


def test_distances_outside_of_kernels():
    @dataclasses.dataclass(frozen=True)
    class Table(ScoreFunction):
        operands: tuple = ("distance",)

        def __call__(self, score, batch, head, q, kv, operands):
            return operands[0]

    table = np.arange(2 * 14, dtype=np.float32).reshape(1, 2, 14)
    found = apply_to_block(Table(), jnp.zeros((3, 2, 5, 10)), [table], jnp.arange(5), 10)
    i, j = np.indices((5, 10))
    assert np.array_equal(found, np.broadcast_to(table[:, :, i - j + 9], (3, 2, 5, 10)))


def test_softcap_and_score_do_not_go_together():
    with pytest.raises(ValueError, match="score: .* softcap"):
        AttentionSpec(1.0, softcap=2.0, score=Everything())
