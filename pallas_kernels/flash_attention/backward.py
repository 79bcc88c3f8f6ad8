"""Flash attention, backward: dq, dk and dv in one kernel, probabilities recomputed from lse.

With P = exp(S - lse) and delta = sum_d O dO - dlse for each query (Dao, FlashAttention-2, arXiv:2307.08691,
algorithm 2; the term in dlse is the gradient of the log-sum-exp, d lse / d S = P):

    dV = P^T dO        dP = dO V^T        dS = P (dP - delta)        dQ = dS K        dK = dS^T Q

One row of the schedule is a block of keys, its columns the queries that see it, over all query heads of the
group. Logits are computed transposed, S^T = K Q^T: lse and delta are then row vectors, and P^T dO and dS^T Q
need no transposed operand. ``transposed`` blocks keep the gradients transposed as well,

    dV^T = dO^T P      dK^T = Q^T dS      dQ^T = K^T dS^T

so that P and dS are the stationary operands of a 256-wide MXU and only head_dim rows stream past.

In VMEM: one block of K and V, dK and dV of it in float32; ``memory_q`` queries of Q, O, dO, lse; dQ of all
queries of the group (or of a chunk of them) in float32. So nothing partial reaches HBM. A block of dQ leaves
in the first step in which it is final and the output is free.

Software-pipelined by hand: the exponentials of the next tiles are issued before the products of this one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import schedule, scores
from pallas_kernels.flash_attention.backward_steps import Chunks, Plan, flush_width, plan_chunks
from pallas_kernels.flash_attention.blocks import LANES, BackwardBlocks
from pallas_kernels.flash_attention.score_tiles import ScoreTiles, as_inputs, block_specs
from pallas_kernels.flash_attention.spec import NO_OPERANDS, AttentionSpec, Operands
from pallas_kernels.flash_attention.tiles import MASKED, NN, NT, TN, Extra, dot, hide, in_kernel
from pallas_kernels.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Keys ``[kv, kv + n_kv)`` of the block and queries ``[q, q + n_q)`` of the columns at hand.

    ``place`` is the (query, key) position that the mask is asked about, or None where all is visible;
    ``first`` says that nothing was added to these keys' gradients before.
    """

    kv: int
    n_kv: int
    q: int
    n_q: int
    place: tuple[Any, Any] | None = None
    first: bool = False


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One grid step of the backward pass: the references, and what is static."""

    q: Any  # (1, memory_q, D)
    k: Any  # (1, block_kv, D)
    v: Any  # (1, block_kv, Dv)
    o: Any  # (1, memory_q, Dv)
    do: Any  # (1, memory_q, Dv)
    lse: Any  # (1, 1, memory_q) float32, times log2(e)
    dlse: Any  # (1, 1, memory_q) float32, or None
    extra: Extra
    dq: Any  # (1, flush, D)
    dk: Any  # (1, block_kv, D)
    dv: Any  # (1, block_kv, Dv)
    dq_acc: Any  # (group * chunk_q, D) float32; the accumulators are transposed if the blocks are
    dk_acc: Any  # (block_kv, D) float32
    dv_acc: Any  # (block_kv, Dv) float32
    kt: Any  # (D, block_kv) if transposed, else None
    blocks: BackwardBlocks
    spec: AttentionSpec
    score: ScoreTiles | None
    head: Any  # of the query
    row: Any  # position of the first key
    column: Any  # position of the first query in VMEM

    def along(self, ref: Any, start: Any, n: int) -> Any:
        """``n`` positions of the sequence, whichever axis of an accumulator that is."""
        part = pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), n)
        return ref.at[:, part] if self.blocks.transposed else ref.at[part, :]

    def add(self, column: Any, dq_column: Any, tiles: list[_Tile]) -> None:
        """Adds tiles to the gradients; ``column``: their origin in VMEM, ``dq_column``: in ``dq_acc``."""
        transposed, f32 = self.blocks.transposed, jnp.float32
        low, high = min(t.q for t in tiles), max(t.q + t.n_q for t in tiles)
        every = pl.ds(pl.multiple_of(column + low, LANES), high - low)
        o, do = self.o[0, every, :], self.do[0, every, :]
        # delta anew for each block of keys: here it hides behind the MXU
        if transposed:  # both are operands of two products
            qt, dot_ = self.q[0, every, :].T, do.T
            delta = jnp.sum(o.T.astype(f32) * dot_.astype(f32), axis=0, keepdims=True)
        else:
            delta = jnp.sum((o.astype(f32) * do.astype(f32)).T, axis=0, keepdims=True)
        if self.dlse is not None:
            delta = delta - self.dlse[0, :, every]

        def queries(t: _Tile) -> Any:
            return pl.ds(pl.multiple_of(column + t.q, LANES), t.n_q)

        def probabilities(t: _Tile) -> tuple[Array, Array]:
            keys, here = slice(t.kv, t.kv + t.n_kv), slice(t.q - low, t.q - low + t.n_q)
            k, v = self.k[0, keys, :], self.v[0, keys, :]
            if transposed:
                products, dp = dot(k, qt[:, here], NN), dot(v, dot_[:, here], NN)
            else:
                products, dp = dot(k, self.q[0, queries(t), :], NT), dot(v, self.do[0, queries(t), :], NT)
            lse = self.lse[0, :, queries(t)]
            if self.score is not None:
                place = self.column + column + t.q, self.row + t.kv
                scaled = products * self.spec.scale
                logits, pull = self.score.differentiate(scaled, place, queries(t), keys)
                logits = jnp.maximum(logits * scores.LOG2E, MASKED)
            else:
                logits = scores.logits(products, scale=self.spec.scale, softcap=self.spec.softcap)
            s = logits - lse
            if self.extra.alibi_slopes is not None:
                place = self.column + column + self.spec.query_offset, self.row + t.kv
                s = s + scores.alibi(self.extra.alibi_slopes[self.head], place, t.q, s.shape, False)
            if self.extra.bias is not None:
                s = s + self.extra.bias[0, 0, queries(t), keys].astype(f32).T * scores.LOG2E
            if t.place is not None:
                s = self.hide(s, t, queries(t))
            p = scores.exp2(s)
            if self.score is not None:  # a function may be infinite at padded queries, which see nothing
                p = jnp.where(lse < -MASKED, p, 0.0)
            ds = p * (dp - delta[:, here])
            if self.score is not None:
                ds = pull(ds)
            else:
                ds = scores.products_gradient(ds, logits, softcap=self.spec.softcap)
            return p.astype(k.dtype), ds.astype(k.dtype)

        def products(p: Array, ds: Array, t: _Tile) -> None:
            keys, here = slice(t.kv, t.kv + t.n_kv), slice(t.q - low, t.q - low + t.n_q)
            if transposed:
                dv, dk = dot(dot_[:, here], p, NT), dot(qt[:, here], ds, NT)
                dq = dot(self.kt[:, keys], ds, NN)
            else:
                dv, dk = dot(p, self.do[0, queries(t), :], NN), dot(ds, self.q[0, queries(t), :], NN)
                dq = dot(ds, self.k[0, keys, :], TN)
            for ref, value in ((self.dv_acc, dv), (self.dk_acc, dk)):
                part = self.along(ref, t.kv, t.n_kv)
                part[...] = value if t.first else part[...] + value
            part = self.along(self.dq_acc, dq_column + t.q, t.n_q)
            part[...] += dq

        ahead: list[tuple[Array, Array, _Tile]] = []
        for t in tiles:
            ahead.append((*probabilities(t), t))
            if len(ahead) > self.blocks.ahead:
                products(*ahead.pop(0))
        for x in ahead:
            products(*x)

    def hide(self, s: Array, t: _Tile, queries: Any) -> Array:
        ids = None
        if self.extra.q_segment_ids is not None:
            keys = slice(t.kv, t.kv + t.n_kv)
            ids = self.extra.q_segment_ids[0, :, queries], self.extra.kv_segment_ids[0, :, keys]
        return hide(s, self.spec.mask, t.place, ids)

    def result(self, acc: Any, factor: float, ref: Any) -> Array:
        x = (acc[...] * factor).astype(ref.dtype)
        return x.T if self.blocks.transposed else x


def _border_tiles(p: _Pass, border: schedule.Border, query: Any, fresh: bool, shared: bool) -> list[_Tile]:
    """The border's tiles; queries count from the border's first, which is at position ``query``."""
    sub = p.blocks.border
    # Where the mask asks for differences only, they are known now.
    key, query = (p.row, query) if border.shift is None else (0, border.shift)
    touched: set[int] = set()
    tiles = []
    for kv0, kv1, first, last in sorted(schedule.rectangles(border, sub, p.blocks.tile_q, sub)):
        offset, strips = border.offsets[first], range(kv0 // sub, kv1 // sub)
        cut = shared or any(border.states[c][n] != schedule.FULL for c in range(first, last) for n in strips)
        tiles.append(
            _Tile(
                kv0,
                kv1 - kv0,
                offset,
                (last - first) * sub,
                place=(query + offset, key + kv0) if cut else None,
                first=fresh and not touched & set(strips),
            )
        )
        touched |= set(strips)
    return tiles


def _step(p: _Pass, plan: Plan, chunk: int, read: Callable[[str], Any]) -> None:
    b = p.blocks
    in_group, in_memory = read("repeat") * chunk, read("memory") * b.memory_q
    origin = p.column - in_memory
    fresh = functools.reduce(
        jnp.logical_or, [read("border") == n for n, fresh in enumerate(plan.fresh) if fresh], False
    )

    @pl.when(read("first") == 1)
    def _() -> None:
        if b.transposed:
            p.kt[...] = p.k[0].T

    @pl.when((read("first") == 1) & jnp.logical_not(fresh))
    def _() -> None:
        p.dk_acc[...] = jnp.zeros_like(p.dk_acc)
        p.dv_acc[...] = jnp.zeros_like(p.dv_acc)

    for index, border in enumerate(plan.borders):

        def at_border(shared: bool, border: schedule.Border = border, index: int = index) -> None:
            start = read("border_start")
            tiles = _border_tiles(p, border, origin + start, plan.fresh[index], shared)
            p.add(start - in_memory, in_group + start, tiles)

        here = read("border") == index
        if p.extra.q_segment_ids is None:
            pl.when(here)(functools.partial(at_border, False))
        else:
            pl.when(here & (read("shared") == 0))(functools.partial(at_border, False))
            pl.when(here & (read("shared") == 1))(functools.partial(at_border, True))

    def block(at: Any, masked: bool) -> None:
        tiles = [
            _Tile(kv, b.tile_kv, q, b.tile_q, place=(origin + at + q, p.row + kv) if masked else None)
            for q in range(0, b.block_q, b.tile_q)
            for kv in range(0, b.block_kv, b.tile_kv)
        ]
        p.add(at - in_memory, in_group + at, tiles)

    if plan.masked:
        numbers = read("masked_start"), read("start"), read("tiles")

        def under_mask(n: Any, carry: Any) -> Any:
            block(schedule.masked_tile(n, b.block_q, *numbers), True)
            return carry

        lax.fori_loop(0, read("masked_tiles"), under_mask, 0)
    if plan.runs:

        def run(n: Any, start: Any) -> Any:
            block(start + n * b.block_q, False)
            return start

        lax.fori_loop(0, read("tiles"), run, read("start"))

    @pl.when(read("flush") == 1)
    def _() -> None:
        width = p.dq.shape[1]
        p.dq[0] = p.result(p.along(p.dq_acc, read("dq") * width, width), p.spec.scale, p.dq)

    @pl.when(read("last") == 1)
    def _() -> None:
        p.dk[0] = p.result(p.dk_acc, p.spec.scale, p.dk)
        p.dv[0] = p.result(p.dv_acc, 1.0, p.dv)


def _kernel(
    *refs: Any,
    table: schedule.Table,
    plan: Plan,
    blocks: BackwardBlocks,
    spec: AttentionSpec,
    present: tuple[bool, ...],
    score: Callable[..., ScoreTiles] | None,
    kv_heads: int,
    group: int,
    chunk: int,
    has_dlse: bool,
) -> None:
    """``present`` tells which optional operands there are; ``kv_heads`` are those of one batch."""
    remaining = iter(refs)
    prefetch = tuple(itertools.islice(remaining, len(table.operands)))
    inputs = list(itertools.islice(remaining, 6))
    dlse = next(remaining) if has_dlse else None
    extra = Extra(*(next(remaining) if there else None for there in present))
    score_refs = tuple(itertools.islice(remaining, len(spec.score.operands) if spec.score else 0))
    results = list(remaining) + [None] * (not blocks.transposed)
    bh, n = pl.program_id(0), pl.program_id(1)

    def read(name: str) -> Any:
        return table.read(name, n, bh // kv_heads, prefetch)

    position = {
        "head": bh % kv_heads * group + read("repeat"),
        "row": read("row") * blocks.block_kv,
        "column": read("origin") + read("memory") * blocks.memory_q,
    }
    of_scores = score and score(refs=score_refs, batch=bh // kv_heads, head=position["head"])
    p = _Pass(*inputs, dlse, extra, *results, blocks, spec, of_scores, **position)

    @pl.when(n == 0)
    def _() -> None:
        p.dq_acc[...] = jnp.zeros_like(p.dq_acc)

    _step(p, plan, chunk, read)


def backward(
    q: Float[Array, "h m d"],
    k: Float[Array, "g n d"],
    v: Float[Array, "g n e"],
    o: Float[Array, "h m e"],
    lse: Float[Array, "h m"],
    do: Float[Array, "h m e"],
    dlse: Float[Array, "h m"] | None = None,
    operands: Operands = NO_OPERANDS,
    *,
    batch: int,
    spec: AttentionSpec,
    blocks: BackwardBlocks,
    hardware: Hardware,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "h m d"], Float[Array, "g n d"], Float[Array, "g n e"]]:
    """Gradients of attention of padded heads by q, k and v.

    Args:
        q: ``[batch * heads, q_len, head_dim]``; ``q_len`` a multiple of ``blocks.chunk_q``, or of
            ``blocks.memory_q``.
        k: ``[batch * kv_heads, kv_len, head_dim]``; ``kv_len`` a multiple of ``blocks.block_kv``.
        v: ``[batch * kv_heads, kv_len, value_dim]``.
        o: ``[batch * heads, q_len, value_dim]``.
        lse: ``[batch * heads, q_len]`` float32, natural logarithm; -inf for a query that sees nothing.
        do: gradient of ``o``. Padded queries have zeros here and an ``lse`` of -inf.
        dlse: gradient of ``lse``, or None for zero.
        operands: optional tensors, padded to the same lengths.
        batch: of the heads given.
        spec, blocks, hardware: as in the forward pass.
        out_dtype: of the gradients, if not that of ``q``.

    Returns:
        ``dq``, ``dk``, ``dv`` of the shapes of ``q``, ``k``, ``v``.
    """
    heads, q_len, dim = q.shape
    kv_heads, kv_len, value_dim = v.shape
    group = heads // kv_heads
    chunk = blocks.chunk_q or q_len
    chunks = q_len // chunk
    out_dtype = out_dtype or q.dtype
    width = flush_width(blocks)
    tiling = schedule.Tiling(
        rows=kv_len,
        columns=chunk,
        row_block=blocks.block_kv,
        memory=blocks.memory_q,
        tile=blocks.block_q,
        sub=blocks.border,
    )
    chunked = plan_chunks(spec, blocks, operands, tiling, chunks, group, width)

    lse = jnp.where(jnp.isneginf(lse), -MASKED, lse * scores.LOG2E)[:, None]
    inputs = (q, k, v, o, do, lse) + (() if dlse is None else (dlse[:, None],))
    call = functools.partial(
        _call,
        chunked=chunked,
        inputs=inputs,
        operands=operands,
        batch=batch,
        blocks=blocks,
        spec=spec,
        chunk=chunk,
        width=width,
        hardware=hardware,
        dtypes=(out_dtype, jnp.float32 if chunks > 1 else out_dtype),
    )
    if chunks == 1:
        return call(chunked.tables[0].operands)

    def body(sums: tuple, prefetch: Any) -> tuple:
        dq, dk, dv = call(prefetch)
        return (sums[0] + dk, sums[1] + dv), dq

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    numbers = tuple(jnp.stack(column) for column in zip(*(table.operands for table in chunked.tables)))
    (dk, dv), dq = lax.scan(body, zeros, numbers)
    dq = jnp.swapaxes(dq, 0, 1).reshape(q.shape)
    return dq, dk.astype(out_dtype), dv.astype(out_dtype)


def _call(
    prefetch: tuple,
    *,
    chunked: Chunks,
    inputs: tuple,
    operands: Operands,
    batch: int,
    blocks: BackwardBlocks,
    spec: AttentionSpec,
    chunk: int,
    width: int,
    hardware: Hardware,
    dtypes: tuple[DTypeLike, DTypeLike],
) -> tuple[Array, Array, Array]:
    """The kernel over one chunk of queries; ``dtypes`` are those of dq, and of dk and dv."""
    q, k, v, *_ = inputs
    rows, _, dim = q.shape
    kv_rows, kv_len, value_dim = v.shape
    group, kv_heads = rows // kv_rows, kv_rows // batch
    table, f32 = chunked.tables[0], jnp.float32
    once = {"pipeline_mode": pl.Buffered(1)} if blocks.single_buffer else {}

    def read(name: str, b: Any, n: Any, refs: tuple) -> Any:
        return table.read(name, n, b // kv_heads, refs)

    def head(b: Any, n: Any, refs: tuple) -> Any:
        return b * group + read("repeat", b, n, refs)

    def block(b: Any, n: Any, refs: tuple) -> Any:
        """Block of queries of one head."""
        return read("origin", b, n, refs) // blocks.memory_q + read("memory", b, n, refs)

    def queries(depth: int) -> pl.BlockSpec:
        shape = (1, blocks.memory_q, depth)
        return pl.BlockSpec(shape, lambda b, n, *refs: (head(b, n, refs), block(b, n, refs), 0), **once)

    def keys(depth: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, blocks.block_kv, depth), lambda b, n, *refs: (b, read("row", b, n, refs), 0))

    def accumulator(n: int, depth: int) -> Any:
        return pltpu.VMEM((depth, n) if blocks.transposed else (n, depth), f32)

    statistics = pl.BlockSpec(
        (1, 1, blocks.memory_q), lambda b, n, *refs: (head(b, n, refs), 0, block(b, n, refs))
    )
    bias = operands.bias
    extra_specs = Extra(
        pl.BlockSpec((1, 1, blocks.memory_q), lambda b, n, *refs: (b // kv_heads, 0, block(b, n, refs))),
        pl.BlockSpec(
            (1, 1, blocks.block_kv), lambda b, n, *refs: (b // kv_heads, 0, read("row", b, n, refs))
        ),
        bias is not None
        and pl.BlockSpec(
            (1, 1, blocks.memory_q, blocks.block_kv),
            lambda b, n, *refs: (
                b // kv_heads if bias.shape[0] > 1 else 0,
                b % kv_heads * group + read("repeat", b, n, refs) if bias.shape[1] > 1 else 0,
                block(b, n, refs),
                read("row", b, n, refs),
            ),
        ),
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec(memory_space=pltpu.SMEM),
    )
    score_specs = block_specs(
        spec.score,
        operands.score,
        batch=lambda b, n, *refs: b // kv_heads,
        head=lambda b, n, *refs: b % kv_heads * group + read("repeat", b, n, refs),
        query=lambda b, n, *refs: block(b, n, refs),
        key=lambda b, n, *refs: read("row", b, n, refs),
        queries=blocks.memory_q,
        keys=blocks.block_kv,
    )
    # Sinks are in lse already.
    extra = in_kernel(operands)._replace(sinks=None)
    present = tuple(x is not None for x in extra)
    dq, dk, dv = pl.pallas_call(
        functools.partial(
            _kernel,
            table=table,
            plan=chunked.plan,
            blocks=blocks,
            spec=spec,
            present=present,
            score=ScoreTiles.of(spec.score, operands.score, kv_len, hardware),
            kv_heads=kv_heads,
            group=group,
            chunk=chunk,
            has_dlse=len(inputs) > 6,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(kv_rows, chunked.steps),
            in_specs=[
                queries(dim),
                keys(dim),
                keys(value_dim),
                queries(value_dim),
                queries(value_dim),
                *[statistics] * (len(inputs) - 5),
                *itertools.compress(extra_specs, present),
                *score_specs,
            ],
            out_specs=[
                pl.BlockSpec((1, width, dim), lambda b, n, *refs: (b, read("dq", b, n, refs), 0)),
                keys(dim),
                keys(value_dim),
            ],
            scratch_shapes=[
                accumulator(group * chunk, dim),
                accumulator(blocks.block_kv, dim),
                accumulator(blocks.block_kv, value_dim),
                *([pltpu.VMEM((dim, blocks.block_kv), k.dtype)] if blocks.transposed else []),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((kv_rows, group * chunk, dim), dtypes[0]),
            jax.ShapeDtypeStruct(k.shape, dtypes[1]),
            jax.ShapeDtypeStruct(v.shape, dtypes[1]),
        ],
        compiler_params=pltpu.CompilerParams(
            # heads in parallel: both cores of a v4 or v5p chip work
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=hardware.vmem_bytes,
        ),
        interpret=hardware.interpret,
        name="flash_attention_backward",
    )(
        *prefetch,
        *inputs,
        *(x for x in extra if x is not None),
        *as_inputs(spec.score, operands.score),
    )
    return dq.reshape(rows, chunk, dim), dk, dv
