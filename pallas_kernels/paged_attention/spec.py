"""What paged attention is computed: the static description and the optional tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.masks import SlidingWindow
from pallas_kernels.score_function import ScoreFunction


@dataclasses.dataclass(frozen=True)
class PagedSpec:
    """Paged attention, less its tensors. Hashable: a kernel is compiled once for each.

    The queries of a sequence are its last tokens: of ``q_len`` queries and ``kv_len`` keys, query ``i`` is at
    position ``kv_len - q_len + i`` and sees the keys up to its own.

    Attributes:
        scale: factor of the logits ``q k^T``.
        softcap: if given, logits become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv:2408.00118).
        sliding_window: if given, a query sees that many keys, its own the last (Mistral, arXiv:2310.06825).
        block_kv: keys of one buffer, a multiple of the page size; None lets the kernel choose.
        score: a function of ``scale q k^T`` instead of the softcap. Its batch is the sequence, its queries
            and keys are positions in it; causality and the window hide what they do without it.

    Raises:
        ValueError: ``sliding_window`` is below 1, or both ``softcap`` and ``score`` are given.
    """

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    block_kv: int | None = None
    score: ScoreFunction | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: got {self.sliding_window}, needs at least 1")
        if self.softcap is not None and self.score is not None:
            raise ValueError("softcap: got one beside a score function, which takes its place")

    def mask(self, offset: int = 0) -> SlidingWindow:
        """Which keys are seen, where query 0 is at position ``offset``."""
        left = None if self.sliding_window is None else self.sliding_window - 1
        return SlidingWindow(left, 0, offset)


class PagedOperands(NamedTuple):
    """Optional tensors of a paged attention, float32 unless stated.

    Attributes:
        sinks: ``[heads]``: the logit of one more key of each head, whose value is zero.
        k_scale: ``[kv_heads]`` or ``[num_pages, kv_heads]``: factor of the keys in the pages, for caches of 8
            bits.
        v_scale: factor of the values, likewise.
        score: from sequences and positions of some tokens, each ``[t]`` int32, what the spec's score function
            reads of them, float32 or int32: ``[1 or t, 1 or heads]`` of operands along heads or queries, and
            ``[1 or t, 1 or heads, pages_per_seq * page_size]`` of those along keys, distances or pairs.
            Values of tokens that there are not mean nothing.
    """

    sinks: Float[Array, " h"] | None = None
    k_scale: Float[Array, "*pages g"] | None = None
    v_scale: Float[Array, "*pages g"] | None = None
    score: Callable[[Int[Array, " t"], Int[Array, " t"]], tuple[Array, ...]] | None = None


NO_OPERANDS = PagedOperands()
