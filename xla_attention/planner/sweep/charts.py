"""The charts of a sweep: MFU and step time against batch, and bars of time by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xla_attention.planner.accounting import CAUSES
from xla_attention.planner.sweep.config import Sweep
from xla_attention.planner.sweep.runner import Row
from xla_attention.planner.sweep.table import kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[..., float | None]  # of an Outcome, or of what is published


def draw(sweep: Sweep, rows: Sequence[Row], path: Path) -> None:
    """Writes a PNG. Points that failed are left out; of what others published, lines are dashed."""
    from matplotlib.figure import Figure

    planned = [row for row in rows if row.outcome.error is None]
    by_cause = [row for row in planned if row.outcome.causes]  # measured steps are not taken apart
    height = 4 + max(2.0, 0.35 * len(by_cause))
    figure = Figure(figsize=(12, height), layout="constrained")
    lines, bars = figure.subfigures(2, 1, height_ratios=[4, height - 4])
    mfu, step = lines.subplots(1, 2)
    _draw_lines(mfu, sweep, planned, lambda x: None if x.mfu is None else 100 * x.mfu)
    _draw_lines(step, sweep, planned, lambda x: x.step_seconds)
    mfu.set(ylabel="MFU, 6N, %", title=f"solid: {kind(rows)}; dashed: published")
    step.set(ylabel="step, s")
    for axes in (mfu, step):
        axes.set_xlabel("batch")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if planned:
        mfu.legend(fontsize="small")
    if by_cause:
        _draw_bars(bars.subplots(), by_cause)
    figure.savefig(path, dpi=120)


def _draw_lines(axes: Axes, sweep: Sweep, rows: Sequence[Row], value: Value) -> None:
    """One line for each strategy, and for what else differs but the batch."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    of_line = {}
    for row in rows:
        name = _name(row, rows)
        of_line[name] = row.point.label
        lines[name].append((row.outcome.batch_size, value(row.outcome)))
    colours: dict[str, str] = {}
    for name, points in lines.items():
        (line,) = axes.plot(*zip(*sorted(points)), "o-", label=name)
        colours.setdefault(of_line[name], line.get_color())
    for label in dict.fromkeys(each.label for each in sweep.published):
        known = [(each.batch_size, value(each)) for each in sweep.published if each.label == label]
        points = sorted((batch, y) for batch, y in known if y is not None)
        if points:
            name = f"{label}, published"
            axes.plot(*zip(*points), "s--", label=name, color=colours.get(label), fillstyle="none")


def _draw_bars(axes: Axes, rows: Sequence[Row]) -> None:
    names = [f"{_name(row, rows)}, batch {row.outcome.batch_size}" for row in rows]
    left = [0.0] * len(rows)
    for cause in CAUSES:
        seconds = [row.outcome.causes[cause] for row in rows]
        axes.barh(names, seconds, left=left, label=cause)
        left = [sum(pair) for pair in zip(left, seconds)]
    axes.invert_yaxis()
    axes.set(xlabel="step, s, by cause")
    axes.legend(fontsize="small")


def _name(row: Row, rows: Sequence[Row]) -> str:
    """The strategy of a row, and what else differs among rows."""

    def differing(each: Row) -> tuple[str, ...]:
        remat = f"remat {each.point.config.activation_checkpointing}"
        return each.outcome.topology, f"seq {each.outcome.seq_len}", remat

    varied = [len({differing(each)[n] for each in rows}) > 1 for n in range(3)]
    return ", ".join([row.point.label, *(part for part, varies in zip(differing(row), varied) if varies)])
