"""What of an attention problem is useful work, counted by looking at every pair."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.masks import Causal, Chunked, Full, SlidingWindow
from xla_attention.planner.attention_case import AttentionCase, parse_mask

CASE = AttentionCase(2, 4, 2, 50, 16, "bfloat16", Causal(), "forward")


@pytest.mark.parametrize("name", ["causal", "full", "window:1", "window:13", "window:400"])
def test_visible_pairs_are_those_of_the_mask(name):
    case = dataclasses.replace(CASE, mask=parse_mask(name))
    positions = np.arange(50)
    assert case.visible_pairs == case.mask.visible(positions[:, None], positions[None]).sum()


def test_useful_flops_are_those_of_the_products():
    pairs = 50 * 51 // 2
    assert CASE.useful_flops == 2 * 4 * 2 * (2 * pairs * 16)
    backward = dataclasses.replace(CASE, direction="backward")
    assert backward.useful_flops == 2 * 4 * 5 * (2 * pairs * 16)


def test_masks_by_name():
    assert parse_mask("causal") == Causal()
    assert parse_mask("full") == Full()
    assert parse_mask("window:1024") == SlidingWindow(left=1023)


@pytest.mark.parametrize("name", ["window", "window:0", "window:-3", "prefix", ""])
def test_unknown_masks_are_refused(name):
    with pytest.raises(ValueError, match="mask: got .*allowed are causal, full and window:N"):
        parse_mask(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads: got 0"),
        ({"kv_heads": 3}, "kv_heads: got 3, must divide heads=4"),
        ({"dtype": "float16"}, "dtype: got 'float16', allowed are float32, bfloat16"),
        ({"direction": "sideways"}, "pass: got 'sideways', allowed are forward, backward"),
        ({"mask": Chunked(8)}, "depends on more than the distance"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CASE, **change)
