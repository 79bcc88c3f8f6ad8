"""FlexAttention on TPU: torch score and mask functions inside the Pallas flash attention kernel."""

from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from xla_attention.flex.block_mask import BlockMask, create_block_mask
from xla_attention.flex.flex_attention import flex_attention
from xla_attention.flex.trace import FlexTraceError

__all__ = [
    "BlockMask",
    "FlexTraceError",
    "and_masks",
    "create_block_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]
