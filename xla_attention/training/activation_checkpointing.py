"""Activation checkpointing (arXiv:1604.06174): keep a block's inputs, recompute the rest going backward."""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as eager_checkpoint

from xla_attention.models.causal_lm import CausalLM


def checkpoint_activations(model: CausalLM, which: Literal["none", "full"] | int) -> None:
    """Makes blocks of `model`, which is already on its device, recompute their activations.

    Args:
        which: `none`, `full` for all blocks, or n for every n-th.
    """
    if which == "none":
        return
    every = 1 if which == "full" else which
    device = next(model.parameters()).device
    for block in list(model.blocks)[::every]:
        # The forward is replaced, not the module, so parameter names stay those of the model.
        block.forward = _recomputed(block.forward, _checkpoint_on(device))


def as_now(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`function`, to be called later under today's autocast and context variables.

    The backward pass runs in a thread of its own, which knows neither that products are in bfloat16 nor how
    attention is sharded; what it recomputes would be another computation.
    """
    context = contextvars.copy_context()
    dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)

    def run(*args: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            return context.copy().run(function, *args)  # a copy, as one context cannot be entered twice

    return run


def _recomputed(forward: Callable[..., Tensor], checkpoint: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(as_now(forward, inputs[0].device.type), *inputs)

    return run


def _checkpoint_on(device: torch.device) -> Callable[..., Tensor]:
    if device.type != "xla":
        return functools.partial(eager_checkpoint, use_reentrant=False)
    # torch_xla's own puts an optimization barrier before the recomputation; without one the compiler sees the
    # same operations twice and keeps the first results, which saves nothing.
    from torch_xla.utils.checkpoint import checkpoint as xla_checkpoint

    return functools.partial(xla_checkpoint, use_reentrant=True)
