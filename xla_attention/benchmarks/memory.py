"""Device memory of the compiled kernels as the sequence grows: linear, if nothing is queries by keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import rich.box
from rich.table import Table

from xla_attention.benchmarks.kernels import our_candidate
from xla_attention.planner.attention_case import AttentionCase
from xla_attention.planner.compile import Compiled, CompileError, compile_for_tpu
from xla_attention.planner.topology import Topology


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """What one case takes, or the compiler's error."""

    case: AttentionCase
    compiled: Compiled | None
    error: str = ""


def measure_memory(
    cases: Sequence[AttentionCase], topology: Topology, say: Callable[[str], None] = lambda text: None
) -> list[MemoryRow]:
    """Compiles our kernel for each case, one at a time; ``say`` is told which, before."""
    rows = []
    for case in cases:
        say(f"compiling for {topology}: {case.direction}, length {case.seq_len:,}")
        candidate = our_candidate(case, topology)
        try:
            rows.append(MemoryRow(case, compile_for_tpu(candidate.fn, candidate.avals, topology)))
        except CompileError as error:
            rows.append(MemoryRow(case, None, str(error)))
    return rows


def memory_table(rows: Sequence[MemoryRow], topology: Topology) -> Table:
    """Bytes by length, and each as a multiple of what growth in proportion to the first length would give."""
    table = Table(
        title=f"Device memory of one call on one chip of {topology}, MiB",
        caption="In brackets: multiple of linear growth from the first length.\n"
        "Temporary: what XLA keeps between arguments and results; kernels' VMEM is not in it.",
        box=rich.box.SIMPLE_HEAD,
    )
    table.add_column("kernel")
    for column in ("length", "arguments", "outputs", "temporary"):
        table.add_column(column, justify="right")
    first: dict[str, MemoryRow] = {}
    for row in rows:
        case, compiled = row.case, row.compiled
        if compiled is None:
            table.add_row(case.direction, f"{case.seq_len:,}", "does not compile")
            continue
        base = first.setdefault(case.direction, row)
        cells = []
        for name in ("argument_bytes", "output_bytes", "temp_bytes"):
            value = getattr(compiled, name)
            linear = getattr(base.compiled, name) * case.seq_len / base.case.seq_len
            cells.append(f"{value / 2**20:,.2f}" + (f" ({value / linear:.2f})" if linear else ""))
        table.add_row(case.direction, f"{case.seq_len:,}", *cells)
    return table
