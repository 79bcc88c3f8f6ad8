"""Sharding annotations as an operator on tensors in the middle of a model, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from xla_attention.bridge import intern_static, static_of
from xla_attention.sharding.strategy import Spec

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs


def annotated(x: Tensor, mesh: xs.Mesh, spec: Spec) -> Tensor:
    """`x`, and going backward its gradient, sharded as `spec` says.

    An operator of its own, because torch_xla's `mark_sharding_with_gradients` makes a new mesh, and the tiles
    that are kept with it, at every call.
    """
    return shard(x, intern_static((mesh, spec)))


def mark(tensor: Tensor, mesh: xs.Mesh, spec: Spec) -> None:
    """Shards a tensor that stays: a parameter, its gradient, an optimizer's state."""
    import torch_xla.distributed.spmd as xs

    xs.mark_sharding(tensor, mesh, partition_spec(spec))


def partition_spec(spec: Spec) -> tuple[tuple[str, ...] | None, ...]:
    """`spec` as torch_xla writes it: None where a dimension is not sharded."""
    return tuple(axes or None for axes in spec)


@torch.library.custom_op("xla_attention::shard", mutates_args=(), device_types="xla")
def shard(x: Tensor, placement: int) -> Tensor:
    """`x` annotated; `placement` is an interned mesh and spec."""
    import torch_xla.distributed.spmd as xs

    mesh, spec = static_of(placement)
    return xs.mark_sharding(x.clone(), mesh, partition_spec(spec)).global_tensor


@shard.register_fake
def _(x: Tensor, placement: int) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.placement = inputs[1]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return shard(grad, ctx.placement), None


shard.register_autograd(_differentiate, setup_context=_save)


def annotate_outputs(model: nn.Module, specs: dict[str, Spec], mesh: xs.Mesh) -> None:
    """Annotates what modules of `model` return, by their names; the model's code knows nothing of it."""
    for name, spec in specs.items():
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, spec=spec: annotated(output, mesh, spec)
        )


def annotate_gradients(model: nn.Module, specs: dict[str, Spec], mesh: xs.Mesh) -> None:
    """Shards each parameter's gradient as the parameter: the sum over devices becomes a reduce-scatter."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, spec=specs[name]: annotated(grad, mesh, spec))
