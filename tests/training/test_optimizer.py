"""The optimizers and the schedule, against torch's own."""

import copy

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
from torch import nn
from torch.optim import lr_scheduler

from xla_attention.training.config import OptimizerConfig
from xla_attention.training.optimizer import build_optimizer, learning_rate, named_state, set_learning_rate


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


def train(model, optimizer, steps=20, rates=None):
    """Fits the identity; returns the losses."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    losses = []
    for step in range(steps):
        if rates is not None:
            set_learning_rate(optimizer, rates[step])
        x = torch.randn(8, 16, generator=generator).to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_schedule_is_that_of_torch(schedule):
    steps, warmup = 40, 9
    config = OptimizerConfig(lr=0.5, warmup_steps=warmup, schedule=schedule, min_lr_ratio=0.2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
    after = (
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 1 - warmup, eta_min=0.2 * config.lr)
        if schedule == "cosine"
        else lr_scheduler.ConstantLR(optimizer, factor=1)
    )
    ramp = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    torch_schedule = lr_scheduler.SequentialLR(optimizer, [ramp, after], milestones=[warmup])
    for step in range(steps):
        assert learning_rate(step, steps, config) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        torch_schedule.step()
    if schedule == "cosine":
        assert learning_rate(steps - 1, steps, config) == pytest.approx(0.1)


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_updates_are_those_of_torch(name, device):
    """float32, the same operations in another order: 20 steps stay within 2e-6 of torch's own loop."""
    config = OptimizerConfig(name=name, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    ours, theirs = network(), network()
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    reference = (
        torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        if name == "adamw"
        else torch.optim.Adafactor(groups, lr=1e-2)
    )
    ours.to(torch_xla.device() if device == "xla" else "cpu")
    train(ours, build_optimizer(ours, config), rates=[1e-2] * 20)
    train(theirs, reference)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.cpu(), b, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_no_learning_rate_compiles_the_step_anew(name):
    """Rates that torch_xla would treat as constants are among them: 0, 1, and Adafactor's own 1e-3."""
    model = network().to(torch_xla.device())
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    train(model, optimizer, rates=[0.1], steps=1)
    compiled = xla_metrics.metric_data("CompileTime")[0]
    train(model, optimizer, rates=[0.05, 0.0, 1.0, 1e-3, 1e-8, 0.9], steps=6)
    assert xla_metrics.metric_data("CompileTime")[0] == compiled


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_state_exists_before_the_first_step_under_parameter_names(name):
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    state = named_state(model, optimizer)
    assert "3.weight.step" in state and not any(key.startswith("0.bias") for key in state)
    before = {key: tensor.clone() for key, tensor in state.items()}
    train(model, optimizer, rates=[1e-2], steps=1)
    after = named_state(model, optimizer)
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[key], before[key]) for key in before)
    assert copy.deepcopy(after)["3.weight.step"] == 1
