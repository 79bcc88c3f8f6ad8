"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm before each half, one projection for q, k, v."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_attention.models.attention import causal_attention
from xla_attention.models.causal_lm import CausalLM, check_length, residual_stream
from xla_attention.models.config import GPTConfig
from xla_attention.ops.heads import merge_heads, split_heads


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(part, self.head_dim) for part in self.c_attn(x).chunk(3, dim=-1))
        o = causal_attention(q, k, v, segment_ids=segment_ids)
        return self.c_proj(merge_heads(o))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.gelu = nn.GELU(approximate="tanh" if config.activation_function == "gelu_new" else "none")
        self.c_fc = nn.Linear(config.n_embd, inner)
        self.c_proj = nn.Linear(inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class LayerNorm(nn.LayerNorm):
    """LayerNorm computed in float32, returned in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), segment_ids)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is not None:
            positions = self.wpe(position_ids)
        elif segment_ids is None:
            # A slice rather than a lookup: its gradient needs no scatter.
            positions = self.wpe.weight[: input_ids.shape[1]]
        else:
            positions = self.wpe(positions_in_segments(segment_ids))
        x = residual_stream(self.wte(input_ids) + positions)
        for block in self.h:
            x = block(x, segment_ids)
        return self.ln_f(x)


def positions_in_segments(segment_ids: Tensor) -> Tensor:
    """Positions that start again at 0 with each segment, `[batch, seq]` int64, of ids `[batch, seq]`.

    Learned positions are absolute: a packed document must get those that it has alone.
    """
    length = segment_ids.shape[1]
    places = torch.arange(length, device=segment_ids.device)
    begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
    starts = torch.where(begins, places, 0)
    # The running maximum, by doubling: XLA's CPU compiler fails on torch_xla's cummax of longer rows.
    reach = 1
    while reach < length:
        starts = torch.maximum(starts, F.pad(starts[:, :-reach], (reach, 0)))
        reach *= 2
    return places - starts


class GPT(CausalLM):
    """GPT-2 with the parameter names of `GPT2LMHeadModel`; its `Conv1D` is `nn.Linear` here (transposed)."""

    residual_projections = ("c_proj.weight",)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lookups = ("transformer.wpe.weight",) + (() if tied else ("transformer.wte.weight",))
        self.init_weights()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    def hidden_states(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            check_length(input_ids.shape[1], self.config.n_positions, "n_positions")
        return self.transformer(input_ids, segment_ids, position_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(hidden)
        return F.linear(hidden, self.transformer.wte.weight)
