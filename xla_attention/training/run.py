"""Everything that a training run holds, built from its configuration."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from xla_attention.device import pick_device, use_exact_float32
from xla_attention.models import build_model, load_model, load_model_config
from xla_attention.models.causal_lm import CausalLM
from xla_attention.models.config import ModelConfig
from xla_attention.remote import Remote, is_url
from xla_attention.sharding.sharding import Sharding, start_spmd
from xla_attention.text import Tokenizer, load_tokenizer
from xla_attention.training.activation_checkpointing import checkpoint_activations
from xla_attention.training.checkpoint import CheckpointFolder, check_fits, model_to_restore
from xla_attention.training.config import ConfigError, TrainConfig
from xla_attention.training.data import (
    Batch,
    PackedTokens,
    as_batch,
    document_end,
    evaluation_batches,
    in_zigzag,
    load_data,
    training_batch,
)
from xla_attention.training.optimizer import build_optimizer
from xla_attention.training.processes import barrier, folder_of_process, process_index, start_processes
from xla_attention.training.scan_layers import scan_layers, stack_layers
from xla_attention.training.state import TrainState, seed_random, sync

REPORTS = ("metrics.jsonl", "tensorboard", "profile")


@dataclass(frozen=True)
class DeviceBatch:
    """A `Batch` on the device, or in parts on all of them; the same attributes."""

    input_ids: Tensor
    labels: Tensor
    segment_ids: Tensor | None
    position_ids: Tensor | None

    @property
    def targets(self) -> Tensor:
        """Tokens to predict: a scalar, computed where the batch is, as no process has all of it."""
        return (self.labels >= 0).sum()


@dataclass
class Run:
    """A run in progress.

    Attributes:
        held_out: None if nothing is held out.
        end_id: the token that ends a document; None if documents see each other.
        sharding: None on one device.
    """

    config: TrainConfig
    state: TrainState
    tokenizer: Tokenizer
    train_data: PackedTokens
    held_out: PackedTokens | None
    end_id: int | None
    device: torch.device
    checkpoints: CheckpointFolder
    sharding: Sharding | None = None

    def training_batches(self) -> list[DeviceBatch]:
        """The micro batches of the next step."""
        size, rows = self.config.batch_size, self._rows()
        blocks = (
            training_batch(self.train_data, size, self.state.position + micro * size, self.config.seed, rows)
            for micro in range(self.config.grad_accumulation)
        )
        return [self.put(as_batch(each, self.end_id)) for each in blocks]

    def evaluation_batches(self) -> Iterator[DeviceBatch]:
        """The held-out batches."""
        config = self.config
        blocks = evaluation_batches(self.held_out, config.batch_size, config.eval.batches, self._rows())
        return (self.put(as_batch(each, self.end_id)) for each in blocks)

    def put(self, batch: Batch) -> DeviceBatch:
        """Sends a batch, of the rows that this process loads, to the device or devices."""
        if self.sharding and self.sharding.zigzag_shards:
            batch = in_zigzag(batch, self.sharding.zigzag_shards)

        def send(array: np.ndarray | None) -> Tensor | None:
            if array is None:
                return None
            if self.sharding:
                return self.sharding.to_devices(array, self.config.batch_size)
            return torch.from_numpy(array).to(self.device)

        arrays = (batch.input_ids, batch.labels, batch.segment_ids, batch.position_ids)
        return DeviceBatch(*map(send, arrays))

    def loss(self, batch: DeviceBatch) -> Tensor:
        """Mean loss of a batch, in nats per target."""
        reduced = self.config.compute_dtype == "bfloat16"
        # Parameters stay float32; autocast casts them, and their gradients back, where they are multiplied.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=reduced):
            return self.state.model(batch.input_ids, batch.labels, batch.segment_ids, batch.position_ids)

    def update(self) -> None:
        """The optimizer's step; gradients are then gone."""
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        if self.sharding:
            self.sharding.mark_state(self.state.model, self.state.optimizer)

    def attention(self) -> AbstractContextManager[None]:
        """Training and evaluation happen inside it: attention then runs on the mesh."""
        return self.sharding.attention() if self.sharding else nullcontext()

    def save(self, background: bool = False) -> Path:
        """Writes a checkpoint, in the background if that is asked for and the run is sharded."""
        data = self.train_data.fingerprint()
        return self.checkpoints.save(self.state, self.config, self.tokenizer, data, background)

    def _rows(self) -> np.ndarray | None:
        return self.sharding.rows(self.config.batch_size) if self.sharding else None


