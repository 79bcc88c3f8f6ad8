"""`xla-attention bench accuracy`: the limits hold in a few cases, and what is over them is told."""

import dataclasses
from itertools import product

import pytest
import torch
from typer.testing import CliRunner

from xla_attention.benchmarks import accuracy


def run():
    from xla_attention.cli import app

    return CliRunner().invoke(app, ["bench", "accuracy", "--quick"])


def test_quick_cases_are_within_the_limits(first_device):
    result = run()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for case, dtype in product(accuracy.grid(quick=True), ("float32", "bfloat16")):
        (row,) = [line for line in lines if str(case) in line and dtype in line]
        assert row.count("e-") + row.count("e+") == len(accuracy.QUANTITIES)
    assert "over the limit" not in result.output


def test_an_error_over_the_limit_fails_the_command(first_device, monkeypatch):
    operator = accuracy.flash_attention
    monkeypatch.setattr(accuracy, "grid", lambda quick: [accuracy.Case(7, 9, 32, 2, 2, False)])
    monkeypatch.setattr(accuracy, "flash_attention", lambda q, k, v, **kw: operator(q, k, 1.01 * v, **kw))
    result = run()
    assert result.exit_code == 1
    told = [line for line in result.output.splitlines() if line.startswith("over the limit:")]
    # v scaled by 1 % moves o, dq and dk by 1 % of P V or of P dP, and leaves lse alone
    assert {line.split(", ")[2].split(":")[0] for line in told} == {"o", "dq", "dk", "dv"}
    assert {line.split(", ")[1] for line in told} == {"float32", "bfloat16"}


def test_the_grid_meets_what_it_must():
    grid, causal = accuracy.grid(), (False, True)
    lengths = {1, 7, 127, 129, 577, 600, 1023}
    for n in lengths:
        assert {c.is_causal for c in grid if c.q_len == c.kv_len == n} == set(causal)
    unequal = [c for c in grid if c.q_len != c.kv_len]
    assert {(c.q_len < c.kv_len, c.is_causal) for c in unequal} == set(product(causal, causal))
    dims, ratios = {32, 64, 80, 96, 128, 160, 256}, {1, 3, 4, 8}
    assert {(c.head_dim, c.heads // c.kv_heads) for c in grid} == set(product(dims, ratios))
    assert {(c.head_dim, c.is_causal) for c in grid} == set(product(dims, causal))
    assert {(c.heads // c.kv_heads, c.is_causal) for c in grid} == set(product(ratios, causal))


BFLOAT16 = accuracy.Error(accuracy.grid()[0], torch.bfloat16, "dq", 2.9e-3, sdpa=2e-3, sdpa_math=1.7e-3)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"ours": 3.1e-3}, False),
        ({"ours": float("nan")}, False),
        ({"sdpa": 0.0, "ours": 9e-6}, True),  # noise about an exact result
        ({"sdpa": 0.0, "ours": 2e-5}, False),
        ({"quantity": "lse", "sdpa": None, "ours": 2e-3}, False),
        ({"dtype": torch.float32, "ours": 9e-6}, True),
        ({"dtype": torch.float32, "ours": 1.1e-5}, False),
        ({"dtype": torch.float32, "quantity": "o", "ours": 2.1e-6}, False),
    ],
)
def test_limits(changes, passes):
    assert dataclasses.replace(BFLOAT16, **changes).passes is passes
