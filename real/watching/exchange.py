"""Exchanges the times of ranks through the store of their process group.

No collective takes part, so a rank that is late, has ended or is gone holds up no other. Each rank writes the times of
a window under a key of its own. Rank 0 collects them and writes its news under one key. The others read the news when
they write their next times, and then delete the keys that rank 0 has read.
"""

import itertools
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from real.watching.lateness import WorkTimes
from real.watching.tracing import TraceMark
from real.watching.work import StepWork
from simdist.errors import RunError

_LOOK_S = 0.02  # between the first two looks for the times of others; later ones are further apart
_LONGEST_LOOK_S = 0.5
_DECIMALS = 7  # of seconds
_NEWS = "news"


@dataclass(frozen=True, slots=True)
class WindowPost:
    """The times of one rank in a window.

    Args:
        steps: The steps in ascending order.
        is_last: The rank watches no further steps.
    """

    steps: tuple[StepWork, ...]
    is_last: bool

    def to_text(self) -> str:
        """Return the times as JSON."""
        rows = [[each.step, round(each.work_s, _DECIMALS), round(each.step_s, _DECIMALS)] for each in self.steps]
        return json.dumps({"steps": rows, "is_last": self.is_last})

    @classmethod
    def from_text(cls, text: bytes) -> "WindowPost":
        """Return the times of another rank."""
        found = json.loads(text)
        steps = tuple(StepWork(int(step), float(work_s), float(step_s)) for step, work_s, step_s in found["steps"])
        return cls(steps, bool(found["is_last"]))


@dataclass(frozen=True, slots=True)
class WatchNews:
    """What rank 0 tells the others.

    Args:
        window: The last window whose times it has read.
        mark: The step to trace.
        is_off: Rank 0 watches no longer.
    """

    window: int
    mark: TraceMark | None
    is_off: bool = False

    def to_text(self) -> str:
        """Return the news as JSON."""
        mark = None if self.mark is None else [self.mark.step, self.mark.rank, self.mark.kind]
        return json.dumps({"window": self.window, "mark": mark, "is_off": self.is_off})

    @classmethod
    def from_text(cls, text: bytes) -> "WatchNews":
        """Return the news that rank 0 has written."""
        found = json.loads(text)
        mark = None if found["mark"] is None else TraceMark(*found["mark"])
        return cls(found["window"], mark, found["is_off"])


@final
class StoreExchange:
    """The keys of one watch in a store."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        number = store.add(f"simdist/watches/{rank}", 1)  # all ranks make their watches in the same order
        self._store = PrefixStore(f"simdist/watch/{number}", store)
        self._rank = rank
        self._waits_for = set(range(world_size)) - {rank}
        self._n_deleted = 0

    def post(self, window: int, post: WindowPost) -> None:
        """Write the times of this rank."""
        self._store.set(_key(window, self._rank), post.to_text())

    def news(self) -> WatchNews | None:
        """Return the latest news of rank 0, and delete the times that it has read."""
        if not self._store.check([_NEWS]):
            return None
        found = WatchNews.from_text(self._store.get(_NEWS))
        while self._n_deleted <= found.window:
            self._store.delete_key(_key(self._n_deleted, self._rank))
            self._n_deleted += 1
        return found

    def publish(self, news: WatchNews) -> None:
        """Write the news, as rank 0."""
        self._store.set(_NEWS, news.to_text())

    def gather(self, window: int, is_late: Callable[[], bool]) -> dict[int, WindowPost]:
        """Wait for the times of the other ranks, as rank 0. Ranks that have ended are left out.

        Returns:
            The times that have come, by rank.
        """
        missing = sorted(self._waits_for)
        look_s = _LOOK_S
        while missing and not self._store.check([_key(window, rank) for rank in missing]):
            if is_late():
                missing = [rank for rank in missing if self._store.check([_key(window, rank)])]
                break
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        texts = self._store.multi_get([_key(window, rank) for rank in missing]) if missing else []
        posts = {rank: WindowPost.from_text(text) for rank, text in zip(missing, texts, strict=True)}
        self._waits_for -= {rank for rank, post in posts.items() if post.is_last}
        return posts

    def silent(self, posts: Collection[int]) -> list[int]:
        """Return the ranks that have neither ended nor written their times."""
        return sorted(self._waits_for - set(posts))


def _key(window: int, rank: int) -> str:
    return f"{window}/{rank}"


def common_times(posts: Mapping[int, WindowPost]) -> list[WorkTimes]:
    """Return the times of the steps that several ranks have done.

    Ranks that end have fewer steps. Steps of the same ranks come together. Steps of one rank alone tell nothing.

    Raises:
        RunError: No two ranks have a step in common.
    """
    of_rank = {rank: {each.step: each for each in post.steps} for rank, post in sorted(posts.items()) if post.steps}
    ranks_of: dict[int, tuple[int, ...]] = {}
    for step in sorted({step for steps in of_rank.values() for step in steps}):
        ranks_of[step] = tuple(rank for rank, steps in of_rank.items() if step in steps)
    fewest = min(2, len(of_rank))
    found = []
    for ranks, group in itertools.groupby(ranks_of, key=ranks_of.__getitem__):
        if len(ranks) >= fewest:
            steps = list(group)
            rows = [[of_rank[rank][step] for rank in ranks] for step in steps]
            work_s = np.array([[each.work_s for each in row] for row in rows])
            step_s = np.array([[each.step_s for each in row] for row in rows])
            found.append(WorkTimes(steps, ranks, work_s, step_s))
    if of_rank and not found:
        told = "; ".join(f"rank {rank}: {min(steps)}-{max(steps)}" for rank, steps in of_rank.items())
        raise RunError(
            f"ranks count different steps: {told}; give real.watch the same first_step= and every= on all ranks, and "
            f"call watch.step() on all of them at the end of each step"
        )
    return found
