"""The paged attention kernel as torch operators: registration, shapes, and heads cut over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
import torch_xla.runtime as xr
from jax.sharding import PartitionSpec
from torch import Tensor

from pallas_kernels import paged_attention as kernels
from pallas_kernels.hardware import Hardware
from pallas_kernels.paged_attention import PagedOperands, PagedSpec
from pallas_kernels.score_function import OfShard
from xla_attention.bridge import JaxFunction, Sharding, intern_static, static_of
from xla_attention.flex.operands import for_jax
from xla_attention.flex.paged import PagedPlan
from xla_attention.ops.placement import AttentionPlacement, current_placement
from xla_attention.ops.sharded import true_indices

_NO_FUNCTIONS = PagedPlan()


class Problem(NamedTuple):
    """What an operator is told beside its tensors; ``placement`` is None where one device computes."""

    placement: AttentionPlacement | None
    kv_heads: int
    spec: PagedSpec | None = None
    plan: PagedPlan = _NO_FUNCTIONS

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
    plan: PagedPlan = _NO_FUNCTIONS,
    captured: tuple[Tensor, ...] = (),
) -> Tensor:
    """Of XLA tensors; ``kind`` is ``"decode"``, ``"multi"`` or ``"ragged"``, whose ``q_lens`` are sums.

    ``plan`` and ``captured`` are of the spec's score function, if it has one.
    """
    problem = intern_static(Problem(_placement(), kv_pages.shape[2] // (2 * q.shape[-1]), spec, plan))
    pages = (kv_pages, kv_lens, page_indices)
    return attention(kind, q, *pages, q_lens, num_seqs, *operands[:-1], for_jax(captured), problem)


def _attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    q_lens: jax.Array | None,
    num_seqs: jax.Array | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *captured: jax.Array,
    kind: str,
    problem: Problem,
    hardware: Hardware,
) -> jax.Array:
    spec, read = _score_of_shard(problem, captured, q.shape[-2], page_indices.shape[1] * kv_pages.shape[1])
    pages = (kv_pages, kv_lens, page_indices)
    optional, static = PagedOperands(sinks, k_scale, v_scale, read), {"spec": spec, "hardware": hardware}
    if kind == "decode":
        return kernels.paged_attention(q, *pages, optional, **static)
    if kind == "multi":
        return kernels.multi_queries_paged_attention(q, *pages, q_lens, optional, **static)
    return kernels.ragged_paged_attention(q, *pages, q_lens, num_seqs, optional, **static)


def _score_of_shard(
    problem: Problem, captured: tuple[jax.Array, ...], heads: int, keys: int
) -> tuple[PagedSpec, Callable[..., tuple[jax.Array, ...]] | None]:
    """The spec for a device that has ``heads`` query heads, and what its score function reads."""
    spec = problem.spec
    if spec.score is None:
        return spec, None
    axis = problem.heads
    head = true_indices((axis,) if axis else (), heads)

    def read(sequence: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
        arrays = problem.plan.arrays(captured, sequence, position, head, keys)
        return (sequence[:, None], head[None, :], *arrays) if axis else arrays

    return (dataclasses.replace(spec, score=OfShard.of(spec.score)) if axis else spec), read


_kernel_attention = JaxFunction(_attention, "paged_attention")


@torch.library.custom_op(
    "xla_attention::paged_attention",
    mutates_args=(),
    device_types="xla",
    schema="(str kind, Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, Tensor? q_lens, "
    "Tensor? num_seqs, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor[] captured, int problem) "
    "-> Tensor",
)
def attention(kind: str, *args: Any) -> Tensor:
    """Attention; ``problem`` is an interned Problem, ``captured`` what its plan computes from."""
    *tensors, captured, number = args
    problem: Problem = static_of(number)
    of_q = PartitionSpec(*[None] * (tensors[0].ndim - 2), problem.heads)
    pages = PartitionSpec(None, None, problem.heads)
    by_head = (
        None if x is None else PartitionSpec(*[None] * (x.ndim - 1), problem.heads) for x in tensors[6:]
    )
    lie = (of_q, pages, *[PartitionSpec()] * 4, *by_head)
    given = tuple(spec for spec, x in zip(lie, tensors, strict=True) if x is not None)
    sharding = problem.sharding((*given, *[PartitionSpec()] * len(captured)), of_q)
    return _kernel_attention(*tensors, *captured, kind=kind, problem=problem, sharding=sharding)[0]


@attention.register_fake
def _(kind: str, q: Tensor, *_: Any) -> Tensor:
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
