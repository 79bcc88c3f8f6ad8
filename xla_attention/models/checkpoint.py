"""Hugging Face checkpoint folders, `config.json` and `*.safetensors`: loaded as they are, and written back.

The models use Hugging Face's parameter names, so only what differs is listed here, as data.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open

from xla_attention.atomic import atomic_folder
from xla_attention.models.causal_lm import CausalLM
from xla_attention.models.config import GPTConfig, LlamaConfig
from xla_attention.models.registry import load_model_config, model_class
from xla_attention.text import Tokenizer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """How a model's tensors in files differ from its parameters.

    Attributes:
        architecture: the transformers class, for `config.json`.
        prefix: what files of the bare model leave out in front of a name.
        transposed: endings of weights stored `[in, out]` (GPT-2's `Conv1D`), `[out, in]` in `nn.Linear`.
        ignored: endings of tensors that are not weights: causal masks, rotary tables.
    """

    architecture: str
    prefix: str = "model."
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


LAYOUTS = {
    "gpt2": Layout(
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "llama": Layout("LlamaForCausalLM"),
    "mistral": Layout("MistralForCausalLM"),
    "qwen2": Layout("Qwen2ForCausalLM"),
    "qwen3": Layout("Qwen3ForCausalLM"),
}


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def load_model(folder: str | Path, *, dtype: torch.dtype | None = None) -> CausalLM:
    """Loads a checkpoint folder as it is, onto the CPU.

    Args:
        folder: holds `config.json`, and `model.safetensors` or shards with their index.
        dtype: what to convert the weights to; None keeps the type that they are stored in.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the configuration is not supported; a file cannot be read; or tensors are missing, left
            over, or of a wrong shape or type. All files' headers are checked before any weight is read.
    """
    folder = Path(folder)
    config = load_model_config(folder)
    layout = LAYOUTS[config.model_type]
    with torch.device("meta"):
        model = model_class(config)(config)
    stored = _matched(folder, model, layout)
    model.to(_common_dtype(stored) if dtype is None else dtype).to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in stored.items():
            with safe_open(tensor.file, framework="pt") as reader:
                value = reader.get_tensor(tensor.key)
            parameters[name].copy_(value.T if name.endswith(layout.transposed) else value)
    return model


def save_model(
    model: CausalLM,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes a folder that `load_model` and transformers read; it appears complete or not at all.

    Args:
        model: on any device; weights keep their type.
        folder: must not exist, or be empty.
        tokenizer: written beside the weights.
        max_shard_size: bytes, or text such as `"5GB"`: larger models are split over several files.

    Raises:
        FileExistsError: `folder` exists and is not empty.
        OSError: it cannot be written, for example because the disk is full; nothing is left behind.
    """
    layout = LAYOUTS[model.config.model_type]
    weights = {}
    for name, parameter in model.state_dict().items():
        value = parameter.detach().cpu()
        weights[name] = value.T.contiguous() if name.endswith(layout.transposed) else value
    dtype = next(iter(weights.values())).dtype
    with atomic_folder(Path(folder)) as temporary:
        save_description(model.config, temporary, tokenizer, dtype)
        try:
            save_torch_state_dict(weights, temporary, max_shard_size=max_shard_size)
        except SafetensorError as error:
            raise OSError(f"{folder}: the weights could not be written: {error}") from error


def save_description(
    config: GPTConfig | LlamaConfig,
    folder: Path,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes what a Hugging Face folder holds besides the weights, `config.json` and the tokenizer.

    Args:
        folder: made if it is missing.
        dtype: of the weights.
    """
    folder.mkdir(exist_ok=True)
    fields = _config_json(config, LAYOUTS[config.model_type], str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


def _matched(folder: Path, model: CausalLM, layout: Layout) -> dict[str, Stored]:
    """The stored tensor of each parameter, or a ValueError that lists everything that does not fit."""
    wanted = {
        name: tuple(parameter.T.shape if name.endswith(layout.transposed) else parameter.shape)
        for name, parameter in model.named_parameters()
    }
    stored: dict[str, Stored] = {}
    problems = []
    for tensor in _stored_tensors(folder):
        bare = not tensor.key.startswith((layout.prefix, "lm_head."))
        name = layout.prefix + tensor.key if bare else tensor.key
        tied_copy = name == "lm_head.weight" and model.config.tie_word_embeddings
        if tied_copy or name.endswith(layout.ignored):
            continue
        if name not in wanted:
            problems.append(f"unexpected {tensor.key} in {tensor.file.name}")
        elif tensor.shape != wanted[name]:
            found = f"{tensor.key} in {tensor.file.name} has shape {list(tensor.shape)}"
            problems.append(f"{found}, the config asks for {list(wanted[name])}")
        stored[name] = tensor
    missing = [name for name in wanted if name not in stored]
    problems += [f"missing {name}, shape {list(wanted[name])}" for name in missing]
    if problems:
        more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
        shown = "\n  ".join(problems[:8] + more)
        raise ValueError(
            f"{folder}: the weights do not fit config.json (model_type {model.config.model_type}); "
            f"correct the config or use the weights that belong to it:\n  {shown}"
        )
    return stored


def _stored_tensors(folder: Path) -> Iterator[Stored]:
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as reader:
                keys = reader.keys()
                for key in keys:
                    header = reader.get_slice(key)
                    if header.get_dtype() not in FLOATS:
                        raise ValueError(
                            f"{file}: {key} is stored as {header.get_dtype()}, only {', '.join(FLOATS)} are "
                            "supported; convert quantised weights first"
                        )
                    yield Stored(file, key, tuple(header.get_shape()), FLOATS[header.get_dtype()])
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read, is it complete? {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            if index.is_file():
                raise FileNotFoundError(f"{folder} has no {name}, which {INDEX} names")
            raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}; other formats are not read")
    return [folder / name for name in names]


def _common_dtype(stored: dict[str, Stored]) -> torch.dtype:
    kinds: dict[torch.dtype, Stored] = {}
    for tensor in stored.values():
        kinds.setdefault(tensor.dtype, tensor)
    if len(kinds) > 1:
        shown = ", ".join(f"{tensor.key} in {tensor.file.name} is {kind}" for kind, tensor in kinds.items())
        raise ValueError(f"the weights are of several types ({shown}); say with dtype= which to use")
    return next(iter(kinds))


def _config_json(config: GPTConfig | LlamaConfig, layout: Layout, dtype: str) -> dict[str, Any]:
    fields = config.model_dump(exclude={"other"}, exclude_none=True)
    if isinstance(config, LlamaConfig) and config.model_type != "llama":
        fields.setdefault("sliding_window", None)  # left out, it would be 4096 to transformers
    # "dtype" is what newer files call "torch_dtype".
    other = {key: value for key, value in config.other.items() if key != "dtype"}
    return {**other, "architectures": [layout.architecture], **fields, "torch_dtype": dtype}
