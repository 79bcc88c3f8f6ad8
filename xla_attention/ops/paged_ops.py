"""The paged attention kernel as torch operators: registration, shapes, and heads cut over devices."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
import torch_xla.runtime as xr
from jax.sharding import PartitionSpec
from torch import Tensor

from pallas_kernels import paged_attention as kernels
from pallas_kernels.hardware import Hardware
from pallas_kernels.paged_attention import PagedOperands, PagedSpec
from xla_attention.bridge import JaxFunction, Sharding, intern_static, static_of
from xla_attention.ops.placement import AttentionPlacement, current_placement


class Problem(NamedTuple):
    """What an operator is told beside its tensors; ``placement`` is None where one device computes."""

    placement: AttentionPlacement | None
    kv_heads: int
    spec: PagedSpec | None = None

    def sharding(self, inputs: tuple[PartitionSpec, ...], output: PartitionSpec) -> Sharding | None:
        if self.placement is None:
            return None
        return Sharding(self.placement.axes, inputs, (output,), ((),), self.placement.device_ids)

    @property
    def heads(self) -> str | None:
        """The axis of heads. Where they do not divide over it, every device computes all of them."""
        axis = self.placement and self.placement.heads
        return axis if axis and self.kv_heads % self.placement.size(axis) == 0 else None


def _placement() -> AttentionPlacement | None:
    return current_placement() if xr.is_spmd() else None


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
    problem = Problem(_placement(), kv_pages.shape[2] // (2 * q.shape[-1]), spec)
    return attention(
        kind, q, kv_pages, kv_lens, page_indices, q_lens, num_seqs, *operands, intern_static(problem)
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
    "Tensor? num_seqs, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, int problem) -> Tensor",
)
def attention(kind: str, *args: Tensor | int | None) -> Tensor:
    """Attention; ``problem`` is an interned Problem."""
    *tensors, number = args
    problem: Problem = static_of(number)
    of_q = PartitionSpec(*[None] * (tensors[0].ndim - 2), problem.heads)
    by_head = PartitionSpec(problem.heads)
    lie = (of_q, PartitionSpec(None, None, problem.heads), *[PartitionSpec()] * 4, *[by_head] * 3)
    given = tuple(spec for spec, x in zip(lie, tensors, strict=True) if x is not None)
    return _kernel_attention(*tensors, kind=kind, spec=problem.spec, sharding=problem.sharding(given, of_q))[
        0
    ]


@attention.register_fake
def _(kind: str, q: Tensor, *_: Tensor | int | None) -> Tensor:
    return q.new_empty(q.shape)


def _update(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, hardware: Hardware
) -> jax.Array:
    return kernels.update_kv_pages(kv_pages, jnp.concatenate([k, v], axis=1), slots, hardware=hardware)


_kernel_update = JaxFunction(_update, "update_kv_pages")


@torch.library.custom_op(
    "xla_attention::update_kv_pages",
    mutates_args=(),
    device_types="xla",
    schema="(Tensor kv_pages, Tensor k, Tensor v, Tensor slots, int problem) -> Tensor",
)
def updated(kv_pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, problem: int) -> Tensor:
    """``kv_pages`` with rows replaced; ``k``, ``v`` are ``[tokens, kv_heads * head_dim]``."""
    how: Problem = static_of(problem)
    pages, rows = PartitionSpec(None, None, how.heads), PartitionSpec(None, how.heads)
    sharding = how.sharding((pages, rows, rows, PartitionSpec()), pages)
    return _kernel_update(kv_pages, k, v, slots, sharding=sharding)[0]


@updated.register_fake
def _(kv_pages: Tensor, *_: Tensor | int) -> Tensor:
    return kv_pages.new_empty(kv_pages.shape)


def kernel_update(kv_pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, kv_heads: int) -> None:
    """Replaces rows of an XLA tensor: torch_xla gives a tensor that is overwritten its own buffer again."""
    problem = intern_static(Problem(_placement(), kv_heads))
    kv_pages.copy_(updated(kv_pages, k, v, slots, problem))
