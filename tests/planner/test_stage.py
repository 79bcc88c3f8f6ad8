"""Staging a training step: what does not fit is an error here, though another process finds it."""

import pytest

from xla_attention.planner.stage import stage_step
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import TrainConfig

MODEL = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6}, r"dimension 0 of 6 does not divide by data=1 x fsdp=4; the next that does is 8"),
        ({"sharding": {"strategy": "none"}}, r"a step is staged under a strategy"),
    ],
)
def test_what_does_not_fit(tmp_path, changes, message):
    settings = {
        "model": MODEL,
        "data": {"train": ["unread"]},
        "seq_len": 32,
        "batch_size": 8,
        "steps": 1,
        "sharding": {"strategy": "fsdp"},
        "out_dir": str(tmp_path),
    }
    with pytest.raises(ValueError, match=message):
        stage_step(TrainConfig.model_validate(settings | changes), parse_topology("v5e:2x2"))


def settings_of(folder, **changes):
    settings = {
        "model": MODEL,
        "data": {"train": ["unread"], "mask_documents": False},
        "seq_len": 32,
        "batch_size": 128,
        "steps": 1,
        "sharding": {"strategy": "fsdp"},
        "out_dir": str(folder),
    }
    return TrainConfig.model_validate(settings | changes)


def test_more_chips_than_torch_counts_devices(tmp_path):
    """128 overflow the signed byte in which torch counts those that autograd runs on."""
    module = stage_step(settings_of(tmp_path, model=MODEL | {"n_embd": 128}), parse_topology("v5e:8x16"))
    assert len(module) > 1000


def test_what_xla_is_to_place_is_staged_without_annotations(tmp_path):
    slice_ = parse_topology("v5e:2x2")
    auto = stage_step(settings_of(tmp_path, sharding={"strategy": "auto"}), slice_)
    assert b"tpu_custom_call" in auto
    assert b"Sharding" not in auto
    assert b"Sharding" in stage_step(settings_of(tmp_path), slice_)
