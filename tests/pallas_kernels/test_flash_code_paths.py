"""Block sizes that lead the kernels down each of their paths, and TPU's own choices, in the interpreter."""

import itertools

import pytest
from attention_cases import LIMITS, Case, check
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import schedule
from pallas_kernels.flash_attention import BackwardBlocks, BlockSizes, ForwardBlocks
from pallas_kernels.flash_attention.blocks import choose_backward, choose_forward
from pallas_kernels.hardware import GENERATIONS
from pallas_kernels.masks import And, Causal, Chunked, Full, KeyLength, Not, Or, SlidingWindow

WINDOW = SlidingWindow(199)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def forward(**changes):
    small = {"block_q": 256, "tile_q": 128, "block_kv": 128, "border": 128, "border_kv": 128, "ahead": 1}
    return ForwardBlocks(**small | changes)


def backward(**changes):
    small = {"block_kv": 256, "block_q": 256, "memory_q": 512, "tile_kv": 128, "tile_q": 128, "border": 128}
    return BackwardBlocks(**small | changes)


def steps_of(case):
    """The steps of the forward pass, and of the backward without chunks, over padded lengths."""
    heads, kv_heads, q_len, kv_len = case.shape[1:5]
    f, b = case.block_sizes.forward, case.block_sizes.backward
    f_rows, b_rows = -(-q_len // f.block_q) * f.block_q, -(-kv_len // b.block_kv) * b.block_kv
    memory = f.memory_kv or -(-kv_len // f.block_kv) * f.block_kv
    f_columns, b_columns = -(-kv_len // memory) * memory, -(-q_len // b.memory_q) * b.memory_q
    of_forward = schedule.Tiling(f_rows, f_columns, f.block_q, memory, f.block_kv, f.border, f.unroll)
    of_backward = schedule.Tiling(b_rows, b_columns, b.block_kv, b.memory_q, b.block_q, b.border)
    return (
        schedule.build(case.mask, of_forward),
        schedule.build(case.mask, of_backward, rows_are_queries=False, repeats=heads // kv_heads),
    )


@pytest.mark.parametrize(
    ("unroll", "offset", "remainders"), [(2, 0, {0, 1}), slow(2, 128, {0}), slow(3, 128, {0, 1, 2})]
)
def test_unrolled_runs(unroll, offset, remainders):
    blocks = BlockSizes(forward(unroll=unroll), backward())
    case = Case((1, 1, 1, 1024, 1024, 16), Causal(offset), block_sizes=blocks)
    assert {s.kind.remainder for s in steps_of(case)[0]} == remainders
    check(case)


@pytest.mark.parametrize(
    ("mask", "mxu_row_sums"),
    [slow(Full(), True), (Causal(), False), (WINDOW, True)],
    ids=["full", "causal", "window"],
)
def test_streamed_keys_and_queries(mask, mxu_row_sums):
    """Keys come to the forward pass in three pieces, queries to the backward pass in three."""
    blocks = BlockSizes(forward(memory_kv=256, mxu_row_sums=mxu_row_sums), backward(memory_q=256))
    case = Case((1, 2, 1, 700, 600, 32), mask, block_sizes=blocks, with_dlse=True)
    for steps in steps_of(case):
        assert {s.memory for s in steps} == {0, 1, 2}
    check(case)


@pytest.mark.parametrize("transposed", [slow(False), True])
def test_tiles_under_the_mask(transposed):
    """Rows and columns in blocks that do not divide meet the diagonal in more ways than borders are kept."""
    blocks = BlockSizes(
        forward(block_kv=640, border_kv=256),
        backward(block_q=640, memory_q=1280, tile_q=640, transposed=transposed),
    )
    case = Case((1, 2, 1, 1200, 1500, 16), Causal(150), block_sizes=blocks)
    for steps in steps_of(case):
        assert {s.kind.masked for s in steps} == {s.kind.run for s in steps} == {False, True}
        assert len({s.kind.border for s in steps} - {None}) == schedule.MAX_BORDERS
    check(case)


@pytest.mark.parametrize("ahead", [slow(0), slow(1), 9])
def test_borders_in_many_pieces(ahead):
    blocks = BlockSizes(
        forward(
            block_q=512,
            tile_q=256,
            block_kv=512,
            border_kv=256,
            ahead=ahead,
            mxu_row_sums=True,
            single_buffer=True,
        ),
        backward(block_kv=512, block_q=512, tile_q=256, ahead=ahead, single_buffer=True),
    )
    check(Case((1, 1, 1, 512, 512, 64), WINDOW, block_sizes=blocks))


@pytest.mark.parametrize(
    ("chunk_q", "mask", "lengths", "transposed"),
    [
        (256, Causal(), (700, 500), False),  # 3 chunks, of which the last ones see more keys
        (512, Causal(-300), (700, 400), True),  # 2 chunks, the first of which sees little
        slow(512, Full(), (1000, 130), False),
        slow(256, WINDOW, (700, 700), True),
    ],
    ids=str,
)
def test_dq_in_chunks_of_queries(chunk_q, mask, lengths, transposed):
    """dq of all queries does not fit in VMEM: several passes over the keys, whose dk and dv are summed."""
    blocks = BlockSizes(forward(), backward(chunk_q=chunk_q, memory_q=256, transposed=transposed))
    check(Case((1, 2, 1, *lengths, 32), mask, block_sizes=blocks, with_dlse=True))


def test_chunks_in_bfloat16_are_summed_in_float32():
    blocks = BlockSizes(forward(), backward(chunk_q=256, memory_q=256))
    check(Case((1, 2, 1, 400, 200, 32), Causal(), block_sizes=blocks, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("block_kv", "memory_q", "transposed"),
    [slow(256, 512, False), slow(512, 256, True), (384, 512, False), (128, 1024, True)],
)
def test_blocks_of_dq(block_kv, memory_q, transposed):
    """dq leaves in blocks of queries, whatever blocks of keys it is summed over."""
    changes = {"block_kv": block_kv, "memory_q": memory_q, "transposed": transposed, "ahead": 2}
    blocks = BlockSizes(forward(), backward(**changes))
    check(Case((1, 2, 1, 600, 380, 80), Causal(), softcap=2.0, block_sizes=blocks, with_dlse=True))


QUICK = [("v5e", "float32"), ("v6e", "bfloat16")]
REST = sorted(set(itertools.product(GENERATIONS, LIMITS)) - set(QUICK))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *QUICK,
        *(slow(*rest) for rest in REST),
    ],
)
def test_choices_for_tpu(name, dtype):
    """What a TPU runs, but for the hardware."""
    q_len, kv_len, dim = 1300, 1100, 64
    hardware, itemsize = GENERATIONS[name], 2 if dtype == "bfloat16" else 4
    blocks = BlockSizes(
        choose_forward(q_len, kv_len, dim, dim, itemsize, hardware),
        choose_backward(q_len, kv_len, dim, dim, 2, itemsize, hardware),
    )
    check(Case((1, 2, 1, q_len, kv_len, dim), Causal(), block_sizes=blocks, dtype=dtype, with_dlse=True))


@st.composite
def any_case(draw):
    """Blocks of every proportion that a tiling allows, over lengths and masks that fit none of them."""
    several, flag = st.integers(1, 3), st.booleans()
    sub = draw(st.sampled_from([128, 256]))
    block_q, block_kv = sub * draw(several), sub * draw(several)
    f = ForwardBlocks(
        block_q=block_q,
        tile_q=draw(st.sampled_from([n for n in (128, 256, 384, 512) if block_q % n == 0])),
        block_kv=block_kv,
        memory_kv=draw(st.sampled_from([None, block_kv, 2 * block_kv])),
        unroll=draw(several),
        border=sub,
        border_kv=sub * draw(several),
        ahead=draw(st.integers(0, 4)),
        single_buffer=draw(flag),
        mxu_row_sums=draw(flag),
    )
    block_q, block_kv = sub * draw(several), sub * draw(several)
    memory_q = block_q * draw(several)
    b = BackwardBlocks(
        block_kv=block_kv,
        block_q=block_q,
        memory_q=memory_q,
        chunk_q=draw(st.sampled_from([None, memory_q, 2 * memory_q])),
        tile_kv=draw(st.sampled_from([n for n in (128, 256, 384, 512) if block_kv % n == 0])),
        tile_q=draw(st.sampled_from([n for n in (128, 256, 384, 512) if block_q % n == 0])),
        border=sub,
        ahead=draw(st.integers(0, 4)),
        single_buffer=draw(flag),
        transposed=draw(flag),
    )
    length, offset = st.integers(1, 900), st.integers(-600, 600)
    simple = st.one_of(
        st.just(Full()),
        st.builds(Causal, offset),
        st.builds(SlidingWindow, st.integers(0, 300), st.integers(0, 300), offset),
        st.builds(Chunked, st.integers(50, 400)),
        st.builds(KeyLength, length),
    )
    simple = st.one_of(simple, simple.map(Not))
    mask = draw(st.one_of(simple, st.builds(And, simple, simple), st.builds(Or, simple, simple)))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 3)]))
    shape = (1, *heads, draw(length), draw(length), 16)
    # With a gradient of lse no gradient vanishes where queries see one key.
    dtype = draw(st.sampled_from(list(LIMITS)))
    return Case(shape, mask, block_sizes=BlockSizes(f, b), dtype=dtype, with_dlse=True)


@pytest.mark.slow
@settings(max_examples=60)
@given(any_case())
def test_any_blocks(case):
    check(case)
