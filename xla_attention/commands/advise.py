"""`xla-attention advise`."""

import os
from pathlib import Path
from typing import Annotated

import typer


def advise_command(
    config: Annotated[Path, typer.Argument(help="Training configuration, such as configs/train/demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as batch_size=64.")
    ] = None,
    topology: Annotated[str, typer.Option(help="TPU slice, such as v4-8, v5e:4x4 or v5p-128.")] = "v5e:2x2",
    budget: Annotated[int, typer.Option(min=1, help="Steps to compile at most.")] = 12,
    timeout: Annotated[float, typer.Option(help="Seconds that one of them may take.")] = 3600,
    out: Annotated[Path, typer.Option(help="Where the best configuration goes.")] = Path("advised.yaml"),
) -> None:
    """Search strategy, mesh, recomputation and batch for the most predicted tokens/s that fit on a slice.

    Writes a configuration that `xla-attention train` accepts. What was predicted is kept, as by `sweep`.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: JAX need not look for a TPU

    from rich.console import Console

    from xla_attention.planner.sweep.advise import advise, why
    from xla_attention.planner.sweep.config import Point, Sweep
    from xla_attention.planner.sweep.runner import Row, run_points
    from xla_attention.planner.sweep.table import failures, show
    from xla_attention.planner.topology import parse_topology
    from xla_attention.training.config import load_config, save_config

    train, slice_ = load_config(config, overrides or []), parse_topology(topology)
    console = Console()
    with console.status("") as status:

        def predict(point: Point) -> Row:
            status.update(f"{point.label}, batch {point.config.batch_size} on {slice_}")
            return run_points([point], timeout=timeout)[0]

        advice = advise(train, slice_, predict, budget=budget)
    points = tuple(row.point for row in advice.ranking)
    console.print(show(Sweep(f"advice for {config.name}", points, (), ()), advice.ranking))
    for line in failures(advice.ranking):
        console.print(f"no plan: {line}", style="red", highlight=False, markup=False)
    for line in advice.left_out:
        console.print(f"not tried: {line}", highlight=False, markup=False)
    if advice.best is None:
        typer.secho("error: nothing that was tried fits; see the reasons above", fg="red", err=True)
        raise typer.Exit(1)
    if advice.given is not None:
        for line in why(advice.best, advice.given):
            console.print(line, highlight=False, markup=False)
    save_config(advice.best.point.config, out)
    console.print(f"written: {out}; train it with: xla-attention train {out}", highlight=False)
