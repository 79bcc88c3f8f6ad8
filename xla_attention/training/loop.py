"""The training loop."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn

from xla_attention.sharding.sharding import start_spmd
from xla_attention.training.config import TrainConfig
from xla_attention.training.interrupt import StopRequest
from xla_attention.training.metrics import Metrics, peak_of
from xla_attention.training.optimizer import learning_rate, set_learning_rate
from xla_attention.training.processes import process_index
from xla_attention.training.profiling import StepProfiler
from xla_attention.training.run import (
    DeviceBatch,
    Run,
    erase,
    exclusive,
    fetch_reports,
    folder_of,
    prepare,
    push_reports,
)
from xla_attention.training.state import sync


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: steps done.
        eval_loss: held-out loss at the end, in nats per token; None if nothing is held out, or stopped early.
        checkpoint: the last checkpoint.
        stopped_by: name of the signal that ended the run early, or None.
    """

    step: int
    eval_loss: float | None
    checkpoint: Path
    stopped_by: str | None


def train(config: TrainConfig, console: Console | None = None, *, fresh: bool = False) -> TrainResult:
    """Trains to `config.steps`, from the last checkpoint in `config.out_dir` if there is one.

    SIGTERM and SIGINT end the run after the current step, with a checkpoint; a run of several processes after
    the next, in all of them, whichever got the signal.

    Args:
        console: where progress is shown; the terminal by default.
        fresh: first delete what an earlier run left in `config.out_dir`.

    Raises:
        ConfigError: the configuration cannot be used, or does not fit the checkpoint found.
        DataError: the data cannot be used.
        CheckpointError: the last checkpoint cannot be written.
        DivergedError: the loss is no longer finite; no checkpoint is written after that.
    """
    start_spmd(config.sharding)  # before anything asks which process this is
    console = console or Console(quiet=process_index() > 0)
    with StopRequest() as stop, exclusive(folder_of(config)):
        if fresh and process_index() == 0:
            erase(config)
        run = prepare(config, console)
        fetch_reports(config)
        with _metrics(run, console) as metrics, run.attention():
            eval_loss = None
            try:
                _train_steps(run, metrics, console, stop)
                if run.held_out and not stop.signal:
                    eval_loss = evaluate(run)
                    metrics.evaluated(run.state.step, eval_loss)
            finally:  # a run that ends by an error leaves no thread behind that still writes
                _or_warn(run.checkpoints.wait, console)
            checkpoint = run.save()
        _or_warn(functools.partial(push_reports, config), console)
    return TrainResult(run.state.step, eval_loss, checkpoint, stop.signal)


def _train_steps(run: Run, metrics: Metrics, console: Console, stop: StopRequest) -> None:
    config, state = run.config, run.state
    profiler = StepProfiler(config.profile, folder_of(config) / "profile", run.device)
    stop.agree()
    while state.step < config.steps and not stop.signal:
        lr = learning_rate(state.step, config.steps, config.optimizer)
        set_learning_rate(state.optimizer, lr)
        loss, grad_norm = train_step(run)
        state.step += 1
        state.position += config.sequences_per_step
        metrics.step(state.step, lr, loss, grad_norm)
        profiler.step()
        stop.agree()

        if state.step == config.steps or stop.signal:
            break  # the end has an evaluation and a checkpoint of its own
        if run.held_out and _due(config.eval.interval, state.step):
            with metrics.paused():
                metrics.evaluated(state.step, evaluate(run))
        if _due(config.checkpoint.interval, state.step):
            with metrics.paused():
                _save_or_warn(run, console)
    profiler.stop()
    metrics.flush()


def train_step(run: Run) -> tuple[Tensor, Tensor]:
    """One optimizer step, with the batches that are next.

    Returns:
        Loss, and norm of the gradient before clipping: scalars that the device is still computing.
    """
    loss, grad_norm = record_step(run, run.training_batches())
    sync(run.device)
    return loss, grad_norm


def record_step(run: Run, batches: Sequence[DeviceBatch]) -> tuple[Tensor, Tensor]:
    """Forward and backward of each micro batch, clipping, update, as `train_step` does them.

    On XLA nothing is run, but all micro batches up to the last where there are several.
    """
    config, model = run.config, run.state.model
    targets = torch.stack([batch.targets for batch in batches])
    shares = targets / targets.sum().clamp_min(1)
    if config.grad_accumulation > 1:
        sync(run.device)
    losses = []
    for batch, share in zip(batches, shares):
        loss = run.loss(batch) * share
        loss.backward()
        losses.append(loss.detach())
        if config.grad_accumulation > 1:
            sync(run.device)  # one program for each micro batch, rather than one that holds them all
    max_norm = config.optimizer.max_grad_norm or float("inf")
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
    run.update()
    return torch.stack(losses).sum(), grad_norm


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss over the targets of the held-out batches, in nats per token."""
    losses, targets = [], []
    for batch in run.evaluation_batches():
        losses.append(run.loss(batch))
        targets.append(batch.targets)
        sync(run.device)
    counts = [count.item() for count in targets]
    return sum(loss.item() * count for loss, count in zip(losses, counts)) / max(1, sum(counts))


def _due(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


def _save_or_warn(run: Run, console: Console) -> None:
    """A checkpoint that cannot be written must not cost the training that is in memory."""
    _or_warn(run.checkpoints.wait, console)
    _or_warn(functools.partial(push_reports, run.config), console)
    _or_warn(functools.partial(run.save, background=True), console)


def _or_warn(save: Callable[[], Any], console: Console) -> None:
    try:
        save()
    except OSError as error:
        console.print(f"[bold red]warning:[/] {escape(str(error))}; training goes on")


def _metrics(run: Run, console: Console) -> Metrics:
    config = run.config
    return Metrics(
        folder_of(config),
        console,
        first_step=run.state.step,
        steps=config.steps,
        log_interval=config.log_interval,
        tokens_per_step=config.tokens_per_step,
        flops_per_token=run.state.model.flops_per_token(config.seq_len),
        peak=peak_of(run.device, run.sharding.mesh.size() if run.sharding else 1),
    )
