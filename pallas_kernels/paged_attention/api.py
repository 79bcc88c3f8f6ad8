"""Decoding, chunks of queries and ragged batches as lists of query blocks for the one kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.hardware import Hardware
from pallas_kernels.paged_attention.blocks import LANES, PagedBlocks, choose_blocks
from pallas_kernels.paged_attention.by_key import room, scales_of_pages
from pallas_kernels.paged_attention.call import attend_blocks
from pallas_kernels.paged_attention.kernel import QueryBlocks
from pallas_kernels.paged_attention.score_rows import score_inputs
from pallas_kernels.paged_attention.spec import NO_OPERANDS, PagedOperands, PagedSpec
from pallas_kernels.score_function import Along

CACHE_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
_BY_KEY: tuple[Along, ...] = ("key", "distance", "pair")
PAGE_SIZES = (8, 16, 32, 64, 128, 256)


def paged_attention(
    q: Float[Array, "s h d"],
    kv_pages: Array,
    kv_lens: Int[Array, " s"],
    page_indices: Int[Array, "s p"],
    operands: PagedOperands = NO_OPERANDS,
    *,
    spec: PagedSpec,
    hardware: Hardware,
) -> Float[Array, "s h d"]:
    """One query for each sequence, its last token.

    Args:
        q: ``[seqs, heads, head_dim]``, float32 or bfloat16.
        kv_pages: ``[num_pages, page_size, 2 * kv_heads * head_dim]``, see :mod:`layout`; like ``q``, int8 or
            float8_e4m3fn.
        kv_lens: ``[seqs]`` int32: tokens in the cache, the query's own among them; 0 reads nothing. Beyond
            what the pages hold it is cut.
        page_indices: ``[seqs, pages_per_seq]`` int32, clamped to the pool; those behind a length are
            not used.
        operands: optional tensors.
        spec: what attention is computed.
        hardware: what to compile for.

    Returns:
        Like ``q``; zeros where ``kv_lens`` is 0.

    Raises:
        ValueError, TypeError: shapes or types do not fit together; the message names the argument.
    """
    return multi_queries_paged_attention(
        q[:, None], kv_pages, kv_lens, page_indices, None, operands, spec=spec, hardware=hardware
    )[:, 0]


def multi_queries_paged_attention(
    q: Float[Array, "s m h d"],
    kv_pages: Array,
    kv_lens: Int[Array, " s"],
    page_indices: Int[Array, "s p"],
    q_lens: Int[Array, " s"] | None = None,
    operands: PagedOperands = NO_OPERANDS,
    *,
    spec: PagedSpec,
    hardware: Hardware,
) -> Float[Array, "s m h d"]:
    """A chunk of queries for each sequence, its last tokens, as of a prefill or of speculative decoding.

    Args:
        q: ``[seqs, q_len, heads, head_dim]``; of each sequence the first ``q_lens`` are queries.
        q_lens: ``[seqs]`` int32, None for all; beyond ``q_len`` it is cut.
        kv_pages, kv_lens, page_indices, operands, spec, hardware: as of :func:`paged_attention`.

    Returns:
        Like ``q``; zeros behind ``q_lens``, and in rows that see no key.

    Raises:
        ValueError, TypeError: as of :func:`paged_attention`.
    """
    seqs, q_len, heads, dim = q.shape
    check_pages(q, kv_pages)
    blocks = _blocks(q_len, heads, dim, kv_pages, page_indices, operands, spec, hardware)
    kv_lens = _clip_lens(kv_lens, kv_pages, page_indices)
    n = jnp.full((seqs,), q_len, jnp.int32) if q_lens is None else jnp.clip(q_lens, 0, q_len)
    a_seq = -(-q_len // blocks.block_q)
    sequence = jnp.repeat(jnp.arange(seqs, dtype=jnp.int32), a_seq)
    first = jnp.tile(jnp.arange(a_seq, dtype=jnp.int32) * blocks.block_q, seqs)
    work = _work(sequence, first, n, kv_lens, operands, spec, blocks, kv_pages.shape[1])
    pad = a_seq * blocks.block_q - q_len
    padded = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))) if pad else q
    o = _attend(
        padded.reshape(seqs * a_seq, blocks.block_q, heads, dim),
        kv_pages, work, kv_lens, page_indices, operands, spec, blocks, hardware,
    )  # fmt: skip
    o = o.reshape(seqs, a_seq * blocks.block_q, heads, dim)[:, :q_len]
    if q_lens is None and q_len == 1:
        return o
    return jnp.where((jnp.arange(q_len) < n[:, None])[:, :, None, None], o, 0)


def ragged_paged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Array,
    kv_lens: Int[Array, " s"],
    page_indices: Int[Array, "s p"],
    cu_q_lens: Int[Array, " s1"],
    num_seqs: Int[Array, " 1"],
    operands: PagedOperands = NO_OPERANDS,
    *,
    spec: PagedSpec,
    hardware: Hardware,
) -> Float[Array, "t h d"]:
    """Sequences with any number of queries in one flat batch: prefill and decoding mixed.

    Sequences with one query are blocks of one query, as of :func:`paged_attention`; the others are cut into
    larger ones, whose size follows the mean of queries a sequence. Both are lists for the same kernel.

    Args:
        q: ``[total_q, heads, head_dim]``.
        cu_q_lens: ``[seqs + 1]`` int32: sequence s has the queries ``cu_q_lens[s]`` up to, not including,
            ``cu_q_lens[s + 1]``.
        num_seqs: ``[1]`` int32: sequences from there on are dead.
        kv_pages, kv_lens, page_indices, operands, spec, hardware: as of :func:`paged_attention`.

    Returns:
        Like ``q``; zeros in rows of no live sequence, and in rows that see no key.

    Raises:
        ValueError, TypeError: as of :func:`paged_attention`.
    """
    total, heads, dim = q.shape
    seqs = page_indices.shape[0]
    check_pages(q, kv_pages)
    live = jnp.arange(seqs) < num_seqs[0]
    cu = lax.cummax(jnp.clip(cu_q_lens, 0, total))  # they do not decrease, whatever was given
    n = jnp.where(live, cu[1:] - cu[:-1], 0)
    kv_lens = _clip_lens(kv_lens, kv_pages, page_indices)

    def attend(blocks: PagedBlocks, sequence: Array, first: Array, n: Array) -> Array:
        """Of each block, ``[blocks, block_q, heads, head_dim]``."""
        work = _work(sequence, first, n, kv_lens, operands, spec, blocks, kv_pages.shape[1])
        token = cu[sequence][:, None] + first[:, None] + jnp.arange(blocks.block_q)
        mine = q[jnp.minimum(token, total - 1)]
        return _attend(mine, kv_pages, work, kv_lens, page_indices, operands, spec, blocks, hardware)

    token = jnp.arange(total)
    owner = jnp.minimum(jnp.searchsorted(cu[1:], token, side="right"), seqs - 1).astype(jnp.int32)
    place = token - cu[owner]
    alive = (n[owner] > 0) & (place < n[owner]) & (place >= 0)

    one = _blocks(1, heads, dim, kv_pages, page_indices, operands, spec, hardware)
    every = jnp.arange(seqs, dtype=jnp.int32)
    o = attend(one, every, jnp.zeros_like(every), jnp.where(n == 1, n, 0))[owner, 0]
    if total > 1:
        many = _blocks(
            max(-(-total // seqs), 2), heads, dim, kv_pages, page_indices, operands, spec, hardware
        )
        a_seq = jnp.where(n > 1, -(-n // many.block_q), 0)
        ends = jnp.cumsum(a_seq)
        number = total // many.block_q + min(seqs, total // 2)
        block = jnp.arange(number, dtype=jnp.int32)
        sequence = jnp.minimum(jnp.searchsorted(ends, block, side="right"), seqs - 1).astype(jnp.int32)
        first = (block - (ends - a_seq)[sequence]) * many.block_q
        chunks = attend(many, sequence, first.astype(jnp.int32), jnp.where(n > 1, n, 0))
        at = jnp.clip((ends - a_seq)[owner] + place // many.block_q, 0, number - 1)
        o = jnp.where((n[owner] > 1)[:, None, None], chunks[at, place % many.block_q], o)
    return jnp.where(alive[:, None, None], o, 0)


def check_pages(q: Array, kv_pages: Array) -> int:
    """kv heads of pages that fit ``q [..., heads, head_dim]``.

    Raises:
        TypeError: a dtype that the kernel does not take.
        ValueError: a shape that does not fit; the message names the argument.
    """
    heads, dim = q.shape[-2:]
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"q: got {q.dtype}, allowed are float32 and bfloat16")
    if kv_pages.dtype.name not in CACHE_DTYPES:
        raise TypeError(f"kv_pages: got {kv_pages.dtype}, allowed are {', '.join(CACHE_DTYPES)}")
    if kv_pages.ndim != 3 or kv_pages.shape[2] % (2 * dim) or 0 in kv_pages.shape:
        raise ValueError(
            f"kv_pages: got shape {kv_pages.shape}, needs [num_pages, page_size, 2 * kv_heads * {dim}]"
        )
    kv_heads = kv_pages.shape[2] // (2 * dim)
    if heads % kv_heads:
        raise ValueError(f"kv_pages: got {kv_heads} heads, which must divide the {heads} heads of q")
    if kv_pages.shape[1] not in PAGE_SIZES:
        raise ValueError(f"kv_pages: got pages of {kv_pages.shape[1]} tokens, allowed are {PAGE_SIZES}")
    if kv_pages.dtype.itemsize == 1 and kv_pages.shape[1] < 32:
        raise ValueError(
            f"kv_pages: got pages of {kv_pages.shape[1]} tokens in {kv_pages.dtype}, which needs 32 or more: "
            "their rows are packed by 32 in a TPU's memory"
        )
    return kv_heads


def _clip_lens(kv_lens: Array, kv_pages: Array, page_indices: Array) -> Array:
    return jnp.clip(kv_lens, 0, page_indices.shape[1] * kv_pages.shape[1])


def _blocks(
    queries: int,
    heads: int,
    dim: int,
    kv_pages: Array,
    page_indices: Array,
    operands: PagedOperands,
    spec: PagedSpec,
    hardware: Hardware,
) -> PagedBlocks:
    page_size = kv_pages.shape[1]
    if spec.block_kv is not None and (spec.block_kv < 1 or spec.block_kv % page_size):
        raise ValueError(f"block_kv: got {spec.block_kv}, needs a multiple of the page size, {page_size}")
    if _reads_by_key(operands, spec) and spec.block_kv is not None and spec.block_kv % LANES:
        raise ValueError(
            f"block_kv: got {spec.block_kv}, needs a multiple of {LANES} beside scales by page, or a score "
            "function that reads by key"
        )
    return choose_blocks(
        queries=queries,
        heads=heads,
        kv_heads=kv_pages.shape[2] // (2 * dim),
        head_dim=dim,
        page_size=page_size,
        pages_per_seq=page_indices.shape[1],
        kv_itemsize=kv_pages.dtype.itemsize,
        hardware=hardware,
        block_kv=spec.block_kv,
        keyed=0 if spec.score is None else sum(along in _BY_KEY for along in spec.score.operands),
    )


def _reads_by_key(operands: PagedOperands, spec: PagedSpec) -> bool:
    """Whether values follow the keys; they are fetched by whole registers."""
    scales = any(x is not None and x.ndim == 2 for x in (operands.k_scale, operands.v_scale))
    return scales or (spec.score is not None and any(along in _BY_KEY for along in spec.score.operands))


def _work(
    sequence: Array,
    first: Array,
    q_lens: Array,
    kv_lens: Array,
    operands: PagedOperands,
    spec: PagedSpec,
    blocks: PagedBlocks,
    page_size: int,
) -> QueryBlocks:
    """What the blocks that begin at the queries ``first`` of their sequences see."""
    n = jnp.clip(q_lens[sequence] - first, 0, blocks.block_q)
    position = kv_lens[sequence] - q_lens[sequence] + first
    end = jnp.maximum(position + n, 0)
    begin = jnp.zeros_like(end)
    if spec.sliding_window is not None:
        whole = max(page_size, LANES if _reads_by_key(operands, spec) else 1)
        begin = jnp.maximum(position - spec.sliding_window + 1, 0) // whole * whole
    dead = (n == 0) | (end == 0)
    return QueryBlocks(sequence, jnp.where(dead, 0, begin), jnp.where(dead, 0, end), position)


def _attend(
    q: Array,
    kv_pages: Array,
    work: QueryBlocks,
    kv_lens: Array,
    page_indices: Array,
    operands: PagedOperands,
    spec: PagedSpec,
    blocks: PagedBlocks,
    hardware: Hardware,
) -> Array:
    """Of ``q [n, block_q, heads, head_dim]``, like it: rows by set of heads and back."""
    n, block_q, heads, dim = q.shape
    kv_heads = kv_pages.shape[2] // (2 * dim)
    sets, group = kv_heads // blocks.heads, heads // kv_heads
    rows = q.reshape(n, block_q, sets, blocks.heads, group, dim).transpose(0, 2, 3, 1, 4, 5)
    tables = jnp.clip(page_indices, 0, kv_pages.shape[0] - 1)
    page_size = kv_pages.shape[1]
    context = page_indices.shape[1] * page_size
    keys = room(context, blocks.block_kv)
    page_scales = tuple(
        scales_of_pages(x, tables, kv_lens, page_size, blocks.heads, keys)
        for x in (operands.k_scale, operands.v_scale)
    )
    score = score_inputs(
        operands, spec, work.sequence, work.position, blocks, (sets, blocks.heads, group), context
    )
    o = attend_blocks(
        rows.reshape(n, sets, blocks.heads * block_q * group, dim),
        kv_pages, work, tables, operands, spec=spec, blocks=blocks, hardware=hardware, score=score,
        page_scales=page_scales,
    )  # fmt: skip
    o = o.reshape(n, sets, blocks.heads, block_q, group, dim).transpose(0, 3, 1, 2, 4, 5)
    return o.reshape(n, block_q, heads, dim)
