"""Our paged attention beside JAX's and torch_xla's kernels, by the schedules that the TPU compiler makes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.box
from jax.experimental.pallas.ops.tpu import paged_attention as jax_paged
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_ragged
from jaxtyping import Array
from rich.table import Table
from torch_xla.experimental.pallas_kernels import (
    multi_queries_paged_attention_kernel as torch_xla_multi,
)
from torch_xla.experimental.pallas_kernels import ragged_paged_attention_v2 as torch_xla_ragged

from pallas_kernels.hardware import MIB
from pallas_kernels.paged_attention import (
    PagedSpec,
    multi_queries_paged_attention,
    paged_attention,
    ragged_paged_attention,
)
from xla_attention.benchmarks.kernels import OURS, Row, measure_candidates
from xla_attention.benchmarks.peers import Candidate
from xla_attention.planner.compile import libtpu_version
from xla_attention.planner.topology import Topology


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """Sequences of one length, each with its last ``queries`` tokens as queries, in bfloat16.

    Raises:
        ValueError: a size that does not fit; the message names it.
    """

    batch: int
    queries: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}: got {getattr(self, field.name)}, must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, must divide heads={self.heads}")
        if self.queries > self.context:
            raise ValueError(f"queries: got {self.queries}, more than context={self.context}")

    def __str__(self) -> str:
        return (
            f"{self.batch} sequences of {self.context}, {self.queries} queries each, {self.heads} heads on "
            f"{self.kv_heads}, head_dim {self.head_dim}, pages of {self.page_size}"
        )

    @property
    def pages_per_seq(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def least_bytes(self) -> int:
        """Of keys and values, each read once."""
        return self.batch * self.context * 2 * self.kv_heads * self.head_dim * 2

    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """``kv_lens``, ``page_indices``, ``cu_q_lens`` and ``num_seqs``: constants, for exact counts."""
        pages = np.arange(self.batch * self.pages_per_seq, dtype=np.int32)
        cu = np.arange(self.batch + 1, dtype=np.int32) * self.queries
        lens = np.full(self.batch, self.context, np.int32)
        return lens, pages.reshape(self.batch, -1), cu, np.array([self.batch], np.int32)


def candidates(case: PagedCase, topology: Topology) -> Iterator[Candidate]:
    """Ours, then every peer that computes the case, with a handful of block choices."""
    hardware, pages = topology.hardware, case.batch * case.pages_per_seq
    aval = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    rows = aval(pages, case.page_size, 2 * case.kv_heads * case.head_dim)
    interleaved = aval(pages, case.page_size, 2 * case.kv_heads, case.head_dim)
    split = aval(case.kv_heads, pages, case.page_size, case.head_dim)
    flat = aval(case.batch * case.queries, case.heads, case.head_dim)
    chunks = aval(case.batch, case.queries, case.heads, case.head_dim)
    lens, table, cu, num_seqs = case.tables()
    static = {"spec": PagedSpec(case.head_dim**-0.5), "hardware": hardware}

    if case.queries == 1:
        yield Candidate(
            OURS, "its own", lambda q, kv: paged_attention(q, kv, lens, table, **static), (flat, rows)
        )
    else:
        yield Candidate(
            OURS,
            "its own",
            lambda q, kv: multi_queries_paged_attention(q, kv, lens, table, **static),
            (chunks, rows),
        )
    yield Candidate(
        f"{OURS} ragged",
        "its own",
        lambda q, kv: ragged_paged_attention(q, kv, lens, table, cu, num_seqs, **static),
        (flat, rows),
    )
    blocks = _dividing(case, (512, 1024))
    for block in blocks:
        n = block // case.page_size
        if case.queries == 1:
            core = {"megacore_mode": "batch"} if hardware.cores > 1 and case.batch % 2 == 0 else {}
            yield Candidate(
                "JAX paged",
                str(block),
                functools.partial(_jax_paged, lens, table, {"pages_per_compute_block": n, **core}),
                (flat, split, split),
            )
        if case.queries <= 64:  # its grid walks 16 queries at a time: whole prefills take minutes to count
            yield Candidate(
                "torch_xla multi",
                str(block),
                functools.partial(_torch_xla_multi, lens, table, case.queries, n),
                (chunks, split, split),
            )
    for name, kernel in (
        ("JAX ragged", jax_ragged.ragged_paged_attention),
        ("torch_xla ragged", torch_xla_ragged.ragged_paged_attention),
    ):
        for block in blocks:
            for queries in (32,) if case.queries < 64 else (32, 128):
                options = {
                    "num_kv_pages_per_block": block // case.page_size,
                    "num_queries_per_block": queries,
                    "vmem_limit_bytes": min(hardware.vmem_bytes * 7 // 8, 64 * MIB),
                }
                yield Candidate(
                    name,
                    f"{queries}, {block}",
                    functools.partial(_ragged, kernel, (lens, table, cu, num_seqs), options),
                    (flat, interleaved),
                )


def _dividing(case: PagedCase, blocks: Sequence[int]) -> list[int]:
    """The blocks, in keys, of whole pages that divide a sequence's."""
    return [b for b in blocks if b % case.page_size == 0 and case.pages_per_seq % (b // case.page_size) == 0]


def _jax_paged(
    lens: np.ndarray, table: np.ndarray, options: dict[str, Any], q: Array, k: Array, v: Array
) -> Array:
    return jax_paged.paged_attention(q, k, v, jnp.asarray(lens), jnp.asarray(table), **options)


def _torch_xla_multi(
    lens: np.ndarray, table: np.ndarray, queries: int, pages: int, q: Array, k: Array, v: Array
) -> Array:
    return torch_xla_multi.paged_attention(
        q, k, v, jnp.asarray(lens), jnp.asarray(table), jnp.full(len(lens), queries, jnp.int32),
        num_kv_pages_per_compute_block=pages, num_queries_per_compute_block=min(queries, 16),
    )  # fmt: skip


def _ragged(
    kernel: Callable[..., Array],
    tables: Sequence[np.ndarray],
    options: dict[str, Any],
    q: Array,
    kv: Array,
) -> Array:
    return kernel(q, kv, *map(jnp.asarray, tables), sm_scale=q.shape[-1] ** -0.5, **options)


def measure_paged(
    case: PagedCase, topology: Topology, say: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Compiles ours and every peer with each of its block choices: one row for each, ours first."""
    return measure_candidates(candidates(case, topology), topology, say, str(case))


def share_of_floor(case: PagedCase, topology: Topology, row: Row) -> float:
    """Time in which HBM delivers keys and values once, over the time that the row's kernels take."""
    hardware = topology.hardware
    floor = case.least_bytes / (hardware.hbm_bytes_per_second / hardware.clock_hz)
    return floor / row.total


def paged_table(case: PagedCase, topology: Topology, rows: Sequence[Row]) -> Table:
    """The rows as a table: cycles, bytes moved, and the share of the HBM floor."""
    hardware = topology.hardware
    table = Table(
        title=f"{topology}: {case}",
        caption=f"Static schedule of libtpu {libtpu_version()}, cycles of one core; nothing ran on a TPU.\n"
        f"HBM at {hardware.hbm_bytes_per_second / 1e9:.0f} GB/s a chip; MB are of one core. Floor: keys and "
        "values read once.\n? a guess, where loops depend on what is not known. XLA operations around the "
        "kernels are not counted.",
        box=rich.box.SIMPLE_HEAD,
    )
    table.add_column("kernel", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
    for column in ("bundles", "cycles", "with stalls", "MB", "HBM floor", "ms", "ours is faster by"):
        table.add_column(column, justify="right")
    ours = rows[0]
    for row in rows:
        if not row.kernels:
            table.add_row(row.candidate.name, "does not compile")
            continue
        guess = "?" if any(kernel.unknown for kernel in row.kernels) else ""
        table.add_row(
            row.candidate.name,
            row.candidate.blocks + (f" (best of {row.tried})" if row.tried > 1 else ""),
            f"{sum(kernel.bundles for kernel in row.kernels):,}",
            f"{sum(kernel.cycles for kernel in row.kernels):,}{guess}",
            f"{row.total:,}{guess}",
            f"{sum(kernel.hbm_bytes for kernel in row.kernels) / 1e6:,.1f}",
            f"{share_of_floor(case, topology, row):.1%}",
            f"{row.total / hardware.clock_hz * 1e3:.3f}",
            f"{row.total / ours.total:.2f}x" if ours.kernels and row is not ours else "",
        )
    return table
