"""TPU slices by the names that users know."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from pallas_kernels.hardware import GENERATIONS, Hardware

# Accelerator types as Google Cloud names them (https://cloud.google.com/tpu/docs): v4 and v5p count
# TensorCores, two a chip; v5e and v6e count chips.
_PLANES = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
_CUBES = {
    8: (2, 2, 1),
    16: (2, 2, 2),
    32: (2, 2, 4),
    64: (2, 4, 4),
    128: (4, 4, 4),
    256: (4, 4, 8),
    512: (4, 8, 8),
    1024: (8, 8, 8),
    2048: (8, 8, 16),
    4096: (8, 16, 16),
}
_SIZES = {"v4": _CUBES, "v5e": _PLANES, "v5p": _CUBES, "v6e": _PLANES}
_ALIASES = {"v5litepod": "v5e"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of one TPU generation.

    Attributes:
        generation: ``"v4"``, ``"v5e"``, ``"v5p"`` or ``"v6e"``.
        shape: chips along each axis of its torus, two of v5e and v6e, three of v4 and v5p.
    """

    generation: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Devices of an SPMD program on it."""
        return math.prod(self.shape)

    @property
    def hardware(self) -> Hardware:
        """What the kernels choose by."""
        return GENERATIONS[self.generation]

    def jax_options(self) -> dict[str, Any]:
        """Arguments of ``jax.experimental.topologies.get_topology_desc``; one device is one whole chip."""
        options: dict[str, Any] = {"platform": "tpu", "topology_name": str(self)}
        if self.generation == "v4":  # by default each of its two cores would be a device
            options["chip_config_name"] = "megacore"
        if self.shape[:2] == (1, 1):  # otherwise a host has 2x2 chips
            options["chips_per_host_bounds"] = (1, 1, 1)
        return options


def parse_topology(name: str) -> Topology:
    """The slice called ``name``: ``v5e:2x2``, ``v4:2x2x1``, or as Google Cloud says, ``v5e-4``, ``v4-8``.

    Raises:
        ValueError: no such slice; the message lists what is allowed.
    """
    match = re.fullmatch(r"(\w+)(?::(\d+(?:x\d+)+)|-(\d+))", name)
    generation = _ALIASES.get(match[1], match[1]) if match else None
    if match is None or generation not in _SIZES:
        raise ValueError(f"topology: got {name!r}, allowed are {_allowed()}")
    sizes = _SIZES[generation]
    if match[3]:
        if int(match[3]) not in sizes:
            known = ", ".join(f"{generation}-{n}" for n in sizes)
            raise ValueError(f"topology: got {name!r}, allowed for {generation} are {known}")
        return Topology(generation, sizes[int(match[3])])

    shape = tuple(int(n) for n in match[2].split("x"))
    axes = len(next(iter(sizes.values())))
    one_host = shape[:2] == (1, 1) and shape in sizes.values()
    if len(shape) != axes or not one_host and any(n % 2 or n == 0 for n in shape[:2]) or 0 in shape:
        known = ", ".join(str(Topology(generation, s)) for s in sizes.values())
        raise ValueError(
            f"topology: got {name!r}; {generation} slices have {axes} axes, the first two even: {known}"
        )
    return Topology(generation, shape)


def _allowed() -> str:
    return f"slices of {', '.join(_SIZES)}, such as v4:2x2x1 or v4-8, v5e:2x2 or v5e-4"
