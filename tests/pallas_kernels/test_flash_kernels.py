"""The kernels in the interpreter, with the blocks that they choose themselves, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LIMITS, QUICK, Case, check, compiled, definition, relative

from pallas_kernels.flash_attention import AttentionSpec, flash_attention, flash_backward, flash_forward
from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.masks import Causal, Full, KeyLength, SlidingWindow

WINDOW = SlidingWindow(199)


@pytest.mark.parametrize(
    "case",
    [
        # Where a query sees one key only, the logits' gradient is that of lse alone.
        Case((2, 2, 2, 1, 1, 16), with_dlse=True),
        Case((1, 3, 1, 7, 1, 32), with_dlse=True),
        Case((1, 3, 1, 1, 577, 64)),
        Case((1, 4, 1, 7, 129, 80), Causal()),
        Case((1, 8, 1, 129, 7, 32), Causal()),
        Case((2, 2, 1, 127, 127, 17), Causal(), scale=-0.4),
        Case((1, 2, 2, 129, 577, 128), Causal(577 - 129)),
        Case((1, 3, 1, 577, 129, 96), Causal(129 - 577), with_dlse=True),  # most queries see nothing
        Case((1, 1, 1, 600, 300, 256), Causal()),
        Case((1, 2, 1, 129, 127, 160)),
        Case((1, 2, 1, 577, 577, 64), WINDOW),
        Case((1, 2, 1, 300, 520, 64), KeyLength(333) & Causal(100), with_dlse=True),
        Case((1, 2, 1, 129, 577, 64), Causal(), softcap=0.8, with_dlse=True),
        Case((1, 4, 2, 200, 270, 64), Causal(70), dtype="bfloat16", with_dlse=True),
        Case((1, 2, 2, 130, 129, 128), softcap=5.0, dtype="bfloat16"),
    ],
    ids=str,
)
def test_both_passes(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", [Full(), Causal(), WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("lengths", [(127, 577), (577, 577), (600, 1023), (1023, 600)], ids=str)
def test_grid(lengths, dim, mask, dtype):
    heads, kv_heads = {16: (1, 1), 32: (8, 1), 64: (4, 2), 80: (3, 1)}.get(dim, (2, 1))
    check(Case((1, heads, kv_heads, *lengths, dim), mask, dtype=dtype))


def test_queries_that_see_nothing_are_zeros_with_zero_gradients():
    hidden = 100
    o, lse, dq, dk, dv = check(Case((1, 2, 1, 140, 60, 16), Causal(-hidden)))
    assert not o[:, :, :hidden].any()
    assert jnp.isneginf(lse[:, :, :hidden]).all()
    assert not dq[:, :, :hidden].any()
    assert not dk[:, :, 40:].any()  # nor does anything see the last keys
    assert not dv[:, :, 40:].any()


def test_a_mask_that_shows_nothing():
    o, lse, *gradients = check(Case((1, 2, 1, 20, 30, 16), KeyLength(0)))
    assert jnp.isneginf(lse).all()
    assert not any(x.any() for x in (o, *gradients))


def test_logits_far_from_zero_do_not_overflow():
    """exp(100) is no float32; the maximum is taken off first."""
    case = Case((1, 1, 1, 40, 40, 16), Causal(), scale=30.0)
    inputs = case.inputs()
    (o, lse, *gradients), want = compiled(case)(*inputs), definition(case, *inputs)
    assert np.abs(want[1]).max() > 100
    assert relative(lse, want[1]) < LIMITS["float32"][0]
    assert relative(o, want[0]) < 1e-4  # 6e-8 of a logit of hundreds is a few 1e-5 of its exponential
    assert all(np.isfinite(g).all() for g in gradients)


def test_value_dim_may_differ():
    case = Case((1, 2, 2, 50, 50, 32), Causal())
    q, k, _, _, dlse = case.inputs()
    _, _, v, do, _ = Case((1, 2, 2, 50, 50, 80)).inputs(seed=1)
    for g, w in zip(compiled(case)(q, k, v, do, dlse), definition(case, q, k, v, do, dlse)):
        assert relative(g, w) < LIMITS["float32"][1]


def test_differentiable_in_jax():
    """``jax.grad`` reaches q, k and v through both results, and through one without the other."""
    case = Case((1, 4, 2, 33, 47, 32), Causal(14), with_dlse=True)
    q, k, v, do, dlse = case.inputs()

    def gradients(o_weight, lse_weight):
        def loss(q, k, v):
            o, lse = flash_attention(q, k, v, spec=case.spec, hardware=INTERPRETER)
            return (o * o_weight).sum() + (lse * lse_weight).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    jitted = jax.jit(gradients, compiler_options=QUICK)
    for o_weight, lse_weight in ((do, dlse), (do, 0 * dlse), (0 * do, dlse)):
        want = definition(case, q, k, v, o_weight, lse_weight)[2:]
        for g, w in zip(jitted(o_weight, lse_weight), want):
            assert (relative(g, w) if w.any() else np.abs(g).max()) < LIMITS["float32"][1]


def test_the_same_bits_every_time():
    case = Case((2, 4, 2, 150, 270, 64), Causal(), with_dlse=True)
    inputs = case.inputs()
    once = compiled(case)
    runs = [once(*inputs), once(*inputs), compiled(case)(*inputs)]
    for again in runs[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(runs[0], again))


def test_heads_do_not_see_each_other():
    """Each batch and head gives what it gives alone; query heads read the key head of their group."""
    case = Case((2, 4, 2, 40, 60, 16), Causal(), with_dlse=True)
    q, k, v, do, dlse = case.inputs()
    o, lse, dq, dk, dv = compiled(case)(q, k, v, do, dlse)
    alone = compiled(Case((1, 2, 1, 40, 60, 16), Causal(), with_dlse=True))
    for batch, kv_head in np.ndindex(2, 2):
        key = np.s_[batch : batch + 1, kv_head : kv_head + 1]
        query = np.s_[batch : batch + 1, 2 * kv_head : 2 * kv_head + 2]
        one = alone(q[query], k[key], v[key], do[query], dlse[query])
        for x, y in zip((o[query], lse[query], dq[query], dk[key], dv[key]), one):
            assert np.array_equal(x, y)


FITS = (1, 2, 8, 16)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((2, 8, 16), FITS, FITS, r"q: got shape \(2, 8, 16\), expected \[batch"),
        (FITS, (1, 2, 0, 16), (1, 2, 0, 16), "k: got shape .*, every dimension must be positive"),
        (FITS, FITS, (1, 2, 9, 16), "v: got shape .* must be those of k"),
        (FITS, (2, 2, 8, 16), (2, 2, 8, 16), "k: got shape .* must be those of q"),
        (FITS, (1, 2, 8, 32), (1, 2, 8, 32), "k: got shape .* must be those of q"),
        ((1, 3, 8, 16), FITS, FITS, "k: got 2 heads, which must divide the 3 heads of q"),
    ],
)
def test_refuses_shapes(q, k, v, message):
    q, k, v = (jnp.zeros(shape) for shape in (q, k, v))
    static = {"spec": AttentionSpec(0.25), "hardware": INTERPRETER}
    with pytest.raises(ValueError, match=message):
        flash_forward(q, k, v, **static)
    with pytest.raises(ValueError, match=message):
        flash_backward(q, k, v, q, q[..., 0], q, **static)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("float16", "float16", "float16"), "q: got float16, allowed are float32 and bfloat16"),
        (("float32", "float32", "bfloat16"), "v: got bfloat16, but q is float32"),
    ],
)
def test_refuses_types(dtypes, message):
    q, k, v = (jnp.zeros(FITS, dtype) for dtype in dtypes)
    static = {"spec": AttentionSpec(0.25), "hardware": INTERPRETER}
    with pytest.raises(TypeError, match=message):
        flash_forward(q, k, v, **static)
    with pytest.raises(TypeError, match=message):
        flash_backward(q, k, v, q, q[..., 0], q, **static)
