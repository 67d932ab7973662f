"""Changes of links during a run, and the operations that they delayed.

If links misbehaved in a run, its trace has a small table of their changes. `Held` states, for each instance and rank,
how long a link held it up. `simdist.studies.held` computes it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Start in seconds; share of the rate from then on, 1 if undisturbed; number of flows of other jobs.
LinkState: TypeAlias = tuple[float, float, int]
#: Name of a link, such as `nic_out[3]` -> its states in the order of time, the first from 0.0 on.
LinkTable: TypeAlias = Mapping[str, tuple[LinkState, ...]]

_WORDS = {"nic": "NIC of node", "fabric": "fabric of rank", "bridge": "host bridge of node", "disk": "disk of node"}


def link_in_words(name: str) -> str:
    """Describe a link in words.

    >>> link_in_words("nic_out[3]"), link_in_words("storage_server")
    ('NIC of node 3, out', 'storage server')
    """
    found = re.fullmatch(r"(\w+?)_(\w+)\[(\d+)\]", name)
    if found and found[1] in _WORDS:
        return f"{_WORDS[found[1]]} {found[3]}, {found[2]}"
    return re.sub(r"\[(\d+)\]", r" \1", name).replace("_", " ")


@dataclass
class LinkRecorder:
    """Records changes of links, in the order of time.

    Args:
        shares: Share of the rate of links from the start, by name.
    """

    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with links that are slow during the whole run."""
        self._states: dict[str, list[LinkState]] = {name: [(0.0, share, 0)] for name, share in self.shares.items()}

    def set_share(self, at_s: float, name: str, share: float) -> None:
        """Record the share of a link's rate from now on, relative to its share from the start."""
        self._add(at_s, name, share * self.shares.get(name, 1.0), self._last(name)[2])

    def add_flows(self, at_s: float, name: str, n_more: int) -> None:
        """Record that flows of other jobs begin on a link, or end if the number is negative."""
        _, share, n_flows = self._last(name)
        self._add(at_s, name, share, n_flows + n_more)

    def table(self) -> LinkTable:
        """Return the recorded changes."""
        return {name: tuple(states) for name, states in sorted(self._states.items())}

    def _last(self, name: str) -> LinkState:
        return self._states.setdefault(name, [(0.0, self.shares.get(name, 1.0), 0)])[-1]

    def _add(self, at_s: float, name: str, share: float, n_flows: int) -> None:
        last_s, *before = self._last(name)
        if before != [share, n_flows]:
            states = self._states[name]
            if last_s == at_s:
                states.pop()
            states.append((at_s, share, n_flows))


def read_links(found: object) -> LinkTable:
    """Return a table from its JSON.

    Raises:
        ValueError: It is not a table of links.
    """
    if not isinstance(found, dict):
        raise ValueError("links: no object")
    table = {}
    for name, states in found.items():
        table[str(name)] = tuple((float(at_s), float(share), int(n_flows)) for at_s, share, n_flows in states)
        times_s = [at_s for at_s, _, _ in table[str(name)]]
        if times_s[:1] != [0.0] or times_s != sorted(times_s):
            raise ValueError(f"links: times of {name} do not begin with 0 and ascend")
    return table


@dataclass(frozen=True)
class Held:
    """How long links held operations up.

    Args:
        names: Names of these links.
        link: Index of the link that held up an instance on a rank, or -1, int64 `[n_instances, world_size]`.
        seconds: Additional seconds of the instance, float64 `[n_instances, world_size]`.
    """

    names: tuple[str, ...]
    link: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def up(self, index: int, _: object = None) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Yield the links that held up an instance, and for how long, `[world_size, 1]`."""
        for number in np.unique(self.link[index]).tolist():
            if number >= 0:
                yield self.names[number], np.where(self.link[index] == number, self.seconds[index], 0.0)[:, None]

    def of_link(self, number: int) -> NDArray[np.float64]:
        """Return the seconds of one link, `[n_instances, world_size]`."""
        return np.where(self.link == number, self.seconds, 0.0)

    def rank_seconds(self) -> dict[str, float]:
        """Return the total seconds of all instances and ranks by link, the largest first."""
        totals = {name: float(self.of_link(number).sum()) for number, name in enumerate(self.names)}
        return dict(sorted(totals.items(), key=lambda item: -item[1]))
