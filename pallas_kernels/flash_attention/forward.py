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
float32; the logits of one block of keys. V is transposed once a head, in the kernel, when all of it is there;
when keys stream in pieces, V^T comes from outside, since each block of queries meets each piece anew.

Runs are software-pipelined by hand: logits of the next block of keys are issued beside softmax and P V of this
one. The last block of a run and the border after it are one straight line of code, logits some pieces ahead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import schedule, scores
from pallas_kernels.flash_attention.blocks import ForwardBlocks
from pallas_kernels.flash_attention.spec import AttentionSpec
from pallas_kernels.hardware import Hardware

# Finite, so that a difference of two masked values is no NaN; no true logit is below it.
MASKED = -1e30
NT = (((1,), (1,)), ((), ()))  # a @ b.T
NN = (((1,), (0,)), ((), ()))  # a @ b
ONES = 16  # rows of ones beside V^T: one packed tile of bfloat16


def dot(a: Array, b: Array, dims: Any) -> Array:
    """A product accumulated in float32; float32 operands are not rounded to bfloat16 on the MXU."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One grid step of the forward pass: the references, and what is static."""

    q: Any  # (1, block_q, D)
    k: Any  # (1, memory, D)
    v: Any  # (1, memory, D), or transposed if keys are streamed
    vt: Any  # (D or D + ONES, memory): scratch, or a view of the streamed operand
    o: Any  # (1, block_q, Dv)
    lse: Any  # (1, 1, block_q)
    acc: Any  # (D or D + ONES, block_q) float32: O^T, and l below it
    m: Any  # (8, block_q) float32: the running maximum, eight times
    l: Any  # (8, block_q) float32: eight partial sums, added up at the end
    s: Any  # (block_kv, block_q) float32: logits one block of keys ahead
    blocks: ForwardBlocks
    spec: AttentionSpec
    value_dim: int

    def logits(self, cols: slice, key: Any, n: int) -> Array:
        """Logits in powers of two, (keys, queries), of ``n`` keys from ``key`` and the queries ``cols``."""
        products = dot(self.k[0, pl.ds(key, n), :], self.q[0, cols, :], NT)
        return scores.logits(products, scale=self.spec.scale, softcap=self.spec.softcap)

    def accumulate(self, s: Array, cols: slice, key: Any, first: bool = False) -> None:
        """Adds keys [key, key + len(s)) to the queries ``cols``; ``first`` replaces what was there."""
        n, width = s.shape
        m = jnp.max(jnp.max(s.reshape(n // 8, 8, width), axis=0), axis=0, keepdims=True)
        m = jnp.broadcast_to(m, (8, width))
        if not first:
            old = self.m[:, cols]
            m = jnp.maximum(old, m)
            alpha = jnp.exp2(old - m)
        self.m[:, cols] = m
        p = jnp.exp2(s - m[:1])
        if not self.blocks.mxu_row_sums:
            total = jnp.sum(p.reshape(n // 8, 8, width), axis=0)
            self.l[:, cols] = total if first else alpha * self.l[:, cols] + total
        pv = dot(self.vt[:, pl.ds(key, n)], p.astype(self.vt.dtype), NN)
        self.acc[:, cols] = pv if first else alpha[:1] * self.acc[:, cols] + pv

    def mask(self, s: Array, row: Any, column: Any) -> Array:
        """Hides the pairs of a tile that begins at query ``row`` and key ``column``."""
        kv = column + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        q = row + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        return jnp.where(self.spec.mask.visible(q, kv), s, MASKED)

    def transpose_values(self, start: Any, n: int) -> None:
        """Writes V^T of ``n`` keys, and the rows of ones below it; small pieces keep it in registers."""
        for at in range(0, n, 512):
            width = min(512, n - at)
            columns = pl.ds(pl.multiple_of(start + at, 128), width)
            self.vt[: self.value_dim, columns] = self.v[0, columns, :].T
            if self.blocks.mxu_row_sums:
                self.vt[self.value_dim :, columns] = jnp.ones((ONES, width), self.vt.dtype)

    def start(self) -> None:
        self.acc[...] = jnp.zeros_like(self.acc)
        self.m[...] = jnp.full_like(self.m, MASKED)
        self.l[...] = jnp.zeros_like(self.l)

    def finish(self) -> None:
        width = self.blocks.border
        for at in reversed(range(0, self.blocks.block_q, width)):
            cols = slice(at, at + width)
            if self.blocks.mxu_row_sums:
                total = self.acc[self.value_dim : self.value_dim + 1, cols]
            else:
                total = jnp.sum(self.l[:, cols], axis=0, keepdims=True)
            m = self.m[:1, cols]
            seen = m > MASKED / 2  # a query that saw nothing has summed masked keys
            o = self.acc[: self.value_dim, cols] * jnp.where(seen, 1.0 / total, 0.0)
            self.o[0, cols, :] = o.T.astype(self.o.dtype)
            lse = (m + jnp.log2(total)) * (1 / scores.LOG2E)
            self.lse[0, :, cols] = jnp.where(seen, lse, -jnp.inf)


def _border_pieces(
    p: _Pass, border: schedule.Border, row: Any, base: Any, key: Any, fresh: bool
) -> list[tuple[Callable[[], Array], Callable[[Array], None]]]:
    """(issue logits, accumulate them) for each rectangle of the border.

    ``row`` and ``base`` are the positions of the step's first query and of the border's first key, ``key`` is
    the latter counted from the keys in VMEM.
    """
    sub = p.blocks.border
    if border.shift is not None:
        row, base = 0, border.shift  # the mask asks for differences only: known now
    touched: set[int] = set()
    pieces = []
    for q0, q1, first, last in schedule.rectangles(border, sub, p.blocks.border_kv, p.blocks.tile_q):
        cols, offset = slice(q0, q1), border.offsets[first]
        at = pl.multiple_of(key + offset, 128)

        def issue(cols: slice = cols, at: Any = at, first: int = first, last: int = last) -> Array:
            s = p.logits(cols, at, (last - first) * sub)
            # Merged strips are alike; where the mask cuts differs only between sub-columns.
            cut = [border.states[c][cols.start // sub] != schedule.FULL for c in range(first, last)]
            parts, c = [], 0
            while c < len(cut):
                stop = next((n for n in range(c, len(cut)) if cut[n] != cut[c]), len(cut))
                part = s[c * sub : stop * sub]
                column = base + border.offsets[first + c]
                parts.append(p.mask(part, row + cols.start, column) if cut[c] else part)
                c = stop
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)

        strips = set(range(q0 // sub, q1 // sub))
        pieces.append(
            (issue, functools.partial(p.accumulate, cols=cols, key=at, first=fresh and not strips & touched))
        )
        touched |= strips
    return pieces


def _step(
    p: _Pass, kind: schedule.Kind, met: int, row: Any, memory: Any, read: Callable[[str], Any]
) -> None:
    """The body of one kind of step.

    ``row``: first query; ``memory``: first key in VMEM; ``met``: keys whose values are to be transposed.
    """
    b = p.blocks
    if met:
        p.transpose_values(read("met_start"), met)
    tiles = [slice(a, a + b.tile_q) for a in range(0, b.block_q, b.tile_q)]
    whole_border = kind.border is not None and all(
        any(column[n] for column in kind.border.states) for n in range(b.block_q // b.border)
    )
    # Where a border alone reaches every query, its first pieces write what others would add to.
    fresh = kind.first and kind.run is None and whole_border
    if kind.first and not fresh:
        p.start()

    pieces = []
    if kind.run is not None:
        start, count = read("start"), read("tiles")
        at = lambda j: pl.multiple_of(start - memory + j * b.block_kv, b.block_kv)  # noqa: E731

        def consume(s: Array, cols: slice, j: Any) -> None:
            if kind.run:
                s = p.mask(s, row + cols.start, start + j * b.block_kv)
            p.accumulate(s, cols, at(j))

        def step(j: Any) -> None:
            for cols in tiles:
                s = p.s[:, cols]
                following = p.logits(cols, at(j + 1), b.block_kv)
                consume(s, cols, j)
                p.s[:, cols] = following

        for cols in tiles:
            p.s[:, cols] = p.logits(cols, at(0), b.block_kv)
        loops = (count - 1) // b.unroll

        def body(n: Any, carry: Any) -> Any:
            for u in range(b.unroll):
                step(n * b.unroll + u)
            return carry

        lax.fori_loop(0, loops, body, 0)
        for u in range(kind.remainder):
            step(loops * b.unroll + u)
        pieces += [
            (lambda: None, lambda _, cols=cols: consume(p.s[:, cols], cols, count - 1)) for cols in tiles[::-1]
        ]
    if kind.border is not None:
        key = read("border_start")
        pieces += _border_pieces(p, kind.border, row, key, key - memory, fresh)

    issued = [issue() for issue, _ in pieces[: b.ahead]]
    for n, (_, accumulate) in enumerate(pieces):
        if n + b.ahead < len(pieces):
            issued.append(pieces[n + b.ahead][0]())
        accumulate(issued.pop(0))
    if kind.last:
        p.finish()


def _kernel(*refs: Any, table: schedule.Table, kinds: tuple, blocks: ForwardBlocks, spec: AttentionSpec,
            memory: int, streamed: bool) -> None:
    prefetch, refs = refs[: len(table.operands)], refs[len(table.operands) :]
    q, k, v, o, lse, *scratch = refs
    n = pl.program_id(1)
    read = lambda name: table.read(name, n, prefetch)  # noqa: E731
    value_dim = o.shape[-1]
    vt = v.at[0] if streamed else scratch.pop(0)
    p = _Pass(q, k, v, vt, o, lse, *scratch, blocks=blocks, spec=spec, value_dim=value_dim)

    row, column = read("row") * blocks.block_q, read("memory") * memory
    for index, (kind, met) in enumerate(kinds):
        pl.when(read("kind") == index)(functools.partial(_step, p, kind, met, row, column, read))


def forward(
    q: Float[Array, "h m d"],
    k: Float[Array, "g n d"],
    v: Float[Array, "g n e"],
    *,
    spec: AttentionSpec,
    blocks: ForwardBlocks,
    hardware: Hardware,
) -> tuple[Float[Array, "h m e"], Float[Array, "h m"]]:
    """Attention of padded heads.

    Args:
        q: ``[batch * heads, q_len, head_dim]``; ``q_len`` a multiple of ``blocks.block_q``.
        k, v: ``[batch * kv_heads, kv_len, head_dim]``; ``kv_len`` a multiple of ``blocks.memory_kv``, or of
            ``blocks.block_kv``. Padding must be hidden by the mask from every true query.
        spec: mask, scale and score changes.
        blocks: tiling that fits these lengths.
        hardware: what to compile for.

    Returns:
        ``o`` like ``q``, and ``lse [batch * heads, q_len]`` float32.
    """
    heads, q_len, dim = q.shape
    kv_heads, kv_len, value_dim = v.shape
    group = heads // kv_heads
    memory = blocks.memory_kv or kv_len
    streamed = memory < kv_len
    tiling = schedule.Tiling(
        rows=q_len, columns=kv_len, row_block=blocks.block_q, memory=memory, tile=blocks.block_kv,
        sub=blocks.border, unroll=blocks.unroll,
    )
    steps = schedule.build(spec.mask, tiling)
    met = [(None, 0)] * len(steps) if streamed else schedule.first_meetings(steps, tiling)
    of_step = [(step.kind, n) for step, (_, n) in zip(steps, met)]
    kinds = tuple(dict.fromkeys(of_step))
    table = schedule.Table({
        "row": [s.row for s in steps],
        "memory": [s.memory for s in steps],
        "kind": [kinds.index(kind) for kind in of_step],
        "start": [s.start for s in steps],
        "tiles": [s.tiles for s in steps],
        "border_start": [s.border_start for s in steps],
        "met_start": [start for start, _ in met],
    })
    depth = value_dim + (ONES if blocks.mxu_row_sums else 0)
    if streamed:
        v = jnp.swapaxes(v, 1, 2)
        if blocks.mxu_row_sums:
            v = jnp.concatenate([v, jnp.ones((kv_heads, ONES, kv_len), v.dtype)], axis=1)

    row = lambda n, refs: table.read("row", n, refs)  # noqa: E731
    piece = lambda n, refs: table.read("memory", n, refs)  # noqa: E731
    block_q = blocks.block_q
    f32 = jnp.float32
    o, lse = pl.pallas_call(
        functools.partial(_kernel, table=table, kinds=kinds, blocks=blocks, spec=spec, memory=memory,
                          streamed=streamed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table.operands),
            grid=(heads, len(steps)),
            in_specs=[
                pl.BlockSpec((1, block_q, dim), lambda h, n, *refs: (h, row(n, refs), 0)),
                pl.BlockSpec((1, memory, dim), lambda h, n, *refs: (h // group, piece(n, refs), 0)),
                pl.BlockSpec((1, depth, memory), lambda h, n, *refs: (h // group, 0, piece(n, refs)))
                if streamed
                else pl.BlockSpec((1, memory, value_dim), lambda h, n, *refs: (h // group, 0, 0)),
            ],
            out_specs=[
                pl.BlockSpec((1, block_q, value_dim), lambda h, n, *refs: (h, row(n, refs), 0)),
                pl.BlockSpec((1, 1, block_q), lambda h, n, *refs: (h, 0, row(n, refs))),
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
            jax.ShapeDtypeStruct((heads, q_len, value_dim), q.dtype),
            jax.ShapeDtypeStruct((heads, 1, q_len), f32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=hardware.vmem_bytes
        ),
        interpret=hardware.interpret,
        name="flash_attention_forward",
    )(*table.operands, q, k, v)
    return o, lse[:, 0]
