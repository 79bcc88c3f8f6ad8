"""The operators that a score_mod or mask_mod may use: ATen's names, and what they are in JAX.

A function is decomposed to core ATen operators first, so this table is what all of torch's elementwise
functions come down to. ``ELEMENTWISE`` run on tiles inside a kernel: they use only what Mosaic compiles, on
every generation. ``OUTSIDE`` run in XLA before the kernel, on values that do not depend on the score:
indexing, shapes and sums of captured tensors among them.

=============  =========================================================================================
arithmetic     add sub rsub mul div (with rounding_mode) neg abs reciprocal square pow hypot remainder
               fmod
rounding       floor ceil round trunc sign
functions      exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan tanh sinh cosh sigmoid erf atan
clipping       minimum maximum clamp clamp_min clamp_max relu
comparison     eq ne lt le gt ge isnan isinf, and where, masked_fill
logic          logical_and/or/xor/not, bitwise_and/or/xor/not, shifts
outside only   index select slice index_select view permute unsqueeze squeeze expand cat arange
               sum mean amax amin cumsum mm dot, asin acos atan2 asinh acosh atanh erfc lgamma
=============  =========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_attention.flex.expression import Node

DTYPES = {"float32": jnp.float32, "int32": jnp.int32, "bool": jnp.bool_}


def _scaled(fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda a, b, alpha=1: fn(a, b if alpha == 1 else b * alpha)


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc":
        return lax.div(a, b) if jnp.issubdtype(a.dtype, jnp.integer) else jnp.trunc(a / b)
    return a / b


def _power(a: Any, b: Any) -> Any:
    if isinstance(b, int | float) and float(b).is_integer() and abs(b) <= 16:
        return lax.integer_pow(a, int(b))
    if isinstance(b, float) and b == 0.5:
        return jnp.sqrt(a)
    return jnp.power(a, b)


@jax.custom_jvp
def _erf(x: Any) -> Any:
    """A rational function, as Mosaic has no erf: Eigen's, good to a few units of float32."""
    x = jnp.clip(x, -3.832506856900711, 3.832506856900711)
    y = x * x
    p = 0.00022905065861350646
    for c in (0.0034082910107109506, 0.050955695062380861, 0.18520832239976145, 1.128379143519084):
        p = p * y + c
    q = -1.1791602954361697e-7
    for c in (0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667, 0.11098505178285362,
              0.49746925110067538, 1.0):  # fmt: skip
        q = q * y + c
    return x * p / q


@_erf.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    return _erf(x), dx * (2 / math.sqrt(math.pi)) * jnp.exp(-x * x)


@jax.custom_jvp
def _atan(x: Any) -> Any:
    """Cephes' atanf: the argument is brought below tan(pi / 8)."""
    a = jnp.abs(x)
    far, middle = a > 2.414213562373095, a > 0.4142135623730950
    y = jnp.where(far, -1.0 / jnp.maximum(a, 1.0), jnp.where(middle, (a - 1.0) / (a + 1.0), a))
    start = jnp.where(far, math.pi / 2, jnp.where(middle, math.pi / 4, 0.0))
    z = y * y
    p = 8.05374449538e-2
    for c in (-1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1):
        p = p * z + c
    return jnp.where(x < 0, -1.0, 1.0) * (start + (p * z * y + y))


@_atan.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    return _atan(x), dx / (1 + x * x)


@jax.custom_jvp
def _expm1(x: Any) -> Any:
    """tanh(x / 2) (exp(x) + 1): nothing cancels. Beyond +-30 the exponential alone."""
    near = jnp.clip(x, -30.0, 30.0)
    return jnp.where(x > 30.0, jnp.exp(x), jnp.tanh(near / 2) * (jnp.exp(near) + 1))


@_expm1.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    return _expm1(x), dx * jnp.exp(x)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _sign(x: Any) -> Any:
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


# Arguments are cast to the result's dtype first.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": _scaled(lambda a, b: a + b),
    "sub": _scaled(lambda a, b: a - b),
    "rsub": lambda a, b, alpha=1: b - (a if alpha == 1 else a * alpha),
    "mul": lambda a, b: a * b,
    "div": _divide,
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x * x,
    "pow": _power,
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "fmod": jnp.fmod,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "trunc": jnp.trunc,
    "sign": _sign,
    "sgn": _sign,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": _expm1,
    "log": jnp.log,
    "log2": lambda x: jnp.log(x) * (1 / math.log(2)),
    "log10": lambda x: jnp.log(x) * (1 / math.log(10)),
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
    "tanh": jnp.tanh,
    "sinh": lambda x: 0.5 * (_expm1(x) - _expm1(-x)),
    "cosh": lambda x: 0.5 * (jnp.exp(x) + jnp.exp(-x)),
    "sigmoid": lambda x: 0.5 * jnp.tanh(0.5 * x) + 0.5,
    "erf": _erf,
    "hypot": lambda a, b: jnp.sqrt(a * a + b * b),
    "atan": _atan,
    "minimum": jnp.minimum,
    "maximum": jnp.maximum,
    "clamp": _clamp,
    "clamp_min": jnp.maximum,
    "clamp_max": jnp.minimum,
    "relu": lambda x: jnp.maximum(x, 0),
}


