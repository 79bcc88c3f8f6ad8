"""`xla-attention plan`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from xla_attention.planner.outcome import Outcome


def plan_command(
    config: Annotated[Path, typer.Argument(help="Training configuration, such as configs/train/demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as batch_size=64.")
    ] = None,
    topology: Annotated[str, typer.Option(help="TPU slice, such as v4-8, v5e:4x4 or v5p-128.")] = "v5e:2x2",
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="In place of sharding.strategy; may be given several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each strategy.")] = False,
) -> None:
    """Predict a training step on a TPU slice that need not be here: time, MFU, memory, and what takes it.

    Exits with status 1 when it does not fit.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: JAX need not look for a TPU

    from rich.console import Console

    from xla_attention.planner.outcome import of_failure, of_plan
    from xla_attention.planner.plan import PlanError, plan
    from xla_attention.planner.topology import parse_topology
    from xla_attention.training.config import load_config

    slice_ = parse_topology(topology)
    changes = [[*(overrides or []), f"sharding.strategy={name}"] for name in strategy or []]
    console = Console(stderr=as_json)
    failed = False
    for settings in changes or [overrides or []]:
        train = load_config(config, settings)
        with console.status(f"{train.sharding.strategy}: staging the step, and compiling it for {slice_}"):
            try:
                outcome = of_plan(plan(train, slice_))
            except PlanError as error:
                outcome = of_failure(train, slice_, error)
        if as_json:
            typer.echo(outcome.model_dump_json())
        elif outcome.error is None:
            show_plan(outcome, console)
        if outcome.error is not None:
            failed = True
            typer.secho(f"error: {outcome.strategy} on {slice_}: {outcome.error}", fg="red", err=True)
    if failed:
        raise typer.Exit(1)


def show_plan(outcome: "Outcome", console: "Console") -> None:
    """One point: figures, time by cause, the largest costs, and what they rest on."""
    import rich.box
    from rich.table import Table

    from xla_attention.planner.words import MODELLED, NOT_MODELLED, milliseconds

    axes = " x ".join(f"{axis} {size}" for axis, size in outcome.mesh.items()) or "one chip"
    console.print(
        f"{outcome.parameters / 1e9:.3g} B parameters, {outcome.batch_size} x {outcome.seq_len} tokens "
        f"a step, {outcome.strategy} ({axes}) on {outcome.topology}"
    )
    gib = f"{outcome.memory_bytes / 2**30:.2f} of {outcome.capacity_bytes / 2**30:.0f} GiB a chip"
    figures = Table(box=rich.box.SIMPLE_HEAD, show_header=False)
    for name, value in (
        ("step", milliseconds(outcome.step_seconds)),
        ("tokens/s", f"{outcome.tokens_per_second:,.0f}"),
        ("MFU, 6N", f"{outcome.mfu:.1%}"),
        ("MFU, attention in full", f"{outcome.mfu_full:.1%}"),
        ("MFU, causal attention", f"{outcome.mfu_causal:.1%}"),
        ("HBM", f"{gib}: fits"),
    ):
        figures.add_row(name, value)
    console.print(figures)
    table = Table(box=rich.box.SIMPLE_HEAD, title="time by cause", title_justify="left")
    for column in ("cause", "time", "of the step"):
        table.add_column(column, justify="left" if column == "cause" else "right")
    for cause, seconds in outcome.causes.items():
        table.add_row(cause, milliseconds(seconds), f"{seconds / outcome.step_seconds:.1%}")
    console.print(table)
    console.print(f"beside other work: {milliseconds(outcome.hidden_communication)} of communication\n")
    for title, lines in (
        ("largest costs", outcome.largest),
        ("modelled", MODELLED),
        ("not modelled", NOT_MODELLED),
    ):
        console.print(f"{title}:")
        for line in lines:
            console.print(f"  - {line}", highlight=False)
