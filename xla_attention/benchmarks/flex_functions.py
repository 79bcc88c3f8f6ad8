"""Functions for FlexAttention beyond the variants: each is translated in a way of its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_attention.flex.variants import Problem, Variant

Make = Callable[[Problem], Variant]


def _learned(p: Problem, *shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * len(shape)))
    return x.to(p.device, p.dtype).requires_grad_()


def _data(p: Problem, *shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(p.device)


# Steps: ``step(problem) -> (f(score, b, h, q, kv), learned tensors)``.


def _elementwise(fn: Callable[[Tensor], Tensor]) -> Callable:
    return lambda p: ((lambda s, b, h, q, kv: fn(s)), ())


def _indexed(fn: Callable[..., Tensor]) -> Callable:
    return lambda p: (fn, ())


def _table_of_distance(p: Problem) -> tuple:
    t = _learned(p, p.heads, p.q_len + p.kv_len)
    return (lambda s, b, h, q, kv: s + t[h, q - kv + p.kv_len]), (t,)


def _table_of_far_distance(p: Problem) -> tuple:
    t = _learned(p, 33)
    return (lambda s, b, h, q, kv: s + t[((q - kv) // 4).clamp(-16, 16) + 16]), (t,)


def _slope(p: Problem) -> tuple:
    t = _learned(p, p.heads)
    return (lambda s, b, h, q, kv: s - t[h].abs() * 0.1 * (q - kv).abs()), (t,)


def _slope_of_batch(p: Problem) -> tuple:
    t = _learned(p, p.batch, p.heads)
    return (lambda s, b, h, q, kv: s * torch.sigmoid(t[b, h])), (t,)


def _of_queries(p: Problem) -> tuple:
    t = _learned(p, p.batch, p.q_len)
    return (lambda s, b, h, q, kv: s * torch.tanh(t[b, q])), (t,)


def _of_keys(p: Problem) -> tuple:
    t = _learned(p, p.heads, p.kv_len)
    return (lambda s, b, h, q, kv: s + F.softplus(t[h, kv])), (t,)


def _outer(p: Problem) -> tuple:
    t, u = _learned(p, p.q_len), _learned(p, p.kv_len, seed=1)
    return (lambda s, b, h, q, kv: s + t[q] * u[kv]), (t, u)


def _matrix(p: Problem) -> tuple:
    t = _learned(p, p.batch, p.heads, p.q_len, p.kv_len)
    return (lambda s, b, h, q, kv: s + t[b, h, q, kv]), (t,)


def _matrix_of_all(p: Problem) -> tuple:
    t = _learned(p, p.kv_len, p.q_len)
    return (lambda s, b, h, q, kv: s * torch.sigmoid(t[kv, q])), (t,)


def _gathered(p: Problem) -> tuple:
    t, ids = _learned(p, 7, 5), _data(p, p.q_len + p.kv_len, below=5)
    return (lambda s, b, h, q, kv: s + t[ids[q], ids[kv]]), (t,)


def _indirect(p: Problem) -> tuple:
    t, ids = _learned(p, p.heads, 11), _data(p, p.kv_len, below=11)
    return (lambda s, b, h, q, kv: s + t[h, ids[kv]]), (t,)


def _scalar(p: Problem) -> tuple:
    t = _learned(p)
    return (lambda s, b, h, q, kv: s * t.exp()), (t,)


STEPS: dict[str, Callable] = {
    "negated": _elementwise(lambda s: -s),
    "tanh": _elementwise(torch.tanh),
    "softcap 3": _elementwise(lambda s: 3 * torch.tanh(s / 3)),
    "sigmoid": _elementwise(torch.sigmoid),
    "relu": _elementwise(lambda s: F.relu(s) - 0.1 * F.relu(-s)),
    "gelu": _elementwise(F.gelu),
    "silu": _elementwise(F.silu),
    "softplus": _elementwise(F.softplus),
    "elu": _elementwise(F.elu),
    "leaky relu": _elementwise(lambda s: F.leaky_relu(s, 0.2)),
    "hardtanh": _elementwise(F.hardtanh),
    "square": _elementwise(lambda s: s * s * 0.2),
    "cube": _elementwise(lambda s: 0.1 * s**3),
    "power": _elementwise(lambda s: (s.abs() + 0.5) ** 1.5),
    "root": _elementwise(lambda s: torch.sqrt(s * s + 1)),
    "rsqrt": _elementwise(lambda s: s * torch.rsqrt(s * s + 2)),
    "reciprocal": _elementwise(lambda s: 1 / (1 + s.abs())),
    "exp": _elementwise(lambda s: torch.exp(-s.abs())),
    "expm1": _elementwise(lambda s: torch.expm1(s * 0.3)),
    "log": _elementwise(lambda s: torch.log(s.abs() + 0.5)),
    "log1p": _elementwise(lambda s: torch.log1p(s.abs())),
    "sin": _elementwise(torch.sin),
    "cos": _elementwise(torch.cos),
    "atan": _elementwise(torch.atan),
    "erf": _elementwise(torch.erf),
    "sinh": _elementwise(lambda s: torch.sinh(s * 0.4)),
    "cosh": _elementwise(lambda s: torch.cosh(s * 0.4)),
    "clamp": _elementwise(lambda s: s.clamp(-1.5, 2.5)),
    "where": _elementwise(lambda s: torch.where(s > 0, s, 0.3 * s)),
    "maximum": _elementwise(lambda s: torch.maximum(s, 0.5 - s)),
    "hypot": _elementwise(lambda s: torch.hypot(s, s.new_ones(()))),
    "behind": _indexed(lambda s, b, h, q, kv: torch.where(q >= kv, s, s * 0.5)),
    "hides": _indexed(lambda s, b, h, q, kv: torch.where((q + kv) % 3 == 0, -float("inf"), s)),
    "odd heads": _indexed(lambda s, b, h, q, kv: torch.where(h % 2 == 0, s, s + 0.1 * b)),
    "distance": _indexed(lambda s, b, h, q, kv: s - 0.05 * (q - kv).abs()),
    "log distance": _indexed(lambda s, b, h, q, kv: s - torch.log((q - kv).abs() + 1.0)),
    "positions": _indexed(lambda s, b, h, q, kv: s + torch.sin(q * 0.1) * torch.cos(kv * 0.2)),
    "outside only": _indexed(lambda s, b, h, q, kv: s + torch.acos((kv % 7) / 8.0)),
    "table of distance": _table_of_distance,
    "table of far distance": _table_of_far_distance,
    "slope": _slope,
    "slope of batch": _slope_of_batch,
    "of queries": _of_queries,
    "of keys": _of_keys,
    "outer product": _outer,
    "matrix": _matrix,
    "matrix of all": _matrix_of_all,
    "gathered": _gathered,
    "indirect": _indirect,
    "scalar": _scalar,
}


# Masks: ``mask(problem) -> f(b, h, q, kv)``. Each shows key 0 or the query's own to most queries.


def _documents_of_batch(p: Problem) -> Callable:
    ids = (_data(p, p.batch, p.q_len + p.kv_len, below=9) == 0).int().cumsum(1)
    return lambda b, h, q, kv: ids[b, q] == ids[b, kv]


def _lengths(p: Problem) -> Callable:
    n = _data(p, p.batch, below=p.kv_len) + 1
    return lambda b, h, q, kv: kv < n[b]


def _dense(p: Problem) -> Callable:
    seen = _data(p, p.q_len, p.kv_len, below=3) > 0
    return lambda b, h, q, kv: seen[q, kv]


def _dense_of_heads(p: Problem) -> Callable:
    seen = _data(p, p.batch, p.heads, p.q_len, p.kv_len, below=2) > 0
    return lambda b, h, q, kv: seen[b, h, q, kv]


def _keys_of_batch(p: Problem) -> Callable:
    seen = _data(p, p.batch, p.kv_len, below=4) > 0
    return lambda b, h, q, kv: seen[b, kv]


def _offset(p: Problem) -> Callable:
    n = torch.tensor(9, device=p.device)
    return lambda b, h, q, kv: q + n >= kv


MASKS: dict[str, Callable[[Problem], Callable]] = {
    "causal": lambda p: lambda b, h, q, kv: q >= kv,
    "behind": lambda p: lambda b, h, q, kv: q <= kv,
    "window": lambda p: lambda b, h, q, kv: (q - kv).abs() <= 20,
    "far": lambda p: lambda b, h, q, kv: (q - kv).abs() >= 9,
    "chunks": lambda p: lambda b, h, q, kv: q // 50 == kv // 50,
    "stripes": lambda p: lambda b, h, q, kv: (q + 2 * kv) % 5 != 0,
    "first keys": lambda p: lambda b, h, q, kv: kv < 17,
    "not chunks": lambda p: lambda b, h, q, kv: ~((q // 50 == kv // 50) & (q < kv)),
    "window of head": lambda p: lambda b, h, q, kv: (q - kv).abs() <= 5 * (h + 1),
    "of batch": lambda p: lambda b, h, q, kv: (kv + b) % 2 == 0,
    "square": lambda p: lambda b, h, q, kv: (q - 30) * (q - 30) + (kv - 30) * (kv - 30) > 400,
    "documents of batch": _documents_of_batch,
    "lengths": _lengths,
    "dense": _dense,
    "dense of heads": _dense_of_heads,
    "keys of batch": _keys_of_batch,
    "offset": _offset,
}


def composed(steps: tuple[str, ...], masks: tuple[str, ...] = (), join: str = "and") -> Make:
    """Steps one after the other, under masks joined by ``"and"`` or ``"or"``."""

    def make(p: Problem) -> Variant:
        made = [STEPS[name](p) for name in steps]
        conditions = [MASKS[name](p) for name in masks]

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            for fn, _ in made:
                s = fn(s, b, h, q, kv)
            return s

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            seen = conditions[0](b, h, q, kv)
            for fn in conditions[1:]:
                seen = seen & fn(b, h, q, kv) if join == "and" else seen | fn(b, h, q, kv)
            return seen

        learned = tuple(x for _, tensors in made for x in tensors)
        return Variant(score_mod if steps else None, mask_mod if masks else None, learned)

    return make


def functions() -> dict[str, Make]:
    """Every step and every mask alone."""
    return {name: composed((name,)) for name in STEPS} | {
        f"mask {name}": composed((), (name,)) for name in MASKS
    }


def random_function(seed: int) -> tuple[str, Make]:
    """One to three steps under none to two masks, and what they are."""
    draw = random.Random(seed)
    steps = tuple(draw.choices(list(STEPS), k=draw.randint(1, 3)))
    masks = tuple(draw.sample(list(MASKS), k=draw.randint(0, 2)))
    join = draw.choice(("and", "or"))
    return f"{', '.join(steps)} under {f' {join} '.join(masks) or 'no mask'}", composed(steps, masks, join)
