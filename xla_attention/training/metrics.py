"""What a run reports: a progress line, `metrics.jsonl`, and TensorBoard."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from xla_attention.training.jsonl import JsonLines


@dataclass(frozen=True)
class Peak:
    """The FLOP/s that utilisation (MFU) is measured against, and what they are."""

    flops: float
    what: str


def peak_of(device: torch.device, chips: int = 1) -> Peak:
    """The bf16 peak of TPU chips; on the CPU, what a large float32 matrix product reaches there (measured
    now), however many virtual devices share it."""
    if device.type == "xla":
        from xla_attention.device import hardware

        if not hardware().interpret:
            return Peak(chips * hardware().peak_flops, f"the bf16 peak of {chips} TPU {hardware().name}")
    return Peak(_matmul_flops(), "a float32 matrix product on this CPU, timed just now")


def _matmul_flops(size: int = 1024, repeats: int = 30) -> float:
    a = torch.ones(size, size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


class DivergedError(ValueError):
    """The loss or the gradient is no longer finite."""


class Metrics:
    """Collects each step's numbers without making the device wait for the host.

    Losses stay on the device until the next report. A report reads those of all steps but the newest, which
    the device works on meanwhile.

    Args:
        folder: gets `metrics.jsonl` and `tensorboard/`.
        first_step: steps done before; records of later ones, which a killed run may have left, are dropped.
        steps: of the whole run.
        log_interval: steps between reports.
        tokens_per_step: for tokens/s.
        flops_per_token: for MFU.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        first_step: int,
        steps: int,
        log_interval: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak: Peak,
    ) -> None:
        self._console = console
        self._steps = steps
        self._log_interval = log_interval
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._pending: list[tuple[int, float, Tensor, Tensor]] = []
        self._file = JsonLines(folder / "metrics.jsonl", first_step, console.print)
        self._tensorboard = TensorBoard(folder / "tensorboard", first_step, console)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[report]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=first_step, report="compiling")
        self._window_start, self._window_steps = time.perf_counter(), 0
        self._first = True
        console.print(f"MFU is relative to {peak.flops / 1e12:.3g} TFLOP/s, {peak.what}")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._file.close()
        self._tensorboard.close()

    def step(self, step: int, lr: float, loss: Tensor, grad_norm: Tensor) -> None:
        """Takes a finished step's numbers; `loss` and `grad_norm` are scalars still on the device."""
        self._pending.append((step, lr, loss, grad_norm))
        self._window_steps += 1
        if self._first:
            self._report_first_step()
        elif (step - 1) % self._log_interval == 0:  # the newest step is not part of the report
            self._report()
        self._progress.update(self._task, completed=step)

    def evaluated(self, step: int, loss: float) -> None:
        """Takes the result of an evaluation."""
        self._file.write([{"step": step, "eval_loss": loss}])
        self._tensorboard.write(step, {"eval/loss": loss})
        self._console.print(f"step {step}: held-out loss {loss:.4f}")

    def flush(self) -> None:
        """Reads and writes all that is pending.

        Raises:
            DivergedError: a loss or gradient norm is not finite.
        """
        self._write(self._take(len(self._pending)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside (evaluation, saving) is not counted as training time."""
        self.flush()
        yield
        self._restart_clock()

    def _report_first_step(self) -> None:
        """The first step waits for its result, so that later ones are timed without the compilation."""
        self._first = False
        self.flush()
        seconds = time.perf_counter() - self._window_start
        self._console.print(f"first step: {seconds:.1f} s, compilation included")
        self._restart_clock()

    def _report(self) -> None:
        records = self._take(len(self._pending) - 1)
        seconds = (time.perf_counter() - self._window_start) / self._window_steps
        tokens_per_second = self._tokens_per_step / seconds
        mfu = tokens_per_second * self._flops_per_token / self._peak.flops
        if not records:
            return
        records[-1] |= {"step_time": seconds, "tokens_per_second": tokens_per_second, "mfu": mfu}
        self._write(records)
        self._restart_clock()
        report = (
            f"loss {records[-1]['loss']:.4f} · {tokens_per_second:,.0f} tokens/s · "
            f"{seconds:.3f} s/step · MFU {mfu:.1%}"
        )
        self._progress.update(self._task, report=report)
        if not self._console.is_terminal:
            self._console.print(f"step {records[-1]['step']}/{self._steps}: {report}")

    def _take(self, count: int) -> list[dict[str, Any]]:
        ready, self._pending = self._pending[:count], self._pending[count:]
        records = [
            {"step": step, "loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
            for step, lr, loss, grad_norm in ready
        ]
        for record in records:
            if not math.isfinite(record["loss"] + record["grad_norm"]):
                raise DivergedError(
                    f"step {record['step']}: loss {record['loss']}, gradient norm {record['grad_norm']}. "
                    "Checkpoints are from before; lower optimizer.lr or raise optimizer.warmup_steps"
                )
        return records

    def _write(self, records: list[dict[str, Any]]) -> None:
        self._file.write(records)
        for record in records:
            scalars = {f"train/{key}": value for key, value in record.items() if key != "step"}
            self._tensorboard.write(record["step"], scalars)

    def _restart_clock(self) -> None:
        self._window_start, self._window_steps = time.perf_counter(), 0


class TensorBoard:
    """A TensorBoard writer that gives up, with a warning, rather than end the run on a full disk."""

    def __init__(self, folder: Path, first_step: int, console: Console) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._console = console
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._try(lambda writer, name=name, value=value: writer.add_scalar(name, value, step))

    def close(self) -> None:
        self._try(lambda writer: writer.close())

    def _try(self, action: Callable[..., None]) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except OSError as error:
            self._writer = None
            self._console.print(f"TensorBoard log: {error}; no longer written")
