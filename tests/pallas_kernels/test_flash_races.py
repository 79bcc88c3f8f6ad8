"""The kernels in the simulator of a TPU's memories with two cores, under its race detector.

It fills scratch with NaN, raises where something reads out of bounds, and spreads the ``parallel`` grid over
both cores. The kernels start no copies themselves: what could race is what the two cores share.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from attention_cases import LIMITS, Case, definition, relative
from jax._src.pallas.mosaic import interpret
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_attention import (
    BackwardBlocks,
    BlockSizes,
    ForwardBlocks,
    flash_backward,
    flash_forward,
)
from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.masks import Causal

RESIDENT = BlockSizes(
    ForwardBlocks(block_q=128, tile_q=128, block_kv=128, border=128, border_kv=128, ahead=1),
    BackwardBlocks(block_kv=128, block_q=128, memory_q=256, tile_kv=128, tile_q=128, border=128),
)
STREAMED = BlockSizes(
    dataclasses.replace(RESIDENT.forward, memory_kv=128),
    dataclasses.replace(RESIDENT.backward, memory_q=128, chunk_q=128, transposed=True),
)


@pytest.fixture
def two_cores():
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_per_device=2)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def races(capsys):
    """Whether the last kernel raced, and whether anything was said of a race since the last question."""
    return interpret.races.races_found, "RACE DETECTED" in capsys.readouterr().out


def test_a_race_is_found(two_cores, capsys):
    """Both cores write one block."""

    def kernel(x, o):
        o[...] = x[...]

    copy = pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda n: (n, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda n: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )
    jax.block_until_ready(copy(jnp.ones((16, 128))))
    assert races(capsys) == (True, True)


@pytest.mark.parametrize(
    "blocks", [RESIDENT, pytest.param(STREAMED, marks=pytest.mark.slow)], ids=["resident", "streamed"]
)
def test_the_kernels_do_not_race(blocks, two_cores, capsys):
    case = Case((1, 2, 1, 140, 150, 16), Causal(), block_sizes=blocks, with_dlse=True)
    q, k, v, do, dlse = case.inputs()
    static = {"spec": case.spec, "hardware": INTERPRETER}
    o, lse = jax.block_until_ready(jax.jit(lambda *x: flash_forward(*x, **static))(q, k, v))
    assert races(capsys) == (False, False)
    backward = jax.jit(lambda *x: flash_backward(*x, **static))
    gradients = jax.block_until_ready(backward(q, k, v, o, lse, do, dlse))
    assert races(capsys) == (False, False)
    for n, (got, want) in enumerate(zip((o, lse, *gradients), definition(case, q, k, v, do, dlse))):
        assert relative(got, want) < LIMITS["float32"][n >= 2]
