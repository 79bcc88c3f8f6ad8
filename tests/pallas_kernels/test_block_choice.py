"""The blocks that the kernels choose fit the lengths, the tilings and the memory of every generation."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.flash_attention import BackwardBlocks, ForwardBlocks, blocks
from pallas_kernels.flash_attention.backward_steps import flush_width
from pallas_kernels.flash_attention.blocks import BACKWARD, FORWARD, TABLE, choose_backward, choose_forward
from pallas_kernels.hardware import GENERATIONS, INTERPRETER
from pallas_kernels.schedule import Tiling

LANES = 128
LENGTHS = st.one_of(st.integers(1, 1500), st.integers(1, 70_000), st.integers(0, 17).map(lambda n: 2**n))
HARDWARE = st.sampled_from([*GENERATIONS.values(), INTERPRETER])
DIMS = st.sampled_from([16, 32, 64, 80, 96, 128, 160, 192, 256])


def up(n, unit):
    return -(-n // unit) * unit


def forward_vmem(b, kv_len, dim, itemsize):
    """Bytes of the forward kernel: what moves has two buffers, and rows of head_dim fill whole registers."""
    lanes, memory = up(dim, LANES), b.memory_kv or up(kv_len, b.block_kv)
    keys = itemsize * lanes * 2 * memory * (1 if b.single_buffer else 2)  # k, v
    queries = itemsize * lanes * 2 * b.block_q * 2  # q, o
    transposed_values = 0 if b.memory_kv else itemsize * dim * memory
    kept = 4 * b.block_q * (dim + 16 + 2 * 8 + b.block_kv)  # O^T and sums of rows, m and l, logits
    return keys + queries + transposed_values + kept


def backward_vmem(b, q_len, dim, group, itemsize):
    """Bytes of the backward kernel, as :func:`forward_vmem`."""
    lanes = up(dim, LANES)
    depth = dim if b.transposed else lanes
    chunk = b.chunk_q or up(q_len, b.memory_q)
    queries = itemsize * lanes * 3 * b.memory_q * (1 if b.single_buffer else 2)  # q, o, do
    statistics = 4 * 2 * 8 * b.memory_q * 2  # lse, dlse: a row fills a register
    keys = lanes * 2 * b.block_kv * (itemsize + (4 if b.chunk_q else itemsize)) * 2  # k, v; dk, dv
    dq = itemsize * lanes * flush_width(b) * 2
    kept = 4 * depth * (group * chunk + 2 * b.block_kv)
    transposed_keys = itemsize * dim * b.block_kv if b.transposed else 0
    return queries + statistics + keys + dq + kept + transposed_keys


@settings(max_examples=500)
@given(LENGTHS, LENGTHS, DIMS, st.sampled_from([2, 4]), HARDWARE, st.booleans())
def test_forward(q_len, kv_len, dim, itemsize, hardware, simple):
    b = choose_forward(q_len, kv_len, dim, dim, itemsize, hardware, simple=simple)
    columns = up(kv_len, b.memory_kv or b.block_kv)
    Tiling(up(q_len, b.block_q), columns, b.block_q, b.memory_kv or columns, b.block_kv, b.border, b.unroll)
    assert b.block_q % b.tile_q == b.border_kv % b.border == 0
    assert math.gcd(b.block_q, b.block_kv, b.memory_kv or 0, b.border) % LANES == 0
    assert b.block_q < q_len + 2 * LANES  # padding is less than a block of short sequences
    assert forward_vmem(b, kv_len, dim, itemsize) <= hardware.vmem_bytes


@settings(max_examples=500)
@given(LENGTHS, LENGTHS, DIMS, st.sampled_from([1, 2, 4, 8, 32]), st.sampled_from([2, 4]), HARDWARE)
def test_backward(q_len, kv_len, dim, group, itemsize, hardware):
    b = choose_backward(q_len, kv_len, dim, dim, group, itemsize, hardware)
    columns = b.chunk_q or up(q_len, b.memory_q)
    Tiling(up(kv_len, b.block_kv), columns, b.block_kv, b.memory_q, b.block_q, b.border)
    assert b.block_q % b.tile_q == b.block_kv % b.tile_kv == 0
    assert math.gcd(b.block_q, b.block_kv, b.memory_q, b.chunk_q or 0, b.border) % LANES == 0
    assert b.block_kv < kv_len + 2 * LANES
    assert b.block_q < q_len + 2 * LANES
    assert backward_vmem(b, q_len, dim, group, itemsize) <= hardware.vmem_bytes


@pytest.mark.parametrize("hardware", [*GENERATIONS.values(), INTERPRETER], ids=lambda h: h.name)
def test_long_powers_of_two_take_the_generations_own_blocks(hardware):
    """The tables hold what compiled best at such lengths; the choice changes it only to fit."""
    key = f"{hardware.name}/%s/128/4096/bfloat16"
    table = {key: entry["blocks"] for key, entry in json.loads(TABLE.read_text()).items()}
    want = dataclasses.replace(FORWARD[hardware.name], **table.get(key % "forward", {}))
    assert choose_forward(4096, 4096, 128, 128, 2, hardware) == want
    chosen = choose_backward(4096, 4096, 128, 128, 1, 2, hardware)
    want = dataclasses.replace(BACKWARD[hardware.name], **table.get(key % "backward", {}))
    assert chosen == dataclasses.replace(want, memory_q=chosen.memory_q)


def test_a_small_program_takes_many_queries():
    def block_q(length, dim=128, itemsize=2, name="v5e"):
        return choose_forward(length, length, dim, dim, itemsize, GENERATIONS[name], simple=True).block_q

    assert block_q(2048) == block_q(2**15) == block_q(8192, 64, name="v5p") == 2048
    assert block_q(2**17) == 1024
    assert (
        block_q(4096, 256) == block_q(4096, itemsize=4) == block_q(4096, name="v6e") == block_q(3072) == 1024
    )


def test_the_tuned_table(monkeypatch):
    """Nearest length of the nearest head dim above; where nothing was tuned, the generation's own blocks."""
    assert all(
        {"blocks", "cycles", "libtpu", "command"} <= entry.keys()
        for entry in json.loads(TABLE.read_text()).values()
    )
    tuned = {(64, 1024): {"block_q": 512}, (64, 8192): {"block_q": 256}, (128, 4096): {"tile_q": 128}}
    monkeypatch.setattr(blocks, "_tuned", lambda *of: tuned if of == ("v5e", "forward", "bfloat16") else {})

    def chosen(length, dim, itemsize=2, name="v5e"):
        b = choose_forward(length, length, dim, dim, itemsize, GENERATIONS[name])
        return b.block_q, b.tile_q

    own = FORWARD["v5e"]
    assert chosen(1024, 64) == chosen(2048, 32) == (512, own.tile_q)
    assert chosen(4096, 64) == chosen(32768, 64) == (256, own.tile_q)
    assert chosen(1024, 80) == chosen(4096, 128) == (own.block_q, 128)
    assert chosen(4096, 256) == (own.block_q, own.tile_q)
    assert chosen(4096, 128, itemsize=4) == (own.block_q, own.tile_q)
    assert chosen(4096, 128, name="v5p") == (FORWARD["v5p"].block_q, FORWARD["v5p"].tile_q)


