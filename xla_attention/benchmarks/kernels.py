"""Our kernels beside JAX's, by the schedules that the TPU compiler makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import rich.box
from rich.table import Table

from pallas_kernels.flash_attention import AttentionSpec
from xla_attention.benchmarks.peers import Candidate, peers
from xla_attention.planner.attention_case import AttentionCase
from xla_attention.planner.compile import CompileError, compile_for_tpu, libtpu_version
from xla_attention.planner.cycles import KernelCycles
from xla_attention.planner.kernels import flash_kernels
from xla_attention.planner.topology import Topology

OURS = "xla_attention"
UNITS = ("MXU", "VALU", "XLU", "EUP", "LOAD", "STORE", "SALU")


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation with the best of its block choices, or why none compiles.

    Attributes:
        candidate: that choice; the last that was tried, if none compiles.
        kernels: its kernels; empty if none compiles.
        tried: block choices compiled, those refused among them.
        error: the compiler's, if none compiles.
    """

    candidate: Candidate
    kernels: tuple[KernelCycles, ...]
    tried: int
    error: str = ""

    @property
    def total(self) -> int:
        """Cycles of all kernels, with HBM stalls."""
        return sum(kernel.total for kernel in self.kernels)

    def share(self, unit: str) -> float:
        """Cycles in which ``unit`` would be full, of all cycles less stalls."""
        return sum(k.busy(unit) for k in self.kernels) / sum(k.cycles for k in self.kernels)


def our_candidate(case: AttentionCase, topology: Topology) -> Candidate:
    """Flash attention of this package, with the blocks that it chooses itself."""
    forward, backward = flash_kernels(
        case.q_shape,
        case.kv_shape,
        dtype=case.dtype,
        spec=AttentionSpec(scale=case.scale, mask=case.mask),
        hardware=topology.hardware,
    )
    kernel = forward if case.direction == "forward" else backward
    return Candidate(OURS, "its own", kernel.fn, kernel.avals)


def measure_kernels(
    case: AttentionCase, topology: Topology, say: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Compiles ours and every peer with each of its block choices, one at a time.

    Args:
        case: what to compute.
        topology: to compile for.
        say: told before each compilation what is compiled.

    Returns:
        One row for each implementation, ours first.
    """
    return measure_candidates((our_candidate(case, topology), *peers(case)), topology, say, case.direction)


def measure_candidates(
    candidates: Iterable[Candidate], topology: Topology, say: Callable[[str], None], what: str
) -> list[Row]:
    """Compiles all candidates, one at a time, and keeps the best of each name; ``what`` they do is told."""
    best: dict[str, Row] = {}
    for candidate in candidates:
        say(f"compiling for {topology}: {candidate.name}, {what}, blocks {candidate.blocks}")
        before = best.get(candidate.name)
        tried = before.tried + 1 if before else 1
        try:
            compiled = compile_for_tpu(candidate.fn, candidate.avals, topology, cycles=True)
            row = Row(candidate, compiled.kernels, tried)
        except CompileError as error:
            row = Row(candidate, (), tried, str(error))
        if before and before.kernels and not (row.kernels and row.total < before.total):
            row = dataclasses.replace(before, tried=tried)
        best[candidate.name] = row
    return list(best.values())


def kernels_table(case: AttentionCase, topology: Topology, rows: Sequence[Row]) -> Table:
    """The rows as a table: cycles of one core, shares of its units, and of the FLOP/s it could reach."""
    hardware = topology.hardware
    table = Table(
        title=f"{case.direction} on {topology}: {case}",
        caption=_caption(topology, rows),
        box=rich.box.SIMPLE_HEAD,
    )
    table.add_column("kernel", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
    for column in ("bundles", "cycles", "with stalls", *UNITS, "useful", "ms", "ours is faster by"):
        table.add_column(column, justify="right")
    ours = rows[0]
    for row in rows:
        if not row.kernels:
            table.add_row(
                row.candidate.name, "none of them compiles" if row.tried > 1 else "does not compile"
            )
            continue
        of_core = case.useful_flops / hardware.cores
        guess = "?" if any(kernel.unknown for kernel in row.kernels) else ""
        table.add_row(
            row.candidate.name,
            row.candidate.blocks + (f" (best of {row.tried})" if row.tried > 1 else ""),
            f"{sum(kernel.bundles for kernel in row.kernels):,}",
            f"{sum(kernel.cycles for kernel in row.kernels):,}{guess}",
            f"{row.total:,}{guess}",
            *(f"{row.share(unit):.0%}" for unit in UNITS),
            f"{of_core / (row.total * hardware.flops_per_cycle):.1%}",
            f"{row.total / hardware.clock_hz * 1e3:.3f}",
            f"{row.total / ours.total:.2f}x" if ours.kernels and row is not ours else "",
        )
    return table


def _caption(topology: Topology, rows: Sequence[Row]) -> str:
    hardware = topology.hardware
    core = "the core" if hardware.cores == 1 else f"each of a chip's {hardware.cores} cores"
    lines = [
        f"Static schedule of libtpu {libtpu_version()}, cycles of {core}; nothing ran on a TPU.",
        "Units: share of their slots, stalls left out. Useful: FLOPs of visible pairs, of peak, with stalls.",
        f"Stalls and ms: with HBM at {hardware.hbm_bytes_per_second / 1e9:.0f} GB/s a chip.",
        "XLA operations around the kernels are not counted.",
    ]
    unknown = {k.name: sum(k.unknown.values()) for row in rows for k in row.kernels if k.unknown}
    if unknown:
        lines.append(
            "? a guess: " + ", ".join(f"{n} unknown branches in {name}" for name, n in unknown.items())
        )
    return "\n".join(lines)
