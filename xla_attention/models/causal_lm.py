"""What the models share: loss, initial weights, and the counts that utilisation rests on."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalLM(nn.Module):
    """A decoder that predicts the next token.

    Parameter names are those of the Hugging Face model. A tied output projection is the embedding itself, not
    a second parameter, so that nothing which moves or wraps the model can untie it.

    Attributes:
        config: `GPTConfig` or `LlamaConfig`.
        blocks: the layers, an `nn.ModuleList` whose entries may be replaced by wrapped ones (activation
            checkpointing). Each takes hidden states `[batch, seq, hidden_size]` first, takes the rest by
            position too, and returns hidden states.
        residual_projections: endings of the names of the weights that write to the residual stream.
        lookups: names of the tables that are read by index and never multiplied.
    """

    residual_projections: tuple[str, ...]
    lookups: tuple[str, ...]
    config: Any

    @property
    def blocks(self) -> nn.ModuleList:
        raise NotImplementedError

    @property
    def blocks_name(self) -> str:
        """What parameters' names have before the number of a layer, without the dot."""
        return next(name for name, module in self.named_modules() if module is self.blocks)

    @property
    def max_length(self) -> int:
        """The longest sequence that the model takes."""
        return self.config.max_position_embeddings

    def hidden_states(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Final, normalised hidden states `[batch, seq, hidden_size]`; arguments as for `forward`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next token, `[..., vocab_size]`, of hidden states `[..., hidden_size]`."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the loss if labels are given.

        Args:
            input_ids: `[batch, seq]`, int32 or int64; without `position_ids`, `seq` is at most
                `config.max_position_embeddings`.
            labels: `[batch, seq]`, int64: the id that follows `input_ids[b, t]`, already shifted by the
                caller; -100 where there is none to predict.
            segment_ids: `[batch, seq]`, int32: the document of each token, where a row packs several; not
                negative, not decreasing along it. Tokens attend within their document alone, and each
                document gives the logits that it gives by itself. None: a row is one document.
            position_ids: `[batch, seq]`, int32 or int64: the place of each token in its document, where the
                tokens are not in their natural order; below `config.max_position_embeddings`. None: they
                are.

        Returns:
            Logits `[batch, seq, vocab_size]` in the weights' dtype; with labels, their `next_token_loss`.

        Raises:
            ValueError: the sequence is longer than the model's positions, or `segment_ids` or `position_ids`
                have another shape.
        """
        for name, ids in (("segment_ids", segment_ids), ("position_ids", position_ids)):
            if ids is not None and ids.shape != input_ids.shape:
                raise ValueError(
                    f"{name}: got shape {tuple(ids.shape)}, needs that of input_ids, {tuple(input_ids.shape)}"
                )
        logits = self.logits(self.hidden_states(input_ids, segment_ids, position_ids))
        return logits if labels is None else next_token_loss(logits, labels)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Fresh weights: normal, biases zero, norms one; the same for every device and type.

        Projections into the residual stream are divided by sqrt(2 * layers), as each layer adds two of them
        (GPT-2, section 2.3).
        """
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                scale = depth_scale if name.endswith(self.residual_projections) else 1.0
                noise = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                noise.normal_(0.0, scale * self.config.initializer_range, generator=generator)
                parameter.copy_(noise)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one training step, per token, as model FLOPs utilisation counts them.

        `6 N + 12 L H D S` (PaLM, arXiv:2204.02311, appendix B): two operations for each weight forward and
        four backward, and the same for the two matrix products of attention. N is every parameter but the
        tables only looked up (a tied embedding is multiplied, so it counts). Attention counts all `S`
        keys of a query, not the half that the causal mask shows: figures then compare with published ones.
        Recomputation is not counted.

        Args:
            seq_len: tokens in a sequence, S.
        """
        looked_up = sum(self.get_parameter(name).numel() for name in self.lookups)
        config = self.config
        attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_len
        return 6 * (self.num_parameters() - looked_up) + 12 * attention


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats, float32, the mean over the tokens whose label is not -100; 0 if there are none.

    Args:
        logits: `[batch, seq, vocab_size]`, any floating type.
        labels: `[batch, seq]`, int64.
    """
    # Classes in the second dimension, rather than all tokens in one: batch and sequence stay apart, for where
    # both are sharded.
    total = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="sum")
    return total / (labels != -100).sum().clamp_min(1)


def residual_stream(x: Tensor) -> Tensor:
    """Embeddings in the type that autocast computes in, if it is on: a sum as wide as what is added to it.

    Wider, every layer would read, write and keep for the backward pass twice the bytes; norms and the loss
    compute in float32 anyway.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def check_length(length: int, limit: int, name: str) -> None:
    """Raises ValueError if a sequence is longer than the config's `name` allows."""
    if length > limit:
        raise ValueError(f"input_ids: {length} positions, but the model's {name} is {limit}; give fewer")
