"""A mask for each head: the kernels run once for each mask there is, on the heads that have it.

Kernels want as many query heads for every key head. Where heads of one mask are spread unevenly over the key
heads, they run in parts, by how many of them read one key head: no key or value is repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from pallas_kernels.flash_attention.spec import AttentionSpec, Operands
from pallas_kernels.masks import Mask, PerHead


class Part(NamedTuple):
    """Query heads of one mask, as many for each of the key heads that they read, in order."""

    mask: Mask
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]


def parts(mask: PerHead, kv_heads: int) -> list[Part]:
    """The heads, each in one part; ``kv_heads`` divides their number."""
    group = len(mask.masks) // kv_heads
    found: dict[tuple[Mask, int], tuple[list[int], list[int]]] = {}
    for kv_head in range(kv_heads):
        of_mask: dict[Mask, list[int]] = {}
        for head in range(kv_head * group, (kv_head + 1) * group):
            of_mask.setdefault(mask.masks[head], []).append(head)
        for one, heads in of_mask.items():
            part = found.setdefault((one, len(heads)), ([], []))
            part[0].extend(heads)
            part[1].append(kv_head)
    return [Part(one, tuple(heads), tuple(keys)) for (one, _), (heads, keys) in found.items()]


def forward(
    run: Callable[..., tuple[Array, Array]],
    q: Array,
    k: Array,
    v: Array,
    operands: Operands,
    spec: AttentionSpec,
) -> tuple[Array, Array]:
    """``flash_forward`` of a spec whose mask is a ``PerHead``; ``run`` is that of a single mask."""
    split = parts(spec.mask, k.shape[1])
    results = [
        run(
            _take(q, part.heads),
            _take(k, part.kv_heads),
            _take(v, part.kv_heads),
            _operands(operands, part),
            spec=dataclasses.replace(spec, mask=part.mask),
        )
        for part in split
    ]
    o, lse = (_in_order(x, split) for x in zip(*results))
    return o, lse


def backward(
    run: Callable[..., tuple[Array, Array, Array]],
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    do: Array,
    dlse: Array | None,
    operands: Operands,
    spec: AttentionSpec,
) -> tuple[Array, Array, Array]:
    """``flash_backward`` likewise. Parts of one key head are added in float32."""
    split = parts(spec.mask, k.shape[1])
    results = [
        run(
            _take(q, part.heads),
            _take(k, part.kv_heads),
            _take(v, part.kv_heads),
            *(None if x is None else _take(x, part.heads) for x in (o, lse, do, dlse)),
            _operands(operands, part),
            spec=dataclasses.replace(spec, mask=part.mask),
        )
        for part in split
    ]
    dq, dk, dv = zip(*results)
    return _in_order(dq, split), _summed(dk, split), _summed(dv, split)


def _operands(operands: Operands, part: Part) -> Operands:
    """Those of the part's heads."""
    bias, slopes, sinks = operands.bias, operands.alibi_slopes, operands.sinks
    return operands._replace(
        bias=bias if bias is None or bias.shape[1] == 1 else _take(bias, part.heads),
        alibi_slopes=None if slopes is None else _take(slopes, part.heads, axis=0),
        sinks=None if sinks is None else _take(sinks, part.heads, axis=0),
    )


def _take(x: Array, heads: Sequence[int], axis: int = 1) -> Array:
    """``x`` of the heads, by slices: a gather would be slower on a TPU."""
    runs = np.split(np.asarray(heads), np.flatnonzero(np.diff(heads) != 1) + 1)
    pieces = [lax.slice_in_dim(x, int(run[0]), int(run[-1]) + 1, axis=axis) for run in runs]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)


def _in_order(results: Sequence[Array], split: list[Part]) -> Array:
    """The parts' results, head after head."""
    heads = [head for part in split for head in part.heads]
    return _take(jnp.concatenate(results, axis=1), np.argsort(heads))


def _summed(results: Sequence[Array], split: list[Part]) -> Array:
    """The parts' gradients by their key heads, added up for each."""
    of_head: dict[int, list[Array]] = {}
    for x, part in zip(results, split):
        for n, kv_head in enumerate(part.kv_heads):
            of_head.setdefault(kv_head, []).append(x[:, n : n + 1].astype(jnp.float32))
    sums = [functools.reduce(operator.add, of_head[kv_head]) for kv_head in sorted(of_head)]
    return jnp.concatenate(sums, axis=1).astype(results[0].dtype)
