"""Running a sweep's points, and what is written of them; the compiler is replaced."""

import csv
import json
import re
import threading

import pytest

from xla_attention.planner.outcome import Outcome
from xla_attention.planner.sweep import runner
from xla_attention.planner.sweep.charts import draw
from xla_attention.planner.sweep.config import Point, Published, Sweep
from xla_attention.planner.sweep.page import write_page
from xla_attention.planner.sweep.runner import run_points
from xla_attention.planner.sweep.table import COLUMNS, beside_prediction, cells, write_tables
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import TrainConfig

MODEL = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
HANGS = "import time, sys; sys.stdin.read(); time.sleep(60)"
CRASHES = "import sys; sys.stdin.read(); sys.exit('no memory left')"


def point(batch_size, **changes):
    settings = {
        "model": MODEL,
        "data": {"train": ["unread"]},
        "seq_len": 32,
        "batch_size": batch_size,
        "steps": 1,
        "sharding": {"strategy": "fsdp"},
        "out_dir": "unused",
    }
    return Point("fsdp", TrainConfig.model_validate(settings | changes), parse_topology("v5e:2x2"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path / "cache"))


def outcome(batch_size, **fields):
    known = {"parameters": 10, "step_seconds": batch_size / 10, "tokens_per_second": 320.0, "mfu": 0.5}
    causes = dict.fromkeys(("matmul", "attention", "compute", "communication", "copy"), batch_size / 50)
    known |= {"mfu_causal": 0.51, "memory_bytes": 2**30, "causes": causes, "largest": ["products <b>: all"]}
    return Outcome(
        topology="v5e:2x2", strategy="fsdp", batch_size=batch_size, seq_len=32, **(fields or known)
    )


def answers(monkeypatch, by_batch):
    """Has points answered from a table; returns the batches that were asked for."""
    asked, lock = [], threading.Lock()

    def answer(self, point):
        with lock:
            asked.append(point.config.batch_size)
        return by_batch[point.config.batch_size]

    monkeypatch.setattr(runner._Processes, "answer", answer)
    return asked


def test_rows_are_in_order_and_predictions_are_kept(monkeypatch):
    asked = answers(monkeypatch, {8: outcome(8), 16: outcome(16), 32: outcome(32, error="out of memory")})
    points = [point(8), point(16), point(32)]
    seen = []
    rows = run_points(points, jobs=2, progress=seen.append)
    assert [row.outcome.batch_size for row in rows] == [8, 16, 32]
    assert len(seen) == 3 and not any(row.cached for row in rows)
    again = run_points(points, jobs=1)
    assert [row.cached for row in again] == [True, True, False]  # failures are tried again
    assert [row.outcome for row in again] == [row.outcome for row in rows]
    assert sorted(asked) == [8, 16, 32, 32]


def test_what_a_step_does_not_depend_on_does_not_count(monkeypatch):
    asked = answers(monkeypatch, {8: outcome(8)})
    run_points([point(8)])
    assert run_points([point(8, steps=7, out_dir="elsewhere")])[0].cached
    assert not run_points([point(8, seq_len=16)])[0].cached
    assert not run_points([point(8, model=MODEL | {"n_layer": 2})])[0].cached
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("program", "timeout", "message"),
    [(HANGS, 1, "took longer than 1 s"), (CRASHES, 60, "status 1, and said no memory left")],
)
def test_a_process_that_fails_is_a_row(monkeypatch, program, timeout, message):
    start = runner.subprocess.Popen
    monkeypatch.setattr(
        runner.subprocess, "Popen", lambda command, **rest: start([command[0], "-c", program], **rest)
    )
    (row,) = run_points([point(8)], timeout=timeout)
    assert message in row.outcome.error


def test_a_strategy_that_there_is_not_is_a_row():
    (row,) = run_points([point(8, sharding={"strategy": "fsdq"})])
    assert "fsdq" in row.outcome.error


