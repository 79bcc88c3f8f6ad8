"""`xla-attention sweep`."""

import os
from pathlib import Path
from typing import Annotated

import typer


def sweep_command(
    config: Annotated[Path, typer.Argument(help="A sweep, such as configs/sweeps/llama-2b-v4-8.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Folder for results; else runs/sweeps/NAME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Points predicted at a time; each takes some GB.")] = 1,
    measure: Annotated[
        bool,
        typer.Option("--measure/--predict", help="Also run each point on the attached TPU, or virtual CPUs."),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time with --measure, after a warm-up.")] = 10,
    timeout: Annotated[float, typer.Option(help="Seconds that one point may take.")] = 3600,
) -> None:
    """Predict a grid of training steps on TPU slices that need not be here: tables, charts, a page.

    With --measure, run the steps too: medians, a profiler trace of each, and beside them what was predicted
    for the slice. On a CPU, predictions are still of a TPU: compare the column between rows, not with 1.

    What was predicted is kept: after Ctrl-C the same command continues. A point that fails is a row that
    says why.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: JAX need not look for a TPU

    from rich.console import Console
    from rich.progress import Progress

    from xla_attention.planner.sweep.charts import draw
    from xla_attention.planner.sweep.config import load_sweep
    from xla_attention.planner.sweep.page import write_page
    from xla_attention.planner.sweep.runner import Measurement, Row, run_points
    from xla_attention.planner.sweep.table import beside_prediction, devices, failures, show, write_tables

    sweep = load_sweep(config)
    folder = out or Path("runs") / "sweeps" / sweep.name
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task(sweep.name, total=len(sweep.points) * (1 + measure))

        def done(row: Row) -> None:
            progress.advance(task)

        rows = run_points(sweep.points, jobs=jobs, timeout=timeout, progress=done)
        if measure:
            how = Measurement(steps, folder / "profile")
            ran = run_points(sweep.points, timeout=timeout, measure=how, progress=done)
            rows = [beside_prediction(*pair) for pair in zip(ran, rows)]
    write_tables(sweep, rows, folder)
    draw(sweep, rows, folder / "sweep.png")
    write_page(sweep, rows, folder / "sweep.png", folder / "sweep.html")
    console.print(show(sweep, rows))
    for failure in failures(rows):
        console.print(f"no plan: {failure}", style="red", highlight=False, markup=False)
    for device in devices(rows):
        console.print(f"measured on {device}", highlight=False, markup=False)
    for note in sweep.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(f"written: sweep.html, sweep.png, sweep.csv, sweep.json in {folder}", highlight=False)
    if all(row.outcome.error for row in rows):
        raise typer.Exit(1)
