"""Attention of a sharded sequence is attention: ring and exchange of heads, forward and all gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from context_cases import CASES, REFUSED

from pallas_kernels.context_parallel import Context, ring
from pallas_kernels.masks import Causal, Full, SlidingWindow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results():
    """In a process of its own, for its number of devices."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # Small programs that run once: LLVM's optimizations would take most of the time.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, HERE / "context_cases.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name, results):
    # Float32 against float64, relative to the largest element; the figure of the unsharded kernels.
    assert max(results["errors"][name]) < 1e-5


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_by_name(words, results):
    assert words in results["refused"][words]


def test_bfloat16_is_rounded_once(results):
    """Steps are merged in float32: the error is that of one rounding at the end, as on one device."""
    sharded, alone = results["bfloat16"]
    assert sharded < 1.1 * alone


def pairs(part):
    """Of queries and keys that a part computes; a causal square is half."""
    if part is None:
        return 0
    n = (part.queries.stop - part.queries.start) * (part.keys.stop - part.keys.start)
    return n if part.mask == Full() else n / 2


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_a_causal_zigzag_is_the_same_work_in_every_step_on_every_shard(shards):
    length = 64
    steps = ring.plan(Causal(), Context("x", shards, layout="zigzag"), length, length)
    assert len(steps) == shards
    work = {
        pairs(step.before if s <= shard else step.behind)
        for s, step in enumerate(steps)
        for shard in range(shards)
    }
    assert work == {length**2 / 2}


@pytest.mark.parametrize("window, steps", [(1, 1), (2, 2), (64, 2), (66, 3), (1000, 8)])
def test_a_window_takes_no_more_steps_than_it_spans(window, steps):
    mask = SlidingWindow(window - 1)
    assert len(ring.plan(mask, Context("x", 8, layout="contiguous"), 64, 64)) == steps
