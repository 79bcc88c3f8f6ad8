"""One attention, run by the kernels in the interpreter and by the definition in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import (
    AttentionSpec,
    BlockSizes,
    attention_reference,
    flash_backward,
    flash_forward,
)
from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.masks import Full, Mask

# Compiling is most of a test's time, and these programs run for milliseconds.
QUICK = {"xla_backend_optimization_level": 0}

# Of the forward pass, and of the backward. float32 rounds at 6e-8; sums of hundreds of terms, of mixed sign
# and partly cancelling in the gradients, lose a decimal: these are the limits the project holds itself to.
# bfloat16 rounds at 2^-9, results and probabilities both; in the gradients two rounded factors meet.
LIMITS = {"float32": (2e-6, 1e-5), "bfloat16": (2**-7, 2**-6)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, in the order batch, heads, key heads, queries, keys, head dim; and what attention."""

    shape: tuple[int, int, int, int, int, int]
    mask: Mask = Full()
    softcap: float | None = None
    query_offset: int = 0
    block_sizes: BlockSizes | None = None
    dtype: str = "float32"
    scale: float | None = None
    with_dlse: bool = False

    def __str__(self):
        changed = (f for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default)
        return " ".join([str(self.shape), *(f"{f.name}={getattr(self, f.name)}" for f in changed)])

    @property
    def spec(self):
        scale = self.shape[-1] ** -0.5 if self.scale is None else self.scale
        return AttentionSpec(scale, self.mask, self.softcap, self.query_offset, self.block_sizes)

    def inputs(self, seed=0):
        """q, k, v, do and dlse, normal."""
        batch, heads, kv_heads, q_len, kv_len, dim = self.shape
        rng = np.random.default_rng(seed)
        keys, queries = (batch, kv_heads, kv_len, dim), (batch, heads, q_len, dim)
        normal = [rng.standard_normal(shape) for shape in (queries, keys, keys, queries)]
        dlse = jnp.asarray(rng.standard_normal(queries[:3]), jnp.float32)
        return *(jnp.asarray(x, self.dtype) for x in normal), dlse


def compiled(case, hardware=INTERPRETER):
    """A compiled function of q, k, v, do and dlse: the results of both passes."""

    def both(q, k, v, do, dlse):
        static = {"spec": case.spec, "hardware": hardware}
        o, lse = flash_forward(q, k, v, **static)
        return o, lse, *flash_backward(q, k, v, o, lse, do, dlse if case.with_dlse else None, **static)

    return jax.jit(both, compiler_options=QUICK)


def check(case):
    """Runs both passes and holds them to the limits of their dtype; returns o, lse, dq, dk and dv."""
    inputs = case.inputs()
    got, want = compiled(case)(*inputs), definition(case, *inputs)
    limits = dict(zip(("o", "dq", "dk", "dv"), (LIMITS[case.dtype][0], *[LIMITS[case.dtype][1]] * 3)))
    # Where the MXU sums probabilities, it sums them as rounded: off by a factor of at most 1 + 2^-9.
    rounded = case.block_sizes and case.block_sizes.forward.mxu_row_sums and case.dtype == "bfloat16"
    limits["lse"] = 2**-9 if rounded else LIMITS["float32"][0]
    for name, g, w in zip(("o", "lse", "dq", "dk", "dv"), got, want):
        assert g.dtype == ("float32" if name == "lse" else case.dtype)
        assert relative(g, w) < limits[name], name
    return got


def definition(case, q, k, v, do, dlse):
    """o, lse, dq, dk and dv in float64, written out."""
    q, k, v, do, dlse = (np.asarray(x, np.float64) for x in (q, k, v, do, dlse))
    spec, group = case.spec, q.shape[1] // k.shape[1]
    o, lse = attention_reference(q, k, v, spec=spec, xp=np)
    repeated_k, repeated_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    s = spec.scale * q @ repeated_k.mT
    slope = 1.0
    if spec.softcap is not None:
        s = spec.softcap * np.tanh(s / spec.softcap)
        slope = 1 - (s / spec.softcap) ** 2
    shown = spec.mask.visible(np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :])
    p = np.exp(np.where(shown, s - np.where(np.isneginf(lse), 0, lse)[..., None], -np.inf))
    delta = np.sum(o * do, axis=-1) - (dlse if case.with_dlse else 0)
    ds = spec.scale * slope * p * (do @ repeated_v.mT - delta[..., None])
    of_group = (k.shape[0], k.shape[1], group, *k.shape[2:])
    dk = (ds.mT @ q).reshape(of_group).sum(axis=2)
    dv = (p.mT @ do).reshape(*of_group[:-1], v.shape[-1]).sum(axis=2)
    return o, lse, ds @ repeated_k, dk, dv


def relative(got, want):
    """Largest error over the largest element; infinities and NaN must be where they are wanted."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite])
    assert np.isfinite(got[finite]).all()
    error = np.abs(got[finite] - want[finite]).max(initial=0.0)
    return error / np.abs(want[finite]).max() if error else 0.0
