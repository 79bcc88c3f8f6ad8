"""DMA as one queue of a core's share of the memory bandwidth, without latency."""

from __future__ import annotations

import collections

from pallas_kernels.hardware import Hardware

# Bytes of the unit in which DMA instructions count.
GRANULE = {"v4": 512, "v5e": 32, "v5p": 32, "v6e": 32}


class DmaQueue:
    """Transfers in flight, by the synchronisation flag that they raise.

    Attributes:
        hbm_bytes: bytes that went from or to HBM.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._granule = GRANULE[hardware.name]
        self._bytes_per_cycle = hardware.hbm_bytes_per_second / hardware.cores / hardware.clock_hz
        self._free = 0.0  # when HBM has served all that was asked
        self._flights: dict[int | None, collections.deque[tuple[float, int]]] = collections.defaultdict(
            collections.deque
        )
        self.hbm_bytes = 0

    def start(self, now: float, granules: int, flag: int | None, *, hbm: bool) -> None:
        """A transfer begins at the cycle ``now``; one between on-chip memories is done at once."""
        done = now
        if hbm:
            size = granules * self._granule
            self.hbm_bytes += size
            self._free = done = max(now, self._free) + size / self._bytes_per_cycle
        self._flights[flag].append((done, granules))

    def wait(self, now: float, granules: int, flag: int | None) -> float:
        """Cycles until ``granules`` have arrived under ``flag``."""
        until, flights = now, self._flights[flag]
        while granules > 0 and flights:
            done, amount = flights.popleft()
            until = max(until, done)
            if amount > granules:
                flights.appendleft((done, amount - granules))
            granules -= amount
        return until - now
