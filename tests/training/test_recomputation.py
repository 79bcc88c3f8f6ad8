"""What is recomputed going backward is the forward's computation: as precise, and as sharded."""

from contextvars import ContextVar

import pytest
import torch
import torch_xla

from xla_attention.models import build_model, load_model_config
from xla_attention.training import activation_checkpointing, scan_layers

# Stands for the placement of attention, which needs several devices.
setting: ContextVar[str] = ContextVar("setting", default="unknown")
MODEL = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
}


@pytest.mark.parametrize("loop", [False, True], ids=["layers", "loop"])
def test_the_backward_pass_recomputes_under_the_forwards_settings(first_device, monkeypatch, loop):
    model = build_model(load_model_config(MODEL)).to(first_device)
    seen = []
    block_type = type(model.blocks[0])
    forward = block_type.forward

    def watched(self, *args):
        seen.append((torch.is_autocast_enabled("xla"), setting.get()))
        return forward(self, *args)

    monkeypatch.setattr(block_type, "forward", watched)
    if loop:
        scan_layers.stack_layers(model)
        scan_layers.scan_layers(model, "full")
    else:
        activation_checkpointing.checkpoint_activations(model, "full")
    ids = torch.zeros(1, 32, dtype=torch.int64).to(first_device)
    token = setting.set("sharded")
    with torch.autocast("xla", torch.bfloat16):
        loss = model.hidden_states(ids).float().sum()
    setting.reset(token)
    forwards = len(seen)
    loss.backward()
    assert len(seen) > forwards > 0
    assert set(seen) == {(True, "sharded")}
    torch_xla.sync()
