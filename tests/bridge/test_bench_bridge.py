"""The benchmark of host time runs here, and prints both operators."""

from typer.testing import CliRunner


def test_prints_both_operators(first_device):
    from xla_attention.cli import app

    result = CliRunner().invoke(app, ["bench", "bridge", "--calls", "3"])
    assert result.exit_code == 0, result.output
    for operator in ("xla_attention", "torch_xla"):
        rows = [line.split() for line in result.output.splitlines() if operator in line]
        # flash attention forward and with backward, and a paged decode
        assert [len([cell for cell in row if cell.isdigit()]) for row in rows] == [2, 1]
