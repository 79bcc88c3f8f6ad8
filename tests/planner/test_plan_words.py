"""What the compiler refuses, in words."""

import pytest

from xla_attention.planner.compile import CompileError
from xla_attention.planner.plan import OutOfMemoryError, _in_words


@pytest.mark.parametrize(
    ("message", "needed", "capacity"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 32.76G of 30.75G hbm. Exceeded",
            32.76 * 2**30,
            30.75 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=270582939648) would exceed memory (size=103079215104)",
            270582939648,
            103079215104,
        ),
    ],
)
def test_too_little_memory_is_told_in_bytes(message, needed, capacity):
    error = _in_words(CompileError(message))
    assert isinstance(error, OutOfMemoryError)
    assert (error.needed, error.capacity) == (int(needed), int(capacity))
    assert "GiB too much" in str(error)


def test_of_another_refusal_the_first_line_is_kept():
    error = _in_words(CompileError("INTERNAL: no\nand more"))
    assert not isinstance(error, OutOfMemoryError) and str(error) == "INTERNAL: no"
