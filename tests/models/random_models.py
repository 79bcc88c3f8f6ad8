"""Small random models of transformers, the ones that ours are compared with."""

import copy

import torch
import transformers

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # large enough that a wrong bias, norm or angle shows
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "llama_biases": transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama_tied": transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama3_scaling": transformers.LlamaConfig(**COMMON, rope_theta=500000.0, rope_scaling=LLAMA3),
    "llama_linear": transformers.LlamaConfig(**COMMON, rope_scaling={"type": "linear", "factor": 2.0}),
    "llama_head_dim": transformers.LlamaConfig(**COMMON, head_dim=24),
    "mistral": transformers.MistralConfig(**COMMON, sliding_window=64),
    "mistral_window": transformers.MistralConfig(**COMMON, sliding_window=11),  # the tests give 48 tokens
    "mistral_all": transformers.MistralConfig(**COMMON, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**COMMON, use_sliding_window=False),
    "qwen2_window": transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=11, max_window_layers=1
    ),
    "qwen3_window": transformers.Qwen3Config(
        **COMMON,
        head_dim=32,
        use_sliding_window=True,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2_tied": transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=32),
    "gpt2": transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.1
    ),
    "gpt2_untied": transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=96, tie_word_embeddings=False
    ),
}


def their_model(name, seed=0):
    """A random transformers model, every vector (norms, biases) random too, so that none can be forgotten."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])  # a model writes its dtype into its configuration
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def token_ids(batch=2, length=48, seed=1):
    return torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(seed))
