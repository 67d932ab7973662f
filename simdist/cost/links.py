"""What a message costs on one link: startup and bytes, by formula or from a measured table."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.scenario.link import Link


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A link: `latency_s` until a message's first byte arrives, then `capacity_Bps`.

    A link with a measured table takes, for a message of b bytes, the interpolated time T(b), beyond the table along its
    last slope. It is cut into the startup T(smallest size) and the rest, which is expressed as the bytes that would
    flow for that long at the average rate of the table. Sharing, rounds and parallel links then treat it as any other.

    Args:
        latency_s: Startup of a message, seconds.
        capacity_Bps: Bytes per second of all parallel links together.
        n_parallel: How many links work side by side.
        table: Measured `(nbytes, seconds)` of one of them.
    """

    latency_s: float
    capacity_Bps: float
    n_parallel: int = 1
    table: tuple[tuple[float, float], ...] | None = None

    @classmethod
    def of(cls, link: Link, *, n_parallel: int = 1) -> "LinkCost":
        """Return the cost of a scenario's link, `n_parallel` of which work side by side."""
        if link.table is None:
            return cls(link.latency_s, link.bandwidth_Bps * link.efficiency * n_parallel, n_parallel)
        table = tuple((float(point.nbytes), point.time_s) for point in link.table)
        (smallest, startup_s), (largest, last_s) = table[0], table[-1]
        average_Bps = (largest - smallest) / (last_s - startup_s) if last_s > startup_s else math.inf
        return cls(startup_s, average_Bps * n_parallel, n_parallel, table)

    def flowing(self, nbytes: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes that messages of `nbytes` put on the link (0 on an unlimited one), of the same shape."""
        nbytes = np.asarray(nbytes, dtype=np.float64)
        if math.isinf(self.capacity_Bps):
            return np.zeros_like(nbytes)
        if self.table is None:
            return nbytes
        return np.asarray((self._message_s(nbytes) - self.latency_s) * self.capacity_Bps / self.n_parallel)

    def _message_s(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return T(nbytes) of the table."""
        sizes, seconds = np.array(self.table, dtype=np.float64).T
        slope_s_per_byte = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        beyond_s = seconds[-1] + (nbytes - sizes[-1]) * slope_s_per_byte
        return np.asarray(np.where(nbytes <= sizes[-1], np.interp(nbytes, sizes, seconds), beyond_s))
