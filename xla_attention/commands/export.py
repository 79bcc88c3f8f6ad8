"""`xla-attention export`."""

from typing import Annotated

import typer


def export_command(
    run: Annotated[
        str,
        typer.Argument(help="A run's out_dir, for its latest checkpoint, or a checkpoint; or a URL of one."),
    ],
    folder: Annotated[str, typer.Argument(help="The new Hugging Face folder, or its URL.")],
) -> None:
    """Write one Hugging Face folder of a checkpoint, however many devices it was trained on."""
    from xla_attention.text import load_tokenizer
    from xla_attention.training.checkpoint import export_model, find_checkpoint

    checkpoint = find_checkpoint(run)
    if checkpoint is None:
        raise FileNotFoundError(f"{run}: neither a training checkpoint nor a folder with checkpoints/step-*")
    export_model(checkpoint, folder, load_tokenizer(checkpoint / "model"))
    typer.echo(f"{checkpoint} -> {folder}")
