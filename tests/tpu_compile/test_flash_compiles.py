"""The flash kernels compile for every TPU generation, both ways, in memory linear in the sequence."""

import itertools
import math

import jax
import pytest
from typer.testing import CliRunner

from pallas_kernels.flash_attention import AttentionSpec
from pallas_kernels.masks import Causal
from xla_attention.bridge import lower
from xla_attention.planner.compile import compile_for_tpu
from xla_attention.planner.kernels import flash_kernels
from xla_attention.planner.topology import parse_topology

pytestmark = pytest.mark.tpu_compile
HEADS, KV_HEADS = 8, 2


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("seq_len", "head_dim"),
    [
        (1024, 128),
        *(pytest.param(s, d, marks=pytest.mark.slow) for s, d in itertools.product((4096, 32768), (64, 128))),
    ],
)
def test_forward_and_backward(name, seq_len, head_dim):
    topology = parse_topology(name)
    kernels = flash_kernels(
        (1, HEADS, seq_len, head_dim),
        (1, KV_HEADS, seq_len, head_dim),
        dtype="bfloat16",
        spec=AttentionSpec(scale=head_dim**-0.5, mask=Causal()),
        hardware=topology.hardware,
    )
    for kernel in kernels:
        assert "tpu_custom_call" in lower(kernel.fn, kernel.avals, "tpu").mlir_module()
        compiled = compile_for_tpu(kernel.fn, kernel.avals, topology)
        arguments = sum(math.prod(a.shape) * a.dtype.itemsize for a in kernel.avals)
        # Copies of arguments and results, a head_dim of 64 padded to 128 lanes, come to less than five times
        # the arguments; one bfloat16 matrix of logits would be 9 to 145 times as large from 4096 on.
        assert arguments <= compiled.argument_bytes < 2 * arguments
        if seq_len > 1024:
            assert compiled.temp_bytes < 8 * arguments


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("seq_len", "head_dim", "dtype"), [(256, 64, "float32"), (1024, 128, "bfloat16")])
def test_packed_documents(name, seq_len, head_dim, dtype):
    """The kernels of `data.mask_documents`, with segment ids of queries and keys."""
    topology = parse_topology(name)
    ids = jax.ShapeDtypeStruct((1, seq_len), "int32")
    kernels = flash_kernels(
        (1, HEADS, seq_len, head_dim),
        (1, KV_HEADS, seq_len, head_dim),
        dtype=dtype,
        spec=AttentionSpec(scale=head_dim**-0.5, mask=Causal()),
        hardware=topology.hardware,
        reads=(ids, ids),
    )
    for kernel in kernels:
        assert [a.dtype for a in kernel.avals[-2:]] == ["int32", "int32"]
        compile_for_tpu(kernel.fn, kernel.avals, topology)


@pytest.mark.parametrize(
    ("seq_len", "head_dim", "kv_heads", "dtype"),
    [
        (1024, 128, 8, "float32"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product((1024, 4096), (64, 128, 256), (1, 2, 8), ("float32",))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product((1024, 8192), (64, 128, 256), (1, 8), ("bfloat16",))
        ),
    ],
)
def test_the_smallest_memory(seq_len, head_dim, kv_heads, dtype):
    """v4 has 16 MiB of VMEM, up to 5 of them spilled registers in float32: the choice leaves room."""
    topology = parse_topology("v4:2x2x1")
    for kernel in flash_kernels(
        (1, HEADS, seq_len, head_dim),
        (1, kv_heads, seq_len, head_dim),
        dtype=dtype,
        spec=AttentionSpec(scale=head_dim**-0.5, mask=Causal()),
        hardware=topology.hardware,
    ):
        compile_for_tpu(kernel.fn, kernel.avals, topology)


def test_command_prints_a_row_for_each_kernel():
    from xla_attention.cli import app

    config = ["configs/train/demo.yaml", "batch_size=1", "seq_len=256"]
    result = CliRunner().invoke(app, ["compile", *config, "--topology", "v5e-4"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "float32 kernels, compiled for one chip of v5e:2x2" in result.output
    assert "q 1x4x256x64" in result.output
    for kernel in ("flash forward", "flash backward"):
        (row,) = [line for line in result.output.splitlines() if kernel in line]
        assert row.count("MiB") == 3


def test_command_says_which_kernel_does_not_compile(monkeypatch):
    from xla_attention.cli import app

    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
    result = CliRunner().invoke(app, ["compile", "configs/train/demo.yaml", "batch_size=1", "seq_len=256"])
    assert result.exit_code == 1
    assert "error: flash forward, q 1x4x256x64" in result.output
    assert "no_such_flag" in result.output


def test_command_refuses_an_unknown_slice():
    from xla_attention.cli import app

    result = CliRunner().invoke(app, ["compile", "configs/train/demo.yaml", "--topology", "v9-4"])
    assert result.exit_code == 1
    assert "topology: got 'v9-4', allowed are slices of v4" in result.output
