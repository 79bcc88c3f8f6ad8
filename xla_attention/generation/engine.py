"""Batched generation with continuous batching over a cache of pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xla_attention.generation.pages import PagePool
from xla_attention.generation.request import Completion, FinishReason, Output, Request, Sequence
from xla_attention.generation.scheduler import Scheduler
from xla_attention.generation.steps import Sizes, Steps
from xla_attention.generation.text import TextStream
from xla_attention.models import CausalLM
from xla_attention.ops.paged import PAGE_SIZES
from xla_attention.text import Tokenizer

if TYPE_CHECKING:
    from xla_attention.sharding.sharding import Sharding


@dataclass(frozen=True)
class Counts:
    """What an engine has done so far.

    Attributes:
        graphs, most_graphs: compiled, and the most that ever are; 0 off XLA.
        pages_allocated, pages_freed: equal when all completions have ended.
        steps, tokens: runs of the model, and tokens given.
        preemptions: times that a sequence lost its pages to an earlier one.
    """

    graphs: int
    most_graphs: int
    pages_allocated: int
    pages_freed: int
    steps: int
    tokens: int
    preemptions: int


class Engine:
    """Continues many texts at once; each joins the batch when it is submitted, and leaves when it ends.

    Each step computes one flat batch: the newest token of every sequence, and prompts, in chunks. Keys and
    values are kept in pages; if they run out, the sequences that came last wait and are computed anew.

    Args:
        model: on the device to compute on. The cache has the type of its weights.
        tokenizer: for text and stop strings; None gives ids alone.
        max_seqs: sequences in the batch at a time.
        max_tokens: of one step, at least `max_seqs`. Longer prompts are computed in several.
        page_size: tokens of a page, one of `PAGE_SIZES`.
        max_length: of prompt and continuation; None for the model's longest.
        pages: of the cache; None for as many as `max_seqs` sequences of `max_length` need.
        vocab_size: choose only ids below it: None for the tokenizer's, if it is given, else the model's.
        sharding: how the model's parameters are placed, in an SPMD program.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        max_seqs: int = 8,
        max_tokens: int = 256,
        page_size: int = 32,
        max_length: int | None = None,
        pages: int | None = None,
        vocab_size: int | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        most = model.config.vocab_size
        if vocab_size is None:
            vocab_size = most if tokenizer is None else min(tokenizer.vocab_size, most)
        if not 1 <= vocab_size <= most:
            raise ValueError(f"vocab_size: got {vocab_size}, must be 1 to the model's {most}")
        if max_seqs < 1:
            raise ValueError(f"max_seqs: got {max_seqs}, must be at least 1")
        if max_tokens < max_seqs:
            raise ValueError(f"max_tokens: got {max_tokens}, must be at least max_seqs={max_seqs}")
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size: got {page_size}, allowed are {PAGE_SIZES}")
        self.max_length = model.max_length if max_length is None else max_length
        if not 1 <= self.max_length <= model.max_length:
            raise ValueError(f"max_length: got {max_length}, must be 1 to the model's {model.max_length}")
        pages_per_seq = -(-self.max_length // page_size)
        self._pool = PagePool(max_seqs * pages_per_seq if pages is None else pages)
        sizes = Sizes(self._pool.num_pages, page_size, max_seqs, max_tokens, pages_per_seq, vocab_size)
        self._steps = Steps(model, sizes, sharding)
        self._scheduler = Scheduler(self._pool, page_size, max_seqs, max_tokens)
        self._sizes, self._tokenizer, self._ids = sizes, tokenizer, most
        self._active: dict[Completion, tuple[Sequence, TextStream | None]] = {}
        self._done_steps = self._tokens = self._preemptions = 0

    @property
    def counts(self) -> Counts:
        return Counts(
            graphs=self._steps.graphs,
            most_graphs=self._steps.most_graphs,
            pages_allocated=self._pool.allocated,
            pages_freed=self._pool.freed,
            steps=self._done_steps,
            tokens=self._tokens,
            preemptions=self._preemptions + sum(c.preemptions for c in self._active),
        )

    def submit(self, request: Request) -> Completion:
        """Has a text continued from the next step on that has room for it.

        Raises:
            ValueError: it can never fit, an id is outside the vocabulary, or it has stop strings and there is
                no tokenizer.
        """
        prompt, new = request.prompt_ids, request.max_new_tokens
        if wrong := [i for i in prompt if not 0 <= i < self._ids]:
            raise ValueError(f"prompt_ids: {wrong[0]} is not below the model's vocab_size={self._ids}")
        total = len(prompt) + new
        makes = f"max_new_tokens: {len(prompt)} prompt tokens and {new} new ones make {total}, but"
        if total > self.max_length:
            raise ValueError(f"{makes} the model takes at most {self.max_length} here")
        room = self._pool.num_pages * self._sizes.page_size
        if total - 1 > room:  # the last token is given, and never computed
            raise ValueError(f"{makes} the cache has pages for {room}; raise pages")
        if request.stop and self._tokenizer is None:
            raise ValueError("stop: strings need a tokenizer; give the engine one, or use stop_ids")
        completion, text = Completion(request), None
        if self._tokenizer is not None:
            text = TextStream(self._tokenizer, prompt, request.stop)
        sequence = Sequence(completion)
        self._active[completion] = sequence, text
        self._scheduler.add(sequence)
        return completion

    def cancel(self, completion: Completion) -> None:
        """Ends a completion now; one that has ended stays as it is.

        Raises:
            ValueError: it is not this engine's.
        """
        if completion in self._active:
            self._end(completion, "cancelled")
        elif completion.finish_reason is None:
            raise ValueError("completion: it was not submitted to this engine")

    def step(self) -> list[Output]:
        """Runs the model once. What it gave, in the order of the batch; empty if only parts of prompts were
        computed, or there is nothing to do."""
        step = self._scheduler.schedule()
        if not step:
            return []
        tokens = self._steps.run(step)
        self._done_steps += 1
        for sequence, count in step.items():
            sequence.cached += count
        return [self._take(sequence.completion, token) for sequence, token in tokens.items()]

    def run(self) -> Iterator[Output]:
        """Steps until nothing is left, with what each gives as it comes. More may be submitted meanwhile."""
        while not self._scheduler.idle:
            yield from self.step()

    def _take(self, completion: Completion, token: int) -> Output:
        request, (_, stream) = completion.request, self._active[completion]
        if token in request.stop_ids:
            return Output(completion, None, self._end(completion, "stop"))
        completion.tokens.append(token)
        self._tokens += 1
        piece = "" if stream is None else stream.add(token)
        completion.text += piece
        if stream is not None and stream.stopped:
            piece += self._end(completion, "stop")
        elif len(completion.tokens) == request.max_new_tokens:
            piece += self._end(completion, "length")
        return Output(completion, token, piece)

    def _end(self, completion: Completion, reason: FinishReason) -> str:
        """The text that was held back."""
        sequence, stream = self._active.pop(completion)
        self._scheduler.remove(sequence)
        self._preemptions += completion.preemptions
        completion.finish_reason = reason
        rest = "" if stream is None else stream.finish()
        completion.text += rest
        return rest
