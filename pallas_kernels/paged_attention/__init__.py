"""Attention to keys and values in pages: decoding, chunks of queries and ragged batches by one kernel."""

from pallas_kernels.paged_attention.api import (
    multi_queries_paged_attention,
    paged_attention,
    ragged_paged_attention,
)
from pallas_kernels.paged_attention.layout import (
    combine_kv_pages,
    from_interleaved,
    split_kv_pages,
    to_interleaved,
)
from pallas_kernels.paged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.paged_attention.spec import PagedOperands, PagedSpec
from pallas_kernels.paged_attention.update import update_kv_pages

__all__ = [
    "PagedOperands",
    "PagedSpec",
    "combine_kv_pages",
    "from_interleaved",
    "multi_queries_paged_attention",
    "paged_attention",
    "ragged_paged_attention",
    "ragged_paged_attention_reference",
    "split_kv_pages",
    "to_interleaved",
    "update_kv_pages",
]
