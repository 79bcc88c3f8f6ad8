"""`xla-attention generate`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def generate_command(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A Hugging Face folder, a training checkpoint, or a run's out_dir (its latest)."),
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Below 1 is more predictable; 0 takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest that reach p only.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed gives another text.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type to compute in; default bfloat16 on TPU, float32 on CPU."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes' or a tokenizer.json, where the checkpoint has none.")
    ] = None,
) -> None:
    """Continue a text with a language model."""
    import torch

    from xla_attention.device import hardware, pick_device
    from xla_attention.generation import Sampling, generate, stream_text
    from xla_attention.models import load_model
    from xla_attention.text import load_tokenizer
    from xla_attention.training.checkpoint import is_checkpoint, load_weights

    sampling = Sampling(temperature, top_k, top_p)
    folder = find_model_folder(checkpoint)
    text = load_tokenizer(tokenizer or folder)
    device, description = pick_device()
    dtype = dtype or ("float32" if hardware().interpret else "bfloat16")
    typer.echo(f"{folder} in {dtype} on {description}", err=True)
    load, source = (load_weights, folder.parent) if is_checkpoint(folder.parent) else (load_model, folder)
    model = load(source, dtype=getattr(torch, dtype)).to(device).eval()

    prompt_ids = text.encode(prompt, special_tokens=True)
    if not prompt_ids and text.eos_id is not None:
        prompt_ids = [text.eos_id]  # in training, a text follows the end of another
    new_ids = generate(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop_ids=_stop_ids(text.eos_id, model.config.eos_token_id),
        vocab_size=min(text.vocab_size, model.config.vocab_size),
    )
    typer.echo(prompt, nl=False)
    for piece in stream_text(text, prompt_ids, new_ids):
        typer.echo(piece, nl=False)
    typer.echo()


def find_model_folder(place: str | Path) -> Path:
    """The Hugging Face folder that `place` is, holds, or has as its latest training checkpoint.

    Args:
        place: a folder; or the URL of a run or a checkpoint, which is copied here.

    Raises:
        FileNotFoundError: there is none.
    """
    from xla_attention.remote import is_url
    from xla_attention.training.checkpoint import CheckpointFolder, find_checkpoint

    path = find_checkpoint(place) if is_url(place) else Path(place)
    if path is None:
        raise FileNotFoundError(f"{place}: neither a training checkpoint nor a run that has saved one")
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such folder; models are not downloaded, give one on this machine"
        )
    latest = CheckpointFolder(path / "checkpoints", keep_last=1).latest()
    for folder in (path, path / "model", *([latest / "model"] if latest else [])):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(
        f"{path} has no config.json, no model/config.json and no checkpoints/step-*; "
        "give a Hugging Face folder, a training checkpoint, or a run's out_dir that has saved one"
    )


def _stop_ids(*ids: int | list[int] | None) -> set[int]:
    return {i for entry in ids if entry is not None for i in (entry if isinstance(entry, list) else [entry])}
