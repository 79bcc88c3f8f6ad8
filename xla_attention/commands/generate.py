"""`xla-attention generate`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    import torch

    from xla_attention.generation import Counts
    from xla_attention.models import CausalLM
    from xla_attention.sharding.sharding import Sharding


def generate_command(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A Hugging Face folder, a training checkpoint, or a run's out_dir (its latest)."),
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of them, one a line; or .jsonl, strings or objects with a prompt."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most, to each.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Below 1 is more predictable; 0 takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest that reach p only.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed gives another text. The n-th prompt adds n.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; repeatable.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type to compute in; default bfloat16 on TPU, float32 on CPU."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes' or a tokenizer.json, where the checkpoint has none.")
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="Place the weights over all devices by a sharding strategy of training.")
    ] = "none",
    max_seqs: Annotated[int, typer.Option(help="Prompts that are worked on at a time.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one step; longer prompts take several.")] = 256,
    page_size: Annotated[int, typer.Option(help="Tokens of a page of the cache.")] = 32,
    pages: Annotated[
        int | None, typer.Option(help="Pages of the cache; default what --max-seqs of the longest need.")
    ] = None,
) -> None:
    """Continue one text, or a file of them, with a language model.

    One continuation is written as it comes, those of a file as JSON lines in its order. What was compiled and
    how fast it went goes to stderr.
    """
    import torch

    from xla_attention.device import hardware, pick_device
    from xla_attention.generation import Engine, Request, Sampling
    from xla_attention.generation.generate import rounded_length
    from xla_attention.generation.prompts import read_prompts
    from xla_attention.sharding.config import ShardingConfig
    from xla_attention.sharding.sharding import Sharding, start_spmd
    from xla_attention.text import load_tokenizer

    sampling = Sampling(temperature, top_k, top_p)
    if (prompt is None) == (prompts is None):
        raise ValueError("give either --prompt TEXT or --prompts FILE")
    texts = {1: prompt} if prompts is None else read_prompts(prompts)
    folder = find_model_folder(checkpoint)
    text = load_tokenizer(tokenizer or folder)
    if strategy == "auto":
        raise ValueError("strategy: auto is XLA's choice for a training step; choose another, such as 2d")
    plan = start_spmd(ShardingConfig(strategy=strategy))
    device, description = pick_device()
    dtype = dtype or ("float32" if hardware().interpret else "bfloat16")
    sharding = Sharding(plan) if plan else None
    over = f", weights over {sharding}" if sharding else ""
    typer.echo(f"{folder} in {dtype} on {description}{over}", err=True)
    model = _load(folder, getattr(torch, dtype), device, sharding)

    requests = {}
    for place, (line, written) in enumerate(texts.items()):
        ids = text.encode(written, special_tokens=True)
        if not ids and text.eos_id is not None:
            ids = [text.eos_id]  # in training, a text follows the end of another
        stop_ids = _stop_ids(text.eos_id, model.config.eos_token_id)
        with _naming_line(prompts, line):
            requests[line] = Request(
                tuple(ids), max_new_tokens, sampling, seed + place, frozenset(stop_ids), tuple(stop or ())
            )
    longest = max(len(request.prompt_ids) for request in requests.values()) + max_new_tokens
    engine = Engine(
        model,
        text,
        max_seqs=min(max_seqs, len(requests)),
        max_tokens=max_tokens,
        page_size=page_size,
        max_length=rounded_length(longest, model.max_length),
        pages=pages,
        sharding=sharding,
    )
    completions = []
    for line, request in requests.items():
        with _naming_line(prompts, line):
            completions.append(engine.submit(request))
    began = time.perf_counter()
    if prompts is None:
        typer.echo(prompt, nl=False)
        for output in engine.run():
            typer.echo(output.text, nl=False)
        typer.echo()
    else:
        waiting = list(zip(texts.values(), completions))
        for _ in engine.run():
            while waiting and (done := waiting[0][1]).finish_reason is not None:
                line = {"prompt": waiting.pop(0)[0], "text": done.text, "finish_reason": done.finish_reason}
                typer.echo(json.dumps(line, ensure_ascii=False))
    typer.echo(_summary(engine.counts, time.perf_counter() - began), err=True)


def _load(folder: Path, dtype: torch.dtype, device: torch.device, sharding: Sharding | None) -> CausalLM:
    """The model on its device."""
    from xla_attention.models import load_model
    from xla_attention.training.checkpoint import is_checkpoint, load_weights

    load, source = (load_weights, folder.parent) if is_checkpoint(folder.parent) else (load_model, folder)
    model = load(source, dtype=dtype)
    if sharding:
        sharding.check_parameters(model)
    model.to(device).eval()
    if sharding:
        sharding.place_parameters(model)
    return model


def _summary(counts: Counts, seconds: float) -> str:
    return (
        f"{counts.tokens} tokens in {counts.steps} steps, {seconds:.1f} s with compilation: "
        f"{counts.tokens / seconds:.1f} tokens/s; {counts.graphs} graphs compiled, at most "
        f"{counts.most_graphs} ever are; {counts.pages_allocated} pages allocated, {counts.pages_freed} "
        f"freed; {counts.preemptions} preemptions"
    )


@contextlib.contextmanager
def _naming_line(file: Path | None, line: int) -> Iterator[None]:
    """Says which line of a file of prompts an error is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}, line {line}: {error}" if file else str(error)) from None


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
