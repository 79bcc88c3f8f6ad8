"""What paged attention is computed: the static description and the optional tensors."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.masks import SlidingWindow


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

    Raises:
        ValueError: ``sliding_window`` is below 1.
    """

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    block_kv: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: got {self.sliding_window}, needs at least 1")

    def mask(self, offset: int = 0) -> SlidingWindow:
        """Which keys are seen, where query 0 is at position ``offset``."""
        left = None if self.sliding_window is None else self.sliding_window - 1
        return SlidingWindow(left, 0, offset)


class PagedOperands(NamedTuple):
    """Optional tensors of a paged attention, float32.

    Attributes:
        sinks: ``[heads]``: the logit of one more key of each head, whose value is zero.
        k_scale: ``[kv_heads]``: factor of the keys in the pages, for caches of 8 bits.
        v_scale: ``[kv_heads]``: factor of the values, likewise.
    """

    sinks: Float[Array, " h"] | None = None
    k_scale: Float[Array, " g"] | None = None
    v_scale: Float[Array, " g"] | None = None


NO_OPERANDS = PagedOperands()
