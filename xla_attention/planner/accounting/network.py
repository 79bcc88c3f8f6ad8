"""How long collectives take on the links of a slice.

A group of chips is taken as a grid in the torus. All of its links work at once: along each axis of the torus
over which the group extends a chip has two links where the axis closes to a ring, and else, at the end of a
line, one. Where several groups lie between each other along an axis, they share its links. What bounds a
gather, or a reduction, is then what one chip receives; an exchange of all with all, what crosses the middle.
This is the bandwidth bound of "How to scale your model" (https://jax-ml.github.io/scaling-book/), whose
microsecond for each hop is added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Bytes per second of one link in one direction. v4: Jouppi et al., 2023 (arXiv:2304.01433), 50 GB/s a link;
# the others: https://cloud.google.com/tpu/docs, whose figures are of all links of a chip: 1600, 4800 and
# 3200 Gbit/s in one direction over four, six and four links.
LINK_BYTES_PER_SECOND = {"v4": 50e9, "v5e": 50e9, "v5p": 100e9, "v6e": 100e9}
HOP_SECONDS = 1e-6
# Axes that close to rings: of v4 and v5p those of whole cubes of 4; of v5e and v6e those of a whole pod.
_RING = {"v4": 4, "v5e": 16, "v5p": 4, "v6e": 16}


@dataclasses.dataclass(frozen=True)
class Network:
    """The links of one slice.

    Attributes:
        generation: ``"v4"``, ``"v5e"``, ``"v5p"`` or ``"v6e"``.
        shape: chips along each axis of its torus.
        places: coordinates of each device, in the order of the program's devices.
    """

    generation: str
    shape: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    def seconds(self, kind: str, groups: np.ndarray, size: int) -> float:
        """Time of one collective.

        Args:
            kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"`` or
                ``"collective-permute"``.
            groups: devices, ``[groups, members]``; of a permute, pairs of source and target.
            size: bytes of the whole tensor: a gather's result, what is summed; what one device exchanges, or
                passes on.

        Raises:
            ValueError: another kind.
        """
        if kind == "collective-permute":
            return max((self._permute(pair, size) for pair in groups), default=0.0)
        if kind not in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
            raise ValueError(f"kind: {kind!r} is no collective")
        return max(self._group(kind, group, size) for group in groups)

    def _group(self, kind: str, group: Sequence[int], size: int) -> float:
        n = len(group)
        if n == 1:
            return 0.0
        axes = self._axes(group)
        rate = LINK_BYTES_PER_SECOND[self.generation]
        hops = sum(extent // 2 if ring else extent - 1 for extent, ring, _ in axes) * HOP_SECONDS
        if kind == "all-to-all":
            # Half of what each chip sends is for the other half of an axis, half of it each way.
            middles = (n * size / 4 / (n / extent * _links(ring) / share) for extent, ring, share in axes)
            return max(middles) / rate + hops
        links = sum(_links(ring) / share for _, ring, share in axes)
        once = size * (n - 1) / n / (links * rate) + hops
        return 2 * once if kind == "all-reduce" else once

    def _permute(self, pair: Sequence[int], size: int) -> float:
        """A message takes its hops in turn, and shares the links with those of the chips that it passes."""
        hops = 0
        for at, to, length in zip(self.places[pair[0]], self.places[pair[1]], self.shape):
            distance = abs(at - to)
            hops += min(distance, length - distance) if self._is_ring(length) else distance
        return hops * (size / LINK_BYTES_PER_SECOND[self.generation] + HOP_SECONDS)

    def _axes(self, group: Sequence[int]) -> list[tuple[int, bool, float]]:
        """Along each axis of the torus where the group extends: members, whether they close to a ring, and
        between how many groups the links are shared."""
        found = []
        for place, length in zip(np.array([self.places[n] for n in group]).T, self.shape):
            members = len(set(place.tolist()))
            if members == 1:
                continue
            span = int(place.max() - place.min()) + 1
            stride = math.gcd(*(int(x) for x in np.diff(np.unique(place))))
            whole = members * stride >= length
            found.append((members, whole and self._is_ring(length), max(stride, span / members)))
        return found

    def _is_ring(self, length: int) -> bool:
        return length % _RING[self.generation] == 0


def _links(ring: bool) -> int:
    return 2 if ring else 1
