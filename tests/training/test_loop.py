"""The loop: what it computes, what it reports, and that the device is never made to wait or compile again."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
from rich.console import Console
from small import GPT, LLAMA, QUIET, config, losses

import xla_attention.models.attention as model_attention
import xla_attention.models.llama as llama
from xla_attention.training.config import ConfigError, load_config
from xla_attention.training.data import as_batch
from xla_attention.training.loop import evaluate, train, train_step
from xla_attention.training.optimizer import learning_rate, set_learning_rate
from xla_attention.training.run import exclusive, prepare

DEMO = Path(__file__).parents[2] / "configs" / "train" / "demo.yaml"


def take_steps(run, steps):
    """Losses and gradient norms of the next few steps."""
    config, taken = run.config, []
    for _ in range(steps):
        set_learning_rate(run.state.optimizer, learning_rate(run.state.step, config.steps, config.optimizer))
        loss, norm = train_step(run)
        run.state.step += 1
        run.state.position += config.sequences_per_step
        taken.append((loss.item(), norm.item()))
    return taken


def steps_of(tmp_path, count=6, **changes):
    run = prepare(config(tmp_path, **changes), QUIET)
    return take_steps(run, count), run


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt2"])
def test_xla_and_eager_torch_agree(tmp_path, model):
    """The kernels against plain torch attention, float32: 20 steps of one loss curve to 1e-3."""
    on_xla, _ = steps_of(tmp_path, 20, model=model, steps=20)
    eager, _ = steps_of(tmp_path, 20, model=model, steps=20, device="eager")
    assert on_xla[-1][0] < on_xla[0][0] - 0.3  # it learns, so the curves say something
    torch.testing.assert_close(torch.tensor(on_xla), torch.tensor(eager), atol=1e-3, rtol=1e-3)


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    """The mean over 2 x 2 sequences is that over 4; float32 sums in another order differ by 1e-5."""
    accumulated, _ = steps_of(tmp_path, batch_size=2, grad_accumulation=2)
    at_once, _ = steps_of(tmp_path, batch_size=4)
    torch.testing.assert_close(torch.tensor(accumulated), torch.tensor(at_once), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", ["xla", "eager"])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt2"])
def test_documents_do_not_see_each_other(tmp_path, model, device):
    """What comes before a border changes neither training nor held-out loss of what comes after it."""
    for masked, seen in ((True, False), (False, True)):
        data = {"train": ["{stdlib}/json/*.py"], "mask_documents": masked}
        run = prepare(config(tmp_path, model=model, device=device, data=data), QUIET)
        blocks = run.train_data.take(range(4))
        blocks[:, 10] = run.tokenizer.eos_id
        other = blocks.copy()
        other[:, :10] = ord("x")
        labels = blocks[:, 1:].copy()
        labels[:, :11] = -100
        batches = [
            dataclasses.replace(as_batch(given, run.end_id), labels=labels) for given in (blocks, other)
        ]
        with torch.no_grad():
            one, another = (run.loss(run.put(batch)).item() for batch in batches)
        assert (one != another) == seen


@pytest.mark.filterwarnings("error:None of the inputs have requires_grad")
@pytest.mark.parametrize(("device", "which"), [("xla", "full"), ("eager", "full"), ("eager", 2)])
def test_activation_checkpointing_changes_no_result(tmp_path, which, device):
    plain, _ = steps_of(tmp_path, 3, device=device)
    recomputed, run = steps_of(tmp_path, 3, device=device, activation_checkpointing=which)
    torch.testing.assert_close(torch.tensor(recomputed), torch.tensor(plain), atol=1e-6, rtol=1e-5)
    evaluate(run)  # without gradients there is nothing to recompute, and nothing to warn of
    assert "model.layers.0.mlp.up_proj.weight" in run.state.model.state_dict()


def test_activation_checkpointing_recomputes_blocks_going_backward(tmp_path, monkeypatch):
    """Each block's forward runs once, and once more if it is recomputed, behind an optimization barrier."""
    calls = []
    forward = llama.MLP.forward
    monkeypatch.setattr(llama.MLP, "forward", lambda self, x: calls.append(self) or forward(self, x))
    for which, expected in (("none", 2), ("full", 4), (2, 3)):
        run = prepare(config(tmp_path, activation_checkpointing=which), QUIET)
        calls.clear()
        loss = run.loss(run.put(as_batch(run.train_data.take(range(4)), run.end_id)))
        loss.backward()
        assert len(calls) == expected
        gradients = [p.grad for p in run.state.model.parameters()]
        hlo = torch_xla._XLAC._get_xla_tensors_hlo(gradients)
        assert hlo.count("opt-barrier(") == expected - 2


@pytest.mark.parametrize("device", ["xla", "eager"])
def test_bfloat16_computes_with_float32_parameters(tmp_path, monkeypatch, device):
    """Attention sees bfloat16; what the optimizer keeps is float32; losses stay within bfloat16's reach."""
    seen = []
    attention = model_attention.flash_attention

    def spy(q, k, v, **options):
        o = attention(q, k, v, **options)
        seen.append({x.dtype for x in (q, k, v, o)})
        return o

    monkeypatch.setattr(model_attention, "flash_attention", spy)
    reduced, run = steps_of(tmp_path, device=device, compute_dtype="bfloat16")
    assert seen and all(dtypes == {torch.bfloat16} for dtypes in seen)
    state = [
        *run.state.model.parameters(),
        *(t for s in run.state.optimizer.state.values() for t in s.values()),
    ]
    assert {tensor.dtype for tensor in state} == {torch.float32}

    monkeypatch.undo()
    full, _ = steps_of(tmp_path, device="eager")
    reduced_losses, full_losses = (torch.tensor([loss for loss, _ in run_]) for run_ in (reduced, full))
    torch.testing.assert_close(reduced_losses, full_losses, atol=5e-3, rtol=0)
    assert reduced != full


