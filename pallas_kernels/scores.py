"""What happens to a tile of products q k^T before the softmax, in powers of two, and its derivative.

The kernels take exponentials to base 2 (one multiplication fewer for each element), so log2(e) is folded into
the factor of the logits: 2^(log2(e) x) = e^x.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

LOG2E = math.log2(math.e)


def logits(
    products: Float[Array, "m n"], *, scale: float, softcap: float | None
) -> Float[Array, "m n"]:
    """log2(e) times the logits: ``scale * products``, softcapped if asked."""
    if softcap is None:
        return products * (scale * LOG2E)
    return jnp.tanh(products * (scale / softcap)) * (softcap * LOG2E)


def products_gradient(
    gradient: Float[Array, "m n"], logits2: Float[Array, "m n"], *, softcap: float | None
) -> Float[Array, "m n"]:
    """Gradient by ``scale * products`` from the gradient by the logits; d tanh(x) = 1 - tanh(x)^2."""
    if softcap is None:
        return gradient
    t = logits2 * (1 / (softcap * LOG2E))
    return gradient * (1 - t * t)
