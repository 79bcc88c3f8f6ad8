"""The paged kernel in the simulator of a TPU's memories with two cores, under its race detector.

The kernel starts its own copies, into a ring of buffers that runs on across sequences: a buffer that is
filled again too early, or read before its pages have arrived, is a race. Scratch is NaN there, and a read
out of bounds raises.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic import interpret
from jax.experimental.pallas import tpu as pltpu
from paged_cases import Case, relative

from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.paged_attention import ragged_paged_attention, update_kv_pages

TWO_CORES = dataclasses.replace(INTERPRETER, cores=2)


@pytest.fixture
def two_cores():
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_per_device=2)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def test_the_ring_of_pages_does_not_race(two_cores):
    case = Case(((1, 33), (3, 20), (1, 48), (1, 0)), page_size=8, pages_per_seq=6, block_kv=16, behind=1)
    attend = functools.partial(ragged_paged_attention, spec=case.spec, hardware=TWO_CORES)
    got = jax.block_until_ready(jax.jit(attend)(*case.inputs()))
    assert not interpret.races.races_found
    assert relative(got, case.expected()) < 2e-6  # float32 in another order


def test_update_does_not_race(two_cores):
    pages, new = np.zeros((4, 8, 32), np.float32), np.ones((6, 32), np.float32)
    slots = np.array([9, 3, -1, 9, 32, 31], np.int32)
    update = jax.jit(functools.partial(update_kv_pages, hardware=INTERPRETER))
    got = np.asarray(jax.block_until_ready(update(pages, new, slots))).reshape(32, 32)
    assert not interpret.races.races_found
    assert [n for n in range(32) if got[n].any()] == [3, 9, 31]
