"""When the peers of one rank reach its collectives, if the rank is real and its peers are simulated.

A rank influences its peers only by the ends of the collectives that it takes part in. Everything else that they do is
known from a simulation. So for each collective of the rank

    peers = max over sources of (end of the source + lag)
    end   = max(own arrival, peers) + seconds

where a source is an earlier collective of the rank, or the start of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PeerArrivals:
    """The peers of one rank, as far as the rank meets them.

    The n collectives of the rank are numbered in program order. End 0 starts the run, end i + 1 is of collective i.

    Args:
        rank: The rank.
        rows: Their rows in a trace, int64 `[n]`.
        seconds: From the readiness of the last member to the end on this rank, float64 `[n]`.
        sources: Numbers of the ends that the peers of each collective depend on, int64 `[n, k]`.
        lag_s: Seconds from each of these ends until the last peer is ready, float64 `[n, k]`; -inf where `sources` has
            fewer than k, or where the rank is alone in its group.
    """

    rank: int
    rows: NDArray[np.int64]
    seconds: NDArray[np.float64]
    sources: NDArray[np.int64]
    lag_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rows)

    def sources_of(self, number: int) -> list[int]:
        """Return the numbers of the ends that the peers of a collective depend on."""
        return [int(each) for each in self.sources[number][np.isfinite(self.lag_s[number])]]

    def ready_s(self, number: int, ends_s: Sequence[float] | NDArray[np.float64]) -> float:
        """Return when the last peer is ready for a collective; -inf if the rank has no peers there.

        Args:
            number: Number of the collective.
            ends_s: Ends since the start of the run, `[n + 1]`, as far as `sources_of` names them.
        """
        lags_s = self.lag_s[number]
        known = np.isfinite(lags_s)
        return max(
            (ends_s[source] + lag for source, lag in zip(self.sources[number][known], lags_s[known], strict=True)),
            default=-np.inf,
        )