def test_short_sequences_get_short_blocks():
    f, b = choose_forward(1, 1, 64, 64, 4, INTERPRETER), choose_backward(1, 1, 64, 64, 1, 4, INTERPRETER)
    assert (f.block_q, f.block_kv, b.block_q, b.block_kv, b.memory_q) == (LANES,) * 5


def test_keys_stream_where_a_head_does_not_fit():
    assert choose_forward(4096, 4096, 128, 128, 2, GENERATIONS["v5e"]).memory_kv is None
    assert choose_forward(1024, 2**18, 256, 256, 4, GENERATIONS["v5e"]).memory_kv is not None
    assert choose_backward(2**18, 1024, 256, 256, 8, 4, GENERATIONS["v5e"]).chunk_q is not None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ForwardBlocks(block_q=256, tile_q=192), "tile_q"),
        (lambda: ForwardBlocks(block_kv=0), "block_kv"),
        (lambda: ForwardBlocks(unroll=0), "unroll"),
        (lambda: ForwardBlocks(memory_kv=700), "memory_kv"),
        (lambda: BackwardBlocks(block_kv=256, tile_kv=192), "tile_kv"),
        (lambda: BackwardBlocks(block_q=256, memory_q=512, tile_q=192), "tile_q"),
        (lambda: BackwardBlocks(memory_q=1500), "memory_q"),
        (lambda: BackwardBlocks(memory_q=4096, chunk_q=5000), "chunk_q"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_blocks_that_do_not_divide_are_refused(make, name):
    """Where they are made, by the name of what is wrong: inside a kernel they would give wrong numbers."""
    with pytest.raises(ValueError, match=name):
        make()
