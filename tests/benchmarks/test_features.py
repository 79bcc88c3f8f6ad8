"""`xla-attention bench features`: a few of its cases, and what it says when one is wrong."""

import dataclasses
import os

import pytest
import torch
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

from xla_attention.benchmarks import feature_cases, feature_sdpa, features
from xla_attention.benchmarks.feature_sdpa import SdpaError

ONE_QUERY = feature_cases.Shape(2, 2, 2, 1, 130, 96, 48)


def run(*options):
    from xla_attention.cli import app

    with pytest.MonkeyPatch.context() as patch:
        # The command's would stay.
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        patch.setenv("XLA_COMPILATION_CACHE_SIZE", os.environ.get("XLA_COMPILATION_CACHE_SIZE", "2048"))
        return CliRunner().invoke(app, ["bench", "features", *options])


@pytest.mark.slow
def test_quick_cases_are_within_the_limits(first_device):
    result = run("--quick", "--verbose")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    cases = feature_cases.grid(quick=True)
    assert len(cases) == 13
    for case in cases:
        (row,) = [line for line in lines if str(case) in line]
        results = 5 + (case.score.bias is not None) + case.score.sinks
        assert row.count("/") - str(case).count("/") == results
    assert "13 cases, 13 measured" in result.output
    assert "; 0 failures" in result.output


def test_what_is_wrong_is_told_and_fails_the_command(first_device, monkeypatch):
    """An operator whose window is one key short, and one that raises."""
    shape = feature_cases.Shape(1, 2, 1, 60, 60, 16, 16)
    cases = [
        feature_cases.Case(mask, feature_cases.Score(), shape, torch.float32)
        for mask in (feature_cases.window, feature_cases.prefix, feature_cases.causal)
    ]
    operator = features.flash_attention

    def wrong(*args, sliding_window=None, mask=None, **options):
        if mask is not None:
            raise RuntimeError("no such mask")
        return operator(*args, sliding_window=sliding_window and sliding_window - 1, **options)

    monkeypatch.setattr(features, "grid", lambda quick: cases)
    monkeypatch.setattr(
        features,
        "flash_attention",
        lambda *args, **options: (
            wrong(*args, **options) if args or options["q"].device.type == "xla" else operator(**options)
        ),
    )
    result = run()
    assert result.exit_code == 1
    told = [line for line in result.output.splitlines() if line.startswith("failed:")]
    assert len(told) == 6
    assert {line.split("; ")[0] for line in told} == {"failed: window", "failed: prefix"}
    (raised,) = [line for line in told if "prefix" in line]
    assert "RuntimeError: no such mask" in raised
    assert "3 cases, 2 measured" in result.output


def test_the_grid_is_wide_enough():
    grid = feature_cases.grid()
    assert len(grid) >= 300
    assert len(set(map(str, grid))) == len(grid)
    shapes = set(feature_cases.SHAPES)
    for kind in ("mask", "score"):
        for value in {getattr(case, kind) for case in grid}:
            assert {case.shape for case in grid if getattr(case, kind) == value} == shapes


@pytest.mark.parametrize(
    ("definition", "flex", "passes"),
    [(1.9e-6, 1.9e-6, True), (2.1e-6, 0.0, False), (0.0, 2.1e-6, False), (float("nan"), 0.0, False)],
)
def test_limits(definition, flex, passes):
    case = feature_cases.grid()[0]
    assert features.Error(case, "o", definition, flex).passes is passes


@pytest.mark.parametrize(
    ("fused", "limit"), [(2e-3, 3e-3), (1e-4, 2**-9), (1.0, 2**-8)], ids=["ratio", "own rounding", "absolute"]
)
def test_limits_by_the_error_of_sdpa(fused, limit):
    case = next(case for case in feature_cases.grid() if case.dtype == torch.bfloat16)
    assert features.Error(case, "o", 0.0, 0.0, SdpaError(fused, 0.0)).limit == pytest.approx(limit)


@pytest.mark.parametrize("mask", feature_cases.MASKS, ids=lambda mask: mask.__name__)
def test_sdpa_computes_the_same_attention(mask, first_device):
    """The output, in float64; its gradients are torch's business."""
    shape = feature_cases.Shape(2, 4, 2, 60, 70, 32, 16)
    score = feature_cases.Score(bias="batch x heads", alibi=True, sinks=True, scale=0.2)
    problem = feature_cases.Case(mask, score, shape, torch.float32).build()
    added, blind = feature_sdpa._additive_mask(problem)
    tensors = [problem.leaves[name] for name in "qkv"]
    do = torch.ones_like(problem.do).masked_fill(blind, 0.0)
    o, *_ = feature_sdpa._results(tensors, added, do, problem, SDPBackend.MATH, torch.float64)
    wide = {name: x.double() for name, x in problem.leaves.items()}
    want, _ = features._operator(problem, wide)
    torch.testing.assert_close(o, want.masked_fill(blind, 0.0), rtol=0, atol=1e-12)


def test_sdpa_has_no_softcap():
    shape, score = feature_cases.SHAPES[0], feature_cases.Score(softcap=2.0)
    problem = feature_cases.Case(feature_cases.causal, score, shape, torch.bfloat16).build()
    assert feature_sdpa.sdpa_errors(problem) == {}


def test_sdpa_has_no_gradients_by_q_and_k_where_a_query_sees_one_key():
    case = feature_cases.Case(feature_cases.causal, feature_cases.Score(), ONE_QUERY, torch.bfloat16)
    assert set(feature_sdpa.sdpa_errors(case.build())) == {"o", "dv"}
    with_a_sink = dataclasses.replace(case, score=feature_cases.Score(sinks=True))
    assert set(feature_sdpa.sdpa_errors(with_a_sink.build())) == {"o", "dq", "dk", "dv"}


def test_a_row_that_sees_nothing_must_do_so_in_both():
    want = torch.tensor([0.0, -torch.inf, 3.0], dtype=torch.float64)
    assert features._distance(want.float(), want) == 0
    assert features._distance(torch.tensor([0.0, -1e30, 3.0]), want) == torch.inf
