"""The page layout, and converters to and from those that people have.

Ours is ``kv_pages [num_pages, page_size, 2 * kv_heads * head_dim]``: a row is one token, the keys of all
heads and then the values of all heads. A page is contiguous, so one DMA fetches it whole, for every head.

One text for NumPy, JAX and torch: ``xp`` is the library's namespace.
"""

from __future__ import annotations

from typing import Any


def combine_kv_pages(k_pages: Any, v_pages: Any, xp: Any) -> Any:
    """Our pages from ``k_pages`` and ``v_pages [kv_heads, num_pages, page_size, head_dim]``, those of JAX and
    torch_xla.

    Raises:
        ValueError: the shapes differ.
    """
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"v_pages: got shape {tuple(v_pages.shape)}, k_pages has {tuple(k_pages.shape)}")
    heads, pages, size, dim = k_pages.shape
    rows = [xp.moveaxis(x, 0, 2).reshape(pages, size, heads * dim) for x in (k_pages, v_pages)]
    return xp.concatenate(rows, 2)


def split_kv_pages(kv_pages: Any, kv_heads: int, xp: Any) -> tuple[Any, Any]:
    """``k_pages`` and ``v_pages [kv_heads, num_pages, page_size, head_dim]`` from our pages."""
    pages, size, width = kv_pages.shape
    x = kv_pages.reshape(pages, size, 2, kv_heads, width // (2 * kv_heads))
    return xp.moveaxis(x[:, :, 0], 2, 0), xp.moveaxis(x[:, :, 1], 2, 0)


def from_interleaved(kv_pages: Any) -> Any:
    """Our pages from ``[num_pages, page_size, 2 * kv_heads, head_dim]`` of the ragged kernels of JAX,
    torch_xla and vLLM, in which K and V of one head lie side by side: K0, V0, K1, V1, ..."""
    pages, size, combined, dim = kv_pages.shape
    x = kv_pages.reshape(pages, size, combined // 2, 2, dim)
    return x.swapaxes(2, 3).reshape(pages, size, combined * dim)


def to_interleaved(kv_pages: Any, kv_heads: int) -> Any:
    """The inverse of :func:`from_interleaved`."""
    pages, size, width = kv_pages.shape
    x = kv_pages.reshape(pages, size, 2, kv_heads, width // (2 * kv_heads))
    return x.swapaxes(2, 3).reshape(pages, size, 2 * kv_heads, width // (2 * kv_heads))
