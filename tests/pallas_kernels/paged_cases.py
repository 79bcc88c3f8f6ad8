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

CACHES = {
    "float32": np.dtype("float32"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype("int8"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


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
    seed: int = 0

    @property
    def spec(self):
        return PagedSpec(self.dim**-0.5, self.softcap, self.sliding_window, self.block_kv)

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
            scales = {
                name: random.uniform(0.01, 0.02, self.kv_heads).astype(np.float32)
                for name in ("k_scale", "v_scale")
            }
            pages = np.clip(pages * 50, -127, 127)
        pages = pages.astype(CACHES[self.cache])
        if self.cache != "int8":  # what no query may see
            clean, pages = pages, np.full_like(pages, np.nan)
            for s, (_, kv_len) in enumerate(self.lens):
                for at in range(min(kv_len, self.page_size * self.pages_per_seq)):
                    where = tables[s, at // self.page_size], at % self.page_size
                    pages[where] = clean[where]
        operands = PagedOperands(
            random.standard_normal(self.heads).astype(np.float32) if self.sinks else None, **scales
        )
        return q, pages, kv_lens, tables, cu, np.array([len(self.lens)], np.int32), operands

    def expected(self):
        q, pages, *rest, operands = self.inputs()
        pages = pages.astype(np.float32)
        return ragged_paged_attention_reference(q, pages, *rest, operands, spec=self.spec, xp=np)

    def ragged(self, dtype=jnp.float32, hardware=INTERPRETER):
        q, *rest = self.inputs()
        return run("ragged", self.spec, hardware)(q.astype(dtype), *rest)


FUNCTIONS = {
    "ragged": ragged_paged_attention,
    "multi": multi_queries_paged_attention,
    "decode": paged_attention,
}


@functools.lru_cache(maxsize=64)
def run(name, spec, hardware=INTERPRETER):
    return jax.jit(functools.partial(FUNCTIONS[name], spec=spec, hardware=hardware))


def relative(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.isfinite(got).all()
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)
