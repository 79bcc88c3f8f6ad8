"""Checkpoints that do not fit, and writing that goes wrong."""

import json

import pytest
import torch
from random_models import their_model
from safetensors.torch import load_file, save_file

from xla_attention.models import load_model, save_model

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    their_model("llama").save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def error_of(folder, kind=ValueError):
    with pytest.raises(kind) as raised:
        load_model(folder)
    return str(raised.value)


def test_missing_tensor(folder):
    change_weights(folder, lambda weights: weights.pop(Q_PROJ))
    assert f"missing {Q_PROJ}, shape [64, 64]" in error_of(folder)


def test_unexpected_tensor(folder):
    change_weights(folder, lambda weights: weights.update({"model.extra": torch.zeros(3)}))
    assert "unexpected model.extra in model.safetensors" in error_of(folder)


def test_wrong_shape(folder):
    change_weights(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(32, 64)}))
    expected = f"{Q_PROJ} in model.safetensors has shape [32, 64], the config asks for [64, 64]"
    assert expected in error_of(folder)


def test_a_config_of_another_model_lists_the_first_differences(folder):
    change_config(folder, intermediate_size=128, num_hidden_layers=4)
    message = error_of(folder)
    assert (
        "mlp.down_proj.weight in model.safetensors has shape [64, 112], the config asks for [64, 128]"
        in message
    )
    assert "more" in message
    assert len(message.splitlines()) < 12


def test_quantised_weights(folder):
    change_weights(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    assert f"{Q_PROJ} is stored as I8" in error_of(folder)


def test_mixed_types(folder):
    change_weights(folder, lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].half()}))
    message = error_of(folder)
    assert f"{Q_PROJ} in model.safetensors is torch.float16" in message
    assert "dtype=" in message
    assert load_model(folder, dtype=torch.float32).blocks[1].self_attn.q_proj.weight.dtype == torch.float32


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors cannot be read, is it complete?" in error_of(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in error_of(
        folder, FileNotFoundError
    )


def test_a_shard_is_missing(tmp_path):
    their_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    message = error_of(tmp_path, FileNotFoundError)
    assert f"has no {shard.name}, which model.safetensors.index.json names" in message


def test_saving_never_replaces_a_folder(folder):
    model = load_model(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(FileExistsError, match="exists already"):
        save_model(model, folder)
    assert sorted(folder.iterdir()) == before


def test_a_failed_save_leaves_nothing(folder, tmp_path, monkeypatch):
    import safetensors

    def full_disk(*args, **kwargs):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.serialize_file", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        save_model(load_model(folder), tmp_path / "saved")
    assert sorted(tmp_path.iterdir()) == [folder]
