"""Attention operators for torch tensors."""

from xla_attention.ops.flash import flash_attention
from xla_attention.ops.flex import flex_attention
from xla_attention.ops.heads import merge_heads, split_heads
from xla_attention.ops.paged import (
    combine_kv_pages,
    multi_queries_paged_attention,
    paged_attention,
    ragged_paged_attention,
    split_kv_pages,
    update_kv_pages,
)
from xla_attention.ops.placement import AttentionPlacement, from_zigzag, to_zigzag, use_attention_placement
from xla_attention.ops.segments import segment_ids_from_lengths

__all__ = [
    "AttentionPlacement",
    "combine_kv_pages",
    "flash_attention",
    "flex_attention",
    "from_zigzag",
    "merge_heads",
    "multi_queries_paged_attention",
    "paged_attention",
    "ragged_paged_attention",
    "segment_ids_from_lengths",
    "split_heads",
    "split_kv_pages",
    "to_zigzag",
    "update_kv_pages",
    "use_attention_placement",
]
