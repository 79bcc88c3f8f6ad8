"""create_block_mask against torch's, intervals against every pair, and lengths that no matrix could have."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from xla_attention import BlockMask, and_masks, create_block_mask, or_masks
from xla_attention.benchmarks.flex_functions import MASKS, composed
from xla_attention.flex.bounds import bounds
from xla_attention.flex.trace import trace
from xla_attention.flex.variants import VARIANTS, Problem
from xla_attention.flex.variants.causal import causal
from xla_attention.flex.variants.documents import document_ids, documents
from xla_attention.flex.variants.sliding_window import sliding_window

PURE = [name for name, make in MASKS.items() if not trace(make(Problem(2, 4, 9, 9)), "mask_mod").captured]


def lists(mask):
    """Of each row, how many blocks are listed, and which; partial ones and full ones."""
    for num, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for n, row in zip(num.flatten().tolist(), indices.flatten(0, 2).tolist()):
            yield sorted(row[:n])


@pytest.mark.parametrize("name", [*VARIANTS, *(f"mask {name}" for name in MASKS)])
def test_the_lists_are_torchs(name):
    problem = Problem(2, 4, 150, 110)
    make = VARIANTS[name] if name in VARIANTS else composed((), (name.removeprefix("mask "),))
    mask_mod = make(problem).mask_mod
    if mask_mod is None:
        return
    sizes = (mask_mod, 2, 4, 150, 110)
    ours, theirs = (
        create(*sizes, device="cpu", BLOCK_SIZE=(32, 16))
        for create in (create_block_mask, torch_flex.create_block_mask)
    )
    assert list(lists(ours)) == list(lists(theirs))
    assert (ours.shape, ours.BLOCK_SIZE, str(ours)) == (theirs.shape, theirs.BLOCK_SIZE, str(theirs))
    assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_on_an_xla_device(first_device):
    ids = document_ids(150, first_device)
    mask_mod = and_masks(causal, documents(ids))
    ours = create_block_mask(mask_mod, 2, None, 150, 150, first_device, 32)
    theirs = torch_flex.create_block_mask(
        and_masks(causal, documents(ids.cpu())), 2, None, 150, 150, "cpu", 32
    )
    assert ours.kv_indices.device == first_device
    assert list(lists(ours)) == list(lists(theirs))
    assert str(ours) == str(theirs)
    assert ours.sparsity() == theirs.sparsity()
    part = ours[1:, 0]
    assert (type(part), part.shape, part.kv_indices.device) == (BlockMask, (1, 1, 150, 150), first_device)
    assert list(lists(part)) == list(lists(theirs[1:, 0]))
    assert type(ours.to("cpu")) is BlockMask
    assert torch.equal(ours._adjust(64, 64).to_dense().cpu(), theirs._adjust(64, 64).to_dense())


@pytest.mark.parametrize(
    ("mask_mod", "partial", "full"),
    [
        (causal, 1024, 1024 * 1023 // 2),
        (sliding_window(4096), 1024 + 992, 31 * 1024 - 31 * 32 // 2),
        (documents(torch.arange(131072) // 1024), 0, 128 * 64),
        (or_masks(causal, lambda b, h, q, kv: kv < 1024), 1016, 1024 * 1023 // 2 + 8 * 9 // 2),
    ],
)
def test_131072_by_131072(mask_mod, partial, full):
    """A matrix would take 16 GiB, as bytes."""
    made = create_block_mask(mask_mod, None, None, 131072, 131072)
    assert int(made.kv_num_blocks.sum()) == partial
    assert abs(int(made.full_kv_num_blocks.sum()) - full) <= 40


tiles = st.tuples(st.integers(0, 90), st.integers(1, 40), st.integers(0, 90), st.integers(1, 40))


@settings(max_examples=150)
@given(st.lists(st.sampled_from(PURE), min_size=1, max_size=3), st.sampled_from(["and", "or"]), tiles)
def test_intervals_contain_what_is_there(names, join, tile):
    q0, n, kv0, m = tile
    mask_mod = composed((), tuple(names), join)(Problem(2, 4, 200, 200)).mask_mod
    index = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    seen = mask_mod(*index, torch.arange(q0, q0 + n)[:, None], torch.arange(kv0, kv0 + m))
    inputs = {"b": (0, 1), "h": (0, 3), "q": (q0, q0 + n - 1), "kv": (kv0, kv0 + m - 1)}
    every, some = bounds(trace(mask_mod, "mask_mod").result, inputs)
    assert bool(some) >= bool(seen.any())
    assert bool(every) <= bool(seen.all())


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, kv: torch.where(q > kv, q // 2, kv * 2) >= 30,
        lambda b, h, q, kv: (torch.minimum(q, kv) % 16 < 9) ^ (q > 40),
        lambda b, h, q, kv: ((q * 0.37 - kv / 3).floor() > 2) | ((q - 20) * (kv - 20) < 0),
        lambda b, h, q, kv: (q.float().clamp(10, 50) - kv).abs().int() <= 12,
    ],
)
def test_intervals_of_other_operators(mask_mod):
    q, kv = torch.arange(64)[:, None], torch.arange(64)
    seen = mask_mod(0, 0, q, kv).unflatten(0, (8, 8)).unflatten(2, (8, 8))
    starts = np.arange(0, 64, 8)
    inputs = {"q": (starts[:, None], starts[:, None] + 7), "kv": (starts, starts + 7)}
    every, some = bounds(trace(mask_mod, "mask_mod").result, inputs)
    assert (some >= seen.amax((1, 3)).numpy()).all()
    assert (every <= seen.amin((1, 3)).numpy()).all()
    assert not some.all() or every.any()  # something is decided


def test_bad_sizes():
    with pytest.raises(ValueError, match="Q_LEN: got 0"):
        create_block_mask(causal, None, None, 0, 5)
    with pytest.raises(ValueError, match="BLOCK_SIZE"):
        create_block_mask(causal, None, None, 5, 5, BLOCK_SIZE=(1, 2, 3))
    with pytest.raises(ValueError, match="BLOCK_SIZE"):
        create_block_mask(causal, None, None, 5, 5, BLOCK_SIZE=0)
