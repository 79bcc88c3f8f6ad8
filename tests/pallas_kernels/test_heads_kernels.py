"""Features as heads and back, turned or not, against the definition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.heads import heads_fit, merge_heads, split_heads


def turned(x, angle):
    """``[batch, heads, seq, head_dim]`` by ``[1 or batch, seq, head_dim / 2]``: complex multiplication."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize(
    ("batch", "heads", "seq", "head_dim"),
    [
        (2, 3, 37, 128),  # a head is a register wide
        (1, 4, 600, 64),  # two heads in one, and a last block that is not full
        (2, 2, 16, 256),  # two registers a head
        (1, 4, 40, 96),  # heads that straddle them
        (1, 8, 1, 16),
        (1, 40, 520, 128),  # more than one block of heads
    ],
)
@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways(batch, heads, seq, head_dim, of_batch, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((batch, seq, heads * head_dim)), dtype)
    angle = rng.uniform(-9, 9, (batch if of_batch else 1, seq, head_dim // 2))
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    wide = np.asarray(x, np.float64).reshape(batch, seq, heads, head_dim).transpose(0, 2, 1, 3)

    plain = split_heads(x, head_dim=head_dim, hardware=INTERPRETER)
    np.testing.assert_array_equal(np.asarray(plain, np.float64), wide)
    np.testing.assert_array_equal(merge_heads(plain, hardware=INTERPRETER), x)

    y = split_heads(x, cos, sin, head_dim=head_dim, hardware=INTERPRETER)
    # Two products and a sum in float32, then the rounding of the result: 2^-9 of a bfloat16.
    limit = {"float32": 5e-7, "bfloat16": 2**-8}[dtype] * np.abs(wide).max()
    assert y.dtype == x.dtype and y.shape == wide.shape
    assert np.abs(np.asarray(y, np.float64) - turned(wide, angle)).max() < limit
    back = merge_heads(plain, cos, -sin, hardware=INTERPRETER)
    want = turned(wide, -angle).transpose(0, 2, 1, 3).reshape(x.shape)
    assert np.abs(np.asarray(back, np.float64) - want).max() < limit


@pytest.mark.parametrize(
    ("heads", "head_dim", "fit"),
    [(1, 128, True), (3, 64, False), (2, 64, True), (2, 96, False), (4, 15, False)],
)
def test_heads_that_fit_no_register_are_refused(heads, head_dim, fit):
    assert heads_fit(heads, head_dim) == fit
    if not fit:
        with pytest.raises(ValueError, match="x: got shape .* needs an even head_dim, and a multiple of"):
            split_heads(jnp.zeros((1, 8, heads * head_dim)), head_dim=head_dim, hardware=INTERPRETER)


def test_angles_must_be_of_the_tokens():
    x, half = jnp.zeros((2, 8, 256)), jnp.zeros((2, 8, 64))
    with pytest.raises(ValueError, match="sin: got shape"):
        split_heads(x, half, half[:, :7], head_dim=128, hardware=INTERPRETER)
    with pytest.raises(ValueError, match="needs both or none"):
        merge_heads(jnp.zeros((2, 2, 8, 128)), half, hardware=INTERPRETER)
