"""A wrong set of versions is refused at import, with the command that puts it right."""

import subprocess
import sys
from importlib import metadata

import pytest

from xla_attention import versions


@pytest.fixture
def pretend(monkeypatch):
    """Changes what is installed; None is missing."""
    real = metadata.version

    def install(**found):
        def version(name):
            if name not in found:
                return real(name)
            if found[name] is None:
                raise metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(metadata, "version", version)

    return install


def test_this_environment_passes():
    versions.check_versions()
    assert set(versions.pinned()) == set(versions.CHECKED)


def test_local_suffix_is_tolerated(pretend):
    pretend(torch=metadata.version("torch").partition("+")[0] + "+cpu")
    versions.check_versions()


def test_message_says_what_is_found_needed_and_how_to_install(pretend):
    pretend(jax="0.8.0", libtpu=None)
    with pytest.raises(ImportError) as error:
        versions.check_versions()
    message = str(error.value)
    assert "Found: jax 0.8.0, libtpu is missing." in message
    assert f"Needed: {versions.pinned()['jax']}, {versions.pinned()['libtpu']}." in message
    command = message.partition("pip install ")[2]
    assert command.split() == [f"'{versions.pinned()[name]}'" for name in versions.CHECKED]


def test_import_loads_neither_torch_nor_jax():
    code = "import sys, xla_attention; print([m for m in ('torch', 'torch_xla', 'jax') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_a_folder_that_is_not_installed_says_so(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    with pytest.raises(ImportError, match="not installed; in its folder: pip install --editable"):
        versions.check_versions()
