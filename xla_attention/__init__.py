"""Fast, trustworthy attention for PyTorch models on Cloud TPU: Pallas kernels as torch_xla operators."""

import importlib
from typing import TYPE_CHECKING, Any

from xla_attention.versions import check_versions

check_versions()

if TYPE_CHECKING:
    from xla_attention import masks
    from xla_attention.device import pick_device
    from xla_attention.flex import (
        BlockMask,
        and_masks,
        create_block_mask,
        noop_mask,
        or_masks,
    )
    from xla_attention.generation import Engine, Request, Sampling, generate
    from xla_attention.ops import (
        AttentionPlacement,
        combine_kv_pages,
        flash_attention,
        flex_attention,
        from_zigzag,
        merge_heads,
        multi_queries_paged_attention,
        paged_attention,
        ragged_paged_attention,
        segment_ids_from_lengths,
        split_heads,
        split_kv_pages,
        to_zigzag,
        update_kv_pages,
        use_attention_placement,
    )

_FLEX = ("BlockMask", "and_masks", "create_block_mask", "noop_mask", "or_masks")
_GENERATION = ("Engine", "Request", "Sampling", "generate")
_OPS = (
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
)
__all__ = [
    "AttentionPlacement",
    "BlockMask",
    "Engine",
    "Request",
    "Sampling",
    "and_masks",
    "combine_kv_pages",
    "create_block_mask",
    "flash_attention",
    "flex_attention",
    "from_zigzag",
    "generate",
    "masks",
    "merge_heads",
    "multi_queries_paged_attention",
    "noop_mask",
    "or_masks",
    "paged_attention",
    "pick_device",
    "ragged_paged_attention",
    "segment_ids_from_lengths",
    "split_heads",
    "split_kv_pages",
    "to_zigzag",
    "update_kv_pages",
    "use_attention_placement",
]


def __getattr__(name: str) -> Any:
    """Imports torch and JAX on first use of what needs them: ``import xla_attention`` itself is quick."""
    if name in _OPS:
        from xla_attention import ops

        return getattr(ops, name)
    if name in _FLEX:
        return getattr(importlib.import_module("xla_attention.flex"), name)
    if name in _GENERATION:
        return getattr(importlib.import_module("xla_attention.generation"), name)
    if name == "masks":
        return importlib.import_module("xla_attention.masks")
    if name == "pick_device":
        from xla_attention.device import pick_device

        return pick_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
