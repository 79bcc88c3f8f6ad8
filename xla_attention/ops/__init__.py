"""Attention operators for torch tensors."""

from xla_attention.ops.flash import flash_attention

__all__ = ["flash_attention"]
