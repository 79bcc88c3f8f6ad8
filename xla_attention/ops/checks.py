"""What the operators refuse, before anything is traced."""

from __future__ import annotations

import math
from typing import Any

import torch

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# Eager attention is a reference in plain torch; on XLA the kernels know the types that a TPU computes in.
_XLA_DTYPES = (torch.float32, torch.bfloat16)
_EAGER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks that ``q [batch, heads, q_len, head_dim]`` and ``k, v [batch, kv_heads, kv_len, head_dim]`` fit.

    Raises:
        TypeError: not tensors, dtypes that differ, or a dtype that the device's attention does not take.
        ValueError: a shape or device that does not fit; the message names the argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, needs a torch.Tensor")
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs [batch, heads, seq, head_dim]")
        if 0 in x.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, every dimension must be at least 1")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype: got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device: got {q.device}, {k.device} and {v.device}")
    allowed = _XLA_DTYPES if q.device.type == "xla" else _EAGER_DTYPES
    if q.dtype not in allowed:
        raise TypeError(f"q, k and v: got {q.dtype} on {q.device.type}, allowed there are {_names(allowed)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape: got {tuple(k.shape)} and {tuple(v.shape)}")

    batch, heads, _, head_dim = q.shape
    kv_batch, kv_heads, _, kv_head_dim = k.shape
    if kv_batch != batch:
        raise ValueError(f"k and v: got batch {kv_batch}, q has {batch}")
    if heads % kv_heads:
        raise ValueError(f"k and v: got {kv_heads} heads, which does not divide q's {heads}")
    if kv_head_dim != head_dim:
        raise ValueError(f"k and v: got head_dim {kv_head_dim}, q has {head_dim}")
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {head_dim}, allowed are {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")


def check_finite(name: str, value: Any, *, positive: bool = False) -> float:
    """``value`` as a float.

    Raises:
        TypeError: it is not a Python number.
        ValueError: it is infinite or NaN, or not above zero where ``positive``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a float")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{name}: got {value}, needs a finite number{' above 0' if positive else ''}")
    return float(value)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
