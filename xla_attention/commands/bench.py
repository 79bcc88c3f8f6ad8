"""`xla-attention bench`."""

from typing import Annotated

import typer

bench_app = typer.Typer(no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure."""


@bench_app.command("bridge")
def bench_bridge(
    calls: Annotated[int, typer.Option(min=1, help="Calls of which the median is printed.")] = 500,
) -> None:
    """Print the host time of a cached flash attention call, beside that of torch_xla's own operator."""
    from rich.console import Console
    from rich.table import Table

    from xla_attention.benchmarks.bridge import DTYPE, SHAPE, measure_host_time
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
