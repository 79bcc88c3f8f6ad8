"""Folders in a bucket (`gs://`, and whatever else fsspec opens), each behind a folder of this host.

A bucket cannot rename. A folder there is complete once it holds COMPLETE, which is uploaded last and removed
first; it names this one writing, so that a copy on a host is known to be of it.
"""

import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from xla_attention.atomic import atomic_folder
from xla_attention.cache import cache_folder

COMPLETE = "COMPLETE"


def is_url(place: str | Path) -> bool:
    """Whether `place` is not a path of this host's."""
    return isinstance(place, str) and "://" in place


class Remote:
    """A folder in a bucket.

    Args:
        url: such as `gs://bucket/run`.

    Attributes:
        url: without a slash at its end.
        path: the folder of this host behind it, where files are written before they are uploaded.

    Raises:
        ValueError: no such scheme, or the package that opens it is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            package = " (pip install gcsfs)" if url.startswith(("gs://", "gcs://")) else ""
            raise ValueError(f"{url} cannot be opened: {error}{package}") from None
        scheme, _, place = self.url.partition("://")
        self.path = cache_folder() / "remote" / scheme / place.strip("/")

    def folder(self, name: str) -> "Remote":
        """A folder in it."""
        return Remote(f"{self.url}/{name}")

    def complete(self, prefix: str = "") -> list[str]:
        """Names of the complete folders in it that begin so, in order."""
        with self._errors():
            self._fs.invalidate_cache()
            marks = self._fs.glob(f"{self._root}/{prefix}*/{COMPLETE}")
        return sorted(mark.split("/")[-2] for mark in marks)

    def publish(self, name: str) -> None:
        """Uploads a folder of `path`; it is complete there when this returns, and not before.

        Raises:
            OSError: it cannot be uploaded.
        """
        folder = self.path / name
        (folder / COMPLETE).write_text(uuid.uuid4().hex, encoding="utf-8")
        files = [file for file in folder.rglob("*") if file.is_file()]
        with self._errors():
            self._upload(file for file in files if file.name != COMPLETE)
            self._upload([folder / COMPLETE])

    def push(self, names: Iterable[str]) -> None:
        """Uploads those files and folders of `path` that are there.

        Raises:
            OSError: they cannot be uploaded.
        """
        places = [self.path / name for name in names]
        files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
        with self._errors():
            self._upload(files)

    def fetch(self, name: str, without: str = "") -> Path:
        """A copy of a folder on this host, made if this host has another one or none.

        Args:
            without: a folder in it that is left where it is.
        """
        copy, there = self.path / name, f"{self._root}/{name}"
        with self._errors():
            if self._fs.exists(f"{there}/{COMPLETE}"):
                mark = self._fs.cat_file(f"{there}/{COMPLETE}").decode()
                if copy.is_dir() and (copy / COMPLETE).is_file() and (copy / COMPLETE).read_text() == mark:
                    return copy
            shutil.rmtree(copy, ignore_errors=True)
            with atomic_folder(copy) as unfinished:
                for file in self._fs.find(there):
                    relative = file.removeprefix(there).strip("/")
                    if without and relative.startswith(f"{without}/"):
                        continue
                    (unfinished / relative).parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(file, str(unfinished / relative))
        return copy

    def fetch_file(self, name: str) -> None:
        """Replaces a file of `path` by the one there, if there is one."""
        with self._errors():
            self._fs.invalidate_cache()
            if self._fs.exists(f"{self._root}/{name}"):
                self.path.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(f"{self._root}/{name}", str(self.path / name))

    def remove(self, name: str) -> None:
        """Deletes a file or folder, there and on this host; first what says that it is complete."""
        place = self.path / name
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
        with self._errors():
            self._fs.invalidate_cache()
            there = f"{self._root}/{name}"
            if self._fs.exists(f"{there}/{COMPLETE}"):
                self._fs.rm_file(f"{there}/{COMPLETE}")
            if self._fs.exists(there):
                self._fs.rm(there, recursive=True)

    def names(self) -> list[str]:
        """What is in it, complete or not."""
        with self._errors():
            self._fs.invalidate_cache()
            if not self._fs.exists(self._root):
                return []
            found = self._fs.ls(self._root, detail=False)
        return sorted(entry.rstrip("/").split("/")[-1] for entry in found)

    def _upload(self, files: Iterable[Path]) -> None:
        here = list(files)
        there = [f"{self._root}/{file.relative_to(self.path).as_posix()}" for file in here]
        for folder in {name.rpartition("/")[0] for name in there}:
            self._fs.makedirs(folder, exist_ok=True)
        if here:
            self._fs.put(list(map(str, here)), there)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Each kind of bucket has errors of its own; to us all of them say that it cannot be reached."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error
