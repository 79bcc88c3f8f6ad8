import subprocess
import sys

import pytest

from xla_attention.atomic import atomic_folder


def test_appears_complete(tmp_path):
    final = tmp_path / "runs" / "one"
    with atomic_folder(final) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("text")
        assert not final.exists()
    assert (final / "inner" / "file").read_text() == "text"
    assert list(final.parent.iterdir()) == [final]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="disk"), atomic_folder(tmp_path / "one") as folder:
        (folder / "file").write_text("text")
        raise OSError("disk")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_no_folder_of_that_name_and_the_next_try_works(tmp_path):
    program = (
        "import os, pathlib, signal, sys; from xla_attention.atomic import atomic_folder\n"
        "with atomic_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'old').write_text('text'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "one")])
    assert killed.returncode == -9
    assert not (tmp_path / "one").exists()
    with atomic_folder(tmp_path / "one") as folder:
        (folder / "new").write_text("text")
    assert [path.name for path in tmp_path.rglob("*")] == ["one", "new"]


def test_an_existing_folder_is_not_replaced(tmp_path):
    (tmp_path / "one").mkdir()
    with atomic_folder(tmp_path / "one") as folder:  # empty, so nothing is lost
        (folder / "file").write_text("first")
    with pytest.raises(FileExistsError, match="exists already"), atomic_folder(tmp_path / "one"):
        pass
    assert (tmp_path / "one" / "file").read_text() == "first"
