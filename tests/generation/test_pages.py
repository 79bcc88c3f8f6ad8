import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_attention.generation.pages import PagePool


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_no_page_is_lost_or_handed_out_twice(num_pages, actions):
    """Against the plain definition: a list of who holds what."""
    pool, held = PagePool(num_pages), []
    for allocate, number in actions:
        in_use = [page for pages in held for page in pages]
        if allocate:
            pages = pool.allocate(number)
            assert (pages is None) == (number > num_pages - len(in_use))
            if pages is not None:
                assert len(pages) == number
                held.append(pages)
        elif held:
            pool.free(held.pop(number % len(held)))
        in_use = [page for pages in held for page in pages]
        assert len(set(in_use)) == len(in_use) == pool.allocated - pool.freed
        assert set(in_use) <= set(range(num_pages))
        assert pool.available == num_pages - len(in_use)
    for pages in held:
        pool.free(pages)
    assert pool.allocated == pool.freed
    assert sorted(pool.allocate(num_pages)) == list(range(num_pages))


def test_mistakes_change_nothing():
    pool = PagePool(4)
    first, second = pool.allocate(2)
    for wrong in ([3], [first, first], [second, 9]):
        with pytest.raises(ValueError, match=f"pages: {wrong[-1]} is not handed out"):
            pool.free(wrong)
    assert pool.available == 2 and pool.freed == 0
    with pytest.raises(ValueError, match="count: got -1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="pages: got 0"):
        PagePool(0)
