"""An actor and a storage of one's own, which a scenario names by `kind`."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from simdist.scenario.cluster import Storage
from simdist.scenario.links import CustomActor
from simdist.settings.units import Seconds, Whole

__all__ = ["Nightly", "Objects"]


class Nightly(CustomActor):
    """Another job sends out of the first node, without end, from some time on."""

    kind: Literal["nightly"] = "nightly"
    begin_s: Seconds
    flows: Whole = Field(default=1, ge=1)

    def __call__(self, env: Any, cluster: Any) -> Iterator[Any]:
        """Open the flows."""
        yield env.timeout(self.begin_s)
        for _ in range(self.flows):
            cluster.flow(cluster.nic_out(0))


class Objects(Storage):
    """An object store: it sends the parts of a large file at the same time, after two latencies instead of one."""

    kind: Literal["objects"] = "objects"

    def latencies_s(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return one latency, or two for a file of several parts."""
        return self.open_s + np.where(self.requests(nbytes) > 1, 2.0, 1.0) * self.latency_s
