"""The kernels that functions of FlexAttention become, to compile or count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.flash_attention import AttentionSpec, Operands, operand_gradients
from pallas_kernels.hardware import Hardware
from xla_attention.flex.hoist import Sizes
from xla_attention.flex.operators import DTYPES
from xla_attention.flex.plan import make_plan, operands
from xla_attention.flex.trace import dtype_of, trace
from xla_attention.flex.variants import Problem, Variant
from xla_attention.planner.kernels import Kernel, flash_kernels


def flex_kernels(
    make: Callable[[Problem], Variant],
    q_shape: tuple[int, int, int, int],
    kv_shape: tuple[int, int, int, int],
    *,
    dtype: str,
    hardware: Hardware,
) -> list[Kernel]:
    """As :func:`flash_kernels`, of the functions that ``make`` returns for these sizes.

    Where they capture what is learned, a third computes its gradient, in plain XLA.
    """
    batch, heads, q_len, head_dim = q_shape
    variant = make(Problem(batch, heads, q_len, kv_shape[2]))
    score, mask = (
        fn and trace(fn, kind)
        for fn, kind in ((variant.score_mod, "score_mod"), (variant.mask_mod, "mask_mod"))
    )
    captured = [x for traced in (score, mask) if traced for x in traced.captured]
    trained = frozenset(n for n, x in enumerate(captured) if x.requires_grad)
    plan = make_plan(score, mask, Sizes(batch, heads, q_len, kv_shape[2]), trained)
    spec = AttentionSpec(scale=head_dim**-0.5, mask=plan.mask, softcap=plan.softcap, score=plan.score)
    reads = [jax.ShapeDtypeStruct(tuple(x.shape), DTYPES[dtype_of(x.dtype)]) for x in captured]

    def read(*arrays: Array) -> Operands:
        return operands(plan.names(), plan.arrays(arrays))

    kernels = flash_kernels(
        q_shape, kv_shape, dtype=dtype, spec=spec, hardware=hardware, reads=reads, operands=read
    )
    if not trained:
        return kernels

    def of_learned(*arrays: Array) -> list[Array]:
        learned = [arrays[6 + n] for n in sorted(trained)]

        def scores(*learned: Array) -> list[Array]:
            everything = dict(enumerate(arrays[6:])) | dict(zip(sorted(trained), learned))
            return [x for x in read(*everything.values()).score if jnp.issubdtype(x.dtype, jnp.floating)]

        *_, gradients = operand_gradients(*arrays[:6], None, read(*arrays[6:]), spec=spec)
        return jax.vjp(scores, *learned)[1]([x for x in gradients if x is not None])

    backward = kernels[-1]
    return [*kernels, dataclasses.replace(backward, name="gradient of what is learned", fn=of_learned)]
