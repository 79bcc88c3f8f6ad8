"""Static cycles of compiled kernels: the compiler's VLIW schedule, executed."""

import functools
import hashlib
from pathlib import Path

from pallas_kernels.hardware import GENERATIONS
from xla_attention.planner.cycles.dump import DUMPS_READ, count_cycles
from xla_attention.planner.cycles.known import kernel_operands
from xla_attention.planner.cycles.report import HotSegment, KernelCycles

__all__ = ["DUMPS_READ", "HotSegment", "KernelCycles", "count_cycles", "counter_version", "kernel_operands"]


@functools.cache
def counter_version() -> str:
    """A digest of the code and of the facts that counts depend on; those kept from others are made anew."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join([*sources, repr(GENERATIONS).encode()])).hexdigest()[:16]
