"""Checkpoints of sharded runs: any mesh reads them, and a kill while one is written costs nothing."""

import shutil
import time

import pytest
import torch
from small import LLAMA, QUIET, config, losses
from spmd import run_spmd, start_spmd
from typer.testing import CliRunner

from xla_attention.cli import app
from xla_attention.training.checkpoint import CheckpointFolder, load_weights
from xla_attention.training.loop import train
from xla_attention.training.optimizer import named_state
from xla_attention.training.run import prepare

MODEL = LLAMA | {"vocab_size": 264, "hidden_size": 64, "num_attention_heads": 4}
CHANGES = {"model": MODEL, "batch_size": 8, "data": {"train": ["{stdlib}/json/*.py"], "held_out": 0.0}}

TRAIN = """
import hashlib
from pathlib import Path
from small import QUIET, config
from xla_attention.training.loop import train
from xla_attention.training.run import prepare
from xla_attention.training.sharded_state import named_tensors

def digest(run):
    "Of every bit of the state."
    tensors = named_tensors(run.state.model, run.state.optimizer)
    arrays = {name: tensor.cpu().numpy() for name, tensor in sorted(tensors.items())}
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}

digests = []
for sharding, folder in VARIABLES["runs"]:
    run = config(Path(folder), **VARIABLES["changes"], steps=6, checkpoint={"interval": 3}, sharding=sharding)
    digests.append(digest(prepare(run, QUIET)))
    train(run, QUIET)
print(json.dumps(digests))
"""


def last_steps(folder):
    return torch.tensor([loss for step, loss in losses(folder).items() if step > 3])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 6 steps on a mesh of 2 x 4 devices, and a copy that ends with the checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("runs")
    run_spmd(TRAIN, 8, runs=[({"strategy": "hsdp"}, str(folder / "whole"))], changes=CHANGES)
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoints" / "step-00000006")
    return folder


def test_another_mesh_resumes_with_the_same_state_and_losses(saved, tmp_path):
    """8 devices (2 x 4, hsdp) to 4 x 2 (2d), to 4 (fsdp), and to one. The state is the same bit for
    bit, the losses differ by the order of sums: 1e-5."""
    runs = {}
    for name in ("2d", "four", "one"):
        runs[name] = tmp_path / name
        shutil.copytree(saved / "half", runs[name])
    digests = run_spmd(TRAIN, 8, runs=[({"strategy": "2d"}, str(runs["2d"]))], changes=CHANGES)
    digests += run_spmd(TRAIN, 4, runs=[({"strategy": "fsdp"}, str(runs["four"]))], changes=CHANGES)
    digests += run_spmd(TRAIN, 1, runs=[({"strategy": "none"}, str(runs["one"]))], changes=CHANGES)
    assert all(digest == digests[0] for digest in digests[1:]) and len(digests[0]) > 20
    for folder in runs.values():
        assert list(losses(folder)) == list(range(1, 7))
        torch.testing.assert_close(last_steps(folder), last_steps(saved / "whole"), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_run_on_one_device_goes_on_sharded(saved, tmp_path):
    one = tmp_path / "one"
    settings_ = CHANGES | {"steps": 6, "checkpoint": {"interval": 3}}
    train(config(one, **settings_), QUIET)
    shutil.copytree(one, tmp_path / "eight")
    shutil.rmtree(tmp_path / "eight" / "checkpoints" / "step-00000006")
    run_spmd(TRAIN, 8, runs=[({"strategy": "fsdp"}, str(tmp_path / "eight"))], changes=CHANGES)
    torch.testing.assert_close(last_steps(tmp_path / "eight"), last_steps(one), atol=1e-5, rtol=0)


def test_export_is_one_hugging_face_folder(saved, tmp_path):
    transformers = pytest.importorskip("transformers")
    checkpoint = CheckpointFolder(saved / "whole" / "checkpoints", keep_last=2).latest()
    assert not list((checkpoint / "model").glob("*.safetensors"))
    done = CliRunner().invoke(app, ["export", str(saved / "whole"), str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    ours = load_weights(checkpoint).state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_every_part_is_written_once(saved):
    """Over 2 x 4 devices each part lies on two of them; a file with both would be twice the state."""
    checkpoint = CheckpointFolder(saved / "whole" / "checkpoints", keep_last=2).latest()
    run = prepare(config(saved / "other", **CHANGES), QUIET)
    tensors = [*run.state.model.parameters(), *named_state(run.state.model, run.state.optimizer).values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    written = sum(file.stat().st_size for file in (checkpoint / "state").iterdir())
    assert size < written < 1.5 * size


def test_another_optimizer_is_refused(saved, tmp_path):
    shutil.copytree(saved / "half", tmp_path / "run")
    with pytest.raises(ValueError, match=r"saved by another optimizer"):
        prepare(config(tmp_path / "run", **CHANGES, optimizer={"name": "adafactor"}), QUIET)


TRAIN_ON_A_SLOW_DISK = """
import time
from pathlib import Path
import torch.distributed.checkpoint.filesystem as filesystem
from small import QUIET, config
from xla_attention.training.loop import train

write = filesystem._write_item
def slowly(*args, **kwargs):
    time.sleep(VARIABLES["seconds"])
    return write(*args, **kwargs)
filesystem._write_item = slowly
train(config(Path(VARIABLES["folder"]), **VARIABLES["changes"], steps=8, log_interval=1,
             sharding={"strategy": "fsdp"}, checkpoint={"interval": 2, "keep_last": 9}), QUIET)
print("null")
"""


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written_in_the_background(tmp_path):
    """The disk takes seconds for the second checkpoint, and training goes on meanwhile; a kill then leaves
    the first, from which the run ends as one that was never killed: float32 sums are in the same order."""
    run_spmd(TRAIN_ON_A_SLOW_DISK, 2, folder=str(tmp_path / "whole"), changes=CHANGES, seconds=0)
    killed = tmp_path / "killed"
    process = start_spmd(TRAIN_ON_A_SLOW_DISK, 2, folder=str(killed), changes=CHANGES, seconds=0.05)
    first, second = (killed / "checkpoints" / name for name in ("step-00000002", ".step-00000004.tmp"))
    while not (second / "state").is_dir():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    assert second.is_dir() and not (second / "training.json").exists()
    assert CheckpointFolder(killed / "checkpoints", keep_last=9).all() == [first]

    run_spmd(TRAIN_ON_A_SLOW_DISK, 2, folder=str(killed), changes=CHANGES, seconds=0)
    assert losses(killed) == losses(tmp_path / "whole")
    ends = [load_weights(folder / "checkpoints" / "step-00000008") for folder in (killed, tmp_path / "whole")]
    pairs = zip(*(model.state_dict().values() for model in ends))
    assert all(torch.equal(a, b) for a, b in pairs)
