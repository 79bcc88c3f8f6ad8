"""Static cycles of compiled kernels: the compiler's VLIW schedule, executed."""

from xla_attention.planner.cycles.dump import count_cycles
from xla_attention.planner.cycles.report import HotSegment, KernelCycles

__all__ = ["HotSegment", "KernelCycles", "count_cycles"]
