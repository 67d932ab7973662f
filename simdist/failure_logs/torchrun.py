"""What a log of torchrun says about failures: its agents' messages, and those of NCCL's watchdog.

The agents name the first process that failed, and begin a new round of the rendezvous for each restart. All failures
of one round are one event: the other ranks die because the first one did. NCCL's watchdog ends ranks that wait too
long for a collective operation. So its message makes the event a hang, which began that long before. Slurm's message
says that a node failed: then processes failed because of it.

A message of rounds has the level INFO: without `LOGLEVEL=INFO`, when a round began and its ranks are not known. Then
the first message of the agent stands for the beginning.

Source:
    pytorch/pytorch, torch/distributed/elastic/agent/server/api.py (rounds), multiprocessing/api.py and
    multiprocessing/errors/__init__.py (failures), torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (watchdog);
    SchedMD/slurm, src/slurmd/slurmstepd/req.c and src/srun (ends of a job).
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from simdist.errors import ScenarioError
from simdist.failure_logs.records import (
    SAME_EVENT_S,
    TRAINS_AFTER_S,
    Exposure,
    Interruption,
    LoggedEffect,
    LoggedFailures,
    joined_events,
    timestamp_s,
)
from simdist.settings.base import plural

# What the lines of such a log contain.
_MARKS = (
    "torch.distributed.elastic",
    "torch/distributed/",
    "torchelastic",
    "ProcessGroupNCCL",
    "elastic_operator",
    "Rendezvous complete for workers",
    "failed (exitcode: ",
    "(first observed failure)",
)

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T_ ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?", re.ASCII)
_SHORT_DATE = re.compile(r"[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?", re.ASCII)
_OF_TORCH = re.compile(
    r"torch[./]distributed|elastic|ProcessGroupNCCL|\bapi: (?:\[|failed )|\brun: |rendezvous", re.ASCII
)
_LAUNCH = re.compile(r"Starting elastic_operator with launch configs|Setting OMP_NUM_THREADS environment variable")
_ROUND = re.compile(r"Rendezvous complete for workers")
_N_NODES = re.compile(r"\bgroup_world_size=(\d{1,7})\b", re.ASCII)
_N_RANKS = re.compile(r"\bglobal_world_sizes=\[(\d{1,7})\b", re.ASCII)
_FAILED = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: \d+", re.ASCII)
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_OF_BLOCK = re.compile(r"\b(time|host|exitcode) {2,}: (\S+)")
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*?ran for (\d{1,12}) milliseconds", re.ASCII)
_STOPPED = re.compile(r"Received (?:Signals\.)?\w+ death signal|Process \d+ got signal: ", re.ASCII)
_ENDED = re.compile(r"worker group successfully finished|All workers successfully finished")
_NO_RENDEZVOUS = re.compile(r"^\S*\.Rendezvous(?:Timeout|Connection|Closed|State)Error")
_BY_SLURM = re.compile(r"\*\*\* (?:JOB|STEP) .*?CANCELLED AT |srun: error: Node failure on ")
_NODE_FAILED = re.compile(r"CANCELLED AT \S+ DUE TO NODE FAILURE|srun: error: Node failure on ")
_WHOLE = re.compile(r"-?\d{1,9}", re.ASCII)
_MESSAGES = (_OF_TORCH, _OF_BLOCK, _LAUNCH, _ROUND, _FAILED, _STOPPED, _ENDED, _BY_SLURM)  # whose times count

_CAUSES = (  # what a worker says about its end
    ("GPU fault", re.compile(r"uncorrectable ECC error|fallen off the bus|NVRM: Xid")),
    ("out of memory", re.compile(r"CUDA out of memory|OutOfMemoryError|oom-kill|Out of memory: Killed")),
)
_HANG = "collective time-out"
_NODE = "node failure"
_EFFECTS: dict[str, LoggedEffect] = {_HANG: "hang", _NODE: "node"}  # of other causes: process
_BY_CODE = {-9: "killed (SIGKILL)", -11: "crashed (SIGSEGV)", -7: "crashed (SIGBUS)", -6: "aborted (SIGABRT)"}
_ERROR = "error in the program"
_STOPS = (-15, -2, -1)  # SIGTERM, SIGINT, SIGHUP: somebody, or a scheduler
_ANY_YEAR = 2000
_HALF_YEAR_S = 180 * 86400.0
_JOB = frozenset(["torchrun"])  # logs that are given together are of one job


@dataclass(slots=True)
class Round:
    """One round of the rendezvous: from the start of the processes to their end.

    Args:
        begin_s: When it began; None if the log does not say it.
        last_s: Time of its last message.
        n_nodes: Nodes.
        n_ranks: Ranks.
        is_announced: The log says when the rendezvous was complete.
        end: What ended it; empty if the log does not say it.
        failed_s: When a failure was first seen.
        cause: Of the failure.
        said: Cause that a worker named.
        hung_s: How long a collective operation had hung when the failure was seen.
        n_failed: Ranks that failed by themselves, as far as the log names them.
        hosts: Where.
    """

    begin_s: float | None = None
    last_s: float | None = None
    n_nodes: int | None = None
    n_ranks: int | None = None
    is_announced: bool = False
    end: Literal["", "failed", "stopped", "ended"] = ""
    failed_s: float | None = None
    cause: str = ""
    said: str = ""
    hung_s: float = 0.0
    n_failed: int = 0
    hosts: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float | None:
        """How long it trained; None if the log does not say it."""
        end_s = self.last_s if self.failed_s is None else self.failed_s - self.hung_s
        if self.begin_s is None or end_s is None:
            return None
        if self.hung_s and self.is_announced:  # it may have hung from the start
            return max(0.0, end_s - self.begin_s)
        return end_s - self.begin_s if end_s > self.begin_s else None

    def interruption(self) -> Interruption:
        """Return its failure."""
        effect = _EFFECTS.get(self.cause, "process")
        n_ended = max(1, self.n_failed)
        return Interruption(self.failed_s, self.cause, effect, frozenset(self.hosts), _JOB, n_ended, self.hung_s)


@dataclass(frozen=True, slots=True)
class TorchrunLog:
    """What is in one file.

    Args:
        name: Of the file.
        rounds: In their order.
        n_failed_starts: How often a rendezvous failed.
    """

    name: str
    rounds: tuple[Round, ...]
    n_failed_starts: int


def is_of_torchrun(line: str) -> bool:
    """Tell whether a line is a message of torchrun or of NCCL's watchdog."""
    return any(mark in line for mark in _MARKS)


