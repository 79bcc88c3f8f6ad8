"""Checkpoints that a kill, a full disk or a power cut cannot break.

One checkpoint is one folder:

    step-00000400/
        model/                  a Hugging Face folder: config, weights, tokenizer
        training.safetensors    optimizer state by parameter name, random generators
        training.json           step, data position, fingerprint of the data
        config.yaml             the whole configuration of the run

A sharded run writes weights and optimizer state in parts instead, into `state/` (`sharded_state.py`), while
it trains on; `export_model` makes a Hugging Face folder of them.

It is written under a temporary name and renamed when it is on the disk: a folder with the final name is
complete. In a bucket, parts are written where they stay, the rest is written here and uploaded, and a marker
comes last (`remote.py`).
"""

import fcntl
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from xla_attention.atomic import atomic_folder
from xla_attention.models import build_model, load_model, load_model_config, save_model
from xla_attention.models.causal_lm import CausalLM
from xla_attention.models.checkpoint import save_description
from xla_attention.models.config import ModelConfig
from xla_attention.remote import Remote, is_url
from xla_attention.text import Tokenizer
from xla_attention.training import sharded_state
from xla_attention.training.config import ConfigError, TrainConfig, load_config, save_config
from xla_attention.training.optimizer import copy_to_device, named_state
from xla_attention.training.processes import barrier, process_index
from xla_attention.training.scan_layers import stack_layers, unstacked
from xla_attention.training.state import TrainState, random_state, set_random_state, sync

if TYPE_CHECKING:
    from xla_attention.sharding.sharding import Sharding

PREFIX = "step-"
# With the data, the first two decide what a saved position means; the last, how the state is kept.
MUST_AGREE = ("seq_len", "seed", "scan_layers")


