"""FLOPs and bytes of known operations, against counts by hand and by XLA's own cost analysis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_attention.planner.accounting.work import bytes_accessed, matmul_flops
from xla_attention.planner.cycles.hlo import parse_hlo, shape_bytes


def flops_of(text):
    module = parse_hlo(text)
    entry = module.entry
    return sum(matmul_flops(module, entry, i) for i in entry.instructions.values())


def convolution(shapes, attributes):
    lhs, rhs, out = shapes
    return f"""HloModule m
ENTRY %main (a: {lhs}, b: {rhs}) -> {out} {{
  %a = {lhs}{{1,0}} parameter(0)
  %b = {rhs}{{1,0}} parameter(1)
  ROOT %c = {out}{{1,0}} convolution(%a, %b), {attributes}
}}
"""


@pytest.mark.parametrize(
    ("shapes", "attributes", "expected"),
    [
        # [128, 64] x [64, 32], as a TPU has it
        (("bf16[128,64]", "bf16[64,32]", "f32[128,32]"), "dim_labels=bf_io->bf", 2 * 128 * 64 * 32),
        # ... with the second operand transposed
        (("bf16[128,64]", "bf16[32,64]", "f32[128,32]"), "dim_labels=bf_oi->bf", 2 * 128 * 64 * 32),
        # [8, 1024, 64] x [64, 32]: rows are a spatial dimension, over which a window of one goes
        (
            ("bf16[8,1024,64]", "bf16[1,64,32]", "f32[8,1024,32]"),
            "window={size=1}, dim_labels=b0f_0io->b0f",
            2 * 8 * 1024 * 64 * 32,
        ),
        # two spatial dimensions contracted: a window as large as they are, at one place
        (
            ("bf16[4,16,64]", "bf16[4,16,32]", "f32[1,64,32]"),
            "window={size=4}, dim_labels=0fb_0io->0bf",
            2 * 4 * 16 * 64 * 32,
        ),
        # 16 batches as a dilated window, of whose 16 x 16 pairs of batches 16 are no holes
        (
            ("bf16[16,128,64]", "bf16[16,64,32]", "f32[16,128,32]"),
            "window={size=16 stride=15 pad=0_0 lhs_dilate=16}, dim_labels=0bf_0io->0bf",
            2 * 16 * 128 * 64 * 32,
        ),
        # padding meets nothing: a window of 3 over 8, of whose 24 taps 2 lie outside
        (
            ("f32[2,8,5]", "f32[3,5,7]", "f32[2,8,7]"),
            "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            2 * 2 * 5 * 7 * 22,
        ),
    ],
)
def test_products_of_a_convolution(shapes, attributes, expected):
    assert flops_of(convolution(shapes, attributes)) == expected


@pytest.mark.parametrize("shapes", [((64, 32), (32, 16)), ((4, 64, 32), (4, 32, 16)), ((8, 3), (3, 5))])
def test_products_of_jax_programs_are_those_of_xlas_cost_analysis(shapes):
    """A plain product, a batched one, and one beside elementwise work that is not counted."""
    arrays = [jnp.ones(shape) for shape in shapes]
    compiled = jax.jit(lambda a, b: jnp.matmul(a, b)).lower(*arrays).compile()
    expected = 2 * np.prod(jnp.matmul(*arrays).shape) * shapes[0][-1]
    assert flops_of(compiled.as_text()) == expected == compiled.cost_analysis()["flops"]


def test_products_inside_a_fusion_count_once():
    text = """HloModule m
%fused (p0: f32[8,4], p1: f32[4,2]) -> f32[8,2] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,2]{1,0} parameter(1)
  %d = f32[8,2]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %n = f32[8,2]{1,0} negate(%d)
}
ENTRY %main (a: f32[8,4], b: f32[4,2]) -> f32[8,2] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,2]{1,0} parameter(1)
  ROOT %f = f32[8,2]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
}
"""
    module = parse_hlo(text)
    fusion = module.entry.root
    assert matmul_flops(module, module.entry, fusion) == 2 * 8 * 4 * 2
    assert bytes_accessed(module.entry, fusion) == 4 * (8 * 4 + 4 * 2 + 8 * 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[8,4]{1,0:T(8,128)}", 128),
        ("bf16[3,5]{1,0:T(8,128)(2,1)S(3)}", 30),
        ("(f32[2], /*index=1*/u8[3]{0}, pred[])", 12),
        ("f8e4m3fn[7]{0}", 7),
        ("s4[6]{0}", 3),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, expected):
    assert shape_bytes(shape) == expected


def test_a_slice_moves_only_its_part():
    text = """HloModule m
ENTRY %main (a: f32[100,8], i: s32[], u: f32[1,8]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,8]{1,0} parameter(2)
  %s = f32[1,8]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %w = f32[100,8]{1,0} dynamic-update-slice(%a, %u, %i, %i)
}
"""
    entry = parse_hlo(text).entry
    assert [bytes_accessed(entry, entry.instructions[name]) for name in "sw"] == [64, 64]
