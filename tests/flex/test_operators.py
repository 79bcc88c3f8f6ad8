"""Each elementwise operator of the table against torch, over a range of numbers, with its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from xla_attention.flex import expression, operators
from xla_attention.flex.expression import evaluate
from xla_attention.flex.trace import trace

# fmt: off
UNARY = ["neg", "abs", "reciprocal", "square", "floor", "ceil", "round", "trunc", "sign", "exp", "exp2",
    "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "sinh", "cosh",
    "sigmoid", "erf", "atan", "relu", "isnan", "isinf"]
BINARY = ["add", "sub", "mul", "div", "pow", "remainder", "fmod", "hypot", "minimum", "maximum", "eq", "ne",
    "lt", "le", "gt", "ge"]
INTEGER = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift",
    "floor_divide", "remainder"]
# fmt: on
NUMBERS = np.array([-7.5, -3.0, -1.0, -0.3, -1e-4, 0.0, 1e-5, 0.2, 0.7, 1.0, 2.5, 4.0, 9.0], np.float32)
POSITIVE = {"log", "log2", "log10", "sqrt", "rsqrt", "pow"}


def ours(fn, score, q, kv):
    """The traced function of arrays, and its derivative by the first."""
    result = trace(fn, "score_mod").result
    given = expression.inputs()

    def run(score):
        values = {given["score"]: score, given["q"]: q, given["kv"]: kv}
        return jnp.broadcast_to(evaluate(result, values, operators.apply), score.shape)

    value, pull = jax.vjp(run, score)
    return value, pull(jnp.ones_like(value))[0]


def in_torch(fn, score, q, kv):
    score = torch.tensor(score, dtype=torch.float64, requires_grad=True)
    value = fn(score, None, None, torch.tensor(q), torch.tensor(kv))
    (slope,) = torch.autograd.grad(value.sum(), score, allow_unused=True) if value.requires_grad else (None,)
    return value.detach(), torch.zeros_like(value) if slope is None else slope


def check(fn, score, q=None, kv=None):
    q = np.zeros(score.shape, np.int32) if q is None else q
    kv = np.zeros(score.shape, np.int32) if kv is None else kv
    got, want = ours(fn, jnp.asarray(score), jnp.asarray(q), jnp.asarray(kv)), in_torch(fn, score, q, kv)
    for g, w in zip(got, want):
        # Some units of float32, absolutely below 0.1.
        np.testing.assert_allclose(np.asarray(g, np.float64), w.numpy(), rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    numbers = NUMBERS[NUMBERS > 0] if name in POSITIVE else NUMBERS[NUMBERS != 0]
    numbers = numbers[numbers > -1] if name == "log1p" else numbers
    check(lambda s, b, h, q, kv: getattr(torch, name)(s) + 0.0 * s, numbers)


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    numbers = NUMBERS[NUMBERS > 0] if name in POSITIVE else NUMBERS
    other = 1.73 if name != "pow" else 2.5
    check(lambda s, b, h, q, kv: getattr(torch, name)(s, s * 0.5 + other) + 0.0 * s, numbers)
    check(
        lambda s, b, h, q, kv: getattr(torch, name)(s, torch.full((), other, dtype=s.dtype)) + 0.0 * s,
        numbers,
    )


@pytest.mark.parametrize("name", INTEGER)
def test_integers(name):
    q, kv = (x.reshape(-1).astype(np.int32) for x in np.meshgrid(np.arange(12), np.arange(1, 9)))
    check(lambda s, b, h, q, kv: s + getattr(torch, name)(q, kv), np.zeros(q.shape, np.float32), q, kv)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, q, kv: s + (q / kv),
        lambda s, b, h, q, kv: s + torch.div(q - 20, kv, rounding_mode="trunc"),
        lambda s, b, h, q, kv: s * (q > kv),
        lambda s, b, h, q, kv: torch.where((q > kv) ^ (q > 3), s, 2.0),
        lambda s, b, h, q, kv: s.masked_fill(q != kv, -3.0),
        lambda s, b, h, q, kv: torch.sub(s, q, alpha=2) + torch.add(kv, q, alpha=3),
        lambda s, b, h, q, kv: 2 - s + (1 / kv) + 2.0 ** q.clamp(max=4),
        lambda s, b, h, q, kv: s.clamp(min=-1) + s.clamp(max=1) + torch.clamp(q, 2, 5),
        lambda s, b, h, q, kv: 0.5 * s.to(torch.int32) + s.long() + (q > 2).int() - ~kv,
        lambda s, b, h, q, kv: torch.lerp(s, s * 2, 0.3) + torch.nn.functional.logsigmoid(s),
        lambda s, b, h, q, kv: torch.logaddexp(s, s.new_ones(())) + torch.nn.functional.mish(s),
    ],
)
def test_types_and_constants(fn):
    q, kv = (x.reshape(-1).astype(np.int32) for x in np.meshgrid(np.arange(12), np.arange(1, 9)))
    score = np.random.default_rng(0).normal(size=q.shape).astype(np.float32) * 3
    check(fn, score, q, kv)


def test_the_table_is_documented():
    for name in operators.OPERATORS:
        word = name.removeprefix("bitwise_").removeprefix("logical_").removeprefix("_unsafe_")
        known = {"left_shift": "shifts", "right_shift": "shifts", "sgn": "sign", "floor_divide": "div"}
        known |= {"cast": "", "filled": "", "or": "or", "xor": "xor", "not": "not"}
        assert known.get(word, word) in operators.__doc__, name
