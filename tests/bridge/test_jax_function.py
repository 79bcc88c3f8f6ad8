"""A JAX function in the torch_xla graph: right results, lowered once, never a stale computation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

from xla_attention.bridge import JaxFunction, intern_static, lower, static_of, to_hlo


@pytest.fixture
def lowered():
    """Arguments of every call that JAX traced."""
    return []


@pytest.fixture
def affine(lowered):
    """``sin(x) * scale + shift`` by a Pallas kernel, and ``x``'s sum over rows; ``shift`` may be None."""

    def kernel(x_ref, o_ref, *, scale):
        o_ref[...] = x_ref[...] * scale

    def fn(x, shift=None, *, scale, hardware):
        lowered.append((x.shape, x.dtype, shift is not None, scale))
        scaled = pl.pallas_call(
            functools.partial(kernel, scale=scale),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=hardware.interpret,
        )(jnp.sin(x))
        return scaled if shift is None else scaled + shift, x.sum(axis=0)

    return JaxFunction(fn, "affine")


def test_result_equals_torch(affine, first_device):
    x = torch.randn(8, 128)
    y, total = affine(x.to(first_device), x.to(first_device), scale=3.0)
    # float32 sine by two libraries: a few units in the last place of values up to 7.
    torch.testing.assert_close(y.cpu(), x.sin() * 3 + x, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(total.cpu(), x.sum(0), rtol=1e-5, atol=1e-5)


def test_none_stays_none(affine, first_device):
    x = torch.randn(4, 128)
    y, _ = affine(x.to(first_device), None, scale=2.0)
    torch.testing.assert_close(y.cpu(), x.sin() * 2, rtol=1e-5, atol=2e-6)


def test_a_thousand_calls_lower_once(affine, lowered, first_device):
    x = torch.randn(4, 128, device=first_device)
    for _ in range(1000):
        affine(x, scale=2.0)
    assert len(lowered) == 1


def test_every_part_of_the_signature_lowers_anew(affine, lowered, first_device):
    x = torch.randn(4, 128, device=first_device)
    calls = [
        ((x,), 2.0),
        ((x,), 3.0),
        ((x[:2],), 2.0),
        ((x.bfloat16(),), 2.0),
        ((x, x), 2.0),
        ((x, x[:1]), 2.0),
    ]
    for _ in range(2):
        results = [affine(*tensors, scale=scale)[0].float().cpu() for tensors, scale in calls]
    assert len(lowered) == len(calls)
    base = x.sin().cpu()
    expected = [base * 2, base * 3, base[:2] * 2, base * 2, base * 2 + x.cpu(), base * 2 + x[:1].cpu()]
    for got, want in zip(results, expected):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)  # one of them is bfloat16


def test_empty_tensors_pass(first_device):
    double = JaxFunction(lambda x, *, hardware: x * 2, "double")
    (y,) = double(torch.empty(0, 4, device=first_device))
    assert y.cpu().shape == (0, 4)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.uint8, torch.bool]
)
def test_dtypes_cross_unchanged(dtype, first_device):
    flip = JaxFunction(lambda x, *, hardware: jnp.flip(x), "flip")
    x = torch.tensor([1, 0, 3, 2]).to(dtype)
    (y,) = flip(x.to(first_device))
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), x.flip(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16, torch.complex64])
def test_other_dtypes_are_refused_by_name(affine, dtype, first_device):
    with pytest.raises(TypeError, match=f"argument 0: got {dtype}.*bfloat16.*convert"):
        affine(torch.ones(4, 128, dtype=dtype, device=first_device), scale=2.0)


def test_callers_jax_configuration_neither_matters_nor_changes(affine, first_device):
    settings = {"jax_enable_x64": True, "jax_use_shardy_partitioner": True}
    before = {name: getattr(jax.config, name) for name in settings}
    x = torch.randn(3, 128)
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        y, _ = affine(x.to(first_device), scale=2.0)
        torch.testing.assert_close(y.cpu(), x.sin() * 2, rtol=1e-5, atol=2e-6)
        assert {name: getattr(jax.config, name) for name in settings} == settings
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_lowers_for_a_tpu_that_is_not_there():
    def double(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x) + 1

    exported = lower(double, [jax.ShapeDtypeStruct((8, 128), np.float32)], "tpu")
    assert exported.mlir_module().count("tpu_custom_call") == 1
    assert b"tpu_custom_call" in to_hlo(exported)


def test_unused_arguments_stay_in_the_signature(first_device):
    second = JaxFunction(lambda x, y, *, hardware: y + 1, "second")
    x, y = torch.zeros(2, device=first_device), torch.ones(3, device=first_device)
    assert second(x, y)[0].cpu().tolist() == [2, 2, 2]


def test_interned_values_come_back():
    assert intern_static(("a", 1.5)) == intern_static(("a", 1.5))
    assert static_of(intern_static(("a", 1.5))) == ("a", 1.5)
    assert intern_static(1) != intern_static(True)
