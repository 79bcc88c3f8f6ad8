"""The call of the paged attention kernel: its grid, and what lies in which memory."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hardware import Hardware
from pallas_kernels.paged_attention.blocks import LANES, PagedBlocks
from pallas_kernels.paged_attention.by_key import ByKey
from pallas_kernels.paged_attention.kernel import WINDOW, QueryBlocks, Step
from pallas_kernels.paged_attention.score_rows import PagedScore, ScoreInputs
from pallas_kernels.paged_attention.spec import PagedOperands, PagedSpec


def attend_blocks(
    q: Float[Array, "n sets rows d"],
    kv_pages: Array,
    work: QueryBlocks,
    tables: Int[Array, "s p"],
    operands: PagedOperands,
    *,
    spec: PagedSpec,
    blocks: PagedBlocks,
    hardware: Hardware,
    score: ScoreInputs | None = None,
    page_scales: tuple[Array | None, Array | None] = (None, None),
) -> Float[Array, "n sets rows d"]:
    """Attention of a list of query blocks.

    Args:
        q: of each block, by set of ``blocks.heads`` kv heads; a row for each (kv head, query, query head of
            the group).
        kv_pages: ``[num_pages, page_size, 2 * kv_heads * head_dim]``.
        work: what each block sees, within ``tables``.
        tables: pages of each sequence, all of them in the pool: nothing here checks them again.
        operands: optional tensors; ``score`` is given by itself.
        spec, blocks, hardware: what to compute, how, and on what.
        score: what the spec's score function reads of these blocks.
        page_scales: factors of keys and of values by page, ``[s, sets, heads, keys]``; those by head alone
            are in ``operands``.

    Returns:
        Like ``q``. Rows that see nothing are zero; rows behind a block's last query mean nothing.
    """
    n, sets, rows, dim = q.shape
    width = blocks.heads * dim
    cores = hardware.cores
    of_core = -(-n // cores)
    of_scores = [] if score is None else [x for x in (score.rows, *score.keyed) if x is not None]
    if of_core * cores > n:
        extra = of_core * cores - n
        q, *of_scores = (jnp.pad(x, ((0, extra), (0, 0), (0, 0), (0, 0))) for x in (q, *of_scores))
        last = jnp.zeros((extra,), jnp.int32)
        work = QueryBlocks(
            jnp.concatenate([work.sequence, last + work.sequence[-1]]),
            *(jnp.concatenate([x, last]) for x in work[1:]),
        )
    sequences, pages_per_seq = tables.shape
    windows = -(-sequences // WINDOW)
    tables = jnp.pad(tables, ((0, windows * WINDOW - sequences), (0, -pages_per_seq % LANES)))
    tables = tables.reshape(windows, -1)
    tables = jnp.concatenate([tables, jnp.roll(tables, -1, axis=0)], axis=1)

    def window(core: Any, step: Any, work: Any) -> tuple[Any]:
        return (work[core * of_core + step] // WINDOW,)

    by_head = [None if x is None or x.ndim > 1 else x.astype(jnp.float32) for x in operands[:-1]]
    given = [x is not None for x in by_head]
    extra = [x for x in by_head if x is not None]
    of_pages = [x for x in page_scales if x is not None]
    of_rows = of_scores[: 0 if score is None else len(of_scores) - len(score.keyed)]
    keyed = [*of_scores[len(of_rows) :], *of_pages]

    def block_spec(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda core, step, _: (core * of_core + step, 0, 0, 0))

    rows_spec = block_spec(sets, rows, dim)

    result, statistic = (sets, rows, width), (sets, rows, LANES)
    if blocks.transposed:
        result, statistic = (sets, width, rows), (sets, 8, rows)

    def kernel(work: Any, tables: Any, q: Any, kv: Any, *refs: Any) -> None:
        rest = iter(refs)
        optional = [next(rest) if there else None for there in given]
        rows_ref = next(rest) if of_rows else None
        arrays = tuple(itertools.islice(rest, len(keyed)))
        o, *scratch = rest
        scratch, rings = scratch[: len(scratch) - len(keyed)], scratch[len(scratch) - len(keyed) :]
        by_key = function = None
        if keyed:
            by_sequence = (False,) * (len(keyed) - len(of_pages)) + (True,) * len(of_pages)
            by_key = ByKey(arrays, by_sequence, tuple(rings), scratch[-1], blocks.block_kv)
        of_scales = iter(rings[len(keyed) - len(of_pages) :])
        k_scales, v_scales = (None if x is None else next(of_scales) for x in page_scales)
        if score is not None:
            function = PagedScore(
                spec.score, score.dtypes, score.by_key, rows_ref, tuple(rings), blocks.transposed
            )
        Step(
            work, tables, q, kv, *optional, o, *scratch, function, by_key, k_scales, v_scales,
            blocks=blocks, spec=spec, group=rows // (blocks.heads * blocks.block_q),
            core=pl.program_id(0),
            step=pl.program_id(1),
            number=of_core * cores, of_core=of_core,
        ).run()  # fmt: skip

    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cores, of_core),
            in_specs=[
                pl.BlockSpec((tables.shape[1],), window, memory_space=pltpu.SMEM),
                rows_spec,
                pl.BlockSpec(memory_space=pl.ANY),
                *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(extra),
                *[block_spec(*x.shape[1:]) for x in of_rows],
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(keyed),
            ],
            out_specs=rows_spec,
            scratch_shapes=[
                pltpu.VMEM((blocks.depth, blocks.block_kv, kv_pages.shape[2]), kv_pages.dtype),
                pltpu.VMEM((sets, rows, width), q.dtype),
                pltpu.VMEM(result, jnp.float32),
                pltpu.VMEM(statistic, jnp.float32),
                pltpu.VMEM(statistic, jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((blocks.depth,)),
                *[pltpu.VMEM((blocks.depth, *x.shape[1:3], blocks.block_kv), x.dtype) for x in keyed],
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_bytes,
            disable_bounds_checks=True,  # indices of pages are clamped before they come here
        ),
        interpret=hardware.interpret,
        name="paged_attention",
    )(jnp.concatenate(work).astype(jnp.int32), tables.reshape(-1), q, kv_pages, *extra, *of_rows, *keyed)
    return out[:n]