def parse_torchrun(lines: Iterable[str], name: str) -> TorchrunLog:
    """Return what is in the lines of a log.

    Args:
        lines: Also with the output of the program, and with prefixes of a launcher.
        name: Of the file.
    """
    kept = [line for line in lines if _is_of_interest(line)]
    reading = _LogReading(next((int(found[1]) for line in kept if (found := _DATE.search(line))), _ANY_YEAR))
    for line in kept:
        reading.read(line)
    n_failed_starts = sum(bool(_NO_RENDEZVOUS.match(line)) for line in kept)
    rounds = (each for each in reading.rounds if each.end or each.begin_s is not None)
    return TorchrunLog(name, tuple(rounds), n_failed_starts)


def _is_of_interest(line: str) -> bool:
    patterns = (*_MESSAGES, _ROOT, _N_NODES, _N_RANKS, *(said for _, said in _CAUSES))
    return any(pattern.search(line) for pattern in patterns)


class _LogReading:
    """Reads the lines of a log one after the other."""

    def __init__(self, year: int) -> None:
        self.year = year  # of messages without one
        self.last_s: float | None = None
        self.rounds = [Round()]
        self.is_root = False  # within the part of a block that names the first failure

    def read(self, line: str) -> None:
        """Read the next line."""
        at_s = self._time_s(line)
        self._begin_round(line, at_s)
        current = self.rounds[-1]
        if at_s is not None:
            current.begin_s = at_s if current.begin_s is None else current.begin_s
            current.last_s = current.last_s if current.end else at_s
        if found := _N_NODES.search(line):
            current.n_nodes = int(found[1])
        if found := _N_RANKS.search(line):
            current.n_ranks = int(found[1])
        self._end_round(current, line, at_s)

    def _time_s(self, line: str) -> float | None:
        """Return the time of a message; None of a line of something else, whose clock may be another one."""
        if not any(pattern.search(line) for pattern in _MESSAGES):
            return None
        if found := _DATE.search(line):
            self.last_s = _seconds(*found.groups())
        elif found := _SHORT_DATE.search(line):
            at_s = _seconds(str(self.year), *found.groups())
            if at_s is not None and self.last_s is not None and self.last_s - at_s > _HALF_YEAR_S:
                self.year += 1
                at_s = _seconds(str(self.year), *found.groups())
            self.last_s = at_s
        return self.last_s if found else None

    def _begin_round(self, line: str, at_s: float | None) -> None:
        """Begin a round if a line says so. Each agent of a log says it, and the first one counts."""
        is_announced = bool(_ROUND.search(line))
        if not is_announced and not _LAUNCH.search(line):
            return
        self.is_root = False
        current = self.rounds[-1]
        is_later = at_s is not None and current.begin_s is not None and at_s - current.begin_s > SAME_EVENT_S
        if current.end or (is_later and (current.is_announced or not is_announced)):
            current.end = current.end or "ended"
            self.rounds.append(Round(None, None, current.n_nodes, current.n_ranks, is_announced))
        elif is_announced and not current.is_announced:
            current.is_announced = True
            current.begin_s = None  # training begins now, not at the first message

    def _end_round(self, current: Round, line: str, at_s: float | None) -> None:
        """Note what a line says about the end of a round."""
        if found := _FAILED.search(line):
            _fail(current, int(found[1]), at_s)
        elif found := _WATCHDOG.search(line):
            if not current.end:
                current.end = "failed"
                current.cause = _HANG
                current.failed_s = at_s
                current.hung_s = int(found[1]) / 1e3
        elif _ROOT.search(line):
            self.is_root = True
        elif found := _OF_BLOCK.search(line):
            self._note_block(current, found[1], found[2], at_s)
        elif _NODE_FAILED.search(line) and current.end != "ended":
            current.end = "failed"
            current.cause = _NODE
            current.hung_s = 0.0
            current.failed_s = at_s if current.failed_s is None else current.failed_s
        elif _STOPPED.search(line) or _BY_SLURM.search(line):
            current.end = current.end or "stopped"
        elif _ENDED.search(line):
            current.end = current.end or "ended"
        else:
            current.said = current.said or next((cause for cause, said in _CAUSES if said.search(line)), "")

    def _note_block(self, current: Round, key: str, value: str, at_s: float | None) -> None:
        """Note a line of the block that names all failures of an agent."""
        if key == "host" and self.is_root:
            current.hosts.add(value)
        elif key == "exitcode" and _WHOLE.fullmatch(value):
            current.n_failed += int(value) not in _STOPS
            if self.is_root:
                _fail(current, int(value), self.last_s if at_s is None else at_s)


