"""Layers in a loop: the same training, in a program that does not grow with the depth."""

import pytest
import torch
from small import GPT, LLAMA, QUIET, config, losses
from spmd import run_spmd

from xla_attention.models import build_model, load_model, load_model_config
from xla_attention.planner.stage import stage_step
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import ConfigError
from xla_attention.training.loop import train
from xla_attention.training.scan_layers import stack_layers, unstacked

SHORT = {"steps": 4, "data": {"train": ["{stdlib}/json/*.py"], "held_out": 0.2}}


def results(folder, **changes):
    """Losses, held-out loss and final weights."""
    done = train(config(folder, **SHORT, **changes), QUIET)
    values = torch.tensor([*losses(folder).values(), done.eval_loss])
    return values, load_model(done.checkpoint / "model").state_dict()


@pytest.mark.parametrize(
    ("model", "recompute"),
    [(LLAMA, "full"), (GPT, "none"), (LLAMA, "selective")],
    ids=["full", "none", "selective"],
)
def test_a_loop_trains_as_layer_after_layer(tmp_path, model, recompute):
    """Float32 in another order: losses to 1e-5; weights to a tenth of a step of Adam, which divides a
    gradient by its own size. With documents, so that integers go through the loop too; and evaluated."""
    plain, weights = results(tmp_path / "plain", model=model)
    looped, same = results(
        tmp_path / "loop", model=model, scan_layers=True, activation_checkpointing=recompute
    )
    torch.testing.assert_close(looped, plain, atol=1e-5, rtol=0)
    assert weights.keys() == same.keys()  # the checkpoint is one of Hugging Face's all the same
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, atol=3e-4, rtol=0)


def test_a_looped_run_resumes(tmp_path):
    whole = tmp_path / "whole"
    train(config(whole, **SHORT | {"steps": 6}, scan_layers=True, checkpoint={"interval": 3}), QUIET)
    first = (whole / "checkpoints" / "step-00000003").rename(tmp_path / "saved")
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    first.rename(tmp_path / "again" / "checkpoints" / "step-00000003")
    settings = config(tmp_path / "again", **SHORT | {"steps": 6}, scan_layers=True)
    train(settings, QUIET)
    after = {step: loss for step, loss in losses(whole).items() if step > 3}
    assert {step: loss for step, loss in losses(tmp_path / "again").items() if step > 3} == after
    with pytest.raises(ConfigError, match="scan_layers was True, is False"):
        train(config(tmp_path / "again", **SHORT), QUIET)


SHARDED = """
from pathlib import Path
from small import QUIET, config, losses
from xla_attention.training.checkpoint import load_weights
from xla_attention.training.loop import train

found = {}
for scan in (False, True):
    folder = Path(VARIABLES["folder"]) / str(scan)
    done = train(config(folder, **VARIABLES["changes"], scan_layers=scan), QUIET)
    found[str(scan)] = [*losses(folder).values()], str(done.checkpoint)
a, b = (load_weights(Path(checkpoint)).state_dict() for _, checkpoint in found.values())
assert a.keys() == b.keys()
difference = max((a[name] - b[name]).abs().max().item() for name in a)
print(json.dumps([[losses for losses, _ in found.values()], difference]))
"""


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("2d", marks=pytest.mark.slow)])
def test_a_sharded_loop_trains_as_layer_after_layer(tmp_path, strategy):
    """To 1e-5; weights to a tenth of a step of Adam."""
    model = LLAMA | {"vocab_size": 264, "hidden_size": 64, "num_attention_heads": 4}
    changes = SHORT | {"model": model, "sharding": {"strategy": strategy}}
    changes["data"] = changes["data"] | {"held_out": 0.0}
    (plain, looped), difference = run_spmd(SHARDED, 4, folder=str(tmp_path), changes=changes)
    torch.testing.assert_close(torch.tensor(looped), torch.tensor(plain), atol=1e-5, rtol=0)
    assert difference < 3e-4


def test_the_program_does_not_grow_with_the_depth(tmp_path):
    """Operations of the staged step, forward to optimizer: the same for 2 layers and for 12."""
    sizes = []
    for layers in (2, 12):
        model = LLAMA | {
            "vocab_size": 264,
            "num_hidden_layers": layers,
            "hidden_size": 256,
            "num_attention_heads": 2,
        }
        settings = config(
            tmp_path, model=model, batch_size=4, scan_layers=True, sharding={"strategy": "fsdp"}
        )
        sizes.append(len(stage_step(settings, parse_topology("v5e:2x2"))))
    assert abs(sizes[1] - sizes[0]) < 0.01 * sizes[0]


def test_stacked_and_back():
    model = build_model(load_model_config(LLAMA))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    stack_layers(model)
    assert len(model.blocks) == 1 and model.blocks[0].mlp.up_proj.weight.shape == (2, 64, 32)
    after = unstacked(model).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def test_layers_that_differ_are_refused():
    model = build_model(load_model_config(LLAMA))
    model.blocks[1].self_attn.window = 8
    with pytest.raises(ValueError, match=r"layer 1 is not as the first, in self_attn: window"):
        stack_layers(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scan_layers": True, "device": "eager"}, "scan_layers needs device xla"),
        ({"scan_layers": True, "activation_checkpointing": 2}, "none, selective or full"),
        ({"activation_checkpointing": "selective"}, "needs scan_layers=true"),
        ({"scan_layers": True, "optimizer": {"name": "adafactor"}}, "needs optimizer adamw"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)