def test_an_interruption_ends_what_runs_and_keeps_what_is_done(monkeypatch):
    asked = answers(monkeypatch, {8: outcome(8), 16: outcome(16)})

    def interrupt(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_points([point(8)], progress=interrupt)
    assert run_points([point(8), point(16)])[0].cached
    assert asked == [8, 16]


def test_what_is_written(monkeypatch, tmp_path):
    answers(monkeypatch, {8: outcome(8), 16: outcome(16, error="out of memory: 2.00 GiB too much")})
    points = (point(8), point(16))
    published = (Published(label="fsdp", batch_size=8, step_seconds=0.9, mfu=0.45, source="a <paper>"),)
    sweep = Sweep("small", points, published, ("a note",))
    rows = run_points(points)
    write_tables(sweep, rows, tmp_path)
    draw(sweep, rows, tmp_path / "sweep.png")
    write_page(sweep, rows, tmp_path / "sweep.png", tmp_path / "sweep.html")

    document = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["step_seconds"] for row in document["rows"]] == [0.8, None]
    assert document["rows"][0]["published"]["mfu"] == 0.45
    with open(tmp_path / "sweep.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert (lines[0]["causes.matmul"], lines[0]["published.mfu"]) == ("0.16", "0.45")
    assert lines[1]["error"] == "out of memory: 2.00 GiB too much"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "sweep.html").read_text()
    assert "a &lt;paper&gt;" in page and "products &lt;b&gt;" in page and "2.00 GiB too much" in page
    assert "data:image/png;base64," in page and "http" not in page


def test_a_sweep_without_a_plan_is_written_too(monkeypatch, tmp_path):
    answers(monkeypatch, {8: outcome(8, error="refused")})
    rows = run_points([point(8)])
    draw(Sweep("small", (point(8),), (), ()), rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 0


def test_measured_rows_stand_beside_predictions(monkeypatch, tmp_path):
    answers(monkeypatch, {8: outcome(8)})
    (predicted,) = run_points([point(8)])
    ran = outcome(8, step_seconds=1.6, tokens_per_second=160.0, mfu=0.2, device="eight CPUs")
    asked = answers(monkeypatch, {8: ran})
    how = runner.Measurement(3, tmp_path)
    (measured,) = run_points([point(8)], measure=how)
    run_points([point(8)], measure=how)
    assert asked == [8, 8]  # what was predicted is no measurement, and measurements are not kept
    row = beside_prediction(measured, predicted)
    shown = dict(zip(COLUMNS, cells(row, ())))
    assert (shown["step ms"], shown["predicted ms"], shown["measured / predicted"]) == ("1,600", "800", "2")
    sweep = Sweep("small", (point(8),), (), ())
    draw(sweep, [row], tmp_path / "sweep.png")
    write_page(sweep, [row], tmp_path / "sweep.png", tmp_path / "sweep.html")
    assert "predicted ms" in (tmp_path / "sweep.html").read_text()


def test_a_real_step_is_measured_and_traced(monkeypatch, tmp_path):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    (tmp_path / "text.txt").write_text("a small text, again and again. " * 200)
    real = point(
        8, data={"train": [str(tmp_path / "text.txt")], "held_out": 0}, model=MODEL | {"vocab_size": 260}
    )
    rows = run_points([real], measure=runner.Measurement(2, tmp_path / "profile"))
    found = rows[0].outcome
    assert found.error is None, found.error
    assert found.step_seconds > 0 and found.mfu == pytest.approx(
        found.tokens_per_second * 6 * found.parameters / peak_in(found.device),
        rel=0.02,  # three digits in words
    )
    assert list((tmp_path / "profile" / "fsdp-8-32-none").rglob("*.xplane.pb"))


def peak_in(device):
    return float(re.search(r"against ([\d.e+-]+) TFLOP/s", device)[1]) * 1e12


def test_as_many_devices_as_the_slice_has_chips(monkeypatch, tmp_path):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    (row,) = run_points([point(8)], measure=runner.Measurement(1, tmp_path))
    assert "v5e:2x2 has 4 chips, but 2 devices are attached" in row.outcome.error
