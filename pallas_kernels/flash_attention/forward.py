"""Flash attention, forward: online softmax over blocks of keys, everything transposed.

For a block of queries Q and each block of keys K, V (Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1;
online softmax of Milakov and Gimelshein, arXiv:1805.02867), with logits in powers of two:

    S^T = K Q^T                      (keys, queries)
    m'  = max(m, max_keys S^T)       a = 2^(m - m')       P^T = 2^(S^T - m')
    l'  = a l + sum_keys P^T         O^T' = a O^T + V^T P^T

and at the end O = (O^T / l)^T, lse = (m + log2 l) / log2(e).

Why transposed: the softmax reduces over sublanes, so maximum and sum are elementwise operations on registers
and the statistics of 1,024 queries are 8 registers; P^T is the stationary operand of the MXU, and V^T streams
head_dim rows past it, where P V would fill half of a 256-wide MXU.

In VMEM: K of one head (or ``memory_kv`` keys of it), V^T beside it, one block of Q and O; O^T, m, l in
float32; the logits of one block of keys; of a bias, the part between these queries and keys. V is transposed
once a head, in the kernel, when all of it is there; when keys stream in pieces, V^T comes from outside: each
block of queries meets each piece anew.

Runs are software-pipelined by hand: logits of the next block of keys are issued beside softmax and P V of
this one. The last block of a run and the border after it are one line of code, logits some pieces ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import schedule, scores
from pallas_kernels.flash_attention.blocks import LANES, ForwardBlocks
from pallas_kernels.flash_attention.score_tiles import ScoreTiles, as_inputs, block_specs
from pallas_kernels.flash_attention.spec import NO_OPERANDS, AttentionSpec, Operands
from pallas_kernels.flash_attention.tiles import MASKED, NN, NT, Extra, dot, hide, in_kernel
from pallas_kernels.hardware import Hardware

ONES = 16  # rows of ones beside V^T: one packed tile of bfloat16


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One grid step of the forward pass: the references, and what is static."""

    q: Any  # (1, block_q, D)
    k: Any  # (1, memory, D)
    v: Any  # (1, memory, D), or transposed if keys are streamed
    vt: Any  # (D or D + ONES, memory): scratch, or a view of the streamed operand
    extra: Extra
    o: Any  # (1, block_q, Dv)
    lse: Any  # (1, 1, block_q)
    acc: Any  # (D or D + ONES, block_q) float32: O^T, and l below it
    m: Any  # (8, block_q) float32: the running maximum, eight times
    total: Any  # (8, block_q) float32: eight partial sums l, added up at the end
    s: Any  # (block_kv, block_q) float32: logits one block of keys ahead
    blocks: ForwardBlocks
    spec: AttentionSpec
    score: ScoreTiles | None
    value_dim: int
    head: Any  # of the query
    row: Any  # position of the first query
    memory: Any  # position of the first key in VMEM

    def logits(self, cols: slice, key: Any, n: int) -> Array:
        """Logits in powers of two, (keys, queries), of ``n`` keys from ``key`` and the queries ``cols``."""
        products = dot(self.k[0, pl.ds(key, n), :], self.q[0, cols, :], NT)
        if self.score is not None:
            place = self.row + cols.start, self.memory + key
            s = self.score.apply(products * self.spec.scale, place, cols, pl.ds(key, n))
            s = jnp.maximum(s * scores.LOG2E, MASKED)  # as of a bias
        else:
            s = scores.logits(products, scale=self.spec.scale, softcap=self.spec.softcap)
        if self.extra.alibi_slopes is not None:
            place = self.row + self.spec.query_offset, self.memory + key
            slope = self.extra.alibi_slopes[self.head]
            s = s + scores.alibi(slope, place, cols.start, s.shape, self.linear_alibi)
        if self.extra.bias is not None:
            bias = self.extra.bias[0, 0, cols, pl.ds(key, n)].astype(jnp.float32)
            s = s + jnp.maximum(bias, MASKED).T * scores.LOG2E  # of -inf, the softmax would make NaN
        return s

    @property
    def linear_alibi(self) -> bool:
        """The keys' part alone grows with the block's length: too coarse for float32, far below bfloat16."""
        return self.q.dtype == jnp.bfloat16 and self.spec.mask.hides_after(self.spec.query_offset)

    def accumulate(self, s: Array, cols: slice, key: Any, first: bool = False) -> None:
        """Adds keys [key, key + len(s)) to the queries ``cols``; ``first`` replaces what was there."""
        n, width = s.shape
        m = jnp.max(jnp.max(s.reshape(n // 8, 8, width), axis=0), axis=0, keepdims=True)
        m = jnp.broadcast_to(m, (8, width))
        if not first:
            old = self.m[:, cols]
            m = jnp.maximum(old, m)
            alpha = scores.exp2(old - m)
        self.m[:, cols] = m
        p = scores.exp2(s - m[:1])
        if not self.blocks.mxu_row_sums:
            total = jnp.sum(p.reshape(n // 8, 8, width), axis=0)
            self.total[:, cols] = total if first else alpha * self.total[:, cols] + total
        pv = dot(self.vt[:, pl.ds(key, n)], p.astype(self.vt.dtype), NN)
        self.acc[:, cols] = pv if first else alpha[:1] * self.acc[:, cols] + pv

    def hide(self, s: Array, key: Any, cols: slice, place: tuple[Any, Any]) -> Array:
        """Hides pairs of a tile that begins at ``key`` of VMEM; ``place`` is its (query, key) position."""
        ids = None
        if self.extra.q_segment_ids is not None:
            keys = pl.ds(pl.multiple_of(key, LANES), s.shape[0])
            ids = self.extra.q_segment_ids[0, :, cols], self.extra.kv_segment_ids[0, :, keys]
        return hide(s, self.spec.mask, place, ids)

    def transpose_values(self, start: Any, n: int) -> None:
        """Writes V^T of ``n`` keys, and the rows of ones below it; small pieces keep it in registers."""
        for at in range(0, n, 512):
            width = min(512, n - at)
            columns = pl.ds(pl.multiple_of(start + at, LANES), width)
            self.vt[: self.value_dim, columns] = self.v[0, columns, :].T
            if self.blocks.mxu_row_sums:
                self.vt[self.value_dim :, columns] = jnp.ones((ONES, width), self.vt.dtype)

    def start(self) -> None:
        self.acc[...] = jnp.zeros_like(self.acc)
        self.m[...] = jnp.full_like(self.m, MASKED)
        self.total[...] = jnp.zeros_like(self.total)

    def finish(self) -> None:
        width = self.blocks.border
        for at in reversed(range(0, self.blocks.block_q, width)):
            cols = slice(at, at + width)
            if self.blocks.mxu_row_sums:
                total = self.acc[self.value_dim : self.value_dim + 1, cols]
            else:
                total = jnp.sum(self.total[:, cols], axis=0, keepdims=True)
            m, left_out = self.m[:1, cols], 0.0
            if self.extra.alibi_slopes is not None and self.linear_alibi:
                left_out = scores.alibi_of_queries(self.extra.alibi_slopes[self.head], at, width)
            if self.extra.sinks is not None:  # one more key, whose value is zero
                sink = self.extra.sinks[self.head] * scores.LOG2E + left_out
                top = jnp.maximum(m, sink)
                keep = scores.exp2(m - top)
                total = keep * total + scores.exp2(sink - top)
                factor, lse = keep / total, top + jnp.log2(total)
            else:
                seen = m > MASKED / 2  # a query that saw nothing has summed masked keys
                factor = jnp.where(seen, 1.0 / total, 0.0)
                lse = jnp.where(seen, m + jnp.log2(total), -jnp.inf)
            o = self.acc[: self.value_dim, cols] * factor
            self.o[0, cols, :] = o.T.astype(self.o.dtype)
            self.lse[0, :, cols] = (lse - left_out) * (1 / scores.LOG2E)


def _border_pieces(
    p: _Pass, border: schedule.Border, start: Any, fresh: bool, shared: bool
) -> list[tuple[Callable[[], Array], Callable[[Array], None]]]:
    """(issue logits, accumulate them) for each rectangle of the border, whose first key is ``start``."""
    sub = p.blocks.border
    # Where the mask asks for differences only, they are known now.
    row, base = (p.row, start) if border.shift is None else (0, border.shift)
    touched: set[int] = set()
    pieces = []
    for q0, q1, first, last in schedule.rectangles(border, sub, p.blocks.border_kv, p.blocks.tile_q):
        cols, offset = slice(q0, q1), border.offsets[first]
        at = pl.multiple_of(start - p.memory + offset, LANES)

        def issue(cols: slice = cols, at: Any = at, first: int = first, last: int = last) -> Array:
            s = p.logits(cols, at, (last - first) * sub)
            # Merged strips are alike; where the mask cuts differs only between sub-columns.
            cut = [shared or border.states[c][cols.start // sub] != schedule.FULL for c in range(first, last)]
            parts, c = [], 0
            while c < len(cut):
                stop = next((n for n in range(c, len(cut)) if cut[n] != cut[c]), len(cut))
                part = s[c * sub : stop * sub]
                if cut[c]:
                    place = row + cols.start, base + border.offsets[first + c]
                    part = p.hide(part, at + c * sub, cols, place)
                parts.append(part)
                c = stop
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)

        strips = set(range(q0 // sub, q1 // sub))
        pieces.append(
            (issue, functools.partial(p.accumulate, cols=cols, key=at, first=fresh and not strips & touched))
        )
        touched |= strips
    return pieces


def _step(p: _Pass, kind: schedule.Kind, met: int, read: Callable[[str], Any]) -> None:
    """The body of one kind of step; ``met``: keys whose values are to be transposed."""
    b = p.blocks
    if met:
        p.transpose_values(read("met_start"), met)
    tiles = [slice(a, a + b.tile_q) for a in range(0, b.block_q, b.tile_q)]
    # Where a border alone reaches every query, its first pieces write what others would add to.
    whole_border = kind.border is not None and all(map(any, zip(*kind.border.states)))
    fresh = kind.first and not kind.run and not kind.masked and whole_border
    if kind.first and not fresh:
        p.start()

    start, count = read("start"), read("tiles")
    at = lambda j: pl.multiple_of(start - p.memory + j * b.block_kv, LANES)  # noqa: E731
    if kind.run:
        for cols in tiles:
            p.s[:, cols] = p.logits(cols, at(0), b.block_kv)
    if kind.masked:

        def under_mask(n: Any, carry: Any) -> Any:
            first = schedule.masked_tile(n, b.block_kv, read("masked_start"), start, count)
            key = pl.multiple_of(first - p.memory, LANES)
            for cols in tiles:
                s = p.logits(cols, key, b.block_kv)
                p.accumulate(p.hide(s, key, cols, (p.row + cols.start, first)), cols, key)
            return carry

        lax.fori_loop(0, read("masked_tiles"), under_mask, 0)

    pieces = []
    if kind.run:

        def step(j: Any) -> None:
            for cols in tiles:
                s = p.s[:, cols]
                following = p.logits(cols, at(j + 1), b.block_kv)
                p.accumulate(s, cols, at(j))
                p.s[:, cols] = following

        loops = (count - 1) // b.unroll

        def body(n: Any, carry: Any) -> Any:
            for u in range(b.unroll):
                step(n * b.unroll + u)
            return carry

        lax.fori_loop(0, loops, body, 0)
        for u in range(kind.remainder):
            step(loops * b.unroll + u)
        pieces += [
            (lambda: None, lambda _, cols=cols: p.accumulate(p.s[:, cols], cols, at(count - 1)))
            for cols in tiles[::-1]
        ]
    if kind.border is not None:
        pieces += _border_pieces(p, kind.border, read("border_start"), fresh, kind.shared)

    issued = [issue() for issue, _ in pieces[: b.ahead]]
    for n, (_, accumulate) in enumerate(pieces):
        if n + b.ahead < len(pieces):
            issued.append(pieces[n + b.ahead][0]())
        accumulate(issued.pop(0))
    if kind.last:
        p.finish()


def _kernel(
    *refs: Any,
    table: schedule.Table,
    kinds: tuple[tuple[schedule.Kind, int], ...],
    blocks: ForwardBlocks,
    spec: AttentionSpec,
    present: tuple[bool, ...],
    score: Callable[..., ScoreTiles] | None,
    heads: int,
    memory: int,
    streamed: bool,
) -> None:
    """``present`` tells which optional operands there are, ``heads`` are those of one batch."""
    remaining = iter(refs)
    prefetch = tuple(itertools.islice(remaining, len(table.operands)))
    q, k, v = itertools.islice(remaining, 3)
    extra = Extra(*(next(remaining) if there else None for there in present))
    score_refs = tuple(itertools.islice(remaining, len(spec.score.operands) if spec.score else 0))
    o, lse = itertools.islice(remaining, 2)
    vt = v.at[0] if streamed else next(remaining)
    bh, n = pl.program_id(0), pl.program_id(1)

    def read(name: str) -> Any:
        return table.read(name, n, bh // heads, prefetch)

    position = {"head": bh % heads, "row": read("row") * blocks.block_q, "memory": read("memory") * memory}
    of_scores = score and score(refs=score_refs, batch=bh // heads, head=bh % heads)
    p = _Pass(q, k, v, vt, extra, o, lse, *remaining, blocks, spec, of_scores, o.shape[-1], **position)
    for index, (kind, met) in enumerate(kinds):
        pl.when(read("kind") == index)(functools.partial(_step, p, kind, met, read))


def _steps(
    spec: AttentionSpec, tiling: schedule.Tiling, operands: Operands, streamed: bool
) -> tuple[int, tuple[tuple[schedule.Kind, int], ...], schedule.Table]:
    """The number of steps, their kinds (each with the keys it is the first to meet), and their numbers."""
    steps = schedule.build(spec.mask, tiling)
    met = [(None, 0)] * len(steps) if streamed else schedule.first_meetings(steps, tiling)
    of_step = [(step.kind, n) for step, (_, n) in zip(steps, met)]
    batched = {}
    if operands.q_segment_ids is not None:
        # Which kind a step is of depends on its batch: with a run or without, and if without perhaps shared.
        variants = []
        for run, shared in ((True, False), (False, False), (False, True)):
            variants.append(
                [
                    (
                        dataclasses.replace(
                            kind,
                            masked=kind.run or kind.masked,
                            run=kind.run and run,
                            shared=kind.border is not None and shared,
                        ),
                        n,
                    )
                    for kind, n in of_step
                ]
            )
        kinds = tuple(dict.fromkeys(itertools.chain(*variants)))
        batched = schedule.narrow(
            steps,
            tiling,
            *schedule.segments_meet(
                operands.q_segment_ids, operands.kv_segment_ids, tiling.row_block, tiling.tile
            ),
        )
        with_run, without, shared = np.array([[kinds.index(kind) for kind in column] for column in variants])
        plain = jnp.where(batched["tiles"] > 0, with_run, without)
        batched["kind"] = jnp.where(batched.pop("shared"), shared, plain)
    else:
        kinds = tuple(dict.fromkeys(of_step))
    columns = {
        "row": [s.row for s in steps],
        "memory": [s.memory for s in steps],
        "kind": [kinds.index(kind) if kind in kinds else None for kind in of_step],
        "start": [s.start for s in steps],
        "tiles": [s.tiles for s in steps],
        "masked_start": [s.masked_start for s in steps],
        "masked_tiles": [s.masked_tiles for s in steps],
        "border_start": [s.border_start for s in steps],
        "met_start": [start for start, _ in met],
    }
    return len(steps), kinds, schedule.Table(columns, batched=batched)


def forward(
    q: Float[Array, "h m d"],
    k: Float[Array, "g n d"],
    v: Float[Array, "g n e"],
    operands: Operands = NO_OPERANDS,
    *,
    batch: int,
    spec: AttentionSpec,
    blocks: ForwardBlocks,
    hardware: Hardware,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "h m e"], Float[Array, "h m"]]:
    """Attention of padded heads.

    Args:
        q: ``[batch * heads, q_len, head_dim]``; ``q_len`` a multiple of ``blocks.block_q``.
        k: ``[batch * kv_heads, kv_len, head_dim]``; ``kv_len`` a multiple of ``blocks.memory_kv``, or of
            ``blocks.block_kv``. Padding must be hidden by the mask from every true query.
        v: ``[batch * kv_heads, kv_len, value_dim]``.
        operands: optional tensors, padded to the same lengths.
        batch: of the heads given.
        spec: mask, scale and score changes.
        blocks: tiling that fits these lengths.
        hardware: what to compile for.
        out_dtype: of ``o``, if not that of ``q``.

    Returns:
        ``o [batch * heads, q_len, value_dim]``, and ``lse [batch * heads, q_len]`` float32.
    """
    rows, q_len, dim = q.shape
    kv_rows, kv_len, value_dim = v.shape
    heads, group = rows // batch, rows // kv_rows
    memory = blocks.memory_kv or kv_len
    streamed = memory < kv_len
    tiling = schedule.Tiling(
        rows=q_len,
        columns=kv_len,
        row_block=blocks.block_q,
        memory=memory,
        tile=blocks.block_kv,
        sub=blocks.border,
        unroll=blocks.unroll,
    )
    steps, kinds, table = _steps(spec, tiling, operands, streamed)
    depth = value_dim + (ONES if blocks.mxu_row_sums else 0)
    if streamed:
        v = jnp.swapaxes(v, 1, 2)
        if blocks.mxu_row_sums:
            v = jnp.concatenate([v, jnp.ones((kv_rows, ONES, kv_len), v.dtype)], axis=1)

    def row(h: Any, n: Any, refs: tuple) -> Any:
        return table.read("row", n, h // heads, refs)

    def piece(h: Any, n: Any, refs: tuple) -> Any:
        return table.read("memory", n, h // heads, refs)

    block_q, f32 = blocks.block_q, jnp.float32
    once = {"pipeline_mode": pl.Buffered(1)} if blocks.single_buffer else {}
    v_spec = (
        pl.BlockSpec((1, depth, memory), lambda h, n, *refs: (h // group, 0, piece(h, n, refs)))
        if streamed
        else pl.BlockSpec((1, memory, value_dim), lambda h, n, *refs: (h // group, 0, 0), **once)
    )
    bias = operands.bias
    one = (lambda h: 0, lambda h: h)
    extra_specs = Extra(
        pl.BlockSpec((1, 1, block_q), lambda h, n, *refs: (h // heads, 0, row(h, n, refs))),
        pl.BlockSpec((1, 1, memory), lambda h, n, *refs: (h // heads, 0, piece(h, n, refs))),
        bias is not None
        and pl.BlockSpec(
            (1, 1, block_q, memory),
            lambda h, n, *refs: (
                one[bias.shape[0] > 1](h // heads),
                one[bias.shape[1] > 1](h % heads),
                row(h, n, refs),
                piece(h, n, refs),
            ),
        ),
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec(memory_space=pltpu.SMEM),
    )
    score_specs = block_specs(
        spec.score,
        operands.score,
        batch=lambda h, n, *refs: h // heads,
        head=lambda h, n, *refs: h % heads,
        query=lambda h, n, *refs: row(h, n, refs),
        key=lambda h, n, *refs: piece(h, n, refs),
        queries=block_q,
        keys=memory,
    )
    present = tuple(x is not None for x in in_kernel(operands))
    o, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            table=table,
            kinds=kinds,
            blocks=blocks,
            spec=spec,
            present=present,
            score=ScoreTiles.of(spec.score, operands.score, kv_len, hardware),
            heads=heads,
            memory=memory,
            streamed=streamed,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table.operands),
            grid=(rows, steps),
            in_specs=[
                pl.BlockSpec((1, block_q, dim), lambda h, n, *refs: (h, row(h, n, refs), 0)),
                pl.BlockSpec(
                    (1, memory, dim), lambda h, n, *refs: (h // group, piece(h, n, refs), 0), **once
                ),
                v_spec,
                *itertools.compress(extra_specs, present),
                *score_specs,
            ],
            out_specs=[
                pl.BlockSpec((1, block_q, value_dim), lambda h, n, *refs: (h, row(h, n, refs), 0)),
                pl.BlockSpec((1, 1, block_q), lambda h, n, *refs: (h, 0, row(h, n, refs))),
            ],
            scratch_shapes=[
                *([] if streamed else [pltpu.VMEM((depth, memory), v.dtype)]),
                pltpu.VMEM((depth, block_q), f32),
                pltpu.VMEM((8, block_q), f32),
                pltpu.VMEM((8, block_q), f32),
                pltpu.VMEM((blocks.block_kv, block_q), f32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, q_len, value_dim), out_dtype or q.dtype),
            jax.ShapeDtypeStruct((rows, 1, q_len), f32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=hardware.vmem_bytes
        ),
        interpret=hardware.interpret,
        name="flash_attention_forward",
    )(
        *table.operands,
        q,
        k,
        v,
        *(x for x in in_kernel(operands) if x is not None),
        *as_inputs(spec.score, operands.score),
    )
    return o, lse[:, 0]
