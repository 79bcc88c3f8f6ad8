"""A run whose out_dir is in a bucket: as in a folder, and any host goes on with it."""

import fsspec
import pytest
import torch
from small import QUIET, config, losses, settings
from spmd import run_spmd
from typer.testing import CliRunner

from xla_attention.cli import app
from xla_attention.models import load_model
from xla_attention.remote import COMPLETE, Remote
from xla_attention.training.checkpoint import find_checkpoint, load_weights
from xla_attention.training.config import TrainConfig
from xla_attention.training.loop import train

URL = "memory://bucket/run"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """`hosts(name)`: from here on this process is another host, which has only what is in the bucket."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]

    def host(name):
        monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path / name))
        return Remote(URL)

    yield host
    memory.store.clear()


def run(out_dir, **changes):
    short = {"device": "eager", "checkpoint": {"interval": 4, "keep_last": 2}}
    return TrainConfig.model_validate(settings(out_dir, **short | changes))


def test_another_host_goes_on_from_the_bucket(hosts, tmp_path):
    train(run(tmp_path / "whole"), QUIET)
    first = hosts("first")
    train(run(URL), QUIET)
    there = first.folder("checkpoints")
    assert there.complete() == ["step-00000008", "step-00000012"]
    there.remove("step-00000012")
    first._fs.pipe_file(f"{there._root}/step-00000012/model/config.json", b"{}")  # a killed upload

    second = hosts("second")
    done = train(run(URL), QUIET)
    assert done.checkpoint.is_relative_to(tmp_path / "second")
    assert losses(second.path) == losses(tmp_path / "whole")  # those before from the bucket
    assert there.complete() == ["step-00000008", "step-00000012"]
    ours, same = (load_weights(find_checkpoint(p)).state_dict() for p in (URL, tmp_path / "whole"))
    assert all(torch.equal(ours[name], same[name]) for name in same)
    assert any(name.startswith("/bucket/run/tensorboard/events") for name in first._fs.store)


def test_a_bucket_that_cannot_be_reached_costs_no_training(hosts, monkeypatch):
    remote = hosts("first")
    publish = Remote.publish

    def fail_once(self, name):
        if name == "step-00000004":
            raise OSError("unreachable")
        publish(self, name)

    monkeypatch.setattr(Remote, "publish", fail_once)
    train(run(URL), QUIET)
    assert remote.folder("checkpoints").complete() == ["step-00000008", "step-00000012"]


def test_fresh_forgets_what_is_in_the_bucket(hosts):
    remote = hosts("first")
    train(run(URL), QUIET)
    train(run(URL, steps=2), QUIET, fresh=True)
    assert remote.folder("checkpoints").complete() == ["step-00000002"]
    assert list(losses(remote.path)) == [1, 2]


SHARDED = """
import os
from small import QUIET, settings
from xla_attention.training.config import TrainConfig
from xla_attention.training.loop import train

for host, steps, sharding in VARIABLES["runs"]:
    os.environ["XLA_ATTENTION_CACHE"] = host
    train(
        TrainConfig.model_validate(
            settings(VARIABLES["out_dir"], **VARIABLES["changes"], steps=steps, sharding=sharding)
        ),
        QUIET,
    )
print("null")
"""


@pytest.mark.slow
def test_sharded_parts_go_to_the_bucket_and_another_mesh_reads_them(hosts, tmp_path):
    """2 devices save in the background, 4 devices of another host go on, and one folder is exported to the
    bucket. Losses to 1e-5, by the order of sums."""
    url = f"file://{tmp_path}/bucket/run"  # of this machine, as two processes use it
    changes = {
        "data": {"train": ["{stdlib}/json/*.py"], "held_out": 0.0},
        "model": settings("")["model"] | {"vocab_size": 264},
        "checkpoint": {"interval": 3},
        "optimizer": {"lr": 3e-3, "warmup_steps": 3, "schedule": "constant"},
    }
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_spmd(SHARDED, 2, out_dir=url, changes=changes, runs=[[first, 4, {"strategy": "fsdp"}]])
    checkpoint = tmp_path / "bucket" / "run" / "checkpoints" / "step-00000003"
    assert {".metadata", "__0_0.distcp"} <= {file.name for file in (checkpoint / "state").iterdir()}
    assert (checkpoint / COMPLETE).is_file() and not list((tmp_path / "first").rglob("*.distcp"))
    run_spmd(SHARDED, 4, out_dir=url, changes=changes, runs=[[second, 6, {"strategy": "fsdp"}]])

    whole = config(tmp_path / "whole", **changes, steps=6)
    train(whole, QUIET)
    hosts("third")
    got = losses(tmp_path / "bucket" / "run")
    assert list(got) == list(range(1, 7))
    for step, loss in losses(tmp_path / "whole").items():
        assert abs(got[step] - loss) < 1e-5

    exported = f"file://{tmp_path}/bucket/model"
    done = CliRunner().invoke(app, ["export", url, exported])
    assert done.exit_code == 0, done.output
    ours = load_model(tmp_path / "bucket" / "model").state_dict()
    theirs = load_weights(find_checkpoint(url)).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = CliRunner().invoke(app, ["export", url, exported])
    assert again.exit_code == 1 and "exists already" in str(again.output) + str(again.exception)
