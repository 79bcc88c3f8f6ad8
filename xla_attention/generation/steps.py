"""One step of the model over a flat batch of tokens: ids in, sampled tokens out, in one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xla_attention.generation.request import Sequence
from xla_attention.generation.sampling import GREEDY, SamplingRows, choose, most_likely
from xla_attention.models import CausalLM
from xla_attention.models.attention import PagedCache, use_cache

if TYPE_CHECKING:
    from xla_attention.sharding.sharding import Sharding

SMALLEST_BUCKET = 8


@dataclass(frozen=True)
class Sizes:
    """What is fixed for all steps.

    Attributes:
        num_pages: of the cache.
        page_size: tokens of a page.
        max_seqs: sequences of a step.
        max_tokens: tokens of a step.
        pages_per_seq: pages of the longest sequence.
        vocab_size: only ids below it are chosen.
    """

    num_pages: int
    page_size: int
    max_seqs: int
    max_tokens: int
    pages_per_seq: int
    vocab_size: int

    @property
    def buckets(self) -> tuple[int, ...]:
        """The lengths that batches are filled up to: powers of two, and the longest."""
        lengths, length = [], SMALLEST_BUCKET
        while length < self.max_tokens:
            lengths.append(length)
            length *= 2
        return (*lengths, self.max_tokens)


class Steps:
    """Runs steps on the model's device, and holds the cache.

    On XLA each length of a batch is one graph, and another one if any of its sequences samples: sorting the
    vocabulary is not free. Only the chosen tokens come back to the host.

    Args:
        model: on its device, its parameters placed.
        sizes: of the cache and of batches.
        sharding: how its parameters lie, in an SPMD program. The cache is cut over `tensor` if that divides
            the kv heads, else whole on every device.
    """

    def __init__(self, model: CausalLM, sizes: Sizes, sharding: Sharding | None = None) -> None:
        self._model = model
        self._sizes = sizes
        weight = next(model.parameters())
        self._device = weight.device
        self._on_xla = weight.device.type == "xla"
        self._sharding = sharding
        self.graphs = 0
        config = model.config
        shape = (sizes.num_pages, sizes.page_size, 2 * config.num_key_value_heads * config.head_dim)
        with self._counted():
            kind = {"dtype": weight.dtype, "device": weight.device}
            self._layers = [torch.zeros(shape, **kind) for _ in range(config.num_hidden_layers)]
            self._place_cache()

    @property
    def most_graphs(self) -> int:
        """The most graphs that are ever compiled: one makes the cache, two are for each length of a batch."""
        return 1 + 2 * len(self._sizes.buckets) if self._on_xla else 0

    @torch.no_grad()
    def run(self, step: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Computes so many more tokens of each sequence, whose pages are there already.

        Returns:
            The next token of each sequence that has been computed to its end.
        """
        complete = {s for s, count in step.items() if len(s) == s.cached + count}
        sampled = any(s.completion.request.sampling.temperature > 0 for s in complete)
        ids, positions, last, *fields = self._pack(step)
        rows = self._rows(step, complete) if sampled else None
        with self._counted(), self._placement():
            ids, positions, last, *fields = (x.to(self._device) for x in (ids, positions, last, *fields))
            with use_cache(PagedCache(self._layers, *fields)):
                hidden = self._model.hidden_states(ids[None], position_ids=positions[None])
            logits = self._model.logits(hidden[0].index_select(0, last)).float()
            logits = logits[:, : self._sizes.vocab_size]
            chosen = most_likely(logits) if rows is None else choose(logits, rows.to(self._device))
            self._place_cache()
        return {s: t for s, t in zip(step, chosen.tolist()) if s in complete}

    def _pack(self, step: Mapping[Sequence, int]) -> list[Tensor]:
        """Ids, positions, the place of each sequence's last token, and the fields of PagedCache but its
        first; int32, filled up to shapes that are compiled once."""
        size, seqs = self._sizes.page_size, self._sizes.max_seqs
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends = [0]
        for sequence, count in step.items():
            places = range(sequence.cached, sequence.cached + count)
            ids += sequence.ids(count)
            positions += places
            slots += [sequence.pages[place // size] * size + place % size for place in places]
            ends.append(len(ids))
        length = len(ids)
        if self._on_xla:
            length = next(bucket for bucket in self._sizes.buckets if bucket >= len(ids))
        tables = torch.zeros(seqs, self._sizes.pages_per_seq, dtype=torch.int32)
        for row, sequence in enumerate(step):
            tables[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
        return [
            _filled(ids, length),
            _filled(positions, length),
            _filled([end - 1 for end in ends[1:]], seqs),
            _filled(slots, length, -1),
            _filled([sequence.cached + count for sequence, count in step.items()], seqs),
            tables,
            _filled(ends, seqs + 1, ends[-1]),
            _filled([len(step)], 1),
        ]

    def _rows(self, step: Mapping[Sequence, int], complete: set[Sequence]) -> SamplingRows:
        """Of all sequences of a step; only those that get a token draw a number."""
        dead = self._sizes.max_seqs - len(step)
        samplings = [s.completion.request.sampling if s in complete else GREEDY for s in step]
        uniform = [s.draw() if s in complete and how.temperature else 0.0 for s, how in zip(step, samplings)]
        return SamplingRows.of(samplings + [GREEDY] * dead, uniform + [0.0] * dead, self._sizes.vocab_size)

    def _place_cache(self) -> None:
        """Where XLA would leave it to its own choice, the next step would be another graph."""
        if self._sharding is not None:
            for pages in self._layers:
                self._sharding.place_heads(pages, self._model.config.num_key_value_heads)

    def _placement(self) -> contextlib.AbstractContextManager[None]:
        from xla_attention.ops.placement import use_attention_placement

        return use_attention_placement(self._sharding and self._sharding.placement_of_heads())

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Runs, and counts the graphs of, what is traced in the block."""
        if not self._on_xla:
            yield
            return
        import torch_xla

        before = _compilations()
        yield
        torch_xla.sync()
        self.graphs += _compilations() - before


def _compilations() -> int:
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    return found[0] if found else 0


def _filled(values: list[int], length: int, filler: int = 0) -> Tensor:
    return torch.tensor(values + [filler] * (length - len(values)), dtype=torch.int32)
