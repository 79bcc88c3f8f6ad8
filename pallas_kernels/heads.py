"""Between the features of tokens and the heads of attention, with rotary positions on the way.

``[batch, seq, heads * head_dim]`` is what projections give and take, ``[batch, heads, seq, head_dim]`` what
attention does. Rotary position embedding (Su et al., 2021, arXiv:2104.09864) turns the pairs of channels
``(i, i + head_dim / 2)`` by the angle of the token's position: with ``x = (x1, x2)`` the halves of a head,

    y = (x1 cos - x2 sin, x2 cos + x1 sin) = x (cos, cos) + (x2, x1) (-sin, sin),

in float32. Its gradient is the rotation by the negative angle.

XLA for TPU reads and writes a head's channels several times for this, its halves being less than a register
wide, and once more for the change of layout. Here each block of tokens and heads is in VMEM once: the halves
are exchanged by rotating registers, and the layout changes where blocks are written.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.hardware import Hardware

LANES = 128
BLOCK_TOKENS = 512
BLOCK_BYTES = 2**20  # of one buffer, in VMEM


def heads_fit(heads: int, head_dim: int) -> bool:
    """Whether the kernels take these heads: whole registers' widths hold whole heads, and those divide."""
    return head_dim % 2 == 0 and heads % _group(head_dim) == 0


def split_heads(
    x: Float[Array, "b s f"],
    cos: Float[Array, "#b s e"] | None = None,
    sin: Float[Array, "#b s e"] | None = None,
    *,
    head_dim: int,
    hardware: Hardware,
) -> Float[Array, "b h s d"]:
    """Features as heads, rotated by an angle for each token.

    Args:
        x: ``[batch, seq, heads * head_dim]``, float32 or bfloat16.
        cos, sin: ``[1 or batch, seq, head_dim / 2]``, float32: of the angles; None leaves the heads as they
            are.
        head_dim: elements of one head.
        hardware: what to compile for.

    Returns:
        ``[batch, heads, seq, head_dim]``, in the dtype of ``x``.

    Raises:
        ValueError: heads that :func:`heads_fit` does not take, or shapes that do not fit together.
    """
    batch, seq, features = x.shape
    heads = features // head_dim
    _check("x", x.shape, features, heads, head_dim, cos, sin)
    out = jax.ShapeDtypeStruct((batch, heads, seq, head_dim), x.dtype)
    return _call(x, out, heads, head_dim, cos, sin, hardware, split=True)


def merge_heads(
    x: Float[Array, "b h s d"],
    cos: Float[Array, "#b s e"] | None = None,
    sin: Float[Array, "#b s e"] | None = None,
    *,
    hardware: Hardware,
) -> Float[Array, "b s f"]:
    """Heads as features, rotated by an angle for each token: the inverse of :func:`split_heads` by negative
    angles, and its transpose.

    Args:
        x: ``[batch, heads, seq, head_dim]``, float32 or bfloat16.
        cos, sin, hardware: as of :func:`split_heads`.

    Returns:
        ``[batch, seq, heads * head_dim]``, in the dtype of ``x``.

    Raises:
        ValueError: as of :func:`split_heads`.
    """
    batch, heads, seq, head_dim = x.shape
    _check("x", x.shape, heads * head_dim, heads, head_dim, cos, sin)
    out = jax.ShapeDtypeStruct((batch, seq, heads * head_dim), x.dtype)
    return _call(x, out, heads, head_dim, cos, sin, hardware, split=False)


def _group(head_dim: int) -> int:
    """Heads that fill whole registers' widths together."""
    return LANES // math.gcd(LANES, head_dim)


def _check(
    name: str,
    shape: tuple[int, ...],
    features: int,
    heads: int,
    head_dim: int,
    cos: Array | None,
    sin: Array | None,
) -> None:
    if not heads or features != heads * head_dim or not heads_fit(heads, head_dim):
        raise ValueError(
            f"{name}: got shape {shape} with head_dim {head_dim}, needs an even head_dim, and a multiple of "
            f"{_group(head_dim)} heads of it"
        )
    batch, seq = shape[0], shape[1] if len(shape) == 3 else shape[2]
    if (cos is None) != (sin is None):
        raise ValueError("cos, sin: got one of them, needs both or none")
    for table, x in (("cos", cos), ("sin", sin)):
        if x is not None and x.shape not in {(n, seq, head_dim // 2) for n in (1, batch)}:
            raise ValueError(
                f"{table}: got shape {x.shape}, needs [1 or {batch}, {seq}, {head_dim // 2}], as x needs it"
            )


def _call(
    x: Array,
    out: jax.ShapeDtypeStruct,
    heads: int,
    head_dim: int,
    cos: Array | None,
    sin: Array | None,
    hardware: Hardware,
    *,
    split: bool,
) -> Array:
    batch, seq = x.shape[0], x.shape[1 if split else 2]
    group = _group(head_dim)
    width = group * head_dim
    tokens = min(seq, BLOCK_TOKENS)
    most = max(BLOCK_BYTES // (tokens * width * x.dtype.itemsize), 1)
    sets = heads // group
    a_block = max(n for n in range(1, min(sets, most) + 1) if sets % n == 0)  # sets of heads

    tables, table_specs = [], []
    if cos is not None and sin is not None:
        for first, second in ((cos, cos), (-sin, sin)):
            tables.append(jnp.tile(jnp.concatenate([first, second], -1), (1, 1, group)))
        one = cos.shape[0] == 1
        spec = pl.BlockSpec((1, tokens, width), lambda b, s, h: (0 if one else b, s, 0))
        table_specs = [spec, spec]
    features = pl.BlockSpec((1, tokens, a_block * width), lambda b, s, h: (b, s, h))
    by_head = pl.BlockSpec((1, a_block * group, tokens, head_dim), lambda b, s, h: (b, h, s, 0))

    def kernel(x_ref: Any, *refs: Any) -> None:
        *angles, o_ref = refs
        tables = [ref[0] for ref in angles]
        for n in range(a_block):
            lanes = slice(n * width, (n + 1) * width)
            if split:
                y = _rotate(x_ref[0, :, lanes], tables, head_dim)
                for i in range(group):
                    o_ref[0, n * group + i] = y[:, i * head_dim : (i + 1) * head_dim]
            else:
                parts = [x_ref[0, n * group + i] for i in range(group)]
                whole = parts[0] if group == 1 else jnp.concatenate(parts, -1)
                o_ref[0, :, lanes] = _rotate(whole, tables, head_dim)

    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(batch, pl.cdiv(seq, tokens), sets // a_block),
        in_specs=[features if split else by_head, *table_specs],
        out_specs=by_head if split else features,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=hardware.interpret,
        name="split_heads" if split else "merge_heads",
    )(x, *tables)


def _rotate(x: Array, tables: list[Array], head_dim: int) -> Array:
    """``[tokens, width]``, whole heads side by side; by ``(cos, cos)`` and ``(-sin, sin)`` of each."""
    if not tables:
        return x
    cos, sin = tables
    wide = x.astype(jnp.float32)
    half, width = head_dim // 2, x.shape[1]
    exchanged = pltpu.roll(wide, half, 1)
    if width > head_dim:  # the first halves of several heads come from behind, the second from before
        first = lax.broadcasted_iota(jnp.int32, wide.shape, 1) % head_dim < half
        exchanged = jnp.where(first, pltpu.roll(wide, width - half, 1), exchanged)
    return (wide * cos + exchanged * sin).astype(x.dtype)
