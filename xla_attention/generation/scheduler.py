"""Which sequences take part in a step, with how many tokens, and which pages they get."""

from __future__ import annotations

from collections import deque

from xla_attention.generation.pages import PagePool
from xla_attention.generation.request import Sequence


class Scheduler:
    """Continuous batching: sequences join and leave at any step.

    First come, first served. Sequences that have but their newest token to compute go first, then prompts, in
    chunks, as far as the step's tokens reach. When pages run out, the sequence that came last gives up its
    own and is computed anew later, prompt and continuation; the first to come always goes on, so all end.

    Args:
        pool: where pages come from; as many as any one sequence needs.
        page_size: tokens of a page.
        max_seqs: sequences that hold pages at a time.
        max_tokens: of a step, at least `max_seqs`.
    """

    def __init__(self, pool: PagePool, page_size: int, max_seqs: int, max_tokens: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._max_seqs = max_seqs
        self._max_tokens = max_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order in which they came

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Lets one go, whatever it was doing; its pages are free at once."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def schedule(self) -> dict[Sequence, int]:
        """Tokens of each sequence in the next step, which have their pages; empty only when idle."""
        step: dict[Sequence, int] = {}
        waiting = len(self._waiting)
        decoding = [s for s in self._running if len(s) - s.cached == 1]
        prompts = [s for s in self._running if len(s) - s.cached > 1]
        for sequence in decoding + prompts:
            count = min(len(sequence) - sequence.cached, self._max_tokens - sum(step.values()))
            if count and sequence in self._running and self._make_room(sequence, count, step):
                step[sequence] = count
        preempted = len(self._waiting) > waiting  # who lost its pages now would take them back at once
        while not preempted and self._waiting and len(self._running) < self._max_seqs:
            sequence = self._waiting[0]
            count = min(len(sequence), self._max_tokens - sum(step.values()))
            if not count or not self._grow(sequence, count):
                break
            self._running.append(self._waiting.popleft())
            step[sequence] = count
        return step

    def _make_room(self, sequence: Sequence, count: int, step: dict[Sequence, int]) -> bool:
        """Gets pages for so many more tokens, from who came last if need be; False if that is `sequence`."""
        while not self._grow(sequence, count):
            last = self._running.pop()
            step.pop(last, None)
            self._release(last)
            last.completion.preemptions += 1
            self._waiting.appendleft(last)
            if last is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, count: int) -> bool:
        needed = -(-(sequence.cached + count) // self._page_size) - len(sequence.pages)
        pages = self._pool.allocate(max(needed, 0))
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def _release(self, sequence: Sequence) -> None:
        self._pool.free(sequence.pages)
        sequence.pages, sequence.cached = [], 0
