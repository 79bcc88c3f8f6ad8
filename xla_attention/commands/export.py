"""`xla-attention export`."""

from pathlib import Path
from typing import Annotated

import typer


def export_command(
    run: Annotated[Path, typer.Argument(help="A run's out_dir, for its latest checkpoint, or a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The new Hugging Face folder.")],
) -> None:
    """Write one Hugging Face folder of a checkpoint, however many devices it was trained on."""
    from xla_attention.text import load_tokenizer
    from xla_attention.training.checkpoint import CheckpointFolder, export_model, is_checkpoint

    checkpoint = CheckpointFolder(run / "checkpoints", keep_last=1).latest() or run
    if not is_checkpoint(checkpoint):
        raise FileNotFoundError(f"{run}: neither a training checkpoint nor a folder with checkpoints/step-*")
    export_model(checkpoint, folder, load_tokenizer(checkpoint / "model"))
    typer.echo(f"{checkpoint} -> {folder}")
