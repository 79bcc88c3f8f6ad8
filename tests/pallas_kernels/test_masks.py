"""What a mask says of tiles, against the pairs it shows, one by one."""

import copy
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_masks import leaves, masks

from pallas_kernels.masks import (
    And,
    Causal,
    Chunked,
    Full,
    KeyLength,
    Not,
    Or,
    PerHead,
    SlidingWindow,
    prefix_lm,
)

POSITION, SIDE = st.integers(0, 64), st.integers(1, 24)
TILES = st.lists(st.tuples(POSITION, SIDE, POSITION, SIDE), min_size=1, max_size=6)


def dense(mask, q_len, kv_len):
    return np.asarray(mask.visible(np.arange(q_len)[:, None], np.arange(kv_len)[None, :]))


def answers(mask, tiles):
    """(any, every) of each tile: asked all at once, and counted."""
    q, q_side, kv, kv_side = np.array(tiles).T
    some, every = mask.bounds(q, q + q_side, kv, kv + kv_side)
    cut = [dense(mask, 88, 88)[a : a + m, b : b + n] for a, m, b, n in tiles]
    return some, every, [c.any() for c in cut], [c.all() for c in cut]


@given(st.one_of(leaves, leaves.map(Not)), TILES)
def test_bounds_of_simple_masks_are_exact(mask, tiles):
    some, every, any_, all_ = answers(mask, tiles)
    assert some.tolist() == any_
    assert every.tolist() == all_


@given(masks, TILES)
def test_bounds_of_composed_masks_err_only_towards_more_work(mask, tiles):
    """A tile that is called empty is empty, and one that is called full is full."""
    some, every, any_, all_ = answers(mask, tiles)
    assert not np.any(~some & any_)
    assert not np.any(every & ~np.array(all_))


@given(masks)
def test_bounds_broadcast(mask):
    q, kv = np.arange(0, 32, 8)[:, None], np.arange(0, 48, 4)[None, :]
    some, every = (np.broadcast_to(x, (4, 12)) for x in mask.bounds(q, q + 8, kv, kv + 4))
    for i, j in np.ndindex(4, 12):
        one = mask.bounds(8 * i, 8 * i + 8, 4 * j, 4 * j + 4)
        assert (some[i, j], every[i, j]) == tuple(bool(x) for x in one)


@given(masks)
def test_visible_is_one_predicate_in_numpy_and_jax(mask):
    q, kv = jnp.arange(20)[:, None], jnp.arange(30)[None, :]
    shown = mask.visible(q, kv)
    assert shown.shape == (20, 30)
    assert shown.dtype == bool
    assert np.array_equal(shown, dense(mask, 20, 30))


@given(masks, masks)
def test_composition_is_set_algebra(a, b):
    left, right = dense(a, 50, 80), dense(b, 50, 80)
    assert np.array_equal(dense(a & b, 50, 80), left & right)
    assert np.array_equal(dense(a | b, 50, 80), left | right)
    assert np.array_equal(dense(~a, 50, 80), ~left)


@given(masks, st.integers(1, 30))
def test_shift_invariance_holds_where_it_is_claimed(mask, by):
    whole = dense(mask, 80, 80)
    if mask.shift_invariant:
        assert np.array_equal(whole[:-by, :-by], whole[by:, by:])


@pytest.mark.parametrize(
    ("mask", "claimed"),
    [
        (Full(), True),
        (Causal(3), True),
        (SlidingWindow(5), True),
        (Chunked(4), False),
        (KeyLength(5), False),
        (Causal() & ~Causal(-8), True),
        (Causal() | Full(), True),
        (Causal() & KeyLength(5), False),
        (KeyLength(5) | Causal(), False),
        (~KeyLength(5), False),
    ],
)
def test_shift_invariance_is_claimed_where_it_is_cheap_to_know(mask, claimed):
    assert mask.shift_invariant is claimed