class CheckpointError(OSError):
    """A checkpoint could not be written; what was there before is intact."""


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: holds them; made when the first is saved.
        keep_last: older ones are deleted after each save.
        sharding: of the run; None on one device.
    """

    def __init__(self, folder: Path | Remote, keep_last: int, sharding: "Sharding | None" = None) -> None:
        self._remote = folder if isinstance(folder, Remote) else None
        self.folder = folder.path if isinstance(folder, Remote) else folder
        self.keep_last = keep_last
        self.sharding = sharding
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._being_written: Future[None] | None = None

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first; of those in a bucket, where this host puts its copies."""
        if self._remote:
            return [self.folder / name for name in self._remote.complete(PREFIX)]
        return sorted(self.folder.glob(f"{PREFIX}*"))

    def latest(self) -> Path | None:
        """The newest complete checkpoint; in a bucket, a copy of it, all but its parts."""
        newest = next(reversed(self.all()), None)
        if newest and self._remote:
            return self._remote.fetch(newest.name, without=sharded_state.FOLDER)
        return newest

    def save(
        self,
        state: TrainState,
        config: TrainConfig,
        tokenizer: Tokenizer,
        data: str,
        background: bool = False,
    ) -> Path:
        """Saves, then deletes what is older than the last `keep_last`. A step already saved is left as it is.

        Where another thread or process is saving into the same folder, waits for it first.

        Args:
            data: fingerprint of the training data.
            background: a sharded run copies its state to the host, and returns while that is written.

        Raises:
            CheckpointError: the disk is full or refuses, for this one, or for one begun in the background.
                Earlier checkpoints and `state` are as they were.
        """
        final = self.folder / f"{PREFIX}{state.step:08d}"
        with self._errors(state.step), ExitStack() as turn:
            turn.enter_context(self._turn())
            self.wait()
            if final in self.all():
                return final
            if self.sharding:
                parts = f"{self._remote.url}/{final.name}/{sharded_state.FOLDER}" if self._remote else None
                write = _sharded_writer(state, config, tokenizer, data, parts)
            else:
                write = functools.partial(_write, state=state, config=config, tokenizer=tokenizer, data=data)
            if self.sharding and background:
                turn_there = turn.pop_all()  # it ends with the writing, in the writer's thread
                self._being_written = self._writer.submit(
                    self._publish_in_turn, final, state.step, write, turn_there
                )
            else:
                self._publish(final, write)
        return final

    def wait(self) -> None:
        """Until a checkpoint begun in the background is written.

        Raises:
            CheckpointError: it cannot be.
        """
        being_written, self._being_written = self._being_written, None
        if being_written:
            being_written.result()

    def _publish_in_turn(
        self, final: Path, step: int, write: Callable[[Path], None], turn: AbstractContextManager[None]
    ) -> None:
        with turn, self._errors(step):
            self._publish(final, write)

    def _publish(self, final: Path, write: Callable[[Path], None]) -> None:
        if process_index():  # the first process makes the folder, the others write their parts into it
            barrier()
            write(unfinished_name(final))
            return
        self._remove_unfinished()
        with atomic_folder(final) as unfinished:
            barrier()
            write(unfinished)
        if self._remote:
            self._remote.publish(final.name)
        for old in self.all()[: -self.keep_last]:
            self._remove(old)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits for every other writer of the folder on this host, and keeps them waiting."""
        if process_index():  # the first process waits for all
            yield
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(self.folder.with_name(f".{self.folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except (OSError, SafetensorError) as error:
            if self._remote:
                raise CheckpointError(
                    f"the checkpoint of step {step} was not written to {self._remote.url}: {error}. "
                    "Those that are complete there are as they were"
                ) from error
            latest = self.latest()
            kept = f"the last good one is {latest}" if latest else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {step} was not written to {self.folder}: {error}. "
                f"Free space there or set another out_dir; {kept}"
            ) from error

    def restore(self, checkpoint: Path, state: TrainState) -> None:
        """Puts back everything that `model_to_restore` has not.

        Raises:
            ConfigError: the optimizer state is not that of this optimizer and model.
        """
        saved = load_file(checkpoint / "training.safetensors")
        random = {key: saved.pop(f"random.{key}") for key in ("host", "device") if f"random.{key}" in saved}
        parts = sharded_state.place_of(checkpoint)
        if parts:
            here = sharded_state.named_tensors(state.model, state.optimizer)
            _check_names(checkpoint, here.keys(), sharded_state.names_in(parts))
        else:
            here = named_state(state.model, state.optimizer)
            _check_names(checkpoint, here.keys(), saved.keys())
        if parts and self.sharding:
            sharded_state.read_sharded(parts, here)
        else:
            whole = sharded_state.read_whole(parts, here) if parts else saved
            for name, tensor in here.items():
                copy_to_device(tensor, whole[name])
        if self.sharding:
            self.sharding.mark_state(state.model, state.optimizer)
        sync(state.device)  # before the generators are set: torch_xla's moves on with each
        set_random_state(random, state.device)
        progress = read_progress(checkpoint)
        state.step, state.position = progress["step"], progress["position"]

    def remove_unfinished(self) -> None:
        """Deletes what a killed process left behind; what is being written now is waited for."""
        with self._turn():
            self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        for folder in self.folder.glob(".*.tmp"):
            shutil.rmtree(folder)
        if self._remote:
            for name in set(self._remote.names()) - set(self._remote.complete()):
                self._remote.remove(name)

    def _remove(self, checkpoint: Path) -> None:
        """Deletes a checkpoint; first its name, so that half of one never looks complete."""
        if self._remote:
            self._remote.remove(checkpoint.name)
            return
        doomed = unfinished_name(checkpoint)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is one of a run's checkpoints."""
    return (folder / "training.json").is_file()


def model_to_restore(checkpoint: Path) -> CausalLM:
    """A checkpoint's model on the CPU, for `CheckpointFolder.restore`, which reads sharded weights itself."""
    if not sharded_state.place_of(checkpoint):
        return load_model(checkpoint / "model")
    return build_model(load_model_config(checkpoint / "model"), device="meta").to_empty(device="cpu")


def load_weights(checkpoint: Path, *, dtype: torch.dtype | None = None) -> CausalLM:
    """A checkpoint's model, on the CPU.

    Args:
        dtype: what to convert the weights to; None keeps that of the checkpoint.
    """
    parts = sharded_state.place_of(checkpoint)
    if not parts:
        return load_model(checkpoint / "model", dtype=dtype)
    model = model_to_restore(checkpoint)
    stacked = load_config(checkpoint / "config.yaml").scan_layers
    if stacked:
        stack_layers(model)
    parameters = {sharded_state.PARAMETERS + name: p.detach() for name, p in model.named_parameters()}
    for name, value in sharded_state.read_whole(parts, parameters).items():
        parameters[name].copy_(value)
    model = unstacked(model) if stacked else model
    return model if dtype is None else model.to(dtype)


