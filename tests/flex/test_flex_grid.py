"""Every variant and function over shapes, and random compositions, against torch's eager mode in float64."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_attention.benchmarks.flex_accuracy import LIMIT, Shape, errors
from xla_attention.benchmarks.flex_functions import MASKS, STEPS, composed


@pytest.mark.slow
def test_grid():
    subprocess.run([Path(sys.executable).with_name("xla-attention"), "bench", "flex"], check=True)


def check_composed(steps, masks, join, shape):
    for name, error in errors(composed(tuple(steps), tuple(masks), join), shape).items():
        assert error < LIMIT, name


steps = st.lists(st.sampled_from(sorted(STEPS)), max_size=3)
masks = st.lists(st.sampled_from(sorted(MASKS)), max_size=3)
shapes = st.builds(Shape, st.integers(1, 150), st.integers(1, 150), batch=st.integers(1, 2))


@settings(max_examples=3)
@given(steps, masks, st.sampled_from(["and", "or"]), st.just(Shape(40, 50)))
def test_composed(steps, masks, join, shape):
    check_composed(steps, masks, join, shape)


@pytest.mark.slow
@settings(max_examples=60)
@given(steps, masks, st.sampled_from(["and", "or"]), shapes)
def test_composed_at_length(steps, masks, join, shape):
    check_composed(steps, masks, join, shape)