@given(masks, st.integers(-30, 30))
def test_hiding_what_comes_after_holds_where_it_is_claimed(mask, offset):
    if mask.hides_after(offset):
        assert not (dense(mask, 60, 90) & ~np.tri(60, 90, offset, dtype=bool)).any()


def test_hiding_what_comes_after_is_claimed_for_causal_masks():
    for mask in (Causal(2), SlidingWindow(9, 1, offset=1), KeyLength(4) & Causal(2), Causal(2) & Chunked(8)):
        assert mask.hides_after(2)
        assert not mask.hides_after(1)
    assert not SlidingWindow(4, None).hides_after(100)


def test_definitions():
    assert np.array_equal(dense(Causal(), 5, 7), np.tri(5, 7, dtype=bool))
    assert np.array_equal(dense(Causal(2), 5, 7), np.tri(5, 7, 2, dtype=bool))
    assert np.array_equal(dense(KeyLength(3), 4, 7), np.broadcast_to(np.arange(7) < 3, (4, 7)))
    assert np.array_equal(dense(SlidingWindow(2), 6, 6), np.tri(6, dtype=bool) & ~np.tri(6, k=-3, dtype=bool))
    assert np.array_equal(dense(SlidingWindow(None, 1, offset=2), 5, 9), np.tri(5, 9, 3, dtype=bool))
    assert np.array_equal(dense(SlidingWindow(1, None), 5, 9), ~np.tri(5, 9, -2, dtype=bool))
    assert np.array_equal(dense(Chunked(2), 4, 4), np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool)))
    assert np.array_equal(dense(prefix_lm(2), 4, 4), np.tri(4, dtype=bool) | (np.arange(4) < 2))
    assert dense(Full(), 4, 7).all()


@given(masks)
def test_masks_are_keys_of_caches(mask):
    again = copy.deepcopy(mask)
    assert again is not mask
    assert again == mask
    assert hash(again) == hash(mask)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.anything = 1


def test_different_masks_differ():
    a, b = Causal(), KeyLength(4)
    assert len({a, b, Causal(1), Full(), And(a, b), Or(a, b), Not(a), Not(b)}) == 8


@given(masks)
def test_full_is_neutral(mask):
    assert (mask & Full()) == mask
    assert (Full() & mask) == mask


def test_masks_of_heads_compose_head_by_head():
    two = PerHead([Causal(), Chunked(8)])
    assert (two & KeyLength(5)).masks == (Causal() & KeyLength(5), Chunked(8) & KeyLength(5))
    assert (KeyLength(5) & two).masks == (KeyLength(5) & Causal(), KeyLength(5) & Chunked(8))
    assert (two | KeyLength(5)).masks == (Causal() | KeyLength(5), Chunked(8) | KeyLength(5))
    assert (KeyLength(5) | two).masks == (KeyLength(5) | Causal(), KeyLength(5) | Chunked(8))
    assert (two & ~two).masks == (Causal() & ~Causal(), Chunked(8) & ~Chunked(8))
    assert Full() & two == two & Full() == two
    assert len({two, PerHead((Causal(), Chunked(8)))}) == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PerHead([]), ValueError, "masks: got none, needs one for each query head"),
        (lambda: PerHead([Full(), 3]), TypeError, "masks: got int for head 1, needs a Mask"),
        (lambda: PerHead([PerHead([Full()])]), TypeError, "masks: got PerHead for head 0"),
        (lambda: PerHead([Full()] * 2) | PerHead([Full()] * 3), ValueError, "masks: got 2 heads and 3"),
        (lambda: PerHead([Full()]) & PerHead([Full()] * 3), ValueError, "masks: got 1 heads and 3"),
        (lambda: Causal() & 3, TypeError, "unsupported operand"),
        (lambda: Full() & 3, TypeError, "unsupported operand"),
        (lambda: PerHead([Full()]) | 3, TypeError, "unsupported operand"),
    ],
)
def test_what_composes_with_nothing_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