def find_checkpoint(place: str | Path) -> Path | None:
    """A run's latest checkpoint, or the checkpoint that `place` is; of a bucket's, a copy without its parts.

    Args:
        place: a folder, or a URL.
    """
    if is_url(place):
        whole = Remote(place)
        latest = CheckpointFolder(whole.folder("checkpoints"), keep_last=1).latest()
        above, _, name = whole.url.rpartition("/")
        if latest is None and name in (run := Remote(above)).complete(name):
            latest = run.fetch(name, without=sharded_state.FOLDER)
        return latest
    latest = CheckpointFolder(Path(place) / "checkpoints", keep_last=1).latest()
    return latest or (Path(place) if is_checkpoint(Path(place)) else None)


def export_model(checkpoint: Path, folder: str | Path, tokenizer: Tokenizer) -> None:
    """Writes one Hugging Face folder of a checkpoint, sharded or not.

    Args:
        folder: a path, or a URL.

    Raises:
        FileExistsError: `folder` exists and is not empty.
    """
    if not is_url(folder):
        save_model(load_weights(checkpoint), folder, tokenizer=tokenizer)
        return
    there = Remote(folder)
    if there.names():
        raise FileExistsError(f"{folder} exists already; give a new folder or remove it first")
    shutil.rmtree(there.path, ignore_errors=True)
    save_model(load_weights(checkpoint), there.path, tokenizer=tokenizer)
    rest = [file.name for file in there.path.iterdir() if file.name != "config.json"]
    there.push(rest)
    there.push(["config.json"])  # without it the folder is no model
    shutil.rmtree(there.path)


def unfinished_name(final: Path) -> Path:
    """Where `atomic_folder` keeps what is to become `final`."""
    return final.with_name(f".{final.name}.tmp")


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
    model = unstacked(state.model) if config.scan_layers else state.model
    save_model(model, folder / "model", tokenizer=tokenizer)
    tensors = named_state(state.model, state.optimizer) | _random(state)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "training.safetensors"
    )
    _write_rest(folder, _progress(state, data), config)


def _sharded_writer(
    state: TrainState, config: TrainConfig, tokenizer: Tokenizer, data: str, parts: str | None
) -> Callable[[Path], None]:
    """Copies the state to the host, and returns what writes it without touching a device.

    Args:
        parts: the URL that parts are written to; None for a folder of the checkpoint.
    """
    on_host = sharded_state.to_host(sharded_state.named_tensors(state.model, state.optimizer))
    random, progress = _random(state), _progress(state, data)

    def write(folder: Path) -> None:
        sharded_state.write(parts or folder / sharded_state.FOLDER, on_host)
        if process_index():
            return
        if parts:
            (folder / sharded_state.ELSEWHERE).write_text(parts, encoding="utf-8")
        save_description(state.model.config, folder / "model", tokenizer)
        save_file(random, folder / "training.safetensors")
        _write_rest(folder, progress, config)

    return write


def _random(state: TrainState) -> dict[str, torch.Tensor]:
    return {f"random.{key}": value for key, value in random_state(state.device).items()}


def _progress(state: TrainState, data: str) -> dict[str, Any]:
    return {"step": state.step, "position": state.position, "data": data}


def _write_rest(folder: Path, progress: dict[str, Any], config: TrainConfig) -> None:
    (folder / "training.json").write_text(json.dumps(progress), encoding="utf-8")
    save_config(config, folder / "config.yaml")


def _check_names(checkpoint: Path, here: Set[str], saved: Set[str]) -> None:
    if here != saved:
        example = sorted(here ^ saved)[0]
        raise ConfigError(
            f"{checkpoint}: saved by another optimizer or model ({example} is in only one of them); "
            "set optimizer.name as it was, or train into another out_dir"
        )
