"""Some heads at a time, so that what exists between the steps of a ring is small beside q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.hardware import Hardware

PARTIAL_BYTES = 2**23  # of the float32 results of one step: above it, fewer heads at a time


def head_groups(kv_heads: int, q_shape: tuple[int, ...], hardware: Hardware) -> int:
    """In how many groups heads are taken, one after the other; each has a head for every core at least."""
    batch, heads, length, dim = q_shape
    of_one = 4 * batch * (heads // kv_heads) * length * dim
    fits = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n * of_one <= PARTIAL_BYTES]
    least = next(
        n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n >= min(hardware.cores, kv_heads)
    )
    return kv_heads // max([least, *fits])


def by_head_groups(
    run: Callable[..., tuple[Array, ...]],
    arrays: Sequence[Array | None],
    results: Sequence[jax.ShapeDtypeStruct],
    groups: int,
) -> tuple[Array, ...]:
    """``run(*arrays)`` on one group of heads after the other.

    Args:
        run: a function of arrays whose axis 1 is heads, of queries or of keys.
        arrays: what it is called with; None stays None.
        results: shape and dtype of what it returns on all heads.
        groups: how many; heads divide into them in order.
    """
    if groups == 1:
        return tuple(run(*arrays))

    def part(x: Array | None, n: Array) -> Array | None:
        each = 0 if x is None else x.shape[1] // groups
        return None if x is None else lax.dynamic_slice_in_dim(x, n * each, each, 1)

    def body(n: Array, whole: tuple[Array, ...]) -> tuple[Array, ...]:
        found = run(*(part(x, n) for x in arrays))
        return tuple(
            lax.dynamic_update_slice_in_dim(all_, x, n * x.shape[1], 1) for all_, x in zip(whole, found)
        )

    return lax.fori_loop(0, groups, body, tuple(jnp.zeros(x.shape, x.dtype) for x in results))
