"""The choice of the next token from its logits, for a batch whose rows choose in different ways.

All of it is plain operations on `[rows, vocab_size]`, in the graph of the step that made the logits.
Randomness comes in as one number a row, which the host draws from the request's own generator: what a request
is given depends on its seed and its logits, not on the batch that it rides in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
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


GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class SamplingRows:
    """Samplings of the rows of a batch, as tensors.

    Attributes:
        temperature: 0 where the most likely token is taken.
        top_k: the size of the vocabulary where all tokens are kept.
        top_p: 1 where all are.
        uniform: a number of [0, 1) that decides.
    """

    temperature: Float[Tensor, " rows"]
    top_k: Int[Tensor, " rows"]
    top_p: Float[Tensor, " rows"]
    uniform: Float[Tensor, " rows"]

    @classmethod
    def of(cls, samplings: Sequence[Sampling], uniform: Sequence[float], vocab_size: int) -> "SamplingRows":
        """On the CPU."""
        return cls(
            torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
            torch.tensor([min(s.top_k or vocab_size, vocab_size) for s in samplings], dtype=torch.int64),
            torch.tensor([1.0 if s.top_p is None else s.top_p for s in samplings], dtype=torch.float32),
            torch.tensor(uniform, dtype=torch.float32),
        )

    def to(self, device: torch.device) -> "SamplingRows":
        return SamplingRows(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def most_likely(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """The token of each row that temperature 0 takes."""
    return logits.argmax(dim=-1)


def choose(logits: Float[Tensor, "rows vocab"], rows: SamplingRows) -> Int[Tensor, " rows"]:
    """A token for each row: the first whose cumulated probability exceeds `uniform`."""
    kept = probabilities(logits, rows)
    cumulated = kept.cumsum(dim=-1)
    exceeds = (cumulated > rows.uniform[:, None] * cumulated[:, -1:]) & (kept > 0)
    places = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(exceeds, places, logits.shape[1]).amin(dim=-1)
    # Sums of float32 in parallel need not rise to their last: then no place exceeds.
    drawn = torch.where(first < logits.shape[1], first, kept.argmax(dim=-1))
    return torch.where(rows.temperature == 0, most_likely(logits), drawn)


def probabilities(logits: Float[Tensor, "rows vocab"], rows: SamplingRows) -> Float[Tensor, "rows vocab"]:
    """What `choose` draws from at temperatures above 0, float32, not normalised; 0 for what is not kept.

    Tokens exactly as likely as the least that is kept are kept too.
    """
    temperature = torch.where(rows.temperature == 0, 1.0, rows.temperature)
    scaled = logits.float() / temperature[:, None]
    ordered = scaled.sort(dim=-1, descending=True).values
    least = ordered.gather(1, rows.top_k[:, None] - 1)
    top = torch.where(ordered >= least, ordered, -torch.inf).softmax(dim=-1)
    inside = (top.cumsum(dim=-1) - top < rows.top_p[:, None]) & (top > 0)
    least = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(scaled >= least, scaled, -torch.inf).softmax(dim=-1)
