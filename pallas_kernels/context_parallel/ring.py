"""Ring attention: keys and values travel round the shards of a sequence, queries stay (Liu et al., 2023,
arXiv:2310.01889).

In step s, shard i of n has the keys of shard j = i - s (mod n). The steps are merged as flash attention
merges blocks of keys, from each step's o' and lse', by the kernel:

    m*   = max(m, lse')
    acc* = exp(m - m*) acc + exp(lse' - m*) o'
    l*   = exp(m - m*) l + exp(lse' - m*)

and at the end o = acc / l, lse = m + log l: attention to all keys, exactly. Going backward, with
P = exp(S - lse) of that lse, the gradients of the steps just add up: dq stays, dk and dv travel with their
keys and come home in the end. All of it in float32. The keys of the next step, and the gradients of the last,
are sent before a step computes, so that they travel meanwhile.

What a step computes is known when it is compiled, but for one choice: whether its keys come from before this
shard's queries (s <= i) or from behind them. In a causal zig-zag (``layout.py``), with chunks (i, 2n - 1 - i)
of queries and (j, 2n - 1 - j) of keys:

    j = i       causal among the shard's own positions, which are in order
    j < i       both chunks of queries see all of chunk j, and nothing of 2n - 1 - j
    j > i       chunk 2n - 1 - i sees both chunks of keys; chunk i sees nothing

Each is half of the pairs that the shards' lengths make, on every shard, in every step: nobody waits. In
contiguous parts any mask of ``q - kv`` is the same mask, shifted by s or s - n parts; trailing steps that it
hides from every shard are left out, sending included: a sliding window costs no more steps than it spans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.context_parallel.head_groups import by_head_groups, head_groups
from pallas_kernels.context_parallel.layout import Context, positions
from pallas_kernels.flash_attention import AttentionSpec, Operands, flash_backward, flash_forward
from pallas_kernels.hardware import Hardware
from pallas_kernels.masks import Causal, Full, Mask, Shifted


class Part(NamedTuple):
    """What a shard computes in a step: a range of its queries, and one of the keys at hand, under a mask."""

    queries: slice
    keys: slice
    mask: Mask


class Step(NamedTuple):
    """The part of shards whose keys come from themselves or from before, and of those from behind."""

    before: Part | None
    behind: Part | None


class Keys(NamedTuple):
    """What travels."""

    k: Float[Array, "b g n d"]
    v: Float[Array, "b g n e"]
    ids: Array | None


class Seen(NamedTuple):
    """Attention to what was met so far; float32."""

    acc: Float[Array, "b h m e"]
    m: Float[Array, "b h m"]
    total: Float[Array, "b h m"]


def plan(mask: Mask, context: Context, q_len: int, kv_len: int) -> list[Step]:
    """The steps of the ring, as many as the mask needs.

    Args:
        mask: on positions of the whole sequence.
        context: how it is sharded.
        q_len, kv_len: queries and keys of one shard.

    Raises:
        ValueError: a mask whose parts are not known when it is compiled, or lengths that it does not allow.
    """
    if isinstance(mask, Full):
        every = Part(slice(0, q_len), slice(0, kv_len), mask)
        return [Step(every, every)] * context.shards
    if q_len != kv_len:
        raise ValueError(f"k: under a mask, a ring needs as many keys as queries, got {kv_len} and {q_len}")
    length = q_len
    whole, half = slice(0, length), length // 2
    if context.layout == "zigzag":
        if mask != Causal():
            raise ValueError(
                f"mask: got {mask}; in a zig-zag ring it must be causal, or all, and nothing else: take "
                "layout='contiguous', or method='all_to_all'"
            )
        before = Part(whole, slice(0, half), Full())
        behind = Part(slice(half, length), whole, Full())
        return [Step(Part(whole, whole, mask), None)] + [Step(before, behind)] * (context.shards - 1)
    if not mask.shift_invariant:
        raise ValueError(
            f"mask: got {mask}; in a ring it may depend on the distance of query and key alone: take "
            "method='all_to_all'"
        )

    def shifted(offset: int) -> Part | None:
        some, every = mask.bounds(offset, offset + length, 0, length)
        part = Full() if every else Shifted(mask, offset) if offset else mask
        return Part(whole, whole, part) if some else None

    steps = [
        Step(shifted(n * length), shifted((n - context.shards) * length) if n else None)
        for n in range(context.shards)
    ]
    while len(steps) > 1 and steps[-1] == Step(None, None):
        steps.pop()
    return steps


def check(operands: Operands, spec: AttentionSpec, context: Context, q_len: int, kv_len: int) -> None:
    """Refuses what a ring cannot do; the lengths are those of one shard.

    Raises:
        ValueError: the message names the argument.
    """
    for name in ("bias", "alibi_slopes"):
        if getattr(operands, name) is not None:
            raise ValueError(f"{name}: not in a ring; take method='all_to_all' for the sequence's axis")
    if spec.score is not None:
        raise ValueError("score_mod: not in a ring; take method='all_to_all' for the sequence's axis")
    if not isinstance(spec.mask, Mask):
        raise ValueError("mask: no masks of heads in a ring; take method='all_to_all'")
    plan(spec.mask, context, q_len, kv_len)


def forward(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    operands: Operands,
    *,
    context: Context,
    spec: AttentionSpec,
    hardware: Hardware,
) -> tuple[Float[Array, "b h m e"], Float[Array, "b h m"]]:
    """``flash_forward`` of the whole sequence, on one shard of it; arguments and results are local."""
    index = lax.axis_index(context.axis)
    q_ids, kv_ids = _ids(operands, context, index, q.shape, k.shape)
    steps = plan(spec.mask, context, q.shape[2], k.shape[2])

    def attend(q: Array, part: Part, keys: Keys) -> tuple[Array, Array]:
        k, v, ids = (_cut(x, part.keys) for x in keys)
        return flash_forward(
            _cut(q, part.queries),
            k,
            v,
            Operands(_cut(q_ids, part.queries), ids),
            spec=dataclasses.replace(spec, mask=part.mask),
            hardware=hardware,
            out_dtype=jnp.float32,
        )

    def of_heads(q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
        def add(part: Part | None, keys: Keys, seen: Seen) -> Seen:
            if part is None:
                return seen
            merged = merge(Seen(*(_cut(x, part.queries) for x in seen)), *attend(q, part, keys))
            return Seen(*(_put(whole, x, part.queries) for whole, x in zip(seen, merged)))

        def turn(n: Any, step: Step, carry: tuple, last: bool) -> tuple:
            keys, seen = carry
            following = keys if last else _send(keys, 1, context)
            return following, _choose(n, index, step, add, keys, seen)

        rows = q.shape[:3]
        nothing = Seen(jnp.zeros((*rows, v.shape[3]), jnp.float32), jnp.full(rows, -jnp.inf), jnp.zeros(rows))
        _, seen = _turns(steps, turn, (Keys(k, v, kv_ids), nothing))
        if sinks is not None:  # one more key, whose value is zero
            seen = merge(seen, jnp.zeros_like(seen.acc), jnp.broadcast_to(sinks[..., None], rows))
        o = seen.acc / jnp.where(seen.total > 0, seen.total, 1.0)[..., None]
        return o.astype(q.dtype), seen.m + jnp.log(seen.total)

    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    )
    sinks = None if operands.sinks is None else operands.sinks[None]
    return by_head_groups(of_heads, (q, k, v, sinks), results, head_groups(k.shape[1], q.shape, hardware))


def backward(
    q: Float[Array, "b h m d"],
    k: Float[Array, "b g n d"],
    v: Float[Array, "b g n e"],
    o: Float[Array, "b h m e"],
    lse: Float[Array, "b h m"],
    do: Float[Array, "b h m e"],
    dlse: Float[Array, "b h m"] | None,
    operands: Operands,
    *,
    context: Context,
    spec: AttentionSpec,
    hardware: Hardware,
) -> tuple[Float[Array, "b h m d"], Float[Array, "b g n d"], Float[Array, "b g n e"]]:
    """``flash_backward`` of the whole sequence likewise; ``o`` and ``lse`` are those of :func:`forward`."""
    index = lax.axis_index(context.axis)
    q_ids, kv_ids = _ids(operands, context, index, q.shape, k.shape)
    steps = plan(spec.mask, context, q.shape[2], k.shape[2])

    def of_heads(
        q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dlse: Array | None
    ) -> tuple[Array, Array, Array]:
        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))

        def of_part(part: Part | None, keys: Keys) -> tuple[Array, Array, Array]:
            """Gradients by q, k and v, zero where the part does not reach."""
            if part is None:
                return zeros
            k, v, ids = (_cut(x, part.keys) for x in keys)
            gradients = flash_backward(
                _cut(q, part.queries),
                k,
                v,
                *(_cut(x, part.queries) for x in (o, lse, do, dlse)),
                Operands(_cut(q_ids, part.queries), ids),
                spec=dataclasses.replace(spec, mask=part.mask),
                hardware=hardware,
                out_dtype=jnp.float32,
            )
            return tuple(map(_put, zeros, gradients, (part.queries, part.keys, part.keys)))

        def turn(n: Any, step: Step, carry: tuple, last: bool) -> tuple:
            keys, dq, travelling = carry
            following = keys if last else _send(keys, 1, context)
            arrived = _send(travelling, 1, context)
            dq_here, *here = _choose(n, index, step, of_part, keys)
            return following, dq + dq_here, here if arrived is None else [*map(jnp.add, arrived, here)]

        _, dq, home = _turns(steps, turn, (Keys(k, v, kv_ids), zeros[0], None))
        dk, dv = _send(home, 1 - len(steps), context)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    groups = head_groups(k.shape[1], q.shape, hardware)
    return by_head_groups(of_heads, (q, k, v, o, lse, do, dlse), results, groups)


def merge(seen: Seen, o: Array, lse: Array) -> Seen:
    """Attention to further keys, by its result and log-sum-exp; -inf where a query sees none of them."""
    m = jnp.maximum(seen.m, lse)
    base = jnp.where(m == -jnp.inf, 0.0, m)
    old, new = jnp.exp(seen.m - base), jnp.exp(lse - base)
    return Seen(old[..., None] * seen.acc + new[..., None] * o, m, old * seen.total + new)


def _turns(steps: Sequence[Step], turn: Callable[..., tuple], carry: tuple) -> tuple:
    """All steps, like ones in one loop: the program does not grow with the ring. The last sends no keys."""
    carry = turn(0, steps[0], carry, len(steps) == 1)
    if len(steps) == 1:
        return carry
    n = 1
    for step, alike in itertools.groupby(steps[1:-1]):
        count = len(list(alike))
        if count == 1:
            carry = turn(n, step, carry, False)
        else:
            carry = lax.fori_loop(n, n + count, lambda n, c, step=step: turn(n, step, c, False), carry)
        n += count
    return turn(n, steps[-1], carry, True)


def _choose(n: Any, index: Array, step: Step, of: Callable[..., Any], *args: Any) -> Any:
    """``of(part, *args)`` of this shard's part in step ``n``."""
    if step.before == step.behind or (isinstance(n, int) and n == 0):
        return of(step.before, *args)
    return lax.cond(n <= index, lambda *a: of(step.before, *a), lambda *a: of(step.behind, *a), *args)


