"""Random paged attention problems, whose unused memory is NaN, and the definition's answer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.paged_attention import (
    PagedOperands,
    PagedSpec,
    multi_queries_paged_attention,
    paged_attention,
    ragged_paged_attention,
    ragged_paged_attention_reference,
)
from pallas_kernels.score_function import ScoreFunction

CACHES = {
    "float32": np.dtype("float32"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype("int8"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True)
class Mixed(ScoreFunction):
    """Adds what it reads, of integers hides some, and uses every index."""

    def __call__(self, score, batch, head, q, kv, operands):
        score = 3 * jnp.tanh(score / 3) + 0.1 * batch - 0.03 * (q - kv) * (head + 1)
        for x in operands:
            score = jnp.where(x % 7 == 0, -jnp.inf, score) if x.dtype == jnp.int32 else score + x
        return score

    def reader(self, heads, context, seed):
        """The operands of tokens: of heads and keys random, by distance a table of 16 entries."""
        rng = np.random.default_rng(seed)
        by_head = rng.standard_normal((1, heads)).astype(np.float32)
        by_query = rng.standard_normal((context, 1)).astype(np.float32)
        by_key = rng.integers(1, 30, (8, 1, context)).astype(np.int32)
        table = rng.standard_normal((heads, 16)).astype(np.float32)
        pairs = rng.integers(1, 30, (context, heads, context)).astype(np.int32)

        def read(sequence, position):
            position = jnp.clip(position, 0, context - 1)
            distance = jnp.clip(position[:, None] - jnp.arange(context), 0, 15)
            every = {
                "head": jnp.asarray(by_head),
                "query": jnp.asarray(by_query)[position],
                "key": jnp.asarray(by_key)[sequence],
                "distance": jnp.moveaxis(jnp.asarray(table)[:, distance], 0, 1),
                "pair": jnp.asarray(pairs)[position],
            }
            return tuple(every[along] for along in self.operands)

        return read


@dataclasses.dataclass(frozen=True)
class Case:
    """A flat batch: ``(q_len, kv_len)`` of each sequence, ``dead`` more sequences, then rows of none."""

    lens: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 8
    pages_per_seq: int = 8
    dead: int = 1
    behind: int = 3
    sinks: bool = False
    cache: str = "float32"
    softcap: float | None = None
    sliding_window: int | None = None
    block_kv: int | None = None
    score: tuple[str, ...] | None = None
    scales_by_page: bool = False
    seed: int = 0

    @property
    def spec(self):
        score = None if self.score is None else Mixed(self.score)
        return PagedSpec(self.dim**-0.5, self.softcap, self.sliding_window, self.block_kv, score)

    @property
    def read(self):
        context = self.pages_per_seq * self.page_size
        return None if self.score is None else self.spec.score.reader(self.heads, context, self.seed)

    def inputs(self):
        random = np.random.default_rng(self.seed)
        seqs = len(self.lens) + self.dead
        total = sum(n for n, _ in self.lens) + self.behind
        q = random.standard_normal((total, self.heads, self.dim), np.float32)
        num_pages = seqs * self.pages_per_seq + 1
        tables = random.permutation(num_pages - 1)[: seqs * self.pages_per_seq]
        tables = tables.reshape(seqs, self.pages_per_seq).astype(np.int32)
        kv_lens = np.array([n for _, n in self.lens] + [5] * self.dead, np.int32)
        cu = np.cumsum([0, *(n for n, _ in self.lens), *[0] * self.dead]).astype(np.int32)
        width = 2 * self.kv_heads * self.dim
        pages = random.standard_normal((num_pages, self.page_size, width), np.float32)
        scales = {}
        if self.cache in ("int8", "float8_e4m3fn"):
            shape = (num_pages, self.kv_heads) if self.scales_by_page else self.kv_heads
            scales = {
                name: random.uniform(0.01, 0.02, shape).astype(np.float32) for name in ("k_scale", "v_scale")
            }
            pages = np.clip(pages * 50, -127, 127)
        pages = pages.astype(CACHES[self.cache])
        if self.cache != "int8":  # what no query may see
            clean, pages = pages, np.full_like(pages, np.nan)
            for s, (_, kv_len) in enumerate(self.lens):
                for at in range(min(kv_len, self.page_size * self.pages_per_seq)):
                    where = tables[s, at // self.page_size], at % self.page_size
                    pages[where] = clean[where]
        if self.scales_by_page:  # of pages that nothing was written to
            for x in scales.values():
                x[sorted(set(range(num_pages)) - set(tables[: len(self.lens)].ravel().tolist()))] = np.nan
        operands = PagedOperands(
            random.standard_normal(self.heads).astype(np.float32) if self.sinks else None, **scales
        )
        return q, pages, kv_lens, tables, cu, np.array([len(self.lens)], np.int32), operands

    def expected(self):
        q, pages, *rest, operands = self.inputs()
        pages = pages.astype(np.float32)
        xp = np
        if self.score is not None:
            q, pages, operands, xp = (
                jnp.asarray(q),
                jnp.asarray(pages),
                operands._replace(score=self.read),
                jnp,
            )
        return ragged_paged_attention_reference(q, pages, *rest, operands, spec=self.spec, xp=xp)

    def ragged(self, dtype=jnp.float32, hardware=INTERPRETER):
        q, *rest, operands = self.inputs()
        return run("ragged", self.spec, hardware, self.read)(q.astype(dtype), *rest, operands)


FUNCTIONS = {
    "ragged": ragged_paged_attention,
    "multi": multi_queries_paged_attention,
    "decode": paged_attention,
}


@functools.lru_cache(maxsize=64)
def run(name, spec, hardware=INTERPRETER, read=None):
    def call(*args):
        if isinstance(args[-1], PagedOperands):
            args = (*args[:-1], args[-1]._replace(score=read))
        return FUNCTIONS[name](*args, spec=spec, hardware=hardware)

    return jax.jit(call)


def relative(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.isfinite(got).all()
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)
