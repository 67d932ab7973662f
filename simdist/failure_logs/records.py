"""What a log says about failures, in one form for all programs.

What decides the counts:

* One event that ends many jobs or ranks is one interruption.
* Jobs that a user cancelled and jobs that reached their time limit are not interruptions. Their time counts.
* A start that failed is no interruption: nothing was training.
* Time in which a failure could not have been seen does not count: before the log begins, and after it ends.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal, TypeAlias

#: What an interruption is: a node or a process is gone, nothing goes on until somebody notices, or it is planned.
LoggedEffect: TypeAlias = Literal["node", "process", "hang", "planned"]

#: Interruptions as near as this are one event, if they have something in common.
SAME_EVENT_S = 60.0

#: What failed earlier is a start that failed.
TRAINS_AFTER_S = 60.0
_STRENGTH: tuple[LoggedEffect, ...] = ("node", "process", "planned", "hang")  # what is the cause of what is later here


@dataclass(frozen=True, slots=True)
class Interruption:
    """One event that interrupted training.

    Args:
        at_s: When, in seconds of the log's clock; None if the log has no times.
        cause: As the log names it, such as `node failure`.
        effect: What it ended.
        hosts: Where, as far as the log says it.
        jobs: Names of the jobs that it ended.
        n_ended: Jobs or ranks that it ended.
        hung_s: How long it hung before it was noticed; 0 if it ended at once.
    """

    at_s: float | None
    cause: str
    effect: LoggedEffect
    hosts: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    n_ended: int = 1
    hung_s: float = 0.0

    def has_to_do_with(self, other: "Interruption") -> bool:
        """Tell whether two interruptions are one event, if they are near in time.

        Nodes that fail together have a common cause, such as a switch. Processes do if they share a host or a job.
        What is planned has nothing to do with failures.
        """
        if "planned" in (self.effect, other.effect):
            return self.effect == other.effect and not self.jobs.isdisjoint(other.jobs)
        both_nodes = self.effect == other.effect == "node"
        return both_nodes or not self.hosts.isdisjoint(other.hosts) or not self.jobs.isdisjoint(other.jobs)

    def joined(self, other: "Interruption") -> "Interruption":
        """Return two interruptions as one event. A node that failed is the cause of processes that failed with it."""
        cause = min(self, other, key=lambda each: _STRENGTH.index(each.effect))
        return replace(
            cause,
            at_s=self.at_s,
            hosts=self.hosts | other.hosts,
            jobs=self.jobs | other.jobs,
            n_ended=self.n_ended + other.n_ended,
            hung_s=cause.hung_s,
        )


def joined_events(interruptions: Iterable[Interruption]) -> Iterator[Interruption]:
    """Yield interruptions in the order of their time, those of one event as one.

    Args:
        interruptions: All have a time.
    """
    open_events: list[Interruption] = []
    for each in sorted(interruptions, key=_begin_s):
        while open_events and _begin_s(each) - _begin_s(open_events[0]) > SAME_EVENT_S:
            yield open_events.pop(0)
        of_same = next((i for i, event in enumerate(open_events) if event.has_to_do_with(each)), None)
        if of_same is None:
            open_events.append(each)
        else:
            open_events[of_same] = open_events[of_same].joined(each)
    yield from open_events


def _begin_s(each: Interruption) -> float:
    """Return when an interruption began: a hang does so before it is noticed."""
    assert each.at_s is not None
    return each.at_s - each.hung_s


@dataclass(frozen=True, slots=True)
class Exposure:
    """Component-time in which an interruption would have been seen. None: the log does not say it.

    Args:
        job_s: Seconds of jobs.
        node_s: Seconds of nodes.
        gpu_s: Seconds of GPUs.
    """

    job_s: float | None
    node_s: float | None = None
    gpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedTries:
    """Tries to start again after something had failed.

    Args:
        n_succeeded: Those that trained.
        lost_s: How long each took that failed.
        back_off_s: From the end of one that failed to the next.
    """

    n_succeeded: int
    lost_s: tuple[float, ...]
    back_off_s: tuple[float, ...]

    @property
    def n_tries(self) -> int:
        """All of them."""
        return self.n_succeeded + len(self.lost_s)


@dataclass(frozen=True, slots=True)
class LoggedFailures:
    """What one log says.

    Args:
        file: Its name.
        program: That wrote it.
        exposure: Component-time.
        interruptions: In the order of their time.
        expected: Causes that the log would name if they happened, with what they end.
        not_counted: How many ends of jobs are no interruptions, by what they are.
        recovery_s: Seconds of each part of a recovery, as often as it was seen.
        sources: Of each part, a sentence that says how it was measured.
        notes: What the log does not say, and what was decided. Sentences.
        tries: Tries to start again; None if none was seen.
    """

    file: str
    program: str
    exposure: Exposure
    interruptions: tuple[Interruption, ...]
    expected: Mapping[str, LoggedEffect]
    not_counted: Mapping[str, int]
    recovery_s: Mapping[str, tuple[float, ...]]
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    tries: LoggedTries | None = None


def timestamp_s(text: str) -> float:
    """Return seconds of a time such as `2026-03-01T12:00:00`; a local one, without its zone, as if it were UTC.

    Raises:
        ValueError: It is no time.
    """
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
