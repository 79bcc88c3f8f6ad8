"""A file of one JSON record per line."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends records. On a full disk they wait in memory for the next write.

    Args:
        path: the file, which may exist.
        last_step: steps done before. Records of later ones, and a line that a kill cut short, are dropped.
        warn: told once when the disk refuses.
    """

    def __init__(self, path: Path, last_step: int, warn: Callable[[str], object]) -> None:
        self._path = path
        self._warn = warn
        self._warned = False
        self._waiting = b""
        if path.exists():
            _keep(path, last_step)
        self._file = path.open("ab", buffering=0)

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        self._waiting += b"".join(json.dumps(record).encode() + b"\n" for record in records)
        try:
            written = self._file.write(self._waiting)  # unbuffered: says how much reached the file
            self._waiting = self._waiting[written:]
        except OSError as error:
            if not self._warned:
                self._warn(f"{self._path}: {error}; metrics are kept in memory until it can be written")
            self._warned = True

    def close(self) -> None:
        self.write([])
        self._file.close()


def _keep(path: Path, last_step: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    kept = [line for line in lines if json.loads(line)["step"] <= last_step]
    replacement = path.with_suffix(".tmp")
    replacement.write_bytes(b"".join(kept))
    os.replace(replacement, path)
