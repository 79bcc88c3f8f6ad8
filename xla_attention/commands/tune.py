"""`xla-attention tune`."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from xla_attention.commands import case_options as options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from xla_attention.planner.attention_case import AttentionCase
    from xla_attention.planner.topology import Topology
    from xla_attention.planner.tuning import Trial


def tune_command(
    topology: options.Topology,
    seq_len: options.SeqLen,
    batch: options.Batch = 1,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 8,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bfloat16",
    mask: options.MaskName = "causal",
    passes: options.Passes = "forward,backward",
    limit: Annotated[int, typer.Option(min=1, help="Choices to compile at most, in each pass.")] = 40,
    write: Annotated[
        bool, typer.Option(help="Put the winner into the table that the kernels choose by.")
    ] = True,
) -> None:
    """Search the kernels' block sizes by the TPU compiler's schedules, and keep the best.

    Compiles for a chip that need not be here. What was compiled before is not compiled again.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: JAX need not look for a TPU

    from rich.console import Console

    from pallas_kernels.flash_attention.blocks import TABLE
    from xla_attention.planner.attention_case import AttentionCase, parse_mask
    from xla_attention.planner.compile import CompileError
    from xla_attention.planner.topology import parse_topology
    from xla_attention.planner.tuning import default_blocks, key_of, write_winner

    slice_ = parse_topology(topology)
    cases = [
        AttentionCase(batch, heads, kv_heads, seq_len, head_dim, dtype, parse_mask(mask), direction)
        for direction in passes.split(",")
    ]
    console = Console()
    for case in cases:
        try:
            trials = _search(case, slice_, limit, console)
        except CompileError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(1) from None
        console.print(ranking(trials, default_blocks(case, slice_), f"{case.direction} on {slice_}: {case}"))
        if write:
            command = (
                f"xla-attention tune --topology {slice_} --pass {case.direction} --seq-len {seq_len} "
                f"--batch {batch} --heads {heads} --kv-heads {kv_heads} --head-dim {head_dim} "
                f"--dtype {dtype} --mask {mask} --limit {limit}"
            )
            write_winner(TABLE, case, slice_, trials, command)
            console.print(f"{key_of(case, slice_)} written to {TABLE}")


def _search(case: "AttentionCase", topology: "Topology", limit: int, console: "Console") -> "list[Trial]":
    """The search, with a progress bar that shows the choice that is compiled."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from xla_attention.planner.tuning import default_blocks, tune

    default = default_blocks(case, topology)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    choice = TextColumn("{task.fields[choice]}")
    with Progress(*columns, choice, console=console, transient=True) as progress:
        task = progress.add_task(f"{case.direction} on {topology}", choice="the default")

        def show(done: int, total: int, blocks: object) -> None:
            progress.update(task, completed=done, total=total, choice=_changes(blocks, default))

        return tune(case, topology, limit=limit, on_trial=show)


def ranking(trials: "list[Trial]", default: object, title: str) -> "Table":
    """The choices, fewest cycles first, by what differs from the default."""
    import rich.box
    from rich.table import Table

    refused = [trial for trial in trials if trial.cycles is None]
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, caption=f"{len(refused)} more do not compile")
    table.add_column("cycles with stalls", justify="right")
    table.add_column("of the default", justify="right")
    table.add_column("blocks that differ from the default")
    (before,) = (trial.cycles for trial in trials if trial.blocks == default)
    for trial in trials:
        if trial.cycles is not None:
            changes = _changes(trial.blocks, default) or "the default"
            table.add_row(f"{trial.cycles:,}", f"{trial.cycles / before:.3f}", changes)
    return table


def _changes(blocks: object, default: object) -> str:
    return ", ".join(f"{n}={x}" for n, x in vars(blocks).items() if x != getattr(default, n))
