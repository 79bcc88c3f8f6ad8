"""The `xla-attention` command. Each subcommand is one module of `xla_attention.commands`.

Those modules import torch and JAX inside their functions, so that `--help` is quick.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from xla_attention.commands.advise import advise_command
from xla_attention.commands.bench import bench_app
from xla_attention.commands.collectives import collectives_command
from xla_attention.commands.compile import compile_command
from xla_attention.commands.export import export_command
from xla_attention.commands.generate import generate_command
from xla_attention.commands.plan import plan_command
from xla_attention.commands.show_mask import show_mask_command
from xla_attention.commands.sweep import sweep_command
from xla_attention.commands.tokenize import tokenize_command
from xla_attention.commands.train import train_command
from xla_attention.commands.tune import tune_command


class Commands(TyperGroup):
    """Shows a user's mistake, which the packages raise as ValueError or OSError, as one message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if ctx.params["traceback"]:
                raise
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def options(
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error comes from."),
) -> None:
    """Attention kernels for Cloud TPU in PyTorch: train, sample, measure, and compile for a TPU."""


app.command("train")(train_command)
app.command("generate")(generate_command)
app.command("export")(export_command)
app.command("tokenize")(tokenize_command)
app.command("compile")(compile_command)
app.command("collectives")(collectives_command)
app.command("plan")(plan_command)
app.command("advise")(advise_command)
app.command("sweep")(sweep_command)
app.command("tune")(tune_command)
app.command("show-mask")(show_mask_command)
app.add_typer(bench_app, name="bench")
