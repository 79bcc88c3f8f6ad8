"""Rotary position embedding (Su et al., arXiv:2104.09864) in the half-split layout of Hugging Face."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from xla_attention.models.config import LinearRope, Llama3Rope, LlamaConfig


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines, `[max_position_embeddings, head_dim / 2]`, float32, not in the state dict.

    They are computed on the CPU, so every device multiplies by the same numbers, and computed anew after
    anything that moves, casts or empties the module: `model.to(torch.bfloat16)` must not round them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self._fill()

    def forward(self, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines: of the first `positions`, each `[positions, head_dim / 2]`; or of a tensor of
        positions `[batch, seq]`, each `[batch, 1, seq, head_dim / 2]`."""
        if isinstance(positions, int):
            return self.cos[:positions], self.sin[:positions]
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self._fill()
        return self

    def _fill(self) -> None:
        device = self.cos.device
        compute_on = "meta" if device.type == "meta" else "cpu"
        positions = torch.arange(self.config.max_position_embeddings, dtype=torch.float32, device=compute_on)
        angles = torch.outer(positions, inverse_frequencies(self.config, compute_on))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)


def inverse_frequencies(config: LlamaConfig, device: str = "cpu") -> Tensor:
    """Angle per position of each pair of channels, `rope_theta^(-2i / head_dim)` scaled: `[head_dim / 2]`."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRope(factor=factor):
            return frequencies / factor
        case Llama3Rope() as scaling:
            return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's rule: the turns that a pair makes in the original context decide how much it is slowed."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
