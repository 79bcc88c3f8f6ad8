"""A model and a data set small enough that a step takes milliseconds."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from xla_attention.training.config import TrainConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GPT = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
QUIET = Console(quiet=True)


def settings(out_dir: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as the YAML file would hold it; `changes` replace top-level keys."""
    return {
        "model": LLAMA,
        "data": {"train": ["{stdlib}/json/*.py"], "held_out": 0.2},
        "seq_len": 32,
        "batch_size": 4,
        "steps": 12,
        "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "log_interval": 4,
        "eval": {"batches": 2},
        "out_dir": str(out_dir),
    } | changes


def config(out_dir: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(settings(out_dir, **changes))


def losses(out_dir: Path) -> dict[int, float]:
    """Training loss of each step, as the run recorded it."""
    records = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}
