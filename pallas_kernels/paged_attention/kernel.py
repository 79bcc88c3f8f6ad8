"""Paged attention: one kernel for decoding, chunks of queries and ragged batches.

Its work is a list of query blocks, each some consecutive queries of one sequence, and for each the span of
keys that any of them sees. For a block of queries Q and each block of keys K, V that pages bring (online
softmax of Milakov and Gimelshein, arXiv:1805.02867, in powers of two):

    S = Q K^T                            (rows, keys), rows = heads * queries * group
    m' = max(m, max_keys S)              a = 2^(m - m')        P = 2^(S - m')
    l' = a l + sum_keys P                O' = a O + P V

Q of ``blocks.heads`` kv heads at once is spread to a block-diagonal matrix, so that their products are one
with K as it lies in the pages. For one query a sequence that is all heads: few rows stream past K and V, and
what is wasted is free. For many queries it is one head, and nothing is wasted; all is then computed
transposed, as in flash attention's forward: the softmax reduces over sublanes, and P^T fills the MXU.

In VMEM: ``depth`` buffers of ``block_kv`` tokens, a ring that runs on across blocks and sequences: the block
``depth - 1`` further is asked for before this one is awaited. A full block is awaited once (a DMA semaphore
counts bytes), a partial one page by page. Beside them one block of Q and O, and O, m, l in float32.

In SMEM: the list of query blocks, and of the page table the window of ``WINDOW`` sequences that this one is
in and the next; they move on with the grid, so a table of any size fits. The ring runs ahead as far as they
reach. They are flat: a page is asked for by scalar code, which is what takes the time where heads are few. So
in the common case, a full block that every query sees and another to ask for, both are done in one piece of
code, and the scalar unit works beside the others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels import scores
from pallas_kernels.flash_attention.tiles import MASKED, NN, NT, as_column, dot
from pallas_kernels.paged_attention.blocks import PagedBlocks
from pallas_kernels.paged_attention.by_key import ByKey
from pallas_kernels.paged_attention.score_rows import PagedScore
from pallas_kernels.paged_attention.spec import PagedSpec

WINDOW = 8


def widen_float8(x: Array) -> Array:
    """Numbers in float8_e4m3fn (arXiv:2209.05433) as float32, exactly; the compiler's own way is slower."""
    x = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32)
    magnitude = x & 0x7F
    f = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)  # 2^(e - 7) (1 + m / 8)
    f = jnp.where(magnitude < 8, 2 * f - 2.0**-6, f)  # below 2^-6 there is no implicit one
    return jnp.where(x < 0, -f, f)


class QueryBlocks(NamedTuple):
    """The work, one entry for each block of queries, in the order of sequences; int32.

    Attributes:
        sequence: row of the page table.
        begin: first key that a query of the block sees, rounded down to a page.
        end: behind the last key that one sees; equal to ``begin`` for a block that is dead.
        position: of the block's first query among the keys.
    """

    sequence: Int[Array, " n"]
    begin: Int[Array, " n"]
    end: Int[Array, " n"]
    position: Int[Array, " n"]


