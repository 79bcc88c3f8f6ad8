"""Attention of a sharded sequence by what the TPU compiler makes of it: memory and cycles of a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import rich.box
from rich.table import Table

from pallas_kernels.context_parallel import Context, ContextMethod, SequenceLayout, ring
from pallas_kernels.context_parallel.head_groups import head_groups
from pallas_kernels.flash_attention import AttentionSpec
from pallas_kernels.masks import Mask
from xla_attention.ops.placement import AttentionPlacement
from xla_attention.planner.attention_case import AttentionCase
from xla_attention.planner.compile import Compiled, CompileError, compile_for_tpu, libtpu_version
from xla_attention.planner.kernels import flash_kernels, sharded_kernels
from xla_attention.planner.topology import Topology

AXIS = "context"


@dataclasses.dataclass(frozen=True)
class ContextRow:
    """One case on so many shards.

    Attributes:
        case: what is computed, in all.
        shards: of the sequence.
        compiled: the whole, partitioned: memory of one device.
        cycles: of the kernels of each device, over all steps, with HBM stalls.
        error: the compiler's, if it refused.
    """

    case: AttentionCase
    shards: int
    compiled: Compiled | None = None
    cycles: tuple[int, ...] = ()
    error: str = ""

    @property
    def memory(self) -> int:
        """Bytes of arguments, results and what is between, on one device."""
        return self.compiled.argument_bytes + self.compiled.output_bytes + self.compiled.temp_bytes

    @property
    def mean(self) -> float:
        return sum(self.cycles) / self.shards

    @property
    def imbalance(self) -> float:
        """By how much the device with the most work exceeds the mean."""
        return max(self.cycles) / self.mean - 1


def measure_context(
    cases: Sequence[AttentionCase],
    topology: Topology,
    shards: Sequence[int],
    *,
    method: ContextMethod = "ring",
    layout: SequenceLayout = "zigzag",
    say: Callable[[str], None] = lambda text: None,
) -> list[ContextRow]:
    """Compiles each case over each number of shards.

    Args:
        cases: what to compute.
        topology: a slice with at least as many chips as there are shards.
        shards: of the sequence.
        method, layout: how it is sharded.
        say: told before each compilation what is compiled.

    Raises:
        ValueError: the case cannot be sharded so.
    """
    rows = []
    for case in cases:
        for n in shards:
            say(f"compiling for {topology}: {case.direction}, {n} shards")
            context = Context(AXIS, n, method, layout)
            try:
                rows.append(
                    ContextRow(
                        case, n, _whole(case, topology, context), _cycles(case, topology, context, say)
                    )
                )
            except CompileError as error:
                rows.append(ContextRow(case, n, error=str(error)))
    return rows


def _whole(case: AttentionCase, topology: Topology, context: Context) -> Compiled:
    placement = AttentionPlacement(
        ((AXIS, context.shards),), sequence=AXIS, method=context.method, layout=context.layout
    )
    kernels = sharded_kernels(
        case.q_shape,
        case.kv_shape,
        dtype=case.dtype,
        spec=AttentionSpec(scale=case.scale, mask=case.mask),
        hardware=topology.hardware,
        placement=placement,
    )
    kernel = kernels[case.direction == "backward"]
    return compile_for_tpu(kernel.fn, kernel.avals, topology, sharding=kernel.sharding)


def _cycles(
    case: AttentionCase, topology: Topology, context: Context, say: Callable[[str], None]
) -> tuple[int, ...]:
    """Of each device: the kernels that it runs, each counted by itself."""
    n, hardware = context.shards, topology.hardware

    def of_kernel(heads: tuple[int, int], lengths: tuple[int, int], mask: Mask, partial: bool) -> int:
        say(f"counting for {topology}: {case.direction}, {lengths[0]:,} queries and {lengths[1]:,} keys")
        kernels = flash_kernels(
            (case.batch, heads[0], lengths[0], case.head_dim),
            (case.batch, heads[1], lengths[1], case.head_dim),
            dtype=case.dtype,
            spec=AttentionSpec(scale=case.scale, mask=mask),
            hardware=hardware,
            out_dtype="float32" if partial else None,
        )
        kernel = kernels[case.direction == "backward"]
        return sum(x.total for x in compile_for_tpu(kernel.fn, kernel.avals, topology, cycles=True).kernels)

    if n == 1 or context.method == "all_to_all":
        heads = case.heads // n, max(case.kv_heads // n, 1)
        return (of_kernel(heads, (case.seq_len, case.seq_len), case.mask, False),) * n

    length = case.seq_len // n
    local = (case.batch, case.heads, length, case.head_dim)
    groups = head_groups(case.kv_heads, local, hardware)
    heads = case.heads // groups, case.kv_heads // groups

    def of_part(part: ring.Part | None) -> int:
        if part is None:
            return 0
        lengths = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
        return groups * of_kernel(heads, lengths, part.mask, True)

    steps = ring.plan(case.mask, context, length, length)
    return tuple(
        sum(of_part(step.before if s <= shard else step.behind) for s, step in enumerate(steps))
        for shard in range(n)
    )


def context_table(rows: Sequence[ContextRow], topology: Topology, method: str, layout: str) -> Table:
    """Memory of a device and cycles, beside what the first row of each case would give divided by shards."""
    name = method.replace("_", "-") + (f", {layout}" if method == "ring" else "")
    table = Table(
        title=f"{name} on {topology}: {rows[0].case}",
        caption="MiB of one device. In brackets: multiple of the first row's over the number of shards.\n"
        "Cycles: of the kernels of a device over all steps, mean of the devices, with HBM stalls, by the\n"
        f"schedule of libtpu {libtpu_version()}. Imbalance: of the device with most work, over the mean.",
        box=rich.box.SIMPLE_HEAD,
    )
    table.add_column("pass")
    for column in ("shards", "arguments", "outputs", "temporary", "all bytes", "cycles", "imbalance"):
        table.add_column(column, justify="right")
    first: dict[str, ContextRow] = {}
    for row in rows:
        direction = row.case.direction
        if row.compiled is None:
            table.add_row(direction, str(row.shards), "does not compile")
            continue
        base = first.setdefault(direction, row)
        share = row.shards / base.shards
        sizes = (row.compiled.argument_bytes, row.compiled.output_bytes, row.compiled.temp_bytes)
        table.add_row(
            direction,
            str(row.shards),
            *(f"{size / 2**20:,.1f}" for size in sizes),
            f"{row.memory / 2**20:,.1f} ({row.memory * share / base.memory:.2f})",
            f"{row.mean:,.0f} ({row.mean * share / base.mean:.3f})",
            f"{row.imbalance:.1%}",
        )
    return table
