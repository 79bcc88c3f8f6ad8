"""Checkpoints: exact, atomic, few, and only for the run they belong to."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from small import LLAMA, QUIET, config, losses, settings

import xla_attention.training.checkpoint as checkpoint_module
from xla_attention.training.checkpoint import CheckpointError, CheckpointFolder
from xla_attention.training.config import ConfigError
from xla_attention.training.loop import train, train_step
from xla_attention.training.metrics import DivergedError
from xla_attention.training.optimizer import named_state, set_learning_rate
from xla_attention.training.run import prepare
from xla_attention.training.state import random_state, seed_random, set_random_state


def names(out_dir):
    return [path.name for path in CheckpointFolder(out_dir / "checkpoints", 1).all()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device": "eager", "optimizer": {"name": "adafactor", "lr": 1e-2}},
        {"device": "eager", "compute_dtype": "bfloat16", "grad_accumulation": 2},
    ],
    ids=["xla", "eager-adafactor", "eager-bf16-accumulate"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, changes):
    """12 steps at once, against the first 5, and the other 7 from their checkpoint."""
    whole = train(config(tmp_path / "whole", **changes), QUIET)

    parts = tmp_path / "parts"
    train(config(parts, **changes, checkpoint={"interval": 5, "keep_last": 3}), QUIET)
    for later in ("step-00000010", "step-00000012"):
        shutil.rmtree(parts / "checkpoints" / later)
    assert names(parts) == ["step-00000005"]
    resumed = train(config(parts, **changes), QUIET)

    assert losses(parts) == losses(tmp_path / "whole")
    assert list(losses(parts)) == list(range(1, 13))
    assert resumed.eval_loss == whole.eval_loss
    for file in ("model/model.safetensors", "training.safetensors"):
        assert (resumed.checkpoint / file).read_bytes() == (whole.checkpoint / file).read_bytes()


def test_everything_comes_back(tmp_path):
    run = prepare(config(tmp_path), QUIET)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [
            *run.state.model.parameters(),
            *named_state(run.state.model, run.state.optimizer).values(),
        ]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    run.state.step, run.state.position = 7, 29
    torch.rand(3)
    saved = run.save()
    following = torch.rand(3)

    back = prepare(config(tmp_path), QUIET)
    assert (back.state.step, back.state.position) == (7, 29)
    assert torch.equal(torch.rand(3), following)
    pairs = zip(back.state.model.parameters(), run.state.model.parameters())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    here, there = (named_state(r.state.model, r.state.optimizer) for r in (back, run))
    assert here.keys() == there.keys() and all(torch.equal(here[k].cpu(), there[k].cpu()) for k in here)
    assert saved.name == "step-00000007"


def test_a_resumed_run_runs_the_program_that_the_first_one_compiled(tmp_path):
    train(config(tmp_path, steps=3), QUIET)
    compiled = xla_metrics.metric_data("CompileTime")[0]
    run = prepare(config(tmp_path), QUIET)
    prepared = xla_metrics.metric_data("CompileTime")[0]
    assert prepared <= compiled + 1  # at most the copying of the state
    set_learning_rate(run.state.optimizer, 1e-3)
    train_step(run)
    assert xla_metrics.metric_data("CompileTime")[0] == prepared


def test_random_generators_come_back():
    device = torch_xla.device()
    for seed in (0, 2**63 - 1, 2**64 - 1):  # torch_xla's state is an unsigned 64-bit integer
        seed_random(5, device)
        xm.set_rng_state(seed, str(device))
        saved, expected = random_state(device), torch.rand(3, device=device).cpu()
        seed_random(6, device)
        set_random_state(saved, device)
        torch.testing.assert_close(torch.rand(3, device=device).cpu(), expected, atol=0, rtol=0)


def test_a_diverged_run_stops_before_it_overwrites_good_checkpoints(tmp_path):
    """A learning rate of 1e30 makes the second step's loss infinite or not a number."""
    diverging = {"device": "eager", "optimizer": {"lr": 1e30, "max_grad_norm": None}}
    with pytest.raises(DivergedError, match=r"step \d: loss .*lower optimizer\.lr"):
        train(config(tmp_path, **diverging, checkpoint={"interval": 4, "keep_last": 1}), QUIET)
    assert names(tmp_path) == []


def test_only_the_last_are_kept(tmp_path):
    train(config(tmp_path, device="eager", checkpoint={"interval": 2, "keep_last": 3}), QUIET)
    assert names(tmp_path) == ["step-00000008", "step-00000010", "step-00000012"]


def test_half_written_checkpoints_are_ignored_and_removed(tmp_path):
    train(config(tmp_path, device="eager", steps=6), QUIET)
    half = tmp_path / "checkpoints" / ".step-00000009.tmp"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000006", half)
    (half / "training.json").unlink()
    run = prepare(config(tmp_path, device="eager"), QUIET)
    assert run.state.step == 6 and not half.exists()


