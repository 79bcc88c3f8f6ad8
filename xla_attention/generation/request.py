"""What is asked of the engine, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from xla_attention.generation.sampling import GREEDY, Sampling

# Why a completion ended: a stop token or string, as many tokens as were asked for, or `cancel`.
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Request:
    """A text to continue.

    Attributes:
        prompt_ids: at least one.
        max_new_tokens: give at most so many.
        sampling: how each is chosen from the logits.
        seed: the same seed and logits give the same tokens, whatever else is in the batch.
        stop_ids: end before one of these.
        stop: end before one of these strings.

    Raises:
        ValueError: a value that means nothing.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))
        if isinstance(self.stop, str):
            raise TypeError(f"stop: got the string {self.stop!r}, needs a tuple of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not self.prompt_ids:
            raise ValueError("prompt_ids: got none, needs at least one")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {self.max_new_tokens}, must be at least 1")
        if "" in self.stop:
            raise ValueError("stop: got an empty string, which every text contains")


@dataclass(eq=False)
class Completion:
    """A request on its way.

    Attributes:
        tokens: ids given so far; a stop token is not among them, those of a stop string are.
        text: theirs up to a stop string, in whole characters; empty without a tokenizer.
        finish_reason: None while there is more to come.
        preemptions: times that its pages were taken for another, and it was computed anew.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    preemptions: int = 0


@dataclass(frozen=True)
class Output:
    """What one step gave one completion.

    Attributes:
        completion: whose it is.
        token: None if the step ended it with a stop token.
        text: what became certain: whole characters, nothing that may yet be a stop string.
    """

    completion: Completion
    token: int | None
    text: str


class Sequence:
    """A completion in the scheduler: which of its tokens are in the cache, and where.

    Attributes:
        cached: tokens whose keys and values are in `pages`.
        pages: in the order of the text.
    """

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        self.cached = 0
        self.pages: list[int] = []
        self._random = torch.Generator().manual_seed(completion.request.seed)

    def __len__(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.completion.request.prompt_ids) + len(self.completion.tokens)

    def ids(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens that are not in the cache."""
        prompt, tokens = self.completion.request.prompt_ids, self.completion.tokens
        begin, end, n = self.cached, self.cached + count, len(prompt)
        return prompt[begin:end] + tuple(tokens[max(begin - n, 0) : max(end - n, 0)])

    def draw(self) -> float:
        """The next number of [0, 1) that is this request's own, of 24 bits."""
        return int(torch.randint(1 << 24, (), generator=self._random)) / (1 << 24)
