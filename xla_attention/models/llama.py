"""LLaMA (Touvron et al., arXiv:2302.13971) and, by config, Llama 2 and 3, Mistral, Qwen2 and Qwen3."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_attention.models.attention import causal_attention
from xla_attention.models.causal_lm import CausalLM, check_length, residual_stream
from xla_attention.models.config import LlamaConfig
from xla_attention.models.rope import RotaryEmbedding
from xla_attention.ops.heads import merge_heads, split_heads


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) in float32, returned in the type of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Causal attention, over a window and with fewer key-value heads (GQA) where the config says so."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.window = config.window(layer)
        self.head_dim = config.head_dim
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        qkv_bias = config.attention_bias or config.model_type == "qwen2"
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.attention_bias)
        self.normed = config.model_type == "qwen3"
        if self.normed:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        q, k = self.q_proj(x), self.k_proj(x)
        if self.normed:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        q, k = (split_heads(y, self.head_dim, cos, sin) for y in (q, k))
        v = split_heads(self.v_proj(x), self.head_dim)
        o = causal_attention(q, k, v, sliding_window=self.window, segment_ids=segment_ids)
        return self.o_proj(merge_heads(o))


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        # Positions need not start again with each document: scores depend on their differences alone.
        cos, sin = self.rotary(input_ids.shape[1] if position_ids is None else position_ids)
        x = residual_stream(self.embed_tokens(input_ids))
        for layer in self.layers:
            x = layer(x, cos, sin, segment_ids)
        return self.norm(x)


class Llama(CausalLM):
    """LLaMA with the parameter names of `LlamaForCausalLM`."""

    residual_projections = ("o_proj.weight", "down_proj.weight")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lookups = () if tied else ("model.embed_tokens.weight",)
        self.init_weights()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def hidden_states(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            check_length(input_ids.shape[1], self.config.max_position_embeddings, "max_position_embeddings")
        return self.model(input_ids, segment_ids, position_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(hidden)
        return F.linear(hidden, self.model.embed_tokens.weight)
