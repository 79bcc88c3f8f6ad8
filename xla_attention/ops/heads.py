"""Features of tokens as heads and back, with rotary positions on the way, as torch operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import torch
import torch_xla.runtime as xr
from jax.sharding import PartitionSpec
from torch import Tensor

from pallas_kernels import heads as kernels
from pallas_kernels.hardware import Hardware
from xla_attention.bridge import JaxFunction, Sharding, intern_static, static_of
from xla_attention.ops.placement import AttentionPlacement, current_placement

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def split_heads(x: Tensor, head_dim: int, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
    """Features, such as a projection gives, as heads, such as attention takes; turned by rotary position
    embedding (Su et al., 2021, arXiv:2104.09864) where angles are given.

    On XLA it is one kernel, sharded as attention is; heads whose size fits no register are left to XLA.

    Args:
        x: ``[batch, seq, heads * head_dim]``, floating.
        head_dim: elements of one head; even, if they are turned.
        cos, sin: of each token's angles, ``[seq, head_dim / 2]`` or ``[batch, 1, seq, head_dim / 2]``,
            float32; they have no gradient. Channels ``i`` and ``i + head_dim / 2`` are one pair.

    Returns:
        ``[batch, heads, seq, head_dim]``, in the dtype of ``x``; computed in float32.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape that does not fit; the message names the argument.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, needs a torch.Tensor")
    if x.ndim != 3 or head_dim < 1 or x.shape[2] % head_dim:
        raise ValueError(f"x: got shape {tuple(x.shape)}, needs [batch, seq, heads * {head_dim}]")
    batch, seq, features = x.shape
    _check_angles(cos, sin, batch, seq, head_dim)
    placement = _kernel_placement(x, features // head_dim, head_dim)
    if placement is None:
        heads = x.view(batch, seq, -1, head_dim).transpose(1, 2)
        return heads if cos is None or sin is None else apply_rope(heads, cos, sin)
    return _split(x, *_tables(cos, sin), head_dim, intern_static(placement))


def merge_heads(x: Tensor) -> Tensor:
    """Heads as features: the inverse of :func:`split_heads` without angles.

    Args:
        x: ``[batch, heads, seq, head_dim]``, floating.

    Returns:
        ``[batch, seq, heads * head_dim]``.

    Raises:
        TypeError: ``x`` is no tensor.
        ValueError: its shape is another.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, needs a torch.Tensor")
    if x.ndim != 4:
        raise ValueError(f"x: got shape {tuple(x.shape)}, needs [batch, heads, seq, head_dim]")
    placement = _kernel_placement(x, x.shape[1], x.shape[3])
    if placement is None:
        return x.transpose(1, 2).flatten(2)
    return _merge(x, None, None, intern_static(placement))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs of channels ``(i, i + head_dim / 2)`` by their position's angle, in float32.

    Args:
        x: ``[batch, heads, seq, head_dim]``; the result has its dtype.
        cos, sin: as of :func:`split_heads`.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class _Placed(NamedTuple):
    """That the kernels compute it; sharded, if a placement says how."""

    placement: AttentionPlacement | None


def _kernel_placement(x: Tensor, heads: int, head_dim: int) -> _Placed | None:
    """None where plain operations compute it: what attention itself refuses is left to it to name."""
    if x.device.type != "xla" or x.dtype not in _KERNEL_DTYPES or 0 in x.shape:
        return None
    placement = current_placement()
    if placement is None:
        return _Placed(None) if kernels.heads_fit(heads, head_dim) else None
    seq = x.shape[1 if x.ndim == 3 else 2]
    sizes = {"batch": placement.size(*placement.batch), "seq": placement.size(placement.sequence)}
    shards = placement.size(placement.heads)
    divides = x.shape[0] % sizes["batch"] == 0 and seq % sizes["seq"] == 0 and heads % shards == 0
    if not divides or not xr.is_spmd() or not kernels.heads_fit(heads // shards, head_dim):
        return None
    return _Placed(placement)


def _check_angles(cos: Tensor | None, sin: Tensor | None, batch: int, seq: int, head_dim: int) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("cos, sin: got one of them, needs both or none")
    if cos is not None and head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, needs an even one where heads are turned")
    allowed = {(seq, head_dim // 2), (batch, 1, seq, head_dim // 2)}
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and tuple(table.shape) not in allowed:
            raise ValueError(
                f"{name}: got shape {tuple(table.shape)}, needs [{seq}, {head_dim // 2}] or [{batch}, 1, "
                f"{seq}, {head_dim // 2}]"
            )


def _tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """``[1 or batch, seq, head_dim / 2]`` float32."""
    if cos is None or sin is None:
        return None, None
    shape = (-1, *cos.shape[-2:])
    return cos.float().reshape(shape), sin.float().reshape(shape)


def _split_shard(
    x: jax.Array, cos: jax.Array | None, sin: jax.Array | None, *, head_dim: int, hardware: Hardware
) -> jax.Array:
    return kernels.split_heads(x, cos, sin, head_dim=head_dim, hardware=hardware)


def _merge_shard(
    x: jax.Array, cos: jax.Array | None, sin: jax.Array | None, *, hardware: Hardware
) -> jax.Array:
    return kernels.merge_heads(x, cos, sin, hardware=hardware)


_kernel_split = JaxFunction(_split_shard, "split_heads")
_kernel_merge = JaxFunction(_merge_shard, "merge_heads")


def _sharding(placed: int, cos: Tensor | None, *, split: bool) -> Sharding | None:
    placement: AttentionPlacement | None = static_of(placed).placement
    if placement is None:
        return None
    features = PartitionSpec(placement.batch, placement.sequence, placement.heads)
    heads = PartitionSpec(placement.batch, placement.heads, placement.sequence, None)
    given, result = (features, heads) if split else (heads, features)
    tables: tuple[PartitionSpec, ...] = ()
    if cos is not None:
        tables = (PartitionSpec(placement.batch if cos.shape[0] > 1 else None, placement.sequence, None),) * 2
    return Sharding(placement.axes, (given, *tables), (result,), ((),), placement.device_ids)


@torch.library.custom_op(
    "xla_attention::split_heads",
    mutates_args=(),
    device_types="xla",
    schema="(Tensor x, Tensor? cos, Tensor? sin, int head_dim, int placed) -> Tensor",
)
def _split(x: Tensor, cos: Tensor | None, sin: Tensor | None, head_dim: int, placed: int) -> Tensor:
    (o,) = _kernel_split(x, cos, sin, head_dim=head_dim, sharding=_sharding(placed, cos, split=True))
    return o


@torch.library.custom_op(
    "xla_attention::merge_heads",
    mutates_args=(),
    device_types="xla",
    schema="(Tensor x, Tensor? cos, Tensor? sin, int placed) -> Tensor",
)
def _merge(x: Tensor, cos: Tensor | None, sin: Tensor | None, placed: int) -> Tensor:
    (o,) = _kernel_merge(x, cos, sin, sharding=_sharding(placed, cos, split=False))
    return o


@_split.register_fake
def _(x: Tensor, cos: Tensor | None, sin: Tensor | None, head_dim: int, placed: int) -> Tensor:
    batch, seq, features = x.shape
    return x.new_empty((batch, features // head_dim, seq, head_dim))


@_merge.register_fake
def _(x: Tensor, cos: Tensor | None, sin: Tensor | None, placed: int) -> Tensor:
    batch, heads, seq, head_dim = x.shape
    return x.new_empty((batch, seq, heads * head_dim))


# Each is the other's transpose, turned back: the gradient is the rotation by the negative angle.


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, *rest = inputs
    ctx.save_for_backward(cos, sin)
    ctx.head_dim, ctx.placed = x.shape[-1], rest[-1]


def _split_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return _merge(grad, cos, None if sin is None else -sin, ctx.placed), None, None, None, None


def _merge_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    back = None if sin is None else -sin
    return _split(grad, cos, back, ctx.head_dim, ctx.placed), None, None, None


_split.register_autograd(_split_backward, setup_context=_save)
_merge.register_autograd(_merge_backward, setup_context=_save)
