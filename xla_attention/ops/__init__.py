"""Attention operators for torch tensors."""

from xla_attention.ops.flash import flash_attention
from xla_attention.ops.segments import segment_ids_from_lengths

__all__ = ["flash_attention", "segment_ids_from_lengths"]
