"""What the operators refuse, before anything is traced."""

from __future__ import annotations

import math
from typing import Any

import torch

from pallas_kernels.flash_attention import Operands

MIN_HEAD_DIM, MAX_HEAD_DIM, MAX_VALUE_DIM = 16, 576, 512
# Eager attention is a reference in plain torch; on XLA the kernels know the types that a TPU computes in.
_XLA_DTYPES = (torch.float32, torch.bfloat16)
_EAGER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks that ``q [batch, heads, q_len, head_dim]``, ``k [batch, kv_heads, kv_len, head_dim]`` and
    ``v [batch, kv_heads, kv_len, value_dim]`` fit.

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
    allowed = _floats(q.device)
    if q.dtype not in allowed:
        raise TypeError(f"q, k and v: got {q.dtype} on {q.device.type}, allowed there are {_names(allowed)}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must have one batch, heads and length: got {tuple(k.shape)} and {tuple(v.shape)}"
        )

    batch, heads, _, head_dim = q.shape
    kv_batch, kv_heads, _, kv_head_dim = k.shape
    value_dim = v.shape[3]
    if kv_batch != batch:
        raise ValueError(f"k and v: got batch {kv_batch}, q has {batch}")
    if heads % kv_heads:
        raise ValueError(f"k and v: got {kv_heads} heads, which does not divide q's {heads}")
    if kv_head_dim != head_dim:
        raise ValueError(f"k: got head_dim {kv_head_dim}, q has {head_dim}")
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {head_dim}, allowed are {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    if not MIN_HEAD_DIM <= value_dim <= MAX_VALUE_DIM:
        raise ValueError(f"v: got head_dim {value_dim}, allowed are {MIN_HEAD_DIM} to {MAX_VALUE_DIM}")


def check_operands(operands: Operands, q: torch.Tensor, k: torch.Tensor) -> None:
    """Checks the optional tensors, as the user gave them, against ``q`` and ``k`` that fit each other.

    Raises:
        TypeError: not tensors, or of a wrong dtype.
        ValueError: a shape or device that does not fit, or slopes that ask for a gradient; the message names
            the argument.
    """
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    floats = tuple(d for d in _floats(q.device) if d != torch.float64 or q.dtype == torch.float64)
    check_tensor("segment_ids of q", operands.q_segment_ids, q, (batch, q_len), _INTEGERS)
    check_tensor("segment_ids of k and v", operands.kv_segment_ids, q, (batch, kv_len), _INTEGERS)
    check_tensor("bias", operands.bias, q, ((1, batch), (1, heads), q_len, kv_len), floats)
    check_tensor("alibi_slopes", operands.alibi_slopes, q, (heads,), floats)
    check_tensor("sinks", operands.sinks, q, (heads,), floats)
    check_tensor("q_lens", operands.q_lens, q, (batch,), _INTEGERS)
    check_tensor("kv_lens", operands.kv_lens, q, (batch,), _INTEGERS)
    slopes = operands.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "alibi_slopes: these require grad, but slopes are constants here and get none; detach() them, "
            "or give their term as bias, which is differentiated"
        )


def check_tensor(
    name: str,
    x: Any,
    q: torch.Tensor,
    shape: tuple[int | tuple[int, int], ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Checks one optional tensor; a pair in ``shape`` allows two sizes, and None for ``x`` passes.

    Raises:
        TypeError: it is no tensor, or its dtype is not among ``dtypes``.
        ValueError: its shape is not ``shape``, or its device not that of ``q``.
    """
    if x is None:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, needs a torch.Tensor")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got {x.dtype}, allowed on {q.device.type} are {_names(dtypes)}")
    sizes = [size if isinstance(size, tuple) else (size,) for size in shape]
    if x.ndim != len(sizes) or any(n not in allowed for n, allowed in zip(x.shape, sizes)):
        needs = ", ".join(" or ".join(map(str, dict.fromkeys(allowed))) for allowed in sizes)
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs [{needs}]")
    if x.device != q.device:
        raise ValueError(f"{name}: got a tensor on {x.device}, q is on {q.device}")


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


def _floats(device: torch.device) -> tuple[torch.dtype, ...]:
    return _XLA_DTYPES if device.type == "xla" else _EAGER_DTYPES


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
