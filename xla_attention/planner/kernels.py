"""Which kernels a model runs, as JAX functions to compile, count or time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.flash_attention import AttentionSpec, Operands, flash_backward, flash_forward
from pallas_kernels.hardware import Hardware
from pallas_kernels.masks import Causal
from xla_attention.bridge import Sharding
from xla_attention.models.config import GPTConfig, LlamaConfig
from xla_attention.ops.placement import AttentionPlacement
from xla_attention.ops.shard_functions import backward_of_shard, forward_of_shard
from xla_attention.ops.sharded import shards_of


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel at the shapes that a model gives it.

    Attributes:
        name: such as ``"flash forward"``.
        fn: a JAX function of arrays alone.
        avals: shape and dtype of each argument.
        shapes: the sizes that matter, for people.
        sharding: how the arguments lie, if ``fn`` is one device's part.
    """

    name: str
    fn: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    shapes: str
    sharding: Sharding | None = None


def kernels_of_model(
    config: GPTConfig | LlamaConfig,
    *,
    batch: int,
    seq_len: int,
    dtype: str,
    hardware: Hardware,
    segments: bool = False,
) -> list[Kernel]:
    """The kernels of one training step of the model; every layer runs the same.

    Args:
        config: the model.
        batch: sequences on one chip.
        seq_len: tokens of one sequence.
        dtype: that attention computes in, ``"float32"`` or ``"bfloat16"``.
        hardware: that the kernels choose their block sizes by.
        segments: the sequences are packed documents that do not see each other.
    """
    spec = AttentionSpec(scale=config.head_dim**-0.5, mask=Causal())
    ids = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32)
    return flash_kernels(
        (batch, config.num_attention_heads, seq_len, config.head_dim),
        (batch, config.num_key_value_heads, seq_len, config.head_dim),
        dtype=dtype,
        spec=spec,
        hardware=hardware,
        reads=(ids, ids) if segments else (),
    )


def flash_kernels(
    q_shape: tuple[int, int, int, int],
    kv_shape: tuple[int, int, int, int],
    *,
    dtype: str,
    spec: AttentionSpec,
    hardware: Hardware,
    reads: Sequence[jax.ShapeDtypeStruct] = (),
    operands: Callable[..., Operands] = Operands,
    out_dtype: str | None = None,
) -> list[Kernel]:
    """Flash attention, forward and backward.

    Args:
        q_shape: ``[batch, heads, q_len, head_dim]``.
        kv_shape: ``[batch, kv_heads, kv_len, head_dim]``.
        dtype: ``"float32"`` or ``"bfloat16"``.
        spec: what attention is computed.
        hardware: that the kernels choose their block sizes by.
        reads: shape and dtype of further arrays.
        operands: makes the optional tensors of them.
        out_dtype: of the results, if not ``dtype``.
    """
    q = o = jax.ShapeDtypeStruct(q_shape, jnp.dtype(dtype))
    kv = jax.ShapeDtypeStruct(kv_shape, jnp.dtype(dtype))
    lse = jax.ShapeDtypeStruct(q_shape[:-1], jnp.float32)

    def forward(q: Array, k: Array, v: Array, *arrays: Array) -> tuple[Array, ...]:
        given = operands(*arrays)
        return flash_forward(q, k, v, given, spec=spec, hardware=hardware, out_dtype=out_dtype)

    def backward(*arrays: Array) -> tuple[Array, ...]:
        saved, given = arrays[:6], operands(*arrays[6:])
        return flash_backward(*saved, None, given, spec=spec, hardware=hardware, out_dtype=out_dtype)

    shapes = f"q {_times(q_shape)}, kv {_times(kv_shape)}"
    return [
        Kernel("flash forward", forward, (q, kv, kv, *reads), shapes),
        Kernel("flash backward", backward, (q, kv, kv, o, lse, o, *reads), shapes),
    ]


def sharded_kernels(
    q_shape: tuple[int, int, int, int],
    kv_shape: tuple[int, int, int, int],
    *,
    dtype: str,
    spec: AttentionSpec,
    hardware: Hardware,
    placement: AttentionPlacement,
) -> list[Kernel]:
    """Flash attention of whole tensors, sharded as ``placement`` says, forward and backward.

    Args:
        q_shape, kv_shape, dtype, spec, hardware: as of :func:`flash_kernels`.
        placement: where the dimensions lie.

    Raises:
        ValueError: a dimension does not divide.
    """
    q = o = jax.ShapeDtypeStruct(q_shape, jnp.dtype(dtype))
    kv = jax.ShapeDtypeStruct(kv_shape, jnp.dtype(dtype))
    lse = jax.ShapeDtypeStruct(q_shape[:-1], jnp.float32)
    shards, spec = shards_of(placement, q_shape, kv_shape, Operands(), spec)
    none = Operands()
    nothing = none[:-1]

    def forward(*arrays: Array) -> tuple[Array, ...]:
        return forward_of_shard(*arrays, *nothing, spec=spec, shards=shards, hardware=hardware)

    def backward(*arrays: Array) -> tuple[Array, ...]:
        return backward_of_shard(*arrays, None, *nothing, spec=spec, shards=shards, hardware=hardware)

    shapes = f"q {_times(q_shape)}, kv {_times(kv_shape)}"
    return [
        Kernel("flash forward", forward, (q, kv, kv), shapes, shards.of_forward(none)),
        Kernel("flash backward", backward, (q, kv, kv, o, lse, o), shapes, shards.of_backward(none, False)),
    ]


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
