"""Flash attention, forward and backward, as one core whose mask and score changes are parameters."""

from pallas_kernels.flash_attention.api import flash_attention, flash_backward, flash_forward
from pallas_kernels.flash_attention.blocks import BackwardBlocks, BlockSizes, ForwardBlocks
from pallas_kernels.flash_attention.operand_gradients import operand_gradients
from pallas_kernels.flash_attention.reference import attention_reference
from pallas_kernels.flash_attention.spec import AttentionSpec, Operands

__all__ = [
    "AttentionSpec",
    "BackwardBlocks",
    "BlockSizes",
    "ForwardBlocks",
    "Operands",
    "attention_reference",
    "flash_attention",
    "flash_backward",
    "flash_forward",
    "operand_gradients",
]
