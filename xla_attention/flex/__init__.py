"""torch score and mask functions as what the Pallas kernels take: traced, split, and masks of blocks."""

from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from xla_attention.flex.block_mask import BlockMask, create_block_mask
from xla_attention.flex.trace import FlexTraceError

__all__ = [
    "BlockMask",
    "FlexTraceError",
    "and_masks",
    "create_block_mask",
    "noop_mask",
    "or_masks",
]
