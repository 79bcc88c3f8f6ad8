"""The peers' functions compute attention, and their backward pass alone is the gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.masks import Causal, Full, SlidingWindow
from xla_attention.benchmarks.peers import _fitting, peers
from xla_attention.planner.attention_case import AttentionCase

CASE = AttentionCase(1, 4, 2, 256, 128, "float32", Causal(), "forward")


def inputs(case):
    rng = np.random.default_rng(0)
    q, do = (rng.standard_normal(case.q_shape, np.float32) for _ in range(2))
    k, v = (rng.standard_normal(case.kv_shape, np.float32) for _ in range(2))
    return q, k, v, do


def reference(case, q, k, v, scale):
    """Softmax attention in a few lines of jax.numpy."""
    k, v = (jnp.repeat(x, case.heads // case.kv_heads, axis=1) for x in (k, v))
    positions = np.arange(case.seq_len)
    logits = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") * scale
    seen = case.mask.visible(positions[:, None], positions[None])
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v, precision="highest")


@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(left=99)], ids=str)
def test_forward_is_attention(mask):
    case = dataclasses.replace(CASE, mask=mask)
    q, k, v, _ = inputs(case)
    names = set()
    for peer in peers(case):
        names.add(peer.name)
        assert [(a.shape, a.dtype) for a in peer.avals] == [(x.shape, x.dtype) for x in (q, k, v)]
        with pltpu.force_tpu_interpret_mode():
            o = peer.fn(q, k, v)
        scale = case.scale if peer.name == "JAX flash" else 1.0
        # float32 sums in another order
        np.testing.assert_allclose(o, reference(case, q, k, v, scale), atol=2e-5, rtol=2e-5)
    assert names == {"JAX splash"} | ({"JAX flash"} if not isinstance(mask, SlidingWindow) else set())


def test_backward_alone_is_the_gradient():
    case = dataclasses.replace(CASE, direction="backward")
    q, k, v, do = inputs(case)
    found = list(peers(case))
    assert {peer.name for peer in found} == {"JAX flash", "JAX splash, two kernels", "JAX splash, fused"}
    for peer in found:
        assert all(jnp.issubdtype(a.dtype, jnp.floating) for a in peer.avals)  # tables stay constants
    for peer in found:
        if peer.name != "JAX splash, fused":
            continue
        gradient, *residuals = peer.avals
        assert gradient.shape == do.shape
        o, pullback = jax.vjp(lambda *x: reference(case, *x, 1.0), q, k, v)
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, jnp.repeat(k, 2, axis=1), precision="highest")
        seen = np.tril(np.ones((case.seq_len, case.seq_len), bool))
        lse = jax.nn.logsumexp(jnp.where(seen, logits, -jnp.inf), axis=-1)
        values = [q, k, v, o, lse]
        filled = [x.reshape(aval.shape) for x, aval in zip(values, residuals, strict=True)]
        with pltpu.force_tpu_interpret_mode():
            got = peer.fn(do, *filled)
        for x, y in zip(got, pullback(do), strict=True):
            np.testing.assert_allclose(x.reshape(y.shape), y, atol=2e-4, rtol=2e-4)


def test_block_choices_are_cut_to_the_length():
    assert _fitting([(512, 512), (1024, 256), (1024, 512)], 256) == [(256, 256)]
    assert _fitting([(512, 512), (1024, 256)], 1024) == [(512, 512), (1024, 256)]
    assert _fitting([(512, 512), (1024, 256)], 1536) == [(512, 512)]
