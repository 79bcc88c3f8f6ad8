"""Stopping cleanly: a preempted TPU VM sends SIGTERM, a person presses Ctrl-C."""

import signal
import sys
import threading
from types import FrameType
from typing import Self

from xla_attention.training.processes import Agreement

STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, the first SIGTERM or SIGINT only asks the run to stop; a second one acts as ever.

    Where a run has several processes, one that is told to stop takes the others along: they compute each step
    together, and none could go on without it.

    Attributes:
        signal: name of the signal that ends the run, the same in all processes, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._received = 0
        self._agreement = Agreement()
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._before = {number: signal.signal(number, self._on_signal) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def agree(self) -> None:
        """Sets `signal`; every process calls it after every step.

        All of them stop at the same call: a process alone at the first after its signal, several at the
        second after that of any.
        """
        number = self._agreement.highest(self._received)
        self.signal = signal.Signals(number).name if number else None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        self._restore()
        name = signal.Signals(number).name
        print(f"{name}: saving after this step; once more stops at once", file=sys.stderr)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
