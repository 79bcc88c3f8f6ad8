"""Stopping cleanly: a preempted TPU VM sends SIGTERM, a person presses Ctrl-C."""

import signal
import sys
import threading
from types import FrameType
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, the first SIGTERM or SIGINT only sets `signal`; a second one acts as ever.

    Attributes:
        signal: name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._before = {number: signal.signal(number, self._on_signal) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self._restore()
        print(f"{self.signal}: saving after this step; once more stops at once", file=sys.stderr)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