def _shift(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: fn(jnp.asarray(a, jnp.int32), b)


# Arguments are taken as they are.
PREDICATES: dict[str, Callable[..., Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "isnan": lambda x: x != x,
    "isinf": lambda x: jnp.abs(x) == jnp.inf,
    "logical_and": lambda a, b: _truth(a) & _truth(b),
    "logical_or": lambda a, b: _truth(a) | _truth(b),
    "logical_xor": lambda a, b: _truth(a) ^ _truth(b),
    "logical_not": lambda x: ~_truth(x),
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": lambda x: ~x,
    "bitwise_left_shift": _shift(jnp.left_shift),
    "bitwise_right_shift": _shift(jnp.right_shift),
    "where": lambda c, a, b: jnp.where(_truth(c), a, b),
    "masked_fill": lambda x, mask, value: jnp.where(_truth(mask), value, x),
    "cast": lambda x: x,
}


def _truth(x: Any) -> Any:
    return x if getattr(x, "dtype", None) == jnp.bool_ else jnp.asarray(x) != 0


ELEMENTWISE = ARITHMETIC | PREDICATES


def _index(x: Any, indices: tuple) -> Any:
    """Negative indices count from the end; others outside are clamped, where torch's eager mode raises."""
    at = []
    for size, i in zip(x.shape, indices):
        i = jnp.asarray(i)
        at.append(jnp.clip(jnp.where(i < 0, i + size, i), 0, size - 1))
    return x[tuple(at)]


def _select(x: Any, dim: int, index: Any) -> Any:
    size = x.shape[dim]
    return jnp.take(x, jnp.where(jnp.asarray(index) < 0, index + size, index), axis=dim, mode="clip")


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _expand(x: Any, shape: tuple, implicit: bool = False) -> Any:
    lead = len(shape) - x.ndim
    return jnp.broadcast_to(x, [x.shape[n - lead] if size == -1 else size for n, size in enumerate(shape)])


def _squeeze(x: Any, dims: Any = None) -> Any:
    if dims is None:
        return jnp.squeeze(x)
    dims = dims if isinstance(dims, tuple) else (dims,)
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


def _reduce(fn: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
        return fn(x, axis=dims if dims not in ((), None) else None, keepdims=keepdim)

    return reduced


OUTSIDE: dict[str, Callable[..., Any]] = {
    "index": _index,
    "select": _select,
    "slice": _slice,
    "index_select": lambda x, dim, i: jnp.take(x, i, axis=dim, mode="clip"),
    "view": lambda x, shape: x.reshape(shape),
    "_unsafe_view": lambda x, shape: x.reshape(shape),
    "permute": jnp.transpose,
    "unsqueeze": jnp.expand_dims,
    "squeeze": _squeeze,
    "expand": _expand,
    "cat": lambda xs, dim=0: jnp.concatenate(xs, dim),
    "arange": lambda start, end, step=1: jnp.arange(start, end, step),
    "filled": lambda shape, value: jnp.full(shape, value),
    "sum": _reduce(jnp.sum),
    "mean": _reduce(jnp.mean),
    "amax": _reduce(jnp.max),
    "amin": _reduce(jnp.min),
    "cumsum": jnp.cumsum,
    "mm": jnp.matmul,
    "dot": jnp.dot,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan2": jnp.arctan2,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "erfc": jax.scipy.special.erfc,
    "lgamma": jax.scipy.special.gammaln,
}

OPERATORS = ELEMENTWISE | OUTSIDE


def apply(n: Node, args: tuple) -> Any:
    """The value of a node from its arguments' values, in its dtype."""
    dtype = DTYPES[n.dtype]
    if n.op in ARITHMETIC:
        args = tuple(x.astype(dtype) if hasattr(x, "astype") and x.dtype != dtype else x for x in args)
        if not any(hasattr(x, "astype") for x in args):
            args = tuple(None if x is None else jnp.asarray(x, dtype) for x in args)
    result = jnp.asarray(OPERATORS[n.op](*args, **dict(n.kwargs)))
    return result if result.dtype == dtype else result.astype(dtype)