def _send(arrays: Any, distance: int, context: Context) -> Any:
    """To the shard ``distance`` further on."""
    if distance % context.shards == 0:
        return arrays
    pairs = [(n, (n + distance) % context.shards) for n in range(context.shards)]
    return jax.tree.map(lambda x: lax.ppermute(x, context.axis, pairs), arrays)


def _ids(
    operands: Operands, context: Context, index: Array, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> tuple[Array | None, Array | None]:
    """Segment ids of the shard's queries and keys; what lies beyond a length is in a segment of its own."""
    q_ids, kv_ids, q_lens, kv_lens = (
        getattr(operands, name) for name in ("q_segment_ids", "kv_segment_ids", "q_lens", "kv_lens")
    )
    if all(x is None for x in (q_ids, kv_ids, q_lens, kv_lens)):
        return None, None

    def of(ids: Array | None, lens: Array | None, shape: tuple[int, ...], outside: int) -> Array:
        ids = jnp.zeros((shape[0], shape[2]), jnp.int32) if ids is None else ids.astype(jnp.int32)
        if lens is None:
            return ids
        return jnp.where(positions(context, index, shape[2]) < lens[:, None], ids, outside)

    return of(q_ids, q_lens, q_shape, -1), of(kv_ids, kv_lens, k_shape, -2)


def _axis(x: Array) -> int:
    return 1 if x.ndim == 2 else 2


def _cut(x: Array | None, part: slice) -> Array | None:
    """The part of the sequence; ids have it on axis 1, all else on axis 2."""
    return None if x is None else lax.slice_in_dim(x, part.start, part.stop, axis=_axis(x))


def _put(whole: Array, x: Array, part: slice) -> Array:
    if x.shape == whole.shape:
        return x
    return lax.dynamic_update_slice_in_dim(whole, x, part.start, _axis(x))
