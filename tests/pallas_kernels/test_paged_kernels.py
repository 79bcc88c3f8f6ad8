"""The paged attention kernel through the interpreter, against the definition.

Memory that no query may see is NaN, so a page too many, a row too many or an index outside the pool shows.
Limits: both sides compute in float32 in another order (1e-6); with bfloat16 queries P is rounded to 2^-9.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paged_cases import Case, relative, run

from pallas_kernels.hardware import INTERPRETER, V4
from pallas_kernels.paged_attention import (
    PagedSpec,
    combine_kv_pages,
    from_interleaved,
    split_kv_pages,
    to_interleaved,
    update_kv_pages,
)

EXACT = 2e-6
ROWS, SEQS = 24, 5  # of every case below: equal shapes are compiled once
# Lengths 0 and 1, the edges of pages and blocks, queries before the first key, and dead sequences.
EDGES = ((1, 16), (1, 17), (0, 9), (3, 32), (1, 0))
LONG = ((1, 96), (17, 33), (2, 1), (1, 1))
CASES = {
    "group 2": Case(EDGES),
    "group 1": Case(LONG, heads=2, kv_heads=2, sliding_window=20),
    "group 16, one head": Case(EDGES, heads=16, kv_heads=1, sinks=True, softcap=2.0),
    "int8": Case(((1, 33), (9, 64), (1, 96)), page_size=32, pages_per_seq=3, cache="int8"),
    "float8": Case(((1, 33), (9, 64), (1, 96)), page_size=32, pages_per_seq=3, cache="float8_e4m3fn"),
}


def case_of(name, lens=None, **changes):
    case = CASES[name]
    lens = case.lens if lens is None else lens
    sizes = {"behind": ROWS - sum(n for n, _ in lens), "dead": SEQS - len(lens)}
    if case.page_size == 8:
        sizes |= {"page_size": 16, "pages_per_seq": 6, "block_kv": 32}
    return dataclasses.replace(case, lens=tuple(lens), **{**sizes, **changes})


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    """16 query heads on one, with 8 queries a block, fill lanes: that case is computed transposed."""
    case = case_of(name)
    assert relative(case.ragged(), case.expected()) < EXACT


@pytest.mark.parametrize(
    ("alongs", "changes"),
    [
        pytest.param(("head", "query"), {"sliding_window": 20}, marks=pytest.mark.slow),
        pytest.param(("head", "query"), {"heads": 16, "kv_heads": 1, "sinks": True}, marks=pytest.mark.slow),
        (("key", "head", "distance"), {"heads": 16, "kv_heads": 1}),
        (("query", "pair"), {"sliding_window": 150}),
    ],
)
def test_a_score_function_reads_what_it_asks_for(alongs, changes):
    """Of blocks of 128 keys, of which a window leaves some out; 16 heads are computed transposed."""
    case = Case(((1, 300), (17, 280), (1, 1), (2, 1), (0, 5)), page_size=32, pages_per_seq=10, score=alongs)
    case = dataclasses.replace(case, block_kv=128, **changes)
    assert relative(case.ragged(), case.expected()) < EXACT
    without = dataclasses.replace(case, score=None)
    assert relative(case.ragged(), without.expected()) > 0.1


@pytest.mark.parametrize(("kv_heads", "cache"), [(4, "int8"), (1, "float8_e4m3fn")])
def test_scales_by_page(kv_heads, cache):
    """Four kv heads share a product in decoding; 16 query heads on one are computed transposed."""
    case = Case(((1, 300), (17, 280), (1, 1)), heads=16, kv_heads=kv_heads, page_size=32, pages_per_seq=10)
    case = dataclasses.replace(case, cache=cache, scales_by_page=True, sliding_window=170, block_kv=128)
    assert relative(case.ragged(), case.expected()) < EXACT


LENS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 96)), max_size=SEQS).filter(
    lambda lens: sum(n for n, _ in lens) <= ROWS
)


@settings(max_examples=25)
@given(LENS, st.integers(0, 2**31))
@example([], 0)
@example([(1, 96)] * 5, 1)
@example([(24, 24)], 2)
@example([(0, 5), (24, 3)], 3)
def test_any_lengths(lens, seed):
    for name in ("group 2", "group 1", "group 16, one head"):
        case = case_of(name, lens, seed=seed)
        assert relative(case.ragged(), case.expected()) < EXACT


def test_lengths_and_indices_that_lie_do_no_harm():
    """Indices outside the pool are clamped, lengths cut, sums of lengths made to grow."""
    case = case_of("group 2")
    q, pages, kv_lens, tables, cu, num_seqs, _ = case.inputs()
    pages = np.nan_to_num(pages)
    tables = np.where(np.arange(tables.size).reshape(tables.shape) % 3 == 0, 2**30, -(2**30)).astype(np.int32)
    kv_lens = np.array([2**30, -5, 7, 2**30, 3], np.int32)
    cu = np.array([-3, 4, 2, 8, 2**30, 9], np.int32)
    num_seqs = np.array([2**30], np.int32)
    from pallas_kernels.paged_attention import ragged_paged_attention_reference as reference

    got = run("ragged", case.spec)(q, pages, kv_lens, tables, cu, num_seqs)
    want = reference(q, pages, kv_lens, tables, cu, num_seqs, spec=case.spec, xp=np)
    assert relative(got, want) < EXACT


def test_bfloat16_and_two_cores():
    """Blocks of 512 keys take two steps of the softmax; a chip of two cores splits the blocks of queries."""
    two = dataclasses.replace(INTERPRETER, cores=2)
    case = Case(((1, 700), (1, 513), (1, 40)), page_size=64, pages_per_seq=16, behind=0, cache="bfloat16")
    case = dataclasses.replace(case, block_kv=512, dead=1)
    q, pages, kv_lens, tables, *_ = case.inputs()
    decode = run("decode", case.spec, two)
    q = np.concatenate([q, q[:1]])
    kv_lens[3] = 0
    got = decode(q.astype(jnp.bfloat16), pages, kv_lens, tables)
    assert got.dtype == jnp.bfloat16
    assert relative(got[:3], case.expected()) < 8e-3
    assert (np.asarray(got[3], np.float32) == 0).all()


def test_update_writes_rows_and_nothing_else():
    random = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "int8"):
        pages = random.integers(-100, 100, (4, 32, 64)).astype(jnp.dtype(dtype))
        new = random.integers(-100, 100, (7, 64)).astype(pages.dtype)
        slots = np.array([127, 3, -1, 40, 41, 3, 128], np.int32)
        want = pages.reshape(128, 64).copy()
        for n in (0, 3, 4, 5):
            want[slots[n]] = new[n]
        got = update_kv_pages(jnp.asarray(pages), jnp.asarray(new), jnp.asarray(slots), hardware=INTERPRETER)
        assert np.array_equal(np.asarray(got).reshape(128, 64), want)
    nothing = update_kv_pages(jnp.asarray(pages), jnp.asarray(new), jnp.full(7, -1), hardware=INTERPRETER)
    assert np.array_equal(np.asarray(nothing), pages)


def test_layouts_of_others():
    random = np.random.default_rng(0)
    k, v = random.standard_normal((2, 3, 5, 8, 16), np.float32)
    pages = combine_kv_pages(k, v, np)
    assert pages.shape == (5, 8, 2 * 3 * 16)
    assert np.array_equal(pages[4, 7, 16:32], k[1, 4, 7])
    assert np.array_equal(pages[4, 7, 48:64], v[0, 4, 7])
    back = split_kv_pages(pages, 3, np)
    assert np.array_equal(back[0], k)
    assert np.array_equal(back[1], v)
    others = to_interleaved(pages, 3)
    assert others.shape == (5, 8, 6, 16)
    assert np.array_equal(others[2, 3, 2], k[1, 2, 3])
    assert np.array_equal(others[2, 3, 5], v[2, 2, 3])
    assert np.array_equal(from_interleaved(others), pages)


def test_refusals_name_the_argument():
    case = case_of("group 2")
    q, pages, kv_lens, tables, cu, num_seqs, _ = case.inputs()
    attend = run("ragged", case.spec, V4)
    with pytest.raises(ValueError, match="kv_pages: got pages of 16 tokens in int8"):
        attend(q, pages.astype(np.int8), kv_lens, tables, cu, num_seqs)
    with pytest.raises(TypeError, match="q: got float16"):
        attend(q.astype(np.float16), pages, kv_lens, tables, cu, num_seqs)
    with pytest.raises(ValueError, match="kv_pages: got 2 heads, which must divide the 3"):
        attend(q[:, :3], pages, kv_lens, tables, cu, num_seqs)
    with pytest.raises(ValueError, match="sliding_window: got 0"):
        PagedSpec(1.0, sliding_window=0)
    with pytest.raises(ValueError, match="block_kv: got 24"):
        run("ragged", PagedSpec(1.0, block_kv=24), V4)(q, pages, kv_lens, tables, cu, num_seqs)
