"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Gives a temporary folder to fill, which becomes `path` when the block ends well.

    It is `.{name}.tmp` beside `path`: written to disk, then renamed, so a kill at any moment leaves either no
    `path` or a complete one. An error in the block removes it; a killed process leaves it, and the next call
    for the same `path` removes it.

    Raises:
        FileExistsError: `path` exists and is not an empty folder.
    """
    path = Path(os.path.abspath(path))
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} exists already; give a new folder or remove it first")
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for entry in [*temporary.rglob("*"), temporary]:
            _to_disk(entry)
        temporary.rename(path)
        _to_disk(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
