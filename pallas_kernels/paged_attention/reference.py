"""Paged attention written for reading: the definition that the kernels are tested against.

For each live sequence: its keys and values are gathered from the pages and multiplied by their scales, and
its queries, which are its last tokens, attend to them causally (:func:`attention_reference`). Queries of
sequences that are dead or have no keys give zeros, and so do rows that belong to no sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.flash_attention import AttentionSpec, Operands, attention_reference
from pallas_kernels.paged_attention.spec import NO_OPERANDS, PagedOperands, PagedSpec
from pallas_kernels.score_function import ScoreFunction


@dataclasses.dataclass(frozen=True)
class _OfSequence(ScoreFunction):
    """A function of scores on one sequence, whose queries count from the position ``first``."""

    function: ScoreFunction
    sequence: int
    first: int

    def __call__(self, score: Any, batch: Any, head: Any, q: Any, kv: Any, operands: tuple[Any, ...]) -> Any:
        return self.function(score, batch + self.sequence, head, q + self.first, kv, operands)


def ragged_paged_attention_reference(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    operands: PagedOperands = NO_OPERANDS,
    *,
    spec: PagedSpec,
    xp: Any,
) -> Any:
    """Attention of a flat batch of tokens by its definition, one sequence after the other.

    Args:
        q: ``[total_q, heads, head_dim]``, float32 or float64; callers widen narrower types.
        kv_pages: ``[num_pages, page_size, 2 * kv_heads * head_dim]`` in the type of ``q``.
        kv_lens: ``[max_seqs]`` integers: tokens in the cache, the new ones among them.
        page_indices: ``[max_seqs, pages_per_seq]`` integers, clamped to the pool.
        cu_q_lens: ``[max_seqs + 1]`` integers: sequence s has the queries ``cu_q_lens[s]`` up to, not
            including, ``cu_q_lens[s + 1]``.
        num_seqs: ``[1]``: sequences that are live.
        operands: optional tensors.
        spec: scale, window, softcap and score function.
        xp: the namespace of the arrays, ``numpy`` or ``torch``; beside a score function ``jax.numpy``.

    Returns:
        Like ``q``.
    """
    total, _, dim = q.shape
    num_pages, page_size, width = kv_pages.shape
    kv_heads = width // (2 * dim)
    parts, done = [], 0
    for s in range(min(int(num_seqs[0]), len(kv_lens))):
        first, stop = (min(max(int(x), done), total) for x in (cu_q_lens[s], cu_q_lens[s + 1]))
        kv_len = min(max(int(kv_lens[s]), 0), page_indices.shape[1] * page_size)
        if first >= stop:
            continue
        parts.append(xp.zeros_like(q[done:first]))
        done = stop
        if kv_len == 0:
            parts.append(xp.zeros_like(q[first:stop]))
            continue
        pages = [min(max(int(p), 0), num_pages - 1) for p in page_indices[s, : -(-kv_len // page_size)]]
        rows = kv_pages[xp.asarray(pages)].reshape(-1, width)[:kv_len].reshape(kv_len, 2, kv_heads, dim)
        k, v = (xp.moveaxis(rows[:, n], 0, 1) for n in (0, 1))
        if operands.k_scale is not None:
            k = k * scale_of_keys(operands.k_scale, pages, page_size, kv_len)
        if operands.v_scale is not None:
            v = v * scale_of_keys(operands.v_scale, pages, page_size, kv_len)
        before = kv_len - (stop - first)
        attention = AttentionSpec(spec.scale, spec.mask(before), spec.softcap)
        read = ()
        if spec.score is not None:
            position = xp.arange(before, kv_len)
            arrays = operands.score(xp.full_like(position, s), position)
            read = tuple(_of_queries(x, len(position), kv_len, xp) for x in arrays)
            along = tuple("query" if x.ndim == 3 else "pair" for x in read)
            attention = dataclasses.replace(attention, score=_OfSequence(along, spec.score, s, before))
        mine = xp.moveaxis(q[first:stop], 0, 1)
        o, _ = attention_reference(
            mine[None], k[None], v[None], Operands(sinks=operands.sinks, score=read), spec=attention, xp=xp
        )
        parts.append(xp.moveaxis(o[0], 0, 1))
    parts.append(xp.zeros_like(q[done:]))
    return xp.concatenate(parts, 0)


def scale_of_keys(scale: Any, pages: list[int], page_size: int, kv_len: int) -> Any:
    """Factors ``[kv_heads, 1 or kv_len, 1]`` of a sequence that lies in ``pages``."""
    if scale.ndim == 1:
        return scale[:, None, None]
    return scale[[pages[n // page_size] for n in range(kv_len)]].T[:, :, None]


def _of_queries(x: Any, queries: int, keys: int, xp: Any) -> Any:
    """``[1 or queries, 1 or heads]``, or with keys behind, as ``[1, 1 or heads, queries]`` likewise."""
    x = xp.broadcast_to(x, (queries, *x.shape[1:]))
    return xp.moveaxis(x if x.ndim == 2 else x[..., :keys], 0, 1)[None]
