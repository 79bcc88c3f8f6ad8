"""`xla-attention compile`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from xla_attention.planner.compile import Compiled
    from xla_attention.planner.kernels import Kernel


def compile_command(
    config: Annotated[Path, typer.Argument(help="Training configuration, such as configs/train/demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as seq_len=4096.")
    ] = None,
    topology: Annotated[
        str, typer.Option(help="TPU slice, such as v5e:2x2, v4:2x2x1, v5p-8 or v6e-4.")
    ] = "v5e:2x2",
    dump: Annotated[
        Path | None, typer.Option(help="Folder for the compiler's dumps, one folder a kernel.")
    ] = None,
) -> None:
    """Compile the kernels that a model trains with, forward and backward, for a TPU that need not be here."""
    from rich.console import Console

    from xla_attention.models.registry import load_model_config
    from xla_attention.planner.compile import CompileError, compile_for_tpu
    from xla_attention.planner.kernels import kernels_of_model
    from xla_attention.planner.topology import parse_topology
    from xla_attention.text import load_tokenizer
    from xla_attention.training.config import load_config
    from xla_attention.training.data import document_end

    slice_ = parse_topology(topology)
    train = load_config(config, overrides or [])
    kernels = kernels_of_model(
        load_model_config(train.model),
        batch=train.batch_size,
        seq_len=train.seq_len,
        dtype=train.compute_dtype,
        hardware=slice_.hardware,
        segments=document_end(train.data, load_tokenizer(train.tokenizer)) is not None,
    )
    console = Console()
    results = []
    for kernel in kernels:
        folder = dump and dump / kernel.name.replace(" ", "-")
        with console.status(f"compiling {kernel.name} for {slice_}"):
            try:
                compiled = compile_for_tpu(kernel.fn, kernel.avals, slice_, dump_to=folder)
            except CompileError as error:
                typer.secho(f"error: {kernel.name}, {kernel.shapes}: {error}", fg="red", err=True)
                raise typer.Exit(1) from None
        results.append((kernel, compiled))
    console.print(compile_table(results, f"{train.compute_dtype} kernels, compiled for one chip of {slice_}"))


def compile_table(results: "list[tuple[Kernel, Compiled]]", title: str) -> "Table":
    """What was compiled, how long it took, and the device memory of one call."""
    from rich.table import Table

    cached = any(compiled.cached for _, compiled in results)
    table = Table(title=title, caption="* compiled earlier, kept by content" if cached else None)
    table.add_column("kernel", no_wrap=True)
    table.add_column("shapes", no_wrap=True)
    for column in ("compile", "arguments", "outputs", "temporary"):
        table.add_column(column, justify="right")
    for kernel, compiled in results:
        sizes = (compiled.argument_bytes, compiled.output_bytes, compiled.temp_bytes)
        seconds = f"{compiled.seconds:.1f} s{'*' if compiled.cached else ' '}"
        table.add_row(
            kernel.name, kernel.shapes.replace(", ", "\n"), seconds, *(f"{n / 2**20:.1f} MiB" for n in sizes)
        )
    return table