def _fail(current: Round, exit_code: int, at_s: float | None) -> None:
    """Note the first process of a round that failed."""
    if current.end == "failed" and current.failed_s is None:
        current.failed_s = at_s  # the watchdog's message has no time before torch 2.2
    if current.end:
        return
    if exit_code in _STOPS:
        current.end = "stopped"
        return
    current.end = "failed"
    current.failed_s = at_s
    current.cause = current.said or _BY_CODE.get(exit_code, _ERROR)


def _seconds(year: str, month: str, day: str, clock: str, fraction: str | None) -> float | None:
    try:
        whole_s = timestamp_s(f"{year}-{int(month):02}-{day}T{clock}")
    except ValueError:
        return None  # digits that are no date
    return whole_s + float(f"0.{fraction or 0}")


def torchrun_failures(logs: Sequence[TorchrunLog]) -> LoggedFailures:
    """Return what logs of one job say, such as those of its nodes.

    Rounds of several logs that begin at nearly the same time are one, and so are failures.

    Raises:
        ScenarioError: No message tells when the job ran, or how it ended.
    """
    name = " and ".join(log.name for log in logs)
    rounds = [each for log in logs for each in log.rounds]
    if not any(each.end or each.seconds for each in rounds):
        raise ScenarioError(f"{name}: no message of torchrun tells when it ran, or how it ended: set LOGLEVEL=INFO")
    timed = [each for each in rounds if each.seconds is not None]
    failed = [each for each in timed or rounds if each.end == "failed"]
    trained = [each for each in failed if each.seconds is None or each.seconds >= TRAINS_AFTER_S]
    with_time = [each.interruption() for each in trained if each.failed_s is not None]
    without = [each.interruption() for each in trained if each.failed_s is None]
    events = (*joined_events(with_time), *without)
    pairs = (pair for log in logs for pair in pairwise(log.rounds))
    starts_s = tuple(start_s for pair in pairs if (start_s := _restart_s(*pair)) is not None)
    hung_s = tuple(each.hung_s for each in events if each.cause == _HANG)
    n_stopped = sum(each.end == "stopped" for each in timed or rounds)
    ends = {"failed in the first minute": len(failed) - len(trained), "stopped by a signal": n_stopped}
    recovery_s = {"start": starts_s, "timeouts.collective": hung_s}
    return LoggedFailures(
        name,
        "torchrun",
        _exposure(logs),
        events,
        {} if events else {"failure": "process"},
        {end: n for end, n in ends.items() if n},
        {part: seconds for part, seconds in recovery_s.items() if seconds},
        {
            "start": "first message of a failure to the end of the next rendezvous",
            "timeouts.collective": "as NCCL's watchdog reports it",
        },
        tuple(_notes(logs, rounds, timed)),
    )


