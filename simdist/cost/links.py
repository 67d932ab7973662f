"""What a message costs on one link: startup and bytes, by formula or from a measured table."""

import math
from dataclasses import dataclass

import numpy as np

from simdist.scenario.cluster import Link

__all__ = ["LinkCost"]


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A link: `latency_s` until a message's first byte arrives, then `capacity_Bps`.

    A link with a measured table takes, for a message of b bytes, the interpolated time T(b), beyond the table along
    its last slope. It is cut into the startup T(smallest size) and the rest, which is expressed as the bytes that
    would flow for that long at the capacity, the last slope. Sharing and rounds then treat it as any other link.
    """

    latency_s: float
    capacity_Bps: float
    table: tuple[tuple[float, float], ...] | None = None

    @classmethod
    def of(cls, link: Link, *, n_parallel: int = 1) -> "LinkCost":
        """Return the cost of a scenario's link, `n_parallel` of which work side by side."""
        if link.table is None:
            return cls(link.latency_s, link.bandwidth_Bps * link.efficiency * n_parallel)
        table = tuple((float(nbytes), float(seconds)) for nbytes, seconds in link.table)
        (nbytes_before, seconds_before), (nbytes_last, seconds_last) = table[-2:]
        slope_s_per_byte = (seconds_last - seconds_before) / (nbytes_last - nbytes_before)
        return cls(table[0][1], n_parallel / slope_s_per_byte if slope_s_per_byte else math.inf, table)

    def flowing(self, nbytes: float) -> float:
        """Return the bytes that a message puts on the link (0 on an unlimited one)."""
        if math.isinf(self.capacity_Bps):
            return 0.0
        if self.table is None:
            return nbytes
        return (self._message_s(nbytes) - self.latency_s) * self.capacity_Bps

    def _message_s(self, nbytes: float) -> float:
        assert self.table is not None
        sizes, seconds = zip(*self.table, strict=True)
        if nbytes <= sizes[-1]:
            return float(np.interp(nbytes, sizes, seconds))
        return float(seconds[-1] + (nbytes - sizes[-1]) / self.capacity_Bps)
