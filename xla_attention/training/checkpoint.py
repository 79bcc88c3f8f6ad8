"""Checkpoints that a kill, a full disk or a power cut cannot break.

One checkpoint is one folder:

    step-00000400/
        model/                  a Hugging Face folder: config, weights, tokenizer
        training.safetensors    optimizer state by parameter name, random generators
        training.json           step, data position, fingerprint of the data
        config.yaml             the whole configuration of the run

It is written under a temporary name and renamed when it is on the disk: a folder with the final name is
complete.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from xla_attention.atomic import atomic_folder
from xla_attention.models import load_model_config, save_model
from xla_attention.models.config import ModelConfig
from xla_attention.text import Tokenizer
from xla_attention.training.config import ConfigError, TrainConfig, load_config, save_config
from xla_attention.training.optimizer import copy_to_device, named_state
from xla_attention.training.state import TrainState, random_state, set_random_state, sync

PREFIX = "step-"
# With the data, these decide what a saved position means.
MUST_AGREE = ("seq_len", "seed")


class CheckpointError(OSError):
    """A checkpoint could not be written; what was there before is intact."""


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: holds them; made when the first is saved.
        keep_last: older ones are deleted after each save.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.folder.glob(f"{PREFIX}*"))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.all()), None)

    def save(self, state: TrainState, config: TrainConfig, tokenizer: Tokenizer, data: str) -> Path:
        """Saves, then deletes what is older than the last `keep_last`. A step already saved is left as it is.

        Args:
            data: fingerprint of the training data.

        Raises:
            CheckpointError: the disk is full or refuses. Earlier checkpoints and `state` are as they were.
        """
        final = self.folder / f"{PREFIX}{state.step:08d}"
        if final.exists():
            return final
        try:
            self.remove_unfinished()
            with atomic_folder(final) as unfinished:
                _write(unfinished, state, config, tokenizer, data)
            for old in self.all()[: -self.keep_last]:
                self._remove(old)
        except (OSError, SafetensorError) as error:
            latest = self.latest()
            kept = f"the last good one is {latest}" if latest else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {state.step} was not written to {self.folder}: {error}. "
                f"Free space there or set another out_dir; {kept}"
            ) from error
        return final

    def restore(self, checkpoint: Path, state: TrainState) -> None:
        """Puts back everything but the model's weights, which the caller has loaded.

        Raises:
            ConfigError: the optimizer state is not that of this optimizer and model.
        """
        saved = load_file(checkpoint / "training.safetensors")
        random = {key: saved.pop(f"random.{key}") for key in ("host", "device") if f"random.{key}" in saved}
        here = named_state(state.model, state.optimizer)
        if here.keys() != saved.keys():
            example = sorted(here.keys() ^ saved.keys())[0]
            raise ConfigError(
                f"{checkpoint}: saved by another optimizer or model ({example} is in only one of them); "
                "set optimizer.name as it was, or train into another out_dir"
            )
        for name, tensor in here.items():
            copy_to_device(tensor, saved[name])
        sync(state.device)  # before the generators are set: torch_xla's moves on with each
        set_random_state(random, state.device)
        progress = read_progress(checkpoint)
        state.step, state.position = progress["step"], progress["position"]

    def remove_unfinished(self) -> None:
        """Deletes what a killed process left behind."""
        for folder in self.folder.glob(".*.tmp"):
            shutil.rmtree(folder)

    def _remove(self, checkpoint: Path) -> None:
        """Deletes a checkpoint; first its name, so that half of one never looks complete."""
        doomed = checkpoint.with_name(f".{checkpoint.name}.tmp")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """`step`, `position` and `data` of a checkpoint."""
    return json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))


def check_fits(checkpoint: Path, model: ModelConfig, config: TrainConfig, data: str) -> None:
    """Refuses to resume a run that would silently be another one.

    Args:
        model: what the configuration describes.
        data: fingerprint of what `config.data` now gives.

    Raises:
        ConfigError: the checkpoint was made with another model, seq_len, seed or data; says what differs.
    """
    saved_model = load_model_config(checkpoint / "model").model_dump(exclude={"other"})
    given_model = model.model_dump(exclude={"other"})
    saved_config = load_config(checkpoint / "config.yaml")
    differences = [
        f"model.{key} was {saved_model.get(key)!r}, is {given_model.get(key)!r}"
        for key in sorted(saved_model.keys() | given_model.keys())
        if saved_model.get(key) != given_model.get(key)
    ]
    differences += [
        f"{key} was {getattr(saved_config, key)!r}, is {getattr(config, key)!r}"
        for key in MUST_AGREE
        if getattr(saved_config, key) != getattr(config, key)
    ]
    if not differences and read_progress(checkpoint)["data"] != data:
        differences = ["data.train, data.exclude or data.held_out now give other training data"]
    if differences:
        raise ConfigError(
            f"{checkpoint} does not fit the configuration: {'; '.join(differences)}. "
            "Set it back, train into another out_dir, or start again with --fresh"
        )


def _write(folder: Path, state: TrainState, config: TrainConfig, tokenizer: Tokenizer, data: str) -> None:
    save_model(state.model, folder / "model", tokenizer=tokenizer)
    tensors = named_state(state.model, state.optimizer)
    tensors |= {f"random.{key}": value for key, value in random_state(state.device).items()}
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "training.safetensors"
    )
    progress = {"step": state.step, "position": state.position, "data": data}
    (folder / "training.json").write_text(json.dumps(progress), encoding="utf-8")
    save_config(config, folder / "config.yaml")
