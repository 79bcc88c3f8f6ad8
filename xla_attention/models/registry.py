"""From a description to a model: which `model_type` is which class, and how a configuration is read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from xla_attention.models.causal_lm import CausalLM
from xla_attention.models.config import UNSUPPORTED_UNLESS, GPTConfig, LlamaConfig
from xla_attention.models.gpt import GPT
from xla_attention.models.llama import Llama

CONFIGS: dict[str, type[GPTConfig] | type[LlamaConfig]] = {
    "gpt2": GPTConfig,
    "llama": LlamaConfig,
    "mistral": LlamaConfig,
    "qwen2": LlamaConfig,
    "qwen3": LlamaConfig,
}


def load_model_config(source: str | Path | Mapping[str, Any]) -> GPTConfig | LlamaConfig:
    """Reads and checks a model's configuration.

    Args:
        source: a mapping with the field names of a Hugging Face `config.json`; a YAML file with the same; or
            a `config.json` or a folder that holds one. The first two must have no unknown field. A
            `config.json` may: they are kept in `other`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: `model_type` is unknown, a field is missing, unknown or wrong, or asks for something that
            the models do not compute.
    """
    if isinstance(source, Mapping):
        return _checked(dict(source), "model config")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a YAML file, or a folder with a config.json")
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of fields, got {type(values).__name__}")
    return _checked(_set_unknown_aside(values) if path.suffix == ".json" else values, str(path))


def build_model(
    config: GPTConfig | LlamaConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> CausalLM:
    """A model with fresh weights.

    Args:
        config: what to build.
        seed: of the weights, which do not depend on `device`.
        dtype: of the parameters.
        device: where they are; `"meta"` allocates nothing.
    """
    with torch.device("meta"):
        model = model_class(config)(config).to(dtype)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        model.init_weights(seed)
    return model


def model_class(config: GPTConfig | LlamaConfig) -> type[GPT] | type[Llama]:
    return GPT if isinstance(config, GPTConfig) else Llama


def _config_class(values: Mapping[str, Any], where: str) -> type[GPTConfig] | type[LlamaConfig]:
    kind = values.get("model_type")
    if kind not in CONFIGS:
        raise ValueError(f"{where}: model_type={kind!r} is not supported; use one of {', '.join(CONFIGS)}")
    return CONFIGS[kind]


def _checked(values: dict[str, Any], where: str) -> GPTConfig | LlamaConfig:
    config_class = _config_class(values, where)
    _refuse_unsupported(values, where)
    try:
        config = config_class.model_validate(values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    _refuse_unsupported(config.other, where)
    return config


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    for key, allowed in UNSUPPORTED_UNLESS.items():
        found = values.get(key, allowed[0])
        if found not in allowed:
            raise ValueError(f"{where}: {key}={found!r} is not supported; only {allowed[-1]!r} is")


def _set_unknown_aside(values: dict[str, Any]) -> dict[str, Any]:
    known = {*CONFIGS.get(values.get("model_type"), GPTConfig).model_fields, "rope_parameters"}
    return {
        **{key: value for key, value in values.items() if key in known},
        "other": {key: value for key, value in values.items() if key not in known},
    }
