"""The rows of a sweep as tables: on the terminal, CSV, JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from xla_attention.planner.outcome import Outcome
from xla_attention.planner.sweep.config import Published, Sweep
from xla_attention.planner.sweep.runner import Row

# Published rows stand beside the points of their strategy and batch.
COLUMNS = {
    "topology": "left",
    "strategy": "left",
    "mesh": "left",
    "batch": "right",
    "seq": "right",
    "remat": "left",
    "step ms": "right",
    "predicted ms": "right",
    "measured / predicted": "right",
    "tokens/s": "right",
    "MFU": "right",
    "causal": "right",
    "GiB": "right",
    "published": "right",
    "why not": "left",
}
_WHY = len(COLUMNS) - 1


def cells(row: Row, published: Sequence[Published]) -> list[str]:
    """One row under `COLUMNS`, in words."""
    outcome = row.outcome
    one = published_of(row, published)
    return [
        outcome.topology,
        row.point.label,
        " x ".join(f"{axis} {size}" for axis, size in outcome.mesh.items()),
        str(outcome.batch_size),
        str(outcome.seq_len),
        str(row.point.config.activation_checkpointing),
        _milliseconds(outcome.step_seconds),
        _milliseconds(outcome.predicted_seconds),
        _ratio(outcome),
        "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}",
        _percent(outcome.mfu),
        _percent(outcome.mfu_causal),
        "" if outcome.memory_bytes is None else f"{outcome.memory_bytes / 2**30:.1f}",
        _in_words(one) if one else "",
        outcome.error or "",
    ]


def show(sweep: Sweep, rows: Sequence[Row]) -> Table:
    """For the terminal, which has no room for why points failed: see `failures`."""
    table = Table(title=f"{sweep.name}: {kind(rows)}", title_justify="left")
    columns = [cells(row, sweep.published) for row in rows]
    kept = [n for n in range(_WHY) if any(row[n] for row in columns)]
    for n, (name, justify) in enumerate(COLUMNS.items()):
        if n in kept:
            table.add_column(name, justify=justify, overflow="fold")
    for row in columns:
        table.add_row(*(row[n] for n in kept))
    return table


def kind(rows: Sequence[Row]) -> str:
    """What the rows are, in a word."""
    return "measured" if any(row.outcome.device for row in rows) else "predicted"


def beside_prediction(measured: Row, predicted: Row) -> Row:
    """A measured row with what was predicted of its point."""
    seconds = predicted.outcome.step_seconds
    outcome = measured.outcome.model_copy(update={"predicted_seconds": seconds})
    return Row(measured.point, outcome, measured.cached)


def devices(rows: Sequence[Row]) -> list[str]:
    """What measured rows were measured on."""
    return sorted({row.outcome.device for row in rows if row.outcome.device})


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each point that failed: which it is, and why."""
    return [
        f"{row.point.label} on {row.outcome.topology}, batch {row.outcome.batch_size}: {row.outcome.error}"
        for row in rows
        if row.outcome.error
    ]


def record(row: Row, published: Sequence[Published]) -> dict[str, Any]:
    """One row with all that is known of it; seconds, bytes and shares of 1."""
    outcome = row.outcome.model_dump(mode="json")
    one = published_of(row, published)
    return {
        "label": row.point.label,
        "activation_checkpointing": row.point.config.activation_checkpointing,
        **outcome,
        "published": one.model_dump(mode="json") if one else None,
    }


def write_tables(sweep: Sweep, rows: Sequence[Row], folder: Path) -> None:
    """Writes `sweep.json` and `sweep.csv`, with a column for each cause and published figure."""
    records = [record(row, sweep.published) for row in rows]
    document = {"name": sweep.name, "notes": list(sweep.notes), "rows": records}
    (folder / "sweep.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    flat = [_flat(each) for each in records]
    names = list(dict.fromkeys(name for each in flat for name in each))
    with open(folder / "sweep.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)


def published_of(row: Row, published: Sequence[Published]) -> Published | None:
    """What others measured at a point."""
    of_point = (row.point.label, row.outcome.batch_size)
    return next((each for each in published if (each.label, each.batch_size) == of_point), None)


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif isinstance(value, list):
            flat[name] = "; ".join(value)
        elif name != "published":  # None there: it has no columns
            flat[name] = value
    return flat


def _in_words(published: Published) -> str:
    seconds = published.step_seconds
    parts = [_percent(published.mfu), f"{_milliseconds(seconds)} ms" if seconds else ""]
    return ", ".join(part for part in parts if part)


def _ratio(outcome: Outcome) -> str:
    if outcome.step_seconds is None or outcome.predicted_seconds is None:
        return ""
    return f"{outcome.step_seconds / outcome.predicted_seconds:,.3g}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
