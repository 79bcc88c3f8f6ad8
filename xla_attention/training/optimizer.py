"""AdamW or Adafactor, with a learning rate that lives on the device.

A step on XLA is one compiled program. Every number that changes from step to step (learning rate, step count)
is therefore a tensor, the optimizer's state exists before the first step, and nothing is read back.
"""

import math

import torch
from torch import nn

from xla_attention.models.causal_lm import CausalLM
from xla_attention.training.adafactor import Adafactor
from xla_attention.training.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of a step: a linear warm-up, then constant or half a cosine (SGDR, arXiv 1608.03983).

    Args:
        step: steps taken before, from 0.
        steps: steps in all; the last one (`steps - 1`) has the lowest rate.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def build_optimizer(
    model: CausalLM, config: OptimizerConfig, *, stacked: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of a model that is already on its device, with its state made and zero.

    Matrices and embeddings are decayed; vectors (norms, biases) are not.

    Args:
        stacked: the weights of all layers are one tensor each, `[layers, ...]`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    of_layers = {id(p) for p in model.blocks.parameters()} if stacked else set()
    matrices = {id(p) for p in parameters if p.dim() - (id(p) in of_layers) > 1}
    groups = [
        {"params": [p for p in parameters if id(p) in matrices], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
    ]
    lr = torch.zeros((), device=parameters[0].device)
    if config.name == "adafactor":
        return Adafactor(groups, lr=lr)
    # capturable: the step count is on the device too, which torch allows on accelerators only.
    capturable = lr.device.type != "cpu"
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.betas, capturable=capturable, foreach=False)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=lr.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Copies a learning rate to the device."""
    copy_to_device(optimizer.param_groups[0]["lr"], torch.tensor(value))  # one tensor, shared by all groups


@torch.no_grad()
def copy_to_device(there: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a tensor from the host into one of the same shape, without compiling its users anew.

    A scalar is sent as a vector: torch_xla writes scalars that are 0 or 1 into the program, and merges equal
    ones, so that the program would depend on the values.
    """
    there.copy_(value.reshape(-1).to(there.device).reshape(there.shape))


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name: `{"lm_head.weight.exp_avg": tensor, ...}`, not copied."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for key, tensor in optimizer.state[parameter].items()
    }
