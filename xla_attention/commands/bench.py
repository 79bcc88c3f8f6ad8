"""`xla-attention bench`."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from xla_attention.commands import case_options as options

if TYPE_CHECKING:
    from rich.console import Console

bench_app = typer.Typer(no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure."""


@bench_app.command("bridge")
def bench_bridge(
    calls: Annotated[int, typer.Option(min=1, help="Calls of which the median is printed.")] = 500,
) -> None:
    """Print the host time of cached flash and paged attention calls, beside that of torch_xla's own."""
    from rich.console import Console
    from rich.table import Table

    from xla_attention.benchmarks.bridge import (
        DTYPE,
        PAGED_SHAPE,
        SHAPE,
        measure_host_time,
        measure_paged_host_time,
    )
    from xla_attention.device import pick_device

    _, device = pick_device()
    shape = "x".join(map(str, SHAPE))
    table = Table(title="Host microseconds a call", caption=f"median of {calls}")
    table.add_column("operator")
    table.add_column("forward", justify="right")
    table.add_column("forward and backward", justify="right")
    for row in measure_host_time(calls):
        table.add_row(row.name, f"{row.forward * 1e6:.0f}", f"{row.training * 1e6:.0f}")
    console = Console()
    console.print(f"{device}; q, k and v {shape} {str(DTYPE).removeprefix('torch.')}")
    console.print(table)
    table = Table(title=f"Host microseconds a decode call, q {'x'.join(map(str, PAGED_SHAPE))}")
    table.add_column("operator")
    table.add_column("paged_attention", justify="right")
    for name, seconds in measure_paged_host_time(calls):
        table.add_row(name, f"{seconds * 1e6:.0f}")
    console.print(table)


@bench_app.command("accuracy")
def bench_accuracy(
    quick: Annotated[bool, typer.Option("--quick", help="A few cases only.")] = False,
) -> None:
    """Print the errors of flash attention against float64, beside those of scaled_dot_product_attention.

    Exits with status 1 when one is over its limit.
    """
    from xla_attention.benchmarks.accuracy import report

    if not report(quick=quick):
        raise typer.Exit(1)


