"""Facts of each TPU generation that the kernels choose by: data, no behaviour."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One TPU generation, or the interpreter that stands in for it where there is no TPU.

    Attributes:
        name: ``"v4"``, ``"v5e"``, ``"v5p"``, ``"v6e"`` or ``"interpreter"``.
        vmem_bytes: vector memory of one core, in bytes.
        cores: TensorCores of one chip.
        mxu: side of the systolic array, in elements.
        flops_per_cycle: bf16 FLOPs of one core in one cycle.
        clock_hz: TensorCore clock, in Hz.
        hbm_bytes: memory of one chip, in bytes.
        hbm_bytes_per_second: memory bandwidth of one chip.
        strided_roll: whether it rotates each row of a register by an amount of its own, in one operation.
    """

    name: str
    vmem_bytes: int
    cores: int
    mxu: int
    flops_per_cycle: int
    clock_hz: float
    hbm_bytes: int
    hbm_bytes_per_second: float
    strided_roll: bool = True

    @property
    def interpret(self) -> bool:
        """Whether Pallas kernels run through the interpreter (``pallas_call(interpret=True)``)."""
        return self.name == "interpreter"

    @property
    def peak_flops(self) -> float:
        """bf16 FLOP/s of one chip."""
        return self.flops_per_cycle * self.cores * self.clock_hz


MIB, GIB = 2**20, 2**30

V4 = Hardware("v4", 16 * MIB, 2, 128, 2**17, 1.05e9, 32 * GIB, 1228e9, strided_roll=False)
V5E = Hardware("v5e", 128 * MIB, 1, 128, 2**17, 1.5e9, 16 * GIB, 819e9)
V5P = Hardware("v5p", 64 * MIB, 2, 128, 2**17, 1.75e9, 95 * GIB, 2765e9)
V6E = Hardware("v6e", 128 * MIB, 1, 256, 2**19, 1.75e9, 32 * GIB, 1640e9)
# The interpreter runs the same programs on any host; its limits are the largest TPU's.
INTERPRETER = dataclasses.replace(V5E, name="interpreter", strided_roll=False)

GENERATIONS = {h.name: h for h in (V4, V5E, V5P, V6E)}


def by_name(name: str) -> Hardware:
    """The hardware called ``name``.

    Raises:
        ValueError: the name is unknown; the message lists those known.
    """
    known = {**GENERATIONS, INTERPRETER.name: INTERPRETER}
    if name not in known:
        raise ValueError(f"hardware: got {name!r}, allowed are {sorted(known)}")
    return known[name]