@pytest.mark.parametrize(
    "changes",
    [{}, {"batch_size": 2, "grad_accumulation": 2}, {"compute_dtype": "bfloat16"}],
    ids=["plain", "accumulate", "bf16"],
)
def test_nothing_compiles_or_leaves_the_device_after_the_first_step(tmp_path, changes):
    _, run = steps_of(tmp_path, 1, **changes)
    compiled = xla_metrics.metric_data("CompileTime")[0]
    fetched = xla_metrics.counter_value("aten::_local_scalar_dense") or 0
    for rate in (1e-3, 0.0, 5e-4):
        set_learning_rate(run.state.optimizer, rate)
        train_step(run)
        run.state.position += run.config.sequences_per_step
    assert xla_metrics.metric_data("CompileTime")[0] == compiled
    assert (xla_metrics.counter_value("aten::_local_scalar_dense") or 0) == fetched
    fallbacks = [name for name in xla_metrics.counter_names() if name.startswith("aten::")]
    assert set(fallbacks) <= {"aten::_local_scalar_dense"}  # every operation has an XLA lowering


@pytest.mark.parametrize(
    ("changes", "exact"), [({}, True), ({"compute_dtype": "bfloat16"}, False), ({"device": "eager"}, False)]
)
def test_float32_on_xla_is_float32_outside_the_kernels_too(tmp_path, monkeypatch, changes, exact):
    calls = []
    monkeypatch.setattr("xla_attention.training.run.use_exact_float32", lambda: calls.append(1))
    prepare(config(tmp_path, **changes), QUIET)
    assert bool(calls) == exact


def test_a_run_reports_every_step(tmp_path):
    console = Console(record=True, force_terminal=False, width=200)
    result = train(config(tmp_path, eval={"interval": 5, "batches": 2}), console)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    evaluations = {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert all(record["lr"] > 0 and record["grad_norm"] > 0 for record in steps)
    assert list(evaluations) == [5, 10, 12] and evaluations[12] == result.eval_loss
    timed = [record for record in steps if "mfu" in record]
    assert timed and all(record["tokens_per_second"] > 0 and record["mfu"] > 0 for record in timed)
    assert list((tmp_path / "tensorboard").glob("events*"))
    text = console.export_text()
    assert "device: CPU (Pallas interpreter)" in text and "step 8/12: loss" in text
    assert "held-out loss" in text


def test_evaluation_is_the_mean_loss_and_leaves_no_gradient(tmp_path):
    run = prepare(config(tmp_path, device="eager"), QUIET)
    blocks = run.held_out.take([0, run.held_out.blocks - 1])
    expected = run.loss(run.put(as_batch(blocks, run.end_id))).item()
    run.config = run.config.model_copy(update={"batch_size": 1})
    assert evaluate(run) == pytest.approx(expected, rel=1e-6)
    assert all(p.grad is None for p in run.state.model.parameters())


def test_fine_tuning_starts_from_a_saved_model(tmp_path):
    first = train(config(tmp_path / "first"), QUIET)
    again = config(tmp_path / "second", model=str(first.checkpoint / "model"), steps=1)
    train(again, QUIET)
    assert losses(tmp_path / "second")[1] < losses(tmp_path / "first")[1] - 0.3


@pytest.mark.parametrize("device", ["xla", "eager"])
def test_a_profile_is_written_on_request(tmp_path, device):
    train(config(tmp_path, device=device, profile={"start": 2, "steps": 3}), QUIET)
    assert [file for file in (tmp_path / "profile").rglob("*") if file.is_file() and file.stat().st_size > 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 65}, r"seq_len=65 is longer than the model's 64 positions"),
        (
            {"model": LLAMA | {"vocab_size": 200}},
            r"model\.vocab_size=200 must be at least the tokenizer's 257",
        ),
        ({"model": LLAMA | {"hidden_sizes": 3}}, r"hidden_sizes"),
    ],
)
def test_a_configuration_that_does_not_fit_together_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(config(tmp_path, **changes), QUIET)


def test_two_processes_may_not_share_a_folder(tmp_path):
    with exclusive(tmp_path), pytest.raises(ConfigError, match="another process is training there"):
        train(config(tmp_path), QUIET)


@pytest.mark.slow
def test_200_demo_steps_agree_with_eager_torch(tmp_path):
    """The demo's own configuration, through the kernels and in eager torch: one loss curve to 1e-3."""
    curves = []
    for device in ("xla", "eager"):
        run = prepare(load_config(DEMO, [f"device={device}", f"out_dir={tmp_path / device}"]), QUIET)
        curves.append(torch.tensor([loss for loss, _ in take_steps(run, 200)]))
    on_xla, eager = curves
    assert on_xla[-1] < on_xla[0] - 3
    torch.testing.assert_close(on_xla, eager, atol=1e-3, rtol=0)
