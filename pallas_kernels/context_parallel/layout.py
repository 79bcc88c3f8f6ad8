"""How a sequence lies on the shards of an axis."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

ContextMethod = Literal["ring", "all_to_all"]
SequenceLayout = Literal["contiguous", "zigzag"]


@dataclasses.dataclass(frozen=True)
class Context:
    """The axis that a sequence is sharded over, inside ``jax.shard_map``.

    Attributes:
        axis: its name.
        shards: its size.
        method: ``"ring"`` passes keys and values round; ``"all_to_all"`` exchanges heads for sequence.
        layout: ``"contiguous"``: shard ``i`` has the ``i``-th part of the sequence. ``"zigzag"``: it has
            chunks ``i`` and ``2 shards - 1 - i`` of ``2 shards``, an early and a late one, so that causal
            attention is the same work everywhere (Brandon et al., 2023, arXiv:2311.09431, balance it likewise
            by stripes).
    """

    axis: str
    shards: int
    method: ContextMethod = "ring"
    layout: SequenceLayout = "contiguous"


def zigzag_order(shards: int) -> list[int]:
    """The chunks of the sequence in the order in which they lie on the shards, two on each."""
    return [chunk for n in range(shards) for chunk in (n, 2 * shards - 1 - n)]


def natural_order(shards: int) -> list[int]:
    """Where each chunk lies: the inverse of :func:`zigzag_order`."""
    order = zigzag_order(shards)
    return sorted(range(len(order)), key=order.__getitem__)


def positions(context: Context, index: Array, length: int) -> Int[Array, " m"]:
    """Positions in the whole sequence of the ``length`` elements that shard ``index`` has."""
    here = jnp.arange(length, dtype=jnp.int32)
    if context.layout == "contiguous":
        return index * length + here
    chunk = length // 2
    return jnp.where(here < chunk, index, 2 * context.shards - 2 - index) * chunk + here