@pytest.mark.parametrize("fails_after", [0, 1, 3], ids=["first-file", "weights", "last-file"])
def test_a_full_disk_costs_neither_the_last_checkpoint_nor_the_training(tmp_path, monkeypatch, fails_after):
    """Interval saves fail with a warning and training goes on; once there is space, saving works again."""
    full = {"now": False}
    written = []

    def guard(write):
        def guarded(*args, **kwargs):
            written.append(write)
            if full["now"] and len(written) > fails_after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*args, **kwargs)

        return guarded

    for name in ("save_model", "save_file", "save_config"):
        monkeypatch.setattr(checkpoint_module, name, guard(getattr(checkpoint_module, name)))
    run = prepare(config(tmp_path, device="eager"), QUIET)
    run.state.step = 4
    good = run.save()
    contents = {file: file.read_bytes() for file in good.rglob("*") if file.is_file()}

    full["now"] = True
    written.clear()
    run.state.step = 8
    if fails_after < 3:
        with pytest.raises(
            CheckpointError, match=r"No space left.*set another out_dir; the last good one is .*4"
        ):
            run.save()
        assert names(tmp_path) == [good.name]
        assert not list((tmp_path / "checkpoints").glob(".*"))  # the half that was written is gone
    full["now"] = False
    assert run.save().name == "step-00000008"
    assert {file: file.read_bytes() for file in good.rglob("*") if file.is_file()} == contents


def test_training_goes_on_when_an_interval_save_fails(tmp_path, monkeypatch):
    save = CheckpointFolder.save

    def full_at_six(self, state, *args):
        if state.step == 6:
            raise CheckpointError("the checkpoint of step 6 was not written: No space left on device")
        return save(self, state, *args)

    monkeypatch.setattr(CheckpointFolder, "save", full_at_six)
    result = train(config(tmp_path, device="eager", checkpoint={"interval": 3, "keep_last": 9}), QUIET)
    assert result.step == 12
    assert names(tmp_path) == ["step-00000003", "step-00000009", "step-00000012"]


TRAIN_ON_A_TINY_DISK = """
import json, os, subprocess, sys
sys.path.insert(0, {here!r})
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", {disk!r}], check=True)
from small import config
from rich.console import Console
from xla_attention.training.loop import train
from xla_attention.training.run import prepare
out = Path({disk!r}) / "run"
try:
    train(config(out, device="eager", checkpoint={{"interval": 4, "keep_last": 2}}), Console(width=1000))
except OSError as error:
    print("END", error)
print("RESUMES AT", prepare(config(out, device="eager"), Console(quiet=True)).state.step)
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A file system with room for one checkpoint (about 500 KB) and not for two."""
    namespace = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")
    disk = tmp_path / "disk"
    disk.mkdir()
    program = TRAIN_ON_A_TINY_DISK.format(here=str(Path(__file__).parent), disk=str(disk))
    done = subprocess.run([*namespace, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning: the checkpoint of step 8 was not written" in done.stdout
    assert "training goes on" in done.stdout
    assert "END the checkpoint of step 12 was not written" in done.stdout
    assert "No space left on device" in done.stdout
    assert "RESUMES AT 4" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": LLAMA | {"hidden_size": 64}},
            r"model\.head_dim was 16, is 32; model\.hidden_size was 32, is 64",
        ),
        ({"seq_len": 16}, r"seq_len was 32, is 16"),
        ({"seed": 1}, r"seed was 0, is 1"),
        ({"data": {"train": ["{stdlib}/email/*.py"]}}, r"data\.train.* now give other training data"),
        ({"optimizer": {"name": "adafactor"}}, r"saved by another optimizer.*set optimizer\.name as it was"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, changes, message):
    train(config(tmp_path, device="eager", steps=1), QUIET)
    with pytest.raises(ConfigError, match=message) as error:
        train(config(tmp_path, device="eager", **changes), QUIET)
    assert "out_dir" in str(error.value)
    assert names(tmp_path) == ["step-00000001"]


def test_a_finished_run_is_left_as_it_is(tmp_path):
    first = train(config(tmp_path, device="eager"), QUIET)
    again = train(config(tmp_path, device="eager"), QUIET)
    assert again == first


def test_fresh_starts_again_and_deletes_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    train(config(tmp_path, device="eager", steps=3), QUIET)
    train(config(tmp_path, device="eager", steps=2, seed=5), QUIET, fresh=True)
    assert names(tmp_path) == ["step-00000002"] and list(losses(tmp_path)) == [1, 2]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_checkpoint_carries_the_configuration_and_a_hugging_face_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    result = train(config(tmp_path, device="eager", steps=2), QUIET)
    saved = (result.checkpoint / "config.yaml").read_text()
    assert all(key in saved for key in settings(tmp_path))
    assert json.loads((result.checkpoint / "training.json").read_text())["position"] == 8
    transformers.AutoModelForCausalLM.from_pretrained(result.checkpoint / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.checkpoint / "model")
    assert tokenizer.decode(tokenizer.encode("def f():\n\treturn 'é'")) == "def f():\n\treturn 'é'"
