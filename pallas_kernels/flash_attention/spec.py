"""What attention is computed: the static description and the optional tensors that all parts share."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.blocks import BlockSizes
from pallas_kernels.masks import Full, Mask, PerHead
from pallas_kernels.score_function import ScoreFunction


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Attention, less its tensors. Hashable: a kernel is compiled once for each.

    Attributes:
        scale: factor of the logits ``q k^T``.
        mask: which keys each query sees, in all heads or in each.
        softcap: if given, logits become ``softcap * tanh(logits / softcap)`` before anything is added to them
            (Gemma 2, arXiv:2408.00118).
        query_offset: position of query 0 among the keys, for ALiBi distances.
        block_sizes: tiling of the kernels; None lets the kernel choose for its hardware and shapes.
        score: if given, a function of the logits, which takes the place of ``softcap``.
    """

    scale: float
    mask: Mask | PerHead = Full()
    softcap: float | None = None
    query_offset: int = 0
    block_sizes: BlockSizes | None = None
    score: ScoreFunction | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and self.score is not None:
            raise ValueError("score: it takes the place of softcap, which is also given; give one of them")


HIDDEN = -5e29  # no true logit is near it


class Operands(NamedTuple):
    """Optional tensors of an attention, beside q, k and v.

    Attributes:
        q_segment_ids: ``[batch, q_len]`` int32, not negative; a query sees keys of its own segment only.
            Ids that do not decrease along the sequence let whole tiles be skipped; others cost time, not
            exactness.
        kv_segment_ids: ``[batch, kv_len]`` int32, likewise; given if and only if the queries' are.
        bias: ``[1 or batch, 1 or heads, q_len, kv_len]``, added to the logits. At or below ``HIDDEN``, -inf
            included, it hides the pair.
        alibi_slopes: ``[heads]`` float32; ``-slope * |query_offset + q - kv|`` is added to the logits (Press
            et al., arXiv:2108.12409).
        sinks: ``[heads]`` float32; the logit of one more key of each head, whose value is zero.
        q_lens: ``[batch]`` int32; queries from there on see nothing.
        kv_lens: ``[batch]`` int32; keys from there on are seen by none.
        score: what ``AttentionSpec.score`` reads.
    """

    q_segment_ids: Int[Array, "b m"] | None = None
    kv_segment_ids: Int[Array, "b n"] | None = None
    bias: Float[Array, "#b #h m n"] | None = None
    alibi_slopes: Float[Array, " h"] | None = None
    sinks: Float[Array, " h"] | None = None
    q_lens: Int[Array, " b"] | None = None
    kv_lens: Int[Array, " b"] | None = None
    score: tuple[Array, ...] = ()


NO_OPERANDS = Operands()
