"""A run that is stopped, politely or not, ends where the uninterrupted one ends."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from small import losses, settings

COMMAND = Path(sys.executable).with_name("xla-attention")


def start(config, **options):
    return subprocess.Popen(
        [COMMAND, "train", config],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "500", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        **options,
    )


def wait_for(process, text):
    """Reads the process's output until a line holds `text`; returns what came."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return "".join(seen)
    raise AssertionError(f"ended without {text!r}:\n{''.join(seen)}")


def last_step(out_dir):
    """Step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name[5:]) for path in (out_dir / "checkpoints").glob("step-*")), default=0)


def write(tmp_path, name, **changes):
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path / name, **changes)))
    return path


@pytest.mark.parametrize(
    ("kills", "device"),
    [(1, "eager"), pytest.param(10, "xla", marks=pytest.mark.slow)],
    ids=["3-eager", "10-xla"],
)
def test_kill_9_at_random_moments_then_resume(tmp_path, kills, device):
    """The run saves at every other step, so that some kills hit a checkpoint being written."""
    changes = {"device": device, "steps": 80, "checkpoint": {"interval": 2}}
    whole = start(write(tmp_path, "whole", **changes))
    assert "held-out loss" in whole.communicate()[0]

    config = write(tmp_path, "killed", **changes)
    random.seed(0)
    reached = 0
    for _ in range(kills):
        process = start(config)
        further = reached + random.uniform(0, 60 / kills)
        while last_step(tmp_path / "killed") < further and process.poll() is None:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.1))
        assert process.poll() is None, f"ended before it was killed: {process.communicate()[0]}"
        process.kill()
        process.communicate()
        assert last_step(tmp_path / "killed") >= reached
        reached = last_step(tmp_path / "killed")
    assert reached > 0
    last = start(config)
    output = last.communicate()[0]
    assert last.returncode == 0, output
    assert f"resuming from {tmp_path}/killed/checkpoints/step-{reached:08d}" in output
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    ends = [folder / "checkpoints" / "step-00000080" for folder in (tmp_path / "killed", tmp_path / "whole")]
    for file in ("model/model.safetensors", "training.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stop_signal_saves_and_exits_well(tmp_path, number):
    process = start(write(tmp_path, "run", device="eager", steps=10**6))
    wait_for(process, "first step")
    process.send_signal(number)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert f"{number.name}: stopped after step" in output and "run the same command to go on" in output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(checkpoint.name[5:]) == max(losses(tmp_path / "run"))


def test_mistakes_are_one_message_without_a_traceback(tmp_path):
    config = write(tmp_path, "run", optimizer={"learning_rate": 1})
    process = start(config)
    output = process.communicate()[0]
    assert process.returncode == 1
    assert "error:" in output and "optimizer.learning_rate: unknown key; allowed here: name, lr" in output
    assert "Traceback" not in output


def test_help_is_quick_because_it_imports_nothing_heavy():
    heavy = "torch", "torch_xla", "jax", "numpy", "pydantic"
    program = f"import sys, xla_attention.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
