"""Flash attention, forward and backward, as one core whose mask and score changes are parameters."""

from pallas_kernels.flash_attention.api import flash_backward, flash_forward
from pallas_kernels.flash_attention.blocks import BlockSizes
from pallas_kernels.flash_attention.reference import attention_reference
from pallas_kernels.flash_attention.spec import AttentionSpec

__all__ = ["AttentionSpec", "BlockSizes", "attention_reference", "flash_backward", "flash_forward"]
