"""GPT-2 and LLaMA as plain torch modules, and their Hugging Face checkpoints."""

from xla_attention.models.causal_lm import CausalLM, next_token_loss
from xla_attention.models.checkpoint import load_model, save_model
from xla_attention.models.config import GPTConfig, LlamaConfig
from xla_attention.models.gpt import GPT
from xla_attention.models.llama import Llama
from xla_attention.models.registry import build_model, load_model_config

__all__ = [
    "GPT",
    "CausalLM",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "build_model",
    "load_model_config",
    "load_model",
    "next_token_loss",
    "save_model",
]
