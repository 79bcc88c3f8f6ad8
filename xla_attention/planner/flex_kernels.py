"""The kernels that functions of FlexAttention become, to compile or count."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.flash_attention import AttentionSpec
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
    """As :func:`flash_kernels`, of the functions that ``make`` returns for these sizes."""
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
    return flash_kernels(
        q_shape,
        kv_shape,
        dtype=dtype,
        spec=spec,
        hardware=hardware,
        reads=[jax.ShapeDtypeStruct(tuple(x.shape), DTYPES[dtype_of(x.dtype)]) for x in captured],
        operands=lambda *arrays: operands(plan.names(), plan.arrays(arrays)),
    )
