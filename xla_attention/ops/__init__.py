"""Attention operators for torch tensors."""

from xla_attention.ops.flash import flash_attention
from xla_attention.ops.placement import AttentionPlacement, from_zigzag, to_zigzag, use_attention_placement
from xla_attention.ops.segments import segment_ids_from_lengths

__all__ = [
    "AttentionPlacement",
    "flash_attention",
    "from_zigzag",
    "segment_ids_from_lengths",
    "to_zigzag",
    "use_attention_placement",
]
