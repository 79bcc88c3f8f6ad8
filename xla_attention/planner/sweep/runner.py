"""Runs the points of a sweep, each in a process of its own, and keeps what was predicted of them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pallas_kernels
import xla_attention
from xla_attention.cache import cache_folder
from xla_attention.models import load_model_config
from xla_attention.planner.compile import libtpu_version, write_atomically
from xla_attention.planner.outcome import Outcome, of_error
from xla_attention.planner.sweep.config import Point


@dataclasses.dataclass(frozen=True)
class Row:
    """A point, and what came of it.

    Attributes:
        cached: whether an earlier sweep found it.
    """

    point: Point
    outcome: Outcome
    cached: bool


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How points are measured.

    Attributes:
        steps: that are timed.
        folder: that gets a profiler trace of each point.
    """

    steps: int
    folder: Path

    def request(self, point: Point) -> dict[str, object]:
        """What the worker is told."""
        config = point.config
        name = f"{point.label}-{config.batch_size}-{config.seq_len}-{config.activation_checkpointing}"
        return {"steps": self.steps, "profile": str(self.folder / re.sub(r"[^\w-]+", "_", name))}


def run_points(
    points: Sequence[Point],
    *,
    jobs: int = 1,
    timeout: float = 3600,
    measure: Measurement | None = None,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Predicts points, or measures them, in their order; no failure of one stops the others.

    Predictions are kept by content in `cache_folder()`: configuration, slice, libtpu with its flags, and this
    package's code. So a sweep that was interrupted continues. Failures are not kept, as another try may do
    better; the compiler's refusals are, by `compile_step`.

    Args:
        points: to predict.
        jobs: processes at a time. Each takes some GB, and one to two cores.
        timeout: seconds that one point may take.
        measure: run the points on the attached devices; nothing is then kept, and `jobs` should be 1.
        progress: is told each row when it is there.
    """
    processes = _Processes(timeout, measure)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_row, point, processes): n for n, point in enumerate(points)}
        rows: dict[int, Row] = {}
        try:
            for future in as_completed(futures):
                row = rows[futures[future]] = future.result()
                progress(row)
        except BaseException:  # Ctrl-C: what has not begun is dropped, what runs is ended
            for future in futures:
                future.cancel()
            processes.end()
            raise
    return [rows[n] for n in range(len(points))]


def _row(point: Point, processes: _Processes) -> Row:
    try:
        entry = cache_folder() / "sweep" / f"{_key(point)}.json"
    except ValueError as error:  # strategy or model cannot be used
        return Row(point, of_error(point.config, point.topology, str(error)), cached=False)
    if entry.exists() and not processes.measures:
        return Row(point, Outcome.model_validate_json(entry.read_text()), cached=True)
    outcome = processes.answer(point)
    if outcome.error is None and not processes.measures:
        write_atomically(entry, outcome.model_dump_json())
    return Row(point, outcome, cached=False)


class _Processes:
    """The processes that run, each with children of its own that end with it."""

    def __init__(self, timeout: float, measure: Measurement | None) -> None:
        self._measure = measure
        self._timeout = timeout
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._ended = False

    @property
    def measures(self) -> bool:
        """Whether points are run rather than predicted."""
        return self._measure is not None

    def answer(self, point: Point) -> Outcome:
        request: dict[str, object] = {
            "config": point.config.model_dump(mode="json"),
            "topology": str(point.topology),
        }
        if self._measure:
            request["measure"] = self._measure.request(point)
        failed = functools.partial(of_error, point.config, point.topology)
        with self._lock:
            if self._ended:
                return failed("interrupted")
            process = subprocess.Popen(
                [sys.executable, "-m", "xla_attention.planner.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                start_new_session=True,
            )
            self._running.add(process)
        try:
            answer, errors = process.communicate(json.dumps(request), timeout=self._timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return failed(f"took longer than {self._timeout:.0f} s; --timeout sets the limit")
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            said = errors.strip().splitlines()[-1:] or ["nothing"]
            return failed(f"the process ended with status {process.returncode}, and said {said[0]}")
        return Outcome.model_validate_json(answer.splitlines()[-1])

    def end(self) -> None:
        """Ends all, and lets none begin."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and what it started, the compiler above all."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _key(point: Point) -> str:
    """What a prediction depends on: data, the run's folder and its length are not among it."""
    config = point.config.model_dump(
        mode="json", exclude={"out_dir", "steps", "eval", "checkpoint", "profile"}
    )
    parts = (
        config,
        load_model_config(point.config.model),
        point.config.sharding.load(),
        str(point.topology),
        libtpu_version(),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        _code(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """A hash of the sources of this package and of the kernels."""
    found = hashlib.sha256()
    for package in (pallas_kernels, xla_attention):
        folder = Path(package.__file__).parent
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json", ".yaml"):
                found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()
