"""`xla-attention train`."""

import os
from pathlib import Path
from typing import Annotated

import typer


def train_command(
    config: Annotated[Path, typer.Argument(help="YAML file, such as configs/train/demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as optimizer.lr=3e-4.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what an earlier run left in out_dir, and start again.")
    ] = False,
) -> None:
    """Train a language model; run it again to continue from the last checkpoint."""
    # At each compilation XLA warns that the partitioner torch_xla uses will be replaced one day.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from xla_attention.training.config import load_config

    loaded = load_config(config, overrides or [])

    from xla_attention.training.loop import train

    result = train(loaded, fresh=fresh)
    if result.stopped_by:
        typer.echo(f"{result.stopped_by}: stopped after step {result.step}; run the same command to go on")
    typer.echo(f"checkpoint: {loaded.out_dir}/checkpoints/{result.checkpoint.name}")
    typer.echo(f"sample from it: xla-attention generate {loaded.out_dir} --prompt 'def '")
