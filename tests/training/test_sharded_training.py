"""Training over 8 virtual devices is training on one."""

import json

import pytest
import torch
from small import GPT, LLAMA
from spmd import run_spmd

from xla_attention.training.checkpoint import load_weights

MODELS = {
    "llama": LLAMA | {"vocab_size": 264, "hidden_size": 64, "num_attention_heads": 4},
    "gpt2": GPT | {"vocab_size": 264, "n_embd": 64, "n_head": 4},
}
STRATEGIES = ("replicated", "fsdp", "2d", "hsdp", "fsdp_context")

TRAIN = """
from pathlib import Path
import xla_attention.training.run as run_module
from small import QUIET, config
from xla_attention.training.loop import train

build = run_module.build_optimizer
def with_eps(*args, **kwargs):
    optimizer = build(*args, **kwargs)
    for group in optimizer.param_groups:
        group["eps"] = VARIABLES["eps"]
    return optimizer
run_module.build_optimizer = with_eps

for strategy in VARIABLES["strategies"]:
    folder = Path(VARIABLES["folder"]) / strategy
    sharding = {"strategy": strategy, "mesh": VARIABLES["mesh"]}
    train(
        config(folder, model=VARIABLES["model"], batch_size=8, steps=VARIABLES["steps"], sharding=sharding,
               data={"train": ["{stdlib}/json/*.py"], "mask_documents": True, "held_out": 0.0}),
        QUIET,
    )
print(json.dumps(None))
"""


def train(folder, devices, strategies, model, steps, eps):
    """Losses and final weights under each strategy, by AdamW with this `eps`."""
    run_spmd(
        TRAIN, devices, folder=str(folder), strategies=strategies, model=model, steps=steps, mesh={}, eps=eps
    )
    results = {}
    for strategy in strategies:
        records = map(json.loads, (folder / strategy / "metrics.jsonl").read_text().splitlines())
        losses = [record["loss"] for record in records]
        checkpoint = folder / strategy / "checkpoints" / f"step-{steps:08d}"
        results[strategy] = torch.tensor(losses), load_weights(checkpoint).state_dict()
    return results


def check_equals_one_device(tmp_path, model, strategies, steps, eps=1e-8, weights_atol=3e-4):
    """Float32 sums in another order: losses to 1e-4.

    Weights to a tenth of what a step moves them: Adam divides a gradient by its own size, rounding included.
    """
    one = train(tmp_path / "one", 1, ["none"], MODELS[model], steps, eps)["none"]
    for strategy, (losses, weights) in train(tmp_path, 8, strategies, MODELS[model], steps, eps).items():
        torch.testing.assert_close(losses, one[0], atol=1e-4, rtol=0, msg=lambda m, s=strategy: f"{s}: {m}")
        assert weights.keys() == one[1].keys()
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight,
                one[1][name],
                atol=weights_atol,
                rtol=0,
                msg=lambda m, n=name, s=strategy: f"{s}: {n}: {m}",
            )


@pytest.mark.parametrize(
    ("model", "strategies"),
    [
        ("llama", ("fsdp", "2d", "fsdp_context")),
        pytest.param("gpt2", ("fsdp_context",), marks=pytest.mark.slow),
    ],
)
def test_a_few_steps(tmp_path, model, strategies):
    check_equals_one_device(tmp_path, model, strategies, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_50_steps_under_each_strategy(tmp_path, model):
    check_equals_one_device(tmp_path, model, STRATEGIES, steps=50)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_weights_differ_by_no_more_than_adams_division_makes_of_rounding(tmp_path, model):
    """The same 50 steps with an eps that bounds the division, and nothing else changed: weights to 1e-5,
    as float32 sums in another order give."""
    check_equals_one_device(tmp_path, model, STRATEGIES, steps=50, eps=1e-3, weights_atol=1e-5)


PLACES = """
from pathlib import Path
from small import QUIET, config
from xla_attention.training.loop import record_step, train_step
from xla_attention.training.optimizer import named_state
from xla_attention.training.run import prepare
import torch_xla
import torch_xla.debug.metrics as metrics

def places(tensors):
    return {name: torch_xla._XLAC._get_xla_sharding_spec(tensor) for name, tensor in tensors}

run = prepare(config(Path(VARIABLES["folder"]), **VARIABLES["changes"]), QUIET)
model, optimizer = run.state.model, run.state.optimizer
def everything():
    return places(model.named_parameters()) | places(named_state(model, optimizer).items())

before, compiled = everything(), []
with run.attention():
    for _ in range(3):
        train_step(run)
        compiled.append(metrics.metric_data("CompileTime")[0])
    after = everything()
    run.loss(run.training_batches()[0]).backward()
    torch_xla.sync()
gradients = places((name, parameter.grad) for name, parameter in model.named_parameters())
print(json.dumps([before, after, gradients, compiled]))
"""


def test_everything_stays_where_the_strategy_puts_it(tmp_path):
    """Parameters, gradients and optimizer state, over 2 x 2 devices; and no step compiles anew."""
    changes = {"model": MODELS["llama"], "batch_size": 4, "sharding": {"strategy": "2d"}}
    before, after, gradients, compiled = run_spmd(PLACES, 4, folder=str(tmp_path), changes=changes)
    assert before == after
    assert compiled[0] == compiled[-1]
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    assert before[up].startswith("{devices=[2,2]0,2,1,3")  # rows over tensor, columns over fsdp
    assert before[down].startswith("{devices=[2,2]0,1,2,3")
    for name, place in gradients.items():
        assert place == before[name] == before[f"{name}.exp_avg"] == before[f"{name}.exp_avg_sq"]
