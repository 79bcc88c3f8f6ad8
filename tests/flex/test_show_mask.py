"""`xla-attention show-mask` draws every variant."""

import matplotlib.image
import pytest
from typer.testing import CliRunner

from xla_attention.flex.variants import VARIANTS


@pytest.fixture
def show(tmp_path):
    from xla_attention.cli import app

    def run(*args):
        return CliRunner().invoke(app, ["show-mask", *args])

    return run


def test_all(show, tmp_path):
    result = show("all", "--out", str(tmp_path / "pictures"), "--length", "48", "--block", "16")
    assert result.exit_code == 0, result.output
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == set(VARIANTS)


def test_one(show, tmp_path):
    out = tmp_path / "window.png"
    assert show("sliding_window", "--out", str(out), "--length", "40", "--head", "1").exit_code == 0
    assert matplotlib.image.imread(out).std() > 0.05  # something is drawn


@pytest.mark.parametrize(
    ("args", "says"),
    [(["cuasal"], "known are all, full, causal"), (["full", "--head", "9"], "below heads=4")],
)
def test_mistakes(args, says, show):
    result = show(*args)
    assert result.exit_code == 1
    assert says in result.output
