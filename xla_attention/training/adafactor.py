"""Adafactor without reading anything back from the device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): a matrix's second moment is kept as row and
    column means.

    The same update as `torch.optim.Adafactor`, which reads a norm back to the host for every parameter at
    every step and so would stall an accelerator.

    Args:
        params: parameters, or groups of them that may set `weight_decay`.
        lr: [] float32 on the parameters' device: the largest relative step size.
        beta2_decay: the second moment's decay at step t is `1 - t ** beta2_decay`.
        eps: least parameter scale.
        clip_threshold: largest root mean square of an update.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Tensor,
        *,
        beta2_decay: float = -0.8,
        eps: float = 1e-3,
        clip_threshold: float = 1.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": 0.0,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = _initial_state(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, self.state[p], group)


def _initial_state(p: Tensor) -> dict[str, Tensor]:
    state = {"step": torch.zeros((), device=p.device)}
    if p.dim() > 1:
        state["row_var"] = p.new_zeros((*p.shape[:-1], 1))
        state["col_var"] = p.new_zeros((*p.shape[:-2], 1, p.shape[-1]))
    else:
        state["variance"] = torch.zeros_like(p)
    return state


def _update(p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    step, lr, tiny = state["step"], group["lr"], torch.finfo(p.dtype).eps
    step += 1
    new_share = step ** group["beta2_decay"]
    relative_step = torch.minimum(lr, step.rsqrt())
    step_size = _root_mean_square(p).clamp(min=group["eps"]) * relative_step
    p.mul_(1 - lr * group["weight_decay"])
    if p.dim() > 1:
        row, col = state["row_var"], state["col_var"]
        row.lerp_(grad.square().mean(-1, keepdim=True), new_share)
        col.lerp_(grad.square().mean(-2, keepdim=True), new_share)
        variance = row * col / row.mean(-2, keepdim=True).clamp(min=tiny)
    else:
        variance = state["variance"].lerp_(grad.square(), new_share)
    update = grad * variance.clamp(min=tiny * tiny).rsqrt()
    update /= (_root_mean_square(update) / group["clip_threshold"]).clamp(min=1.0)
    p.sub_(step_size * update)


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
