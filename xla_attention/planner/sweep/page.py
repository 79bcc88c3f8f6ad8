"""One HTML page of a sweep that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from xla_attention.planner.sweep.config import Sweep
from xla_attention.planner.sweep.runner import Row
from xla_attention.planner.sweep.table import COLUMNS, cells
from xla_attention.planner.words import MODELLED, NOT_MODELLED

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1150px; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px } img { max-width: 100% }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
.right { text-align: right }
"""


def write_page(sweep: Sweep, rows: Sequence[Row], chart: Path, path: Path) -> None:
    """Writes the page: charts, table, the largest costs of each point, and what the figures rest on.

    Args:
        chart: a PNG, which is put into the page.
    """
    picture = base64.b64encode(chart.read_bytes()).decode()
    sources = dict.fromkeys(each.source for each in sweep.published)
    sections = [
        f"<h1>{escape(sweep.name)}</h1>",
        f'<img alt="MFU, step time, time by cause" src="data:image/png;base64,{picture}">',
        _table(sweep, rows),
        "<h2>Largest costs</h2>",
        *(_largest(row) for row in rows if row.outcome.largest),
        _list("Notes", sweep.notes),
        _list("Modelled", MODELLED),
        _list("Not modelled", NOT_MODELLED),
        _list("Sources of what is published", sources),
    ]
    head = f'<meta charset="utf-8"><title>{escape(sweep.name)}</title><style>{_STYLE}</style>'
    path.write_text(f"<!doctype html>{head}{''.join(sections)}\n", encoding="utf-8")


def _table(sweep: Sweep, rows: Sequence[Row]) -> str:
    head = "".join(f'<th class="{side}">{escape(name)}</th>' for name, side in COLUMNS.items())
    lines = []
    for row in rows:
        line = zip(cells(row, sweep.published), COLUMNS.values())
        lines.append("".join(f'<td class="{side}">{escape(text)}</td>' for text, side in line))
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _largest(row: Row) -> str:
    return _list(f"{row.point.label}, batch {row.outcome.batch_size}", row.outcome.largest, level=3)


def _list(title: str, lines: Sequence[str] | dict[str, None], level: int = 2) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h{level}>{escape(title)}</h{level}><ul>{items}</ul>"
