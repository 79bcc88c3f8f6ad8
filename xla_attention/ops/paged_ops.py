"""The paged attention kernel as torch operators: registration and shapes."""

from __future__ import annotations

import jax
import torch
from torch import Tensor

from pallas_kernels import paged_attention as kernels
from pallas_kernels.hardware import Hardware
from pallas_kernels.paged_attention import PagedOperands, PagedSpec
from xla_attention.bridge import JaxFunction, intern_static, static_of


@torch.no_grad()  # there is no gradient: a result that asked for one would fail later
def kernel_attention(
    kind: str,
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    operands: PagedOperands,
    spec: PagedSpec,
    *,
    q_lens: Tensor | None = None,
    num_seqs: Tensor | None = None,
) -> Tensor:
    """Of XLA tensors; ``kind`` is ``"decode"``, ``"multi"`` or ``"ragged"``, whose ``q_lens`` are sums."""
    return attention(
        kind, q, kv_pages, kv_lens, page_indices, q_lens, num_seqs, *operands, intern_static(spec)
    )


def _attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    q_lens: jax.Array | None,
    num_seqs: jax.Array | None,
    *operands: jax.Array | None,
    kind: str,
    spec: PagedSpec,
    hardware: Hardware,
) -> jax.Array:
    pages = (kv_pages, kv_lens, page_indices)
    optional, static = PagedOperands(*operands), {"spec": spec, "hardware": hardware}
    if kind == "decode":
        return kernels.paged_attention(q, *pages, optional, **static)
    if kind == "multi":
        return kernels.multi_queries_paged_attention(q, *pages, q_lens, optional, **static)
    return kernels.ragged_paged_attention(q, *pages, q_lens, num_seqs, optional, **static)


_kernel_attention = JaxFunction(_attention, "paged_attention")


@torch.library.custom_op(
    "xla_attention::paged_attention",
    mutates_args=(),
    device_types="xla",
    schema="(str kind, Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, Tensor? q_lens, "
    "Tensor? num_seqs, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, int spec) -> Tensor",
)
def attention(kind: str, *args: Tensor | int | None) -> Tensor:
    """Attention; ``spec`` is an interned PagedSpec."""
    *tensors, spec = args
    return _kernel_attention(*tensors, kind=kind, spec=static_of(spec))[0]


@attention.register_fake
def _(kind: str, q: Tensor, *_: Tensor | int | None) -> Tensor:
    return q.new_empty(q.shape)


_kernel_update = JaxFunction(kernels.update_kv_pages, "update_kv_pages")


@torch.library.custom_op(
    "xla_attention::update_kv_pages",
    mutates_args=(),
    device_types="xla",
    schema="(Tensor kv_pages, Tensor kv, Tensor slots) -> Tensor",
)
def updated(kv_pages: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
    """``kv_pages`` with rows replaced."""
    return _kernel_update(kv_pages, kv, slots)[0]


@updated.register_fake
def _(kv_pages: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
    return kv_pages.new_empty(kv_pages.shape)


def kernel_update(kv_pages: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Replaces rows of an XLA tensor: torch_xla gives a tensor that is overwritten its own buffer again."""
    kv_pages.copy_(updated(kv_pages, kv, slots))
