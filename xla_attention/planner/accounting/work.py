"""FLOPs and bytes of single instructions of an optimized HLO module."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from xla_attention.planner.cycles.hlo import Computation, Instruction, Module, dimensions, shape_bytes

_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")


def bytes_accessed(computation: Computation, i: Instruction) -> int:
    """Of the operands and the result of one instruction, wherever they are; of a slice, and of what is put
    into a larger array, the part that moves."""
    if i.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * shape_bytes(i.shape)
    if i.opcode == "dynamic-update-slice":
        return 2 * shape_bytes(computation.instructions[i.operands[1]].shape)
    read = sum(shape_bytes(computation.instructions[name].shape) for name in _names(i))
    return read + shape_bytes(i.shape)


def matmul_flops(module: Module, computation: Computation, i: Instruction) -> int:
    """Of the matrix products in one instruction, and in what it calls: two for each pair that is multiplied.

    Convolutions, which is what XLA makes of matrix products on a TPU, are counted as XLA's cost analysis
    does: products with padding, or with the holes of a dilated operand, are none.
    """
    if i.opcode == "convolution":
        return _convolution_flops(computation, i)
    if i.opcode == "dot":
        return _dot_flops(computation, i)
    if i.opcode not in ("fusion", "call"):
        return 0
    inner = module.computations[i.attribute("calls") or i.attribute("to_apply")]
    return sum(matmul_flops(module, inner, each) for each in inner.instructions.values())


def _convolution_flops(computation: Computation, i: Instruction) -> int:
    lhs, rhs = (dimensions(computation.instructions[name].shape) for name in i.operands[:2])
    out = dimensions(i.shape)
    labels = _LABELS.search(i.attributes)
    if labels is None:
        raise ValueError(f"HLO: convolution {i.name} has no dim_labels")
    on_lhs, on_rhs, on_out = (dict(zip(text, sizes)) for text, sizes in zip(labels.groups(), (lhs, rhs, out)))
    window = _window(i)
    pairs = 1
    for n, spatial in enumerate(sorted(label for label in on_out if label.isdigit())):
        pairs *= _products(
            (on_lhs[spatial], on_rhs[spatial], on_out[spatial]),
            stride=window("stride", n, 1),
            low=window("pad", n, 0),
            lhs_dilation=window("lhs_dilate", n, 1),
            rhs_dilation=window("rhs_dilate", n, 1),
        )
    return 2 * on_out["b"] * on_out["f"] * on_rhs["i"] * pairs


def _products(
    sizes: tuple[int, int, int],
    *,
    stride: int,
    low: int,
    lhs_dilation: int,
    rhs_dilation: int,
) -> int:
    """Pairs of an input and a kernel element, along one dimension, that meet at all outputs together."""
    lhs, rhs, out = sizes
    places = np.arange(out)[:, None] * stride + np.arange(rhs) * rhs_dilation - low
    inside = (places >= 0) & (places <= (lhs - 1) * lhs_dilation) & (places % lhs_dilation == 0)
    return int(inside.sum())


def _dot_flops(computation: Computation, i: Instruction) -> int:
    lhs = dimensions(computation.instructions[i.operands[0]].shape)
    contracted = (i.attribute("lhs_contracting_dims") or "{}").strip("{}")
    return 2 * math.prod(dimensions(i.shape)) * math.prod(lhs[int(n)] for n in contracted.split(",") if n)


def _window(i: Instruction) -> Callable[[str, int, int], int]:
    """Gives a field of the window along one dimension, or what it is where it is not written."""
    match = _WINDOW.search(i.attributes)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}

    def value(name: str, n: int, default: int) -> int:
        if name not in fields:
            return default
        return int(fields[name].split("x")[n].split("_")[0])

    return value


def _names(i: Instruction) -> tuple[str, ...]:
    return () if i.opcode in ("constant", "parameter") else i.operands
