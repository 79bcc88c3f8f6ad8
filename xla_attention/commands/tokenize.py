"""`xla-attention tokenize`."""

from pathlib import Path
from typing import Annotated

import typer


def tokenize_command(
    out: Annotated[Path, typer.Argument(help="The .bin file to write.")],
    files: Annotated[list[str], typer.Argument(help="Text files, or globs of them in quotes.")],
    tokenizer: Annotated[
        str, typer.Option(help="'bytes', a tokenizer.json, or a folder that holds one.")
    ] = "bytes",
) -> None:
    """Write the token ids of text files into one file, for data.train of a training configuration."""
    from xla_attention.text import load_tokenizer
    from xla_attention.training.data import find_files, tokenize_files

    tokens = tokenize_files(find_files(files, [], "files"), load_tokenizer(tokenizer))
    tokens.tofile(out)
    typer.echo(
        f"{out}: {len(tokens):,} tokens; train on it with data.train=[{out}] data.dtype={tokens.dtype}"
    )
