"""Causal attention as the blocks call it: over the tokens given, or over a cache of pages that is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from xla_attention.ops.flash import flash_attention
from xla_attention.ops.paged import ragged_paged_attention, update_kv_pages


@dataclass(frozen=True)
class PagedCache:
    """Pages, and where the tokens of one flat batch lie in them; see :func:`ragged_paged_attention`.

    Attributes:
        layers: ``kv_pages [num_pages, page_size, 2 * kv_heads * head_dim]`` of each layer, in order.
        slots: ``page * page_size + row`` of each token; -1 for those that only fill the batch up.
        kv_lens: tokens of each sequence, those of this batch among them.
        page_indices: pages of each sequence.
        cu_q_lens: where the tokens of each sequence begin in the batch, and end.
        num_seqs: sequences that are live.
    """

    layers: Sequence[Tensor]
    slots: Int[Tensor, " tokens"]
    kv_lens: Int[Tensor, " seqs"]
    page_indices: Int[Tensor, "seqs pages_per_seq"]
    cu_q_lens: Int[Tensor, " seqs1"]
    num_seqs: Int[Tensor, " 1"]


# The cache in use, and the pages of the layers that have not been called yet.
_in_use: ContextVar[tuple[PagedCache, Iterator[Tensor]] | None] = ContextVar("paged_cache", default=None)


@contextlib.contextmanager
def use_cache(cache: PagedCache) -> Iterator[None]:
    """Around one forward pass over a flat batch ``[1, tokens]``: its keys and values are kept in `cache`, and
    queries see all that the cache has of their sequences.

    Layers take their pages in the order in which they are called, so models need not number them.

    Raises:
        ValueError: the model called attention more or less often than the cache has layers.
    """
    layers = iter(cache.layers)
    token = _in_use.set((cache, layers))
    try:
        yield
    finally:
        _in_use.reset(token)
    if left := len(list(layers)):
        raise ValueError(f"cache: has {len(cache.layers)} layers, of which the model left out {left}")


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sliding_window: int | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Attention of each token to itself and those before it.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k, v: ``[batch, kv_heads, seq, head_dim]``.
        sliding_window: keys that a query sees, its own the last; None for all.
        segment_ids: ``[batch, seq]`` int32, the document of each token; not with a cache.

    Returns:
        Like ``q``.
    """
    if (in_use := _in_use.get()) is None:
        return flash_attention(
            q, k, v, is_causal=True, sliding_window=sliding_window, segment_ids=segment_ids
        )
    if q.shape[0] != 1 or segment_ids is not None:
        raise ValueError("a cache takes one flat batch [1, tokens] without segment_ids")
    cache, layers = in_use
    pages = next(layers, None)
    if pages is None:
        raise ValueError(f"cache: has {len(cache.layers)} layers, the model more")
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    update_kv_pages(pages, k, v, cache.slots)
    o = ragged_paged_attention(
        q, pages, cache.kv_lens, cache.page_indices, cache.cu_q_lens, cache.num_seqs,
        sliding_window=sliding_window,
    )  # fmt: skip
    return o.transpose(0, 1)[None]
