"""What a plan computes from captured tensors, as a torch operator with a gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from pallas_kernels.flash_attention import Operands
from pallas_kernels.hardware import Hardware
from xla_attention.bridge import JaxFunction, intern_static, static_of
from xla_attention.flex.plan import Plan, operands
from xla_attention.flex.trace import Traced

# To JAX, narrower integers and wider floats are what expressions compute in anyway.
_CONVERT = {
    torch.float64: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
}


def captured_tensors(
    score: Traced | None, mask: Traced | None, name: str, device: torch.device
) -> tuple[Tensor, ...]:
    """The captured tensors of both. Those of a mask are moved: ``BlockMask.to`` leaves them behind.

    Args:
        score, mask: traced functions.
        name: of the argument that is on ``device``.
        device: where attention is computed.

    Raises:
        ValueError: score_mod captures one of another device, and it is not a scalar.
    """
    for x in score.captured if score else ():
        if x.device != device and x.ndim:
            raise ValueError(
                f"score_mod: captures a tensor of shape {tuple(x.shape)} on {x.device}, {name} is on {device}"
            )
    return tuple(x.to(device) for traced in (score, mask) if traced for x in traced.captured)


def for_jax(captured: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors in types that expressions compute in."""
    return [x.to(_CONVERT.get(x.dtype, x.dtype)) for x in captured]


def compute_operands(plan: Plan, captured: tuple[Tensor, ...], anchor: Tensor) -> Operands:
    """The kernels' operands of XLA tensors.

    Args:
        plan: what to compute.
        captured: the captured tensors of score_mod and then of mask_mod.
        anchor: a tensor on the device; where nothing is captured, it tells which that is.
    """
    names = plan.names()
    if not names:
        return Operands()
    given = for_jax(captured) or [anchor.detach()]
    return operands(names, _forward(given, intern_static(plan)))


def _compute(*captured: jax.Array, plan: Plan, hardware: Hardware) -> tuple[jax.Array, ...]:
    return tuple(plan.arrays(captured))


_kernel_compute = JaxFunction(_compute, "flex_operands")


@torch.library.custom_op(
    "xla_attention::flex_operands",
    mutates_args=(),
    device_types="xla",
    schema="(Tensor[] captured, int plan) -> Tensor[]",
)
def _forward(captured: list[Tensor], plan: int) -> list[Tensor]:
    return _kernel_compute(*captured, plan=static_of(plan))


def _pull(
    *arrays: jax.Array,
    plan: Plan,
    captured: int,
    wanted: tuple[bool, ...],
    given: tuple[bool, ...],
    hardware: Hardware,
) -> tuple[jax.Array, ...]:
    """Gradients by the captured tensors that want one, from those by the operands that have one."""
    everything, gradients = arrays[:captured], iter(arrays[captured:])

    def of(*learned: jax.Array) -> list[jax.Array]:
        parts = iter(learned)
        every = tuple(next(parts) if needed else x for x, needed in zip(everything, wanted))
        return [x for x, there in zip(plan.arrays(every), given) if there]

    learned = [x for x, needed in zip(everything, wanted) if needed]
    results, pull = jax.vjp(of, *learned)
    return pull([next(gradients).astype(x.dtype) for x in results])


_kernel_pull = JaxFunction(_pull, "flex_operands_backward")


@torch.library.custom_op(
    "xla_attention::flex_operands_backward",
    mutates_args=(),
    device_types="xla",
    schema="(Tensor[] captured, Tensor[] gradients, int plan, bool[] wanted, bool[] given) -> Tensor[]",
)
def _backward(
    captured: list[Tensor], gradients: list[Tensor], plan: int, wanted: list[bool], given: list[bool]
) -> list[Tensor]:
    return _kernel_pull(
        *captured,
        *gradients,
        plan=static_of(plan),
        captured=len(captured),
        wanted=tuple(wanted),
        given=tuple(given),
    )


def _save(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
    captured, ctx.plan = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
    ctx.save_for_backward(*captured)


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    captured = list(ctx.saved_tensors)
    wanted = list(ctx.needs_input_grad[0])
    given = [x is not None for x in gradients]
    if not any(wanted) or not any(given):
        return [None] * len(captured), None
    found = iter(_backward(captured, [x for x in gradients if x is not None], ctx.plan, wanted, given))
    return [next(found) if needed else None for needed in wanted], None


_forward.register_autograd(_differentiate, setup_context=_save)


@_forward.register_fake
def _(captured: list[Tensor], plan: int) -> list[Tensor]:
    avals = [jax.ShapeDtypeStruct(tuple(x.shape), _JAX[x.dtype]) for x in captured]
    shapes = jax.eval_shape(lambda *arrays: static_of(plan).arrays(arrays), *avals)
    return [captured[0].new_empty(x.shape, dtype=_TORCH[jnp.dtype(x.dtype).name]) for x in shapes]


@_backward.register_fake
def _(
    captured: list[Tensor], gradients: list[Tensor], plan: int, wanted: list[bool], given: list[bool]
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, needed in zip(captured, wanted) if needed]


_JAX = {
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.int32: jnp.int32,
    torch.bool: jnp.bool_,
}
_TORCH = {jnp.dtype(j).name: t for t, j in _JAX.items()}