def prepare(config: TrainConfig, console: Console) -> Run:
    """Loads data and model, and continues from the last checkpoint in `config.out_dir` if there is one.

    Raises:
        ConfigError: the configuration does not fit together, or does not fit the checkpoint found.
        DataError, ValueError, FileNotFoundError: data, tokenizer or model that it names cannot be used.
    """
    strategy = start_spmd(config.sharding)
    start_processes()
    device, description = _device(config)
    sharding = Sharding(strategy) if strategy else None
    if device.type == "xla" and config.compute_dtype == "float32":
        use_exact_float32()
    console.print(f"device: {description}" + (f", {sharding}" if sharding else ""))
    tokenizer = load_tokenizer(config.tokenizer)
    end_id = document_end(config.data, tokenizer)
    model_config = _model_config(config, tokenizer)
    train_data, held_out = load_data(
        config.data,
        tokenizer,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        vocab_size=model_config.vocab_size,
        seed=config.seed,
    )
    where = remote.folder("checkpoints") if (remote := remote_of(config)) else config.out_dir / "checkpoints"
    checkpoints = CheckpointFolder(where, config.checkpoint.keep_last, sharding)
    if process_index() == 0:
        checkpoints.remove_unfinished()
    barrier()
    checkpoint = checkpoints.latest()
    if checkpoint is not None:
        check_fits(checkpoint, model_config, config, train_data.fingerprint())
        model = model_to_restore(checkpoint)
    elif isinstance(config.model, dict):
        model = build_model(model_config, seed=config.seed)
    else:
        model = load_model(config.model, dtype=torch.float32)

    arrange_on_host(model, config, sharding)
    model.to(device).train()
    arrange(model, config, sharding)
    state = TrainState(model, build_optimizer(model, config.optimizer, stacked=config.scan_layers))
    if sharding:
        sharding.mark_state(model, state.optimizer)
    sync(device)
    seed_random(config.seed, device)
    if checkpoint is not None:
        checkpoints.restore(checkpoint, state)
        console.print(f"resuming from {checkpoint}")
    held = len(held_out.tokens) if held_out else 0
    tokens = f"{len(train_data.tokens):,} training tokens, {held:,} held out"
    console.print(f"{model.num_parameters() / 1e6:.2f} M parameters; {tokens}")
    return Run(config, state, tokenizer, train_data, held_out, end_id, device, checkpoints, sharding)


def arrange_on_host(model: CausalLM, config: TrainConfig, sharding: Sharding | None) -> None:
    """What `arrange` needs done while the model is on the CPU, or has no data yet.

    Raises:
        ValueError: the model does not fit the configuration.
    """
    if sharding:
        sharding.check(model, config.batch_size, config.seq_len)
        sharding.keep_dimensions(model)
    if config.scan_layers:
        stack_layers(model)
        if sharding:
            sharding.stack_layers(model)


def arrange(model: CausalLM, config: TrainConfig, sharding: Sharding | None) -> None:
    """Puts onto a model, which is on its device, what the configuration says of layers and devices."""
    if sharding:
        sharding.shard_model(model)
    if not config.scan_layers:
        checkpoint_activations(model, config.activation_checkpointing)
    elif sharding:
        scan_layers(model, config.activation_checkpointing, sharding.annotate_layer)
    else:
        scan_layers(model, config.activation_checkpointing)


@contextmanager
def exclusive(out_dir: Path) -> Iterator[None]:
    """Makes `out_dir`, and holds it for this process alone.

    Raises:
        ConfigError: another process trains there.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    with open(out_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"out_dir={out_dir}: another process is training there; use another folder"
            ) from None
        yield


def remote_of(config: TrainConfig) -> Remote | None:
    """The bucket's folder that a run writes to, if it is in a bucket."""
    return Remote(config.out_dir) if is_url(config.out_dir) else None


def folder_of(config: TrainConfig) -> Path:
    """Where this process reports: `out_dir`, or the folder of this host behind its URL; a folder in it for
    each process but the first."""
    remote = remote_of(config)
    return folder_of_process(remote.path if remote else config.out_dir)


def push_reports(config: TrainConfig) -> None:
    """Uploads what this process reported so far, if `out_dir` is in a bucket.

    Raises:
        OSError: it cannot be reached.
    """
    if remote := remote_of(config):
        folder = folder_of(config).relative_to(remote.path)
        remote.push((folder / name).as_posix() for name in REPORTS)


def fetch_reports(config: TrainConfig) -> None:
    """Replaces the metrics on this host by those in the bucket, which another host may have written."""
    if remote := remote_of(config):
        remote.fetch_file((folder_of(config).relative_to(remote.path) / "metrics.jsonl").as_posix())


def erase(config: TrainConfig) -> None:
    """Deletes what a run wrote into `out_dir`, and nothing else."""
    remote = remote_of(config)
    for name in ("checkpoints", *REPORTS):
        if remote:
            remote.remove(name)
            continue
        shutil.rmtree(config.out_dir / name, ignore_errors=True)
        (config.out_dir / name).unlink(missing_ok=True)


def _device(config: TrainConfig) -> tuple[torch.device, str]:
    if config.device == "eager":
        return torch.device("cpu"), "CPU, eager torch"
    return pick_device()


def _model_config(config: TrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    model = load_model_config(config.model)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} must be at least the tokenizer's {tokenizer.vocab_size}"
        )
    if config.seq_len > model.max_position_embeddings:
        raise ConfigError(
            f"seq_len={config.seq_len} is longer than the model's {model.max_position_embeddings} positions; "
            "lower it, or raise them in the model's configuration"
        )
    return model