@dataclasses.dataclass(frozen=True)
class Step:
    """One grid step, a block of queries: the references, and what is static."""

    work: Any  # (4 * n,) int32 in SMEM
    tables: Any  # (2 * WINDOW * pages_per_seq,) int32 in SMEM
    q: Any  # (1, sets, rows, D)
    kv: Any  # (num_pages, page_size, 2 * kv_heads * D) in HBM
    sinks: Any  # (heads,) float32 in SMEM, or None
    k_scale: Any  # (kv_heads,) likewise
    v_scale: Any  # likewise
    o: Any  # (1, sets, rows, D)
    buffers: Any  # (depth, block_kv, 2 * kv_heads * D)
    spread: Any  # (sets, rows, heads * D): Q, block-diagonal
    acc: Any  # (sets, rows, heads * D) float32; transposed (sets, D, rows)
    m: Any  # (sets, rows, LANES) float32; transposed (sets, 8, rows)
    total: Any  # likewise: l
    ring: Any  # SMEM (4,): blocks asked for, cursor (query block, block of keys), blocks awaited
    arrived: Any  # DMA semaphores, one a buffer
    score: PagedScore | None
    by_key: ByKey | None
    k_scales: Any  # of pages: (depth, sets, kv heads of a set, block_kv), a buffer of by_key, or None
    v_scales: Any  # likewise
    blocks: PagedBlocks
    spec: PagedSpec
    group: int
    core: Any
    step: Any
    number: int  # of query blocks in all
    of_core: int  # of query blocks of a core

    @property
    def page_size(self) -> int:
        return self.kv.shape[1]

    @property
    def dim(self) -> int:
        return self.q.shape[3]

    @property
    def index(self) -> Any:
        return self.core * self.of_core + self.step

    def entry(self, field: str, block: Any) -> Any:
        return self.work[QueryBlocks._fields.index(field) * self.number + block]

    def key_blocks(self, block: Any) -> Any:
        """Blocks of keys of a query block; one, of no keys, if it is dead."""
        n = self.entry("end", block) - self.entry("begin", block)
        return jnp.maximum((n + self.blocks.block_kv - 1) // self.blocks.block_kv, 1)

    def copy(self, slot: Any, j: Any, page: Any) -> Any:
        rows = pl.ds(pl.multiple_of(j * self.page_size, self.page_size), self.page_size)
        return pltpu.make_async_copy(self.kv.at[page], self.buffers.at[slot, rows], self.arrived.at[slot])

    def pages(self, left: Any) -> Any:
        return (left + self.page_size - 1) // self.page_size

    def wanted(self) -> tuple[Any, Any, Any]:
        """What the cursor is at: whether it may be asked for, where it begins in the tables, and its keys.

        It may be if there is a block there, and the windows of the tables show it.
        """
        block, n = self.ring[1], self.ring[2]
        here = self.entry("sequence", self.index) // WINDOW * WINDOW
        last = (self.core + 1) * self.of_core
        row = self.entry("sequence", jnp.minimum(block, last - 1)) - here
        start = self.entry("begin", block) + n * self.blocks.block_kv
        at = row * (self.tables.shape[0] // (2 * WINDOW)) + start // self.page_size
        return (block < last) & (row < 2 * WINDOW), at, self.entry("end", block) - start

    def start_copies(self, at: Any, pages: range) -> None:
        """Of some pages of the block under the cursor, whose table begins ``at``."""
        slot = lax.rem(self.ring[0], self.blocks.depth)
        for j in pages:
            self.copy(slot, j, self.tables[at + j]).start()

    def move_on(self) -> None:
        """Moves the cursor behind a block whose pages were asked for, once the rest of it is too."""
        block, n = self.ring[1], self.ring[2]
        if self.by_key is not None:
            begin, slot = self.entry("begin", block), lax.rem(self.ring[0], self.blocks.depth)

            @pl.when(self.entry("end", block) > begin)
            def _() -> None:
                sequence = self.entry("sequence", block)
                self.by_key.start(slot, block, sequence, begin + n * self.blocks.block_kv)

        ends = n + 1 >= self.key_blocks(block)
        self.ring[0] = self.ring[0] + 1
        self.ring[1] = jnp.where(ends, block + 1, block)
        self.ring[2] = jnp.where(ends, 0, n + 1)

    def ask(self) -> None:
        """Asks for the block under the cursor, if it may be."""
        there, at, left = self.wanted()

        @pl.when(there)
        def _() -> None:
            @pl.when(left >= self.blocks.block_kv)
            def _() -> None:
                self.start_copies(at, range(self.blocks.block_kv // self.page_size))

            @pl.when(left < self.blocks.block_kv)
            def _() -> None:
                slot = lax.rem(self.ring[0], self.blocks.depth)

                def start_copy(j: Any, carry: Any) -> Any:
                    self.copy(slot, j, self.tables[at + j]).start()
                    return carry

                lax.fori_loop(0, self.pages(left), start_copy, 0)

            self.move_on()

    def row_head(self, columns: int) -> Array:
        """The kv head of each row, counted within its set."""
        rows = lax.broadcasted_iota(jnp.int32, (self.q.shape[2], columns), 0)
        return rows // (self.blocks.block_q * self.group)

    def by_head(self, values: Any, set_: Any) -> Array:
        """The value of each row's kv head: a column, or of one head a number."""
        first, head = set_ * self.blocks.heads, self.row_head(1)
        if self.blocks.heads == 1:
            return values[first]
        column = jnp.full(head.shape, values[first], jnp.float32)
        for n in range(1, self.blocks.heads):
            column = jnp.where(head == n, values[first + n], column)
        return column

    def by_head_and_key(self, buffer: Any, slot: Any, set_: Any, keys: slice) -> Array:
        """The values of each row's kv head: (rows, keys) or a row, or transposed a column."""
        x = buffer[slot, set_, :, keys]
        if self.blocks.transposed:
            return as_column(x)
        tile = x[:1]
        for n in range(1, self.blocks.heads):
            tile = jnp.where(self.row_head(x.shape[1]) == n, x[n : n + 1], tile)
        return tile

    def statistics(self, set_: Any) -> tuple[Array, Array]:
        """m and l of each row: a column, or transposed a row."""
        if self.blocks.transposed:
            return self.m[set_, :1, :], self.total[set_, :1, :]
        return self.m[set_, :, :1], self.total[set_, :, :1]

    def sinks_of_rows(self, set_: Any) -> Array:
        """The sink of each row's query head, in powers of two, in the shape of m."""
        rows = lax.broadcasted_iota(jnp.int32, self.m.shape[1:], 1 if self.blocks.transposed else 0)
        head = rows // (self.blocks.block_q * self.group) * self.group + rows % self.group
        sinks, of_set = jnp.zeros(rows.shape, jnp.float32), self.blocks.heads * self.group
        for n in range(of_set):
            sinks = jnp.where(head == n, self.sinks[set_ * of_set + n], sinks)
        return sinks * scores.LOG2E

    def for_sets(self, fn: Any) -> None:
        """Calls ``fn(set)`` for every set of heads."""
        sets = self.q.shape[1]
        if sets == 1:
            fn(0)
        else:
            lax.fori_loop(0, sets, lambda n, c: (fn(n), c)[1], 0)

    def start(self, set_: Any) -> None:
        q = self.q[0, set_]
        heads = self.blocks.heads
        if heads > 1:
            mine = self.row_head(self.dim)
            q = jnp.concatenate([jnp.where(mine == h, q, jnp.zeros_like(q)) for h in range(heads)], axis=1)
        self.spread[set_] = q
        self.acc[set_] = jnp.zeros(self.acc.shape[1:], jnp.float32)
        if self.sinks is None:
            self.m[set_] = jnp.full(self.m.shape[1:], MASKED, jnp.float32)
            self.total[set_] = jnp.zeros(self.total.shape[1:], jnp.float32)
        else:
            self.m[set_] = self.sinks_of_rows(set_)
            self.total[set_] = jnp.ones(self.total.shape[1:], jnp.float32)

    def finish(self, set_: Any) -> None:
        out = self.acc[set_]
        if self.blocks.heads > 1:
            of_head = [out[:, h * self.dim : (h + 1) * self.dim] for h in range(self.blocks.heads)]
            out, mine = of_head[0], self.row_head(self.dim)
            for h, other in enumerate(of_head[1:], 1):
                out = jnp.where(mine == h, other, out)
        m, total = self.statistics(set_)
        # A row that saw nothing gathered hidden keys; its maximum tells.
        factor = jnp.where(m > MASKED / 2, 1 / total, 0.0)
        if self.v_scale is not None:
            factor = factor * self.by_head(self.v_scale, set_)
        out = jnp.where(factor == 0.0, 0.0, out * factor)
        self.o[0, set_] = (out.T if self.blocks.transposed else out).astype(self.o.dtype)

    def attend(self, slot: Any, start: Any, position: Any, left: Any, ask_beside: Any = None) -> None:
        """Adds the keys in a buffer.

        Args:
            slot: of the buffer.
            start: position of its first key.
            position: of the first query.
            left: keys in it, or None where it is full and every query sees every key.
            ask_beside: if given, the block under the cursor is full and asked for meanwhile; its table's
                beginning.
        """
        sets = self.q.shape[1]
        if ask_beside is not None and sets > 1:
            self.start_copies(ask_beside, range(self.blocks.block_kv // self.page_size))
            ask_beside = None
        self.for_sets(functools.partial(self._attend, slot, start, position, left, ask_beside))

    def _attend(self, slot: Any, start: Any, position: Any, left: Any, ask_beside: Any, set_: Any) -> None:
        width = self.blocks.heads * self.dim
        part = self.blocks.block_kv // self.blocks.chunks
        keys = self.kv.shape[2] // 2  # lanes of all keys; those of the values follow
        q = self.spread[set_]
        across, along = (0, 1) if self.blocks.transposed else (1, 0)  # axes of keys and of rows

        def load(i: int, offset: int) -> Array:
            lanes = slice(offset, offset + width)
            if not isinstance(set_, int):
                lanes = pl.ds(pl.multiple_of(offset + set_ * width, width), width)
            x = self.buffers[slot, i * part : (i + 1) * part, lanes]
            return (widen_float8(x) if x.dtype == jnp.float8_e4m3fn else x).astype(q.dtype)

        def at(i: int) -> slice:
            return slice(i * part, (i + 1) * part)

        def ask(step: int) -> None:
            """A part of the copies; loads do not move across it, and arithmetic does."""
            if ask_beside is not None:
                pages, steps = self.blocks.block_kv // self.page_size, 2 * self.blocks.chunks
                self.start_copies(ask_beside, range(step * pages // steps, (step + 1) * pages // steps))

        def logits(i: int) -> Array:
            products = dot(load(i, 0), q, NT) if self.blocks.transposed else dot(q, load(i, 0), NT)
            ask(2 * i)
            if self.k_scale is not None:
                products = products * self.by_head(self.k_scale, set_)
            if self.k_scales is not None:
                products = products * self.by_head_and_key(self.k_scales, slot, set_, at(i))
            if self.score is None:
                s = scores.logits(products, scale=self.spec.scale, softcap=self.spec.softcap)
            else:
                s = self.scored(products, slot, set_, start, position, at(i))
            if left is None:
                return s
            token = lax.broadcasted_iota(jnp.int32, s.shape, along) // self.group % self.blocks.block_q
            key = i * part + lax.broadcasted_iota(jnp.int32, s.shape, across)
            seen = (key < left) & self.spec.mask().visible(position + token, start + key)
            return jnp.where(seen, s, MASKED)

        m, total = self.statistics(set_)
        following = logits(0)
        for i in range(self.blocks.chunks):
            s, following = following, logits(i + 1) if i + 1 < self.blocks.chunks else None
            v = load(i, keys)
            ask(2 * i + 1)
            if left is not None:  # what was not fetched may be NaN
                token = i * part + lax.broadcasted_iota(jnp.int32, v.shape, 0)
                v = jnp.where(token < left, v, jnp.zeros_like(v))
            old, m = m, jnp.maximum(m, jnp.max(s, axis=across, keepdims=True))
            alpha, p = scores.exp2(old - m), scores.exp2(s - m)
            total = total * alpha + jnp.sum(p, axis=across, keepdims=True)
            if self.v_scales is not None:
                p = p * self.by_head_and_key(self.v_scales, slot, set_, at(i))
            p = p.astype(v.dtype)
            pv = dot(v.T, p, NN) if self.blocks.transposed else dot(p, v, NN)
            self.acc[set_] = self.acc[set_] * alpha + pv
        self.m[set_] = jnp.broadcast_to(m, self.m.shape[1:])
        self.total[set_] = jnp.broadcast_to(total, self.total.shape[1:])

    def scored(self, products: Array, slot: Any, set_: Any, start: Any, position: Any, keys: slice) -> Array:
        """log2(e) times what the score function makes of the products with some keys of a buffer."""
        across, along = (0, 1) if self.blocks.transposed else (1, 0)

        def count(axis: int) -> Array:
            shape = tuple(n if i == axis else 1 for i, n in enumerate(products.shape))
            return lax.broadcasted_iota(jnp.int32, shape, axis)

        row = count(along)
        head = row // (self.blocks.block_q * self.group) * self.group + row % self.group
        s = self.score.apply(
            products * self.spec.scale,
            slot,
            set_,
            self.entry("sequence", self.index),
            set_ * (self.blocks.heads * self.group) + head,
            position + row // self.group % self.blocks.block_q,
            start + keys.start + count(across),
            keys,
        )
        return jnp.maximum(s * scores.LOG2E, MASKED)  # of -inf, the softmax would make NaN

    def run(self) -> None:
        block_kv, index = self.blocks.block_kv, self.index

        @pl.when(self.step == 0)
        def _() -> None:
            self.ring[0], self.ring[1], self.ring[2], self.ring[3] = 0, index, 0, 0

        ahead = self.blocks.depth - 1
        lax.fori_loop(self.ring[0] - self.ring[3], ahead, lambda n, c: (self.ask(), c)[1], 0)
        self.for_sets(self.start)
        begin, end, position = (self.entry(name, index) for name in ("begin", "end", "position"))

        def body(n: Any, carry: Any) -> Any:
            slot = lax.rem(self.ring[3], self.blocks.depth)
            self.ring[3] = self.ring[3] + 1
            start = begin + n * block_kv
            left = end - start
            whole = left >= block_kv
            clear = whole & (start + block_kv - 1 <= position)
            if self.spec.sliding_window is not None:
                first_of_last = position + self.blocks.block_q - self.spec.sliding_window
                clear = clear & (start >= first_of_last)
            there, at, further = self.wanted()
            common = clear & there & (further >= block_kv)
            if self.by_key is not None:
                pl.when(left > 0)(lambda: self.by_key.wait(slot))

            def wait() -> None:
                pltpu.make_async_copy(
                    self.buffers.at[slot], self.buffers.at[slot], self.arrived.at[slot]
                ).wait()

            @pl.when(common)
            def _() -> None:
                wait()
                self.attend(slot, start, position, None, ask_beside=at)
                self.move_on()

            @pl.when(~common)
            def _() -> None:
                self.ask()
                pl.when(whole)(wait)

                @pl.when(left < block_kv)
                def _() -> None:
                    lax.fori_loop(0, self.pages(left), lambda j, c: (self.copy(slot, j, 0).wait(), c)[1], 0)

                @pl.when(clear)
                def _() -> None:
                    self.attend(slot, start, position, None)

                @pl.when((left > 0) & ~clear)
                def _() -> None:
                    self.attend(slot, start, position, left)

            return carry

        lax.fori_loop(0, self.key_blocks(index), body, 0)
        self.for_sets(self.finish)
