"""Activation checkpointing (arXiv:1604.06174): keep a block's inputs, recompute the rest going backward."""

import functools
from collections.abc import Callable
from typing import Literal

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


def _recomputed(forward: Callable[..., Tensor], checkpoint: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        return checkpoint(forward, *inputs) if torch.is_grad_enabled() else forward(*inputs)

    return run


def _checkpoint_on(device: torch.device) -> Callable[..., Tensor]:
    if device.type != "xla":
        return functools.partial(eager_checkpoint, use_reentrant=False)
    # torch_xla's own puts an optimization barrier before the recomputation; without one the compiler sees the
    # same operations twice and keeps the first results, which saves nothing.
    from torch_xla.utils.checkpoint import checkpoint as xla_checkpoint

    return functools.partial(xla_checkpoint, use_reentrant=True)
