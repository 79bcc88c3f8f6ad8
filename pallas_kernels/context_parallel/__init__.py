"""Attention whose sequence is sharded, from the flash attention core: by a ring, or by exchange of heads."""

from pallas_kernels.context_parallel.api import (
    check_context,
    context_backward,
    context_forward,
    context_operand_gradients,
)
from pallas_kernels.context_parallel.layout import (
    Context,
    ContextMethod,
    SequenceLayout,
    natural_order,
    zigzag_order,
)

__all__ = [
    "Context",
    "ContextMethod",
    "SequenceLayout",
    "check_context",
    "context_backward",
    "context_forward",
    "context_operand_gradients",
    "natural_order",
    "zigzag_order",
]
