"""`xla-attention collectives`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table


def collectives_command(
    config: Annotated[Path, typer.Argument(help="Training configuration, such as configs/train/demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as seq_len=4096.")
    ] = None,
    topology: Annotated[str, typer.Option(help="TPU slice, such as v5e:4x2 or v4:2x2x2.")] = "v5e:4x2",
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="In place of sharding.strategy; may be given several times."),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="List every collective, not only their sums.")] = False,
) -> None:
    """Compile a sharded training step for a TPU slice that need not be here, and show what its chips send."""
    from rich.console import Console

    from xla_attention.planner.collectives import collectives_of, totals
    from xla_attention.planner.compile import CompileError, compile_step
    from xla_attention.planner.stage import stage_step
    from xla_attention.planner.topology import parse_topology
    from xla_attention.training.config import load_config

    slice_ = parse_topology(topology)
    changes = [[*(overrides or []), f"sharding.strategy={name}"] for name in strategy or []]
    console = Console()
    for settings in changes or [overrides or []]:
        train = load_config(config, settings)
        mesh = train.sharding.load().mesh.sizes(slice_.chips)
        name = train.sharding.strategy
        with console.status(f"{name}: staging the step"):
            module = stage_step(train, slice_)
        with console.status(f"{name}: compiling for {slice_}"):
            try:
                step = compile_step(module, slice_)
            except CompileError as error:
                typer.secho(f"error: {name}: {error}", fg="red", err=True)
                raise typer.Exit(1) from None
        found = collectives_of(step.hlo, mesh)
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
        memory = step.compiled.argument_bytes + step.compiled.temp_bytes
        title = f"{name} on {slice_}, {axes}: {memory / 2**30:.2f} GiB a chip"
        rows = [
            (total.kind, ", ".join(total.axes), f"{total.count}", f"{total.bytes / 2**20:.1f}")
            for total in totals(found)
        ]
        console.print(_table(title, ("collective", "over", "a step", "MiB"), rows))
        if each:
            lines = [
                (
                    one.kind,
                    ", ".join(one.axes),
                    f"{one.times} x {one.bytes / 2**20:.1f} MiB",
                    one.shapes,
                    one.source,
                )
                for one in found
            ]
            console.print(_table("each", ("collective", "over", "size", "of", "for"), lines))


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n >= 2 else "left")
    for row in rows:
        table.add_row(*row)
    return table
