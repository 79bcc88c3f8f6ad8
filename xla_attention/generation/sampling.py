"""The choice of the next token from its logits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: logits are divided by it; 0 always takes the most likely token.
        top_k: keep only the k most likely tokens.
        top_p: then keep only the fewest most likely tokens whose probabilities reach p (nucleus sampling,
            Holtzman et al., arXiv:1904.09751).

    Raises:
        ValueError: a value that means nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature: got {self.temperature}, must be 0 (most likely token) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: got {self.top_k}, must be at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p: got {self.top_p}, must be above 0 and at most 1, or None for all tokens"
            )

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token id.

        Args:
            logits: `[vocab_size]`, on the CPU, any floating type.
            generator: where the randomness comes from, on the CPU.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """What `choose` draws from at a temperature above 0: `[vocab_size]`, float32, not normalised."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(0)
        if self.top_p is not None:
            ordered, order = probabilities.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            probabilities[order[before >= self.top_p]] = 0.0
        return probabilities
