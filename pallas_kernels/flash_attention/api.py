"""Flash attention as plain JAX functions: forward, backward, and a differentiable front."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.reference import attention_reference
from pallas_kernels.flash_attention.spec import AttentionSpec
from pallas_kernels.hardware import Hardware


def flash_forward(q, k, v, *, spec: AttentionSpec, hardware: Hardware):
    o, lse = attention_reference(*(x.astype(jnp.float32) for x in (q, k, v)), spec=spec, xp=jnp)
    return o.astype(q.dtype), lse


def flash_backward(q, k, v, o, lse, do, dlse=None, *, spec: AttentionSpec, hardware: Hardware):
    _, vjp = jax.vjp(lambda *x: flash_forward(*x, spec=spec, hardware=hardware), q, k, v)
    return vjp((do, jnp.zeros_like(lse) if dlse is None else dlse))
