"""Hypothesis strategies: masks that are small enough to write out in full."""

from hypothesis import strategies as st

from pallas_kernels.masks import Causal, Chunked, Full, KeyLength, Not, Shifted, SlidingWindow

_side = st.one_of(st.none(), st.integers(-10, 40))
leaves = st.one_of(
    st.just(Full()),
    st.builds(Causal, st.integers(-40, 40)),
    st.builds(SlidingWindow, _side, _side, st.integers(-20, 20)),
    st.builds(Chunked, st.integers(1, 50)),
    st.builds(KeyLength, st.integers(0, 72)),
)


def _compose(masks):
    pairs = st.tuples(masks, masks)
    both, either = pairs.map(lambda p: p[0] & p[1]), pairs.map(lambda p: p[0] | p[1])
    return st.one_of(both, either, masks.map(Not), st.builds(Shifted, masks, st.integers(-20, 20)))


masks = st.recursive(leaves, _compose, max_leaves=4)
