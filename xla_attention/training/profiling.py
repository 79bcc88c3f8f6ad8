"""A profiler trace of a few training steps, to open in TensorBoard."""

from pathlib import Path

import torch

from xla_attention.training.config import ProfileConfig


class StepProfiler:
    """Traces steps `start + 1` to `start + steps` of this process.

    Args:
        folder: where the trace goes.
        device: on XLA, torch_xla's profiler runs; elsewhere torch's.
    """

    def __init__(self, config: ProfileConfig, folder: Path, device: torch.device) -> None:
        self._first, self._last = config.start, config.start + config.steps
        self._folder = folder
        self._profiler = _XlaTrace(folder) if device.type == "xla" else _eager_trace(folder)
        self._done = 0
        self._running = False

    def step(self) -> bool:
        """Call after each step. True when this call has just written the trace."""
        self._done += 1
        if self._first <= self._done < self._last and not self._running:
            self._profiler.start()
            self._running = True
        return self._done >= self._last and self.stop()

    def stop(self) -> bool:
        """Writes the trace if one is running."""
        was_running, self._running = self._running, False
        if was_running:
            self._profiler.stop()
        return was_running


class _XlaTrace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        import torch_xla.debug.profiler as xp

        xp.start_trace(self._folder)

    def stop(self) -> None:
        import torch_xla
        import torch_xla.debug.profiler as xp

        torch_xla.sync(wait=True)
        xp.stop_trace()


def _eager_trace(folder: Path) -> torch.profiler.profile:
    return torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder)))
