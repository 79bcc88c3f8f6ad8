"""A mask for each head in the kernels: against the definition, and against runs of a single mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LIMITS, QUICK, Case, compiled, relative
from operand_cases import by_definition, make

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.per_head import Part, parts
from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.masks import Causal, Chunked, Full, PerHead, SlidingWindow

LOCAL = SlidingWindow(20)
UNEVEN = PerHead([Causal(), Causal(), LOCAL, LOCAL, Causal(), ~Chunked(30), LOCAL, LOCAL])


@pytest.mark.parametrize(
    ("mask", "kv_heads", "want"),
    [
        (PerHead([Causal()] * 4), 2, [Part(Causal(), (0, 1, 2, 3), (0, 1))]),
        (
            PerHead([Full(), LOCAL] * 2),
            4,
            [Part(Full(), (0, 2), (0, 2)), Part(LOCAL, (1, 3), (1, 3))],
        ),
        (
            PerHead([Full(), LOCAL] * 2),
            2,
            [Part(Full(), (0, 2), (0, 1)), Part(LOCAL, (1, 3), (0, 1))],
        ),
        (PerHead([Full(), LOCAL, Full()]), 1, [Part(Full(), (0, 2), (0,)), Part(LOCAL, (1,), (0,))]),
        (
            UNEVEN,
            2,
            [
                Part(Causal(), (0, 1), (0,)),
                Part(LOCAL, (2, 3, 6, 7), (0, 1)),
                Part(Causal(), (4,), (1,)),
                Part(~Chunked(30), (5,), (1,)),
            ],
        ),
    ],
    ids=["one mask", "no groups", "groups", "one key head", "uneven"],
)
def test_heads_in_parts(mask, kv_heads, want):
    assert parts(mask, kv_heads) == want


@pytest.mark.parametrize(
    ("case", "wanted", "bias_shape"),
    [
        (Case((2, 8, 2, 70, 90, 32), UNEVEN), {"bias", "sinks", "alibi"}, (2, 8)),
        (Case((2, 3, 1, 50, 50, 16), PerHead([Causal(), LOCAL, Causal()])), {"bias", "kv_lens"}, (2, 1)),
        (Case((1, 4, 4, 60, 60, 16), PerHead([Causal(), LOCAL] * 2), dtype="bfloat16"), {"segments"}, None),
    ],
    ids=["uneven groups", "one key head", "no groups"],
)
def test_equals_the_definition(case, wanted, bias_shape):
    """Both passes by ``jax.vjp``, gradients by bias and sinks too."""
    operands = make(case, wanted, bias_shape=bias_shape)
    q, k, v, do, dlse = case.inputs()

    def run(q, k, v, operands, do, dlse):
        def attention(q, k, v, operands):
            return flash_attention(q, k, v, operands, spec=case.spec, hardware=INTERPRETER)

        results, vjp = jax.vjp(attention, q, k, v, operands)
        dq, dk, dv, by_operands = vjp((do, jnp.where(jnp.isinf(results[1]), 0, dlse)))
        return *results, dq, dk, dv, by_operands.bias, by_operands.sinks

    got = jax.jit(run, compiler_options=QUICK)(q, k, v, jax.tree.map(jnp.asarray, operands), do, dlse)
    want = by_definition(case, q, k, v, do, dlse, operands)
    names = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
    for name, g, w in zip(names, got, want, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            limits = LIMITS["float32" if name == "lse" else case.dtype]
            assert relative(g, w) < limits[name.startswith("d")], name


def test_each_head_is_that_of_its_mask_alone_bit_for_bit():
    shape = (2, 8, 2, 70, 90, 32)
    inputs = Case(shape).inputs()
    ours = compiled(Case(shape, UNEVEN, with_dlse=True))
    o, lse, dq, *_ = first = ours(*inputs)
    assert all(np.array_equal(x, y) for x, y in zip(first, ours(*inputs)))
    for mask in set(UNEVEN.masks):
        heads = [n for n, its in enumerate(UNEVEN.masks) if its == mask]
        for x, y in zip((o, lse, dq), compiled(Case(shape, mask, with_dlse=True))(*inputs)):
            assert np.array_equal(x[:, heads], y[:, heads])


def test_one_mask_for_every_head_is_that_mask():
    cases = [Case((1, 4, 2, 40, 40, 16), mask) for mask in (PerHead([Causal()] * 4), Causal())]
    for x, y in zip(*(compiled(case)(*case.inputs()) for case in cases)):
        assert np.array_equal(x, y)


def test_refuses_another_number_of_heads():
    q, k, v, *_ = Case((1, 4, 2, 8, 8, 16)).inputs()
    case = Case((1, 4, 2, 8, 8, 16), PerHead([Causal()] * 3))
    with pytest.raises(ValueError, match="mask: got masks of 3 heads, q has 4"):
        flash_attention(q, k, v, spec=case.spec, hardware=INTERPRETER)