def _restart_s(failed: Round, following: Round) -> float | None:
    """Return how long torchrun took to start again; None if the log does not say it, or if Slurm started the job."""
    if failed.end != "failed" or failed.failed_s is None or failed.cause == _NODE:
        return None
    if not following.is_announced or following.begin_s is None:
        return None
    return following.begin_s - failed.failed_s if following.begin_s > failed.failed_s else None


def _exposure(logs: Sequence[TorchrunLog]) -> Exposure:
    """Return component-time of rounds that have a length; one that is in several logs counts once."""
    counted: list[Round] = []
    for log in logs:
        of_others = tuple(counted)
        counted += [
            each
            for each in log.rounds
            if each.seconds is not None
            and not any(abs(_begin_s(each) - _begin_s(other)) <= SAME_EVENT_S for other in of_others)
        ]
    if not counted:
        return Exposure(None)
    times = [(each, each.seconds or 0.0) for each in counted]
    has_nodes = all(each.n_nodes for each in counted)
    has_ranks = all(each.n_ranks for each in counted)
    return Exposure(
        math.fsum(seconds for _, seconds in times),
        math.fsum((each.n_nodes or 0) * seconds for each, seconds in times) if has_nodes else None,
        math.fsum((each.n_ranks or 0) * seconds for each, seconds in times) if has_ranks else None,
    )


def _begin_s(each: Round) -> float:
    assert each.begin_s is not None
    return each.begin_s


def _notes(logs: Sequence[TorchrunLog], rounds: Sequence[Round], timed: Sequence[Round]) -> Iterator[str]:
    n_unknown = len(rounds) - len(timed)
    if n_unknown and timed:
        yield f"{n_unknown} of {len(rounds)} rounds are left out: when they began is not in the log."
    if not timed:
        yield (
            "How long the job ran is not in the log, so it tells no rate: run torchrun with LOGLEVEL=INFO. "
            "Torch 1.11 to 2.0 writes no times."
        )
    elif not all(each.n_ranks for each in timed):
        yield "How many ranks ran is not in the log, so rates are per job: run torchrun with LOGLEVEL=INFO."
    n_starts = sum(log.n_failed_starts for log in logs)
    if n_starts:
        yield f"{n_starts} {plural(n_starts, 'rendezvous')} failed: those are tries that fail, and no interruptions."
    if len(logs) > 1:
        yield f"The {len(logs)} logs are taken to be of one job: rounds that begin within a minute are one."