@bench_app.command("features")
def bench_features(
    quick: Annotated[bool, typer.Option("--quick", help="A few cases only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="A row for each case.")] = False,
) -> None:
    """Print the errors of every mask with every score change, against float64 and against flex_attention.

    Exits with status 1 when one is over its limit.
    """
    _compile_quickly()

    from xla_attention.benchmarks.features import report

    if not report(quick=quick, verbose=verbose):
        raise typer.Exit(1)


@bench_app.command("flex")
def bench_flex(
    quick: Annotated[bool, typer.Option("--quick", help="Each function once, at length 64.")] = False,
    only: Annotated[str, typer.Option(help="Functions whose name contains this.")] = "",
) -> None:
    """Print the errors of flex_attention on XLA against torch's eager one in float64.

    Every variant at several lengths, further functions, and random compositions of them. Exits with status 1
    when one is over its limit.
    """
    _compile_quickly()

    from xla_attention.benchmarks.flex_accuracy import report

    if not report(quick=quick, only=only):
        raise typer.Exit(1)


@bench_app.command("flex-kernels")
def bench_flex_kernels(
    topology: options.Topologies,
    variant: Annotated[
        list[str] | None, typer.Option(help="A variant; may be given several times.  [default: all]")
    ] = None,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 2,
    seq_len: options.SeqLen = 8192,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bfloat16",
    further: Annotated[
        bool, typer.Option("--further", help="The further functions of `bench flex` instead.")
    ] = False,
) -> None:
    """Compile every variant of flex_attention, and compare with built-in forms by the compiler's schedules.

    Exits with status 1 when one does not compile, or takes more than 1.1 times the built-in form's cycles.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    from xla_attention.benchmarks.flex_functions import functions
    from xla_attention.benchmarks.flex_kernels import flex_table, measure_flex
    from xla_attention.flex.variants import VARIANTS
    from xla_attention.planner.topology import parse_topology

    console = _wide_console()
    failed = False
    for slice_ in [parse_topology(name) for name in topology]:
        with console.status("") as status:
            rows = measure_flex(
                slice_,
                heads=heads,
                kv_heads=kv_heads,
                seq_len=seq_len,
                head_dim=head_dim,
                dtype=dtype,
                names=variant or tuple(functions() if further else VARIANTS),
                cycles=not further,
                say=status.update,
            )
            rows = list(rows)
        console.print(flex_table(rows, slice_))
        for row in rows:
            if row.error:
                typer.secho(f"error: {row.variant}, {row.kernel}: {row.error}", fg="red", err=True)
        failed = failed or not all(row.passes for row in rows)
    if failed:
        raise typer.Exit(1)


@bench_app.command("kernels")
def bench_kernels(
    topology: options.Topologies,
    batch: options.Batch = 1,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 8,
    seq_len: options.SeqLen = 4096,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bfloat16",
    mask: options.MaskName = "causal",
    passes: options.Passes = "forward,backward",
) -> None:
    """Compare our kernels with JAX's flash and splash attention by the TPU compiler's schedules.

    Compiles for chips that need not be here. Each kernel is compiled once and its count kept.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: JAX need not look for a TPU

    from xla_attention.benchmarks.kernels import kernels_table, measure_kernels
    from xla_attention.planner.attention_case import AttentionCase, parse_mask
    from xla_attention.planner.topology import parse_topology

    slices = [parse_topology(name) for name in topology]
    cases = [
        AttentionCase(batch, heads, kv_heads, seq_len, head_dim, dtype, parse_mask(mask), direction)
        for direction in passes.split(",")
    ]
    console = _wide_console()
    failed = False
    for slice_ in slices:
        for case in cases:
            with console.status("") as status:
                rows = measure_kernels(case, slice_, status.update)
            console.print(kernels_table(case, slice_, rows))
            if rows[0].error:
                typer.secho(f"error: {rows[0].error}", fg="red", err=True)
                failed = True
    if failed:
        raise typer.Exit(1)


@bench_app.command("context")
def bench_context(
    topology: options.Topology = "v5e:4x2",
    shards: Annotated[
        list[int] | None,
        typer.Option(help="Shards of the sequence; may be given several times.  [default: 1, 2, 4, 8]"),
    ] = None,
    method: Annotated[str, typer.Option(help="ring or all_to_all.")] = "ring",
    layout: Annotated[str, typer.Option(help="zigzag or contiguous.")] = "zigzag",
    batch: options.Batch = 1,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 8,
    seq_len: options.SeqLen = 131072,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bfloat16",
    mask: options.MaskName = "causal",
    passes: options.Passes = "forward,backward",
) -> None:
    """Print memory and cycles of a device, compiled for a TPU, as one sequence is sharded over more of them.

    Exits with status 1 when one does not compile.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    from xla_attention.benchmarks.context import context_table, measure_context
    from xla_attention.planner.attention_case import AttentionCase, parse_mask
    from xla_attention.planner.topology import parse_topology

    slice_ = parse_topology(topology)
    cases = [
        AttentionCase(batch, heads, kv_heads, seq_len, head_dim, dtype, parse_mask(mask), direction)
        for direction in passes.split(",")
    ]
    console = _wide_console()
    with console.status("") as status:
        rows = measure_context(
            cases, slice_, shards or (1, 2, 4, 8), method=method, layout=layout, say=status.update
        )
    console.print(context_table(rows, slice_, method, layout))
    for row in rows:
        if row.error:
            typer.secho(f"error: {row.case.direction}, {row.shards} shards: {row.error}", fg="red", err=True)
    if any(row.error for row in rows):
        raise typer.Exit(1)


@bench_app.command("memory")
def bench_memory(
    topology: options.Topologies,
    seq_len: Annotated[
        list[int] | None,
        typer.Option(help="A length; may be given several times.  [default: 8k, 32k and 128k]"),
    ] = None,
    batch: options.Batch = 1,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 8,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bfloat16",
    mask: options.MaskName = "causal",
) -> None:
    """Print the device memory of our kernels, compiled for a TPU, as the sequence grows.

    Exits with status 1 when one does not compile.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    from xla_attention.benchmarks.memory import measure_memory, memory_table
    from xla_attention.planner.attention_case import AttentionCase, parse_mask
    from xla_attention.planner.topology import parse_topology

    slices = [parse_topology(name) for name in topology]
    cases = [
        AttentionCase(batch, heads, kv_heads, length, head_dim, dtype, parse_mask(mask), direction)
        for direction in ("forward", "backward")
        for length in seq_len or (8192, 32768, 131072)
    ]
    console = _wide_console()
    failed = False
    for slice_ in slices:
        with console.status("") as status:
            rows = measure_memory(cases, slice_, status.update)
        console.print(memory_table(rows, slice_))
        for row in rows:
            if row.error:
                typer.secho(
                    f"error: {row.case.direction}, {row.case.seq_len}: {row.error}", fg="red", err=True
                )
                failed = True
    if failed:
        raise typer.Exit(1)


@bench_app.command("paged")
def bench_paged(
    topology: options.Topologies,
    batch: options.Batch = 16,
    queries: Annotated[int, typer.Option(help="Queries of each sequence, its last tokens.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each sequence in the cache.")] = 4096,
    heads: options.Heads = 32,
    kv_heads: options.KvHeads = 8,
    head_dim: options.HeadDim = 128,
    page_size: Annotated[
        list[int] | None, typer.Option(help="Tokens of a page; may be given several times.  [default: 16]")
    ] = None,
) -> None:
    """Compare our paged attention with JAX's and torch_xla's kernels by the TPU compiler's schedules.

    Exits with status 1 when ours does not compile.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    from xla_attention.benchmarks.paged_kernels import PagedCase, measure_paged, paged_table
    from xla_attention.planner.topology import parse_topology

    slices = [parse_topology(name) for name in topology]
    cases = [
        PagedCase(batch, queries, context, heads, kv_heads, head_dim, size) for size in page_size or (16,)
    ]
    console = _wide_console()
    failed = False
    for slice_ in slices:
        for case in cases:
            with console.status("") as status:
                rows = measure_paged(case, slice_, status.update)
            console.print(paged_table(case, slice_, rows))
            if rows[0].error:
                typer.secho(f"error: {rows[0].error}", fg="red", err=True)
                failed = True
    if failed:
        raise typer.Exit(1)


def _wide_console() -> "Console":
    """The console; wide enough for a table where the output is no terminal, whose width is not known."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 180))


def _compile_quickly() -> None:
    """For hundreds of programs on a CPU, each of which runs once, for milliseconds.

    LLVM's optimizations would take half of the time; and kept, they meet Linux's limit on the memory mappings
    of a process.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "8")
