"""One rank of data-parallel training: its work and its all-reduces in program order, divided into training steps.

A node that a host operation launched takes the place of that operation. So a kernel that ran late, because
communication held it up, still counts at its place in the program. Other nodes are in the order of their ids.

Traces from `simdist chakra export` mark their steps. Other traces do not, but their sequence of all-reduces repeats.
Between the last all-reduce of a step and the first of the next come the optimizer, the forward pass, and the backward
pass of the first bucket. Names distinguish them. Without such names, the work after the very last all-reduce is the
optimizer, and the rest counts as forward pass.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from simdist.chakra.files import CollectiveType, NodeType, find, read_trace
from simdist.errors import TraceError, UnsupportedError

if TYPE_CHECKING:
    from google.protobuf.message import Message

TrainingPhase: TypeAlias = Literal["forward", "backward", "optimize"]

#: Names of phases, and of the host operations that launch them, from PyTorch's autograd, modules and optimizers.
_PHASES: tuple[tuple[re.Pattern[str], TrainingPhase], ...] = (
    (re.compile(r"optimizer\.|^(optimize|trust_ratios)\b", re.IGNORECASE), "optimize"),
    (re.compile(r"backward", re.IGNORECASE), "backward"),
    (re.compile(r"\bforward\b", re.IGNORECASE), "forward"),
)

_LONGEST_S = 1e6  # of one operation; 11 days
_GROUP = re.compile(r'\{[^{}]*"pg_name"[^{}]*\}')
_LEFT_OUT = (CollectiveType.BROADCAST, CollectiveType.BARRIER)
_HINT = "only training that all-reduces its gradients over all ranks in every step can be imported"


@dataclass(frozen=True, slots=True)
class Work:
    """Computes on the device.

    Args:
        seconds: Duration.
        phase: Phase of training; None if the trace does not show it.
        step: Step; None if the trace does not state it.
    """

    seconds: float
    phase: TrainingPhase | None
    step: int | None


@dataclass(frozen=True, slots=True)
class AllReduceCall:
    """Reduces a gradient bucket over a group.

    Args:
        node: The node, for messages.
        nbytes: Bytes of the bucket.
        group: Name of the process group in the trace.
        step: Step; None if the trace does not state it.
    """

    node: str
    nbytes: int
    group: str
    step: int | None


RankEvent: TypeAlias = Work | AllReduceCall


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's trace.

    Args:
        path: The file, for messages.
        rank: Rank from the trace or from the name of the file; None if neither states it.
        world_size: Number of ranks; None if the trace does not state it.
        groups: Ranks of the process groups that the trace describes, by name.
        events: Work and all-reduces, in program order.
        left_out: Kind of node -> number of nodes left out.
    """

    path: Path
    rank: int | None
    world_size: int | None
    groups: dict[str, tuple[int, ...]]
    events: tuple[RankEvent, ...]
    left_out: Counter[str]


def read_rank(path: Path) -> RankTrace:
    """Read one rank's trace, node by node.

    Raises:
        TraceError: It cannot be read, or is damaged.
        UnsupportedError: It does not all-reduce gradients, or contains other communication.
    """
    messages = read_trace(path)
    facts = _facts(next(messages))
    reader = _Reader(path)
    for node in messages:
        reader.add(node)
    reader.refuse()
    events = reader.events()
    rank = facts.get("simdist_rank", _rank_of_name(path))
    return RankTrace(path, rank, facts.get("simdist_world_size"), reader.groups, events, reader.left_out)


def _facts(head: "Message") -> dict[str, int]:
    found = ((each.name, find(head, each.name)) for each in head.attr)
    return {name: value for name, value in found if isinstance(value, int)}


def _rank_of_name(path: Path) -> int | None:
    found = re.search(r"\.(\d{1,9})\.et(\.gz)?$", path.name)
    return int(found[1]) if found else None


class _Reader:
    """Takes the nodes of a trace one by one, in any order, and keeps the relevant ones."""

    def __init__(self, path: Path) -> None:
        self.groups: dict[str, tuple[int, ...]] = {}
        self.left_out: Counter[str] = Counter()
        self._path = path
        self._kept: list[tuple[int, tuple[int, ...], RankEvent]] = []  # its id, its callers
        self._hosts: dict[int, tuple[TrainingPhase | None, tuple[int, ...]]] = {}  # by id; its callers
        self._n_nodes = 0
        self._unknown = ""  # a node without an attribute for host or device
        self._refusal = ""
        self._n_communications = 0
        self._n_host_collectives = 0

    def add(self, node: "Message") -> None:
        self._n_nodes += 1
        is_of_host = find(node, "is_cpu_op")
        match node.type:
            case NodeType.METADATA:
                self.groups.update(_groups(node.inputs.values))
            case NodeType.COMP if is_of_host is True:
                self._add_host(node)
            case NodeType.COMP:
                self._unknown = self._unknown or (self._where(node) if is_of_host is None else "")
                self._add_work(node)
            case NodeType.COMM_COLL if is_of_host is True and find(node, "comm_type") is None:
                self._n_host_collectives += 1  # calls the collective, which is a node of the device
                self._add_host(node)
            case NodeType.COMM_COLL:
                self._add_collective(node)
            case NodeType.MEM_LOAD | NodeType.MEM_STORE:
                self.left_out["loads and saves"] += 1
            case NodeType.COMM_SEND | NodeType.COMM_RECV:
                word = "sends to" if node.type == NodeType.COMM_SEND else "receives from"
                self._n_communications += 1
                self._refuse(node, f"{word} one rank")
            case _:
                self.left_out["nodes of unknown type"] += 1

    def _add_host(self, node: "Message") -> None:
        if find(node, "simdist_op") == "delay":
            self.left_out["delays"] += 1
        self._hosts[node.id] = _named_phase(node), tuple(node.ctrl_deps)

    def _add_work(self, node: "Message") -> None:
        if find(node, "simdist_op") == "delay":
            self.left_out["delays"] += 1
            return
        seconds = find(node, "simdist_duration_s")
        if not isinstance(seconds, float):
            seconds = node.duration_micros * 1e-6
        if not 0 <= seconds <= _LONGEST_S:
            raise TraceError(
                f"{self._where(node)}: simdist_duration_s is {seconds}; it is seconds, from 0 to {_LONGEST_S:g}"
            )
        self._keep(node, Work(seconds, _named_phase(node), _marked_step(node)))

    def _add_collective(self, node: "Message") -> None:
        self._n_communications += 1
        kind = find(node, "comm_type")
        nbytes = find(node, "comm_size")
        group = find(node, "pg_name")
        if kind in _LEFT_OUT:
            self.left_out["broadcasts and barriers"] += 1
            return
        if kind != CollectiveType.ALL_REDUCE:
            self._refuse(node, f"is {_collective_text(kind)}")
            return
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise TraceError(f"{self._where(node)}: comm_size is {nbytes!r}; it is the bytes of the buffer, 1 or more")
        self._keep(node, AllReduceCall(self._where(node), nbytes, str(group or ""), _marked_step(node)))

    def _keep(self, node: "Message", event: RankEvent) -> None:
        self._kept.append((node.id, tuple(node.ctrl_deps), event))

    def _refuse(self, node: "Message", problem: str) -> None:
        self._refusal = self._refusal or f"{self._where(node)} {problem}: {_HINT}"

    def refuse(self) -> None:
        """Refuse, after the last node, a trace that is not data-parallel training.

        Raises:
            TraceError: Its nodes do not state their kind.
            UnsupportedError: It does not all-reduce gradients, or contains other communication.
        """
        events = [event for _, _, event in self._kept]
        if self._n_communications and not _seconds(events):
            raise UnsupportedError(
                f"{self._path}: communicates {self._n_communications:,} times and computes for 0 s: this is a "
                f"benchmark of communication or was made for a simulator, no job: {_HINT}"
            )
        if self._refusal:
            raise UnsupportedError(self._refusal)
        if not any(isinstance(event, AllReduceCall) for event in events):
            calls = (
                f", but {self._n_host_collectives:,} collectives of the host without comm_type, as before "
                f"`chakra_trace_link` joins a host's trace with that of its device"
            )
            raise UnsupportedError(
                f"{self._path}: has no all-reduce among {self._n_nodes:,} nodes"
                f"{calls if self._n_host_collectives else ''}: {_HINT}"
            )
        if self._unknown and self._hosts:
            raise TraceError(f"{self._unknown} has no is_cpu_op, other nodes have: it is true of what the host does")

    def events(self) -> tuple[RankEvent, ...]:
        """Return work and all-reduces in program order."""
        placed = []
        for node_id, deps, event in self._kept:
            host = self._caller(deps)
            if host is not None and isinstance(event, Work) and event.phase is None:
                event = replace(event, phase=self._phase(host))
            placed.append((node_id if host is None else host, node_id, event))
        return tuple(event for _, _, event in sorted(placed, key=lambda each: each[:2]))

    def _caller(self, deps: Sequence[int]) -> int | None:
        return next((dep for dep in deps if dep in self._hosts), None)

    def _phase(self, host: int | None) -> TrainingPhase | None:
        """Return the phase in the name of a host operation, or else in the name of its nearest caller with a phase."""
        phase = None
        passed = set()
        while host is not None and host not in passed and phase is None:  # converters write some as their own callers
            passed.add(host)
            phase, deps = self._hosts[host]
            host = self._caller(deps)
        self._hosts.update(dict.fromkeys(passed, (phase, ())))
        return phase

    def _where(self, node: "Message") -> str:
        name = node.name if len(node.name) <= 60 else node.name[:57] + "..."
        return f"{self._path}: node {node.id} {name!r}"


def _named_phase(node: "Message") -> TrainingPhase | None:
    return next((phase for pattern, phase in _PHASES if pattern.search(node.name)), None)


def _collective_text(kind: object) -> str:
    names = {int(each): each.name.lower().replace("_", "-") for each in CollectiveType}
    return f"of kind {names[kind]}" if isinstance(kind, int) and kind in names else f"of comm_type {kind!r}"


def _marked_step(node: "Message") -> int | None:
    step = find(node, "simdist_step")
    return step if isinstance(step, int) else None


def _groups(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the process groups in the text of PyTorch's `process_group:init`; nothing for other texts."""
    for found in _GROUP.finditer(text):
        try:
            group = json.loads(found[0])
        except ValueError:
            continue
        ranks = group.get("ranks")
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            yield str(group["pg_name"]), tuple(sorted(ranks))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Args:
        forward_s: Seconds before the first bucket's backward pass.
        buckets_s: Seconds of each bucket's backward pass, in the order of the all-reduces.
        optimize_s: Seconds after the last all-reduce.
        nbytes: Bytes of each all-reduce, in order.
    """

    forward_s: float
    buckets_s: tuple[float, ...]
    optimize_s: float
    nbytes: tuple[int, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of all work."""
        return self.forward_s + math.fsum(self.buckets_s) + self.optimize_s


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How all-reduces form steps.

    Args:
        n_skipped: All-reduces before the first complete step.
        n_calls: All-reduces of a step.
        n_steps: Steps.
    """

    n_skipped: int
    n_calls: int
    n_steps: int


def find_rhythm(sizes: Sequence[int], n_steps: int | None) -> Rhythm | None:
    """Return how a sequence of all-reduces repeats; None if it does not consist of `n_steps` equal parts.

    If there are several ways to divide it, the shortest step is taken. The first step may differ: PyTorch's
    DistributedDataParallel rebuilds its buckets after it. A sequence that does not repeat is one step.

    >>> find_rhythm([4, 1, 7, 2, 7, 2, 7, 2], None)
    Rhythm(n_skipped=2, n_calls=2, n_steps=3)
    """
    n = len(sizes)
    if n_steps is not None:
        return Rhythm(0, n // n_steps, n_steps) if n % n_steps == 0 else None
    for n_calls in range(1, n // 2 + 1):
        n_equal = 0
        while n_equal < n - n_calls and sizes[n - 1 - n_equal] == sizes[n - 1 - n_equal - n_calls]:
            n_equal += 1
        found = 1 + n_equal // n_calls
        n_skipped = n - found * n_calls
        if found > 1 and n_skipped <= n_calls:
            return Rhythm(n_skipped, n_calls, found)
    return Rhythm(0, n, 1)


def names_phases(rank_trace: RankTrace) -> bool:
    """Tell whether names in a trace show the phases."""
    return any(isinstance(event, Work) and event.phase == "backward" for event in rank_trace.events)


def cut(rank_trace: RankTrace, rhythm: Rhythm | None) -> list[Step]:
    """Return the steps of a rank_trace.

    Args:
        rank_trace: The trace of one rank.
        rhythm: How all-reduces form steps; None if events state their steps.

    Raises:
        TraceError: Some all-reduces state their step, and others do not.
        UnsupportedError: Not every step has the same all-reduces.
    """
    parts = _by_mark(rank_trace) if rhythm is None else _by_rhythm(rank_trace.events, rhythm)
    steps = [_step(events) for events in parts]
    for number, step in enumerate(steps):
        if step.nbytes != steps[0].nbytes:
            raise UnsupportedError(
                f"{rank_trace.path}: {_calls_text(step)} in step {number}, {_calls_text(steps[0])} in step 0: only "
                f"training that all-reduces the same gradients in every step can be imported"
            )
    return steps


def _calls_text(step: Step) -> str:
    return f"{len(step.nbytes)} all-reduces of {sum(step.nbytes):,} bytes"


def _by_mark(rank_trace: RankTrace) -> list[list[RankEvent]]:
    parts: dict[int, list[RankEvent]] = {}
    for event in rank_trace.events:
        if event.step is not None:
            parts.setdefault(event.step, []).append(event)
        elif isinstance(event, AllReduceCall):
            raise TraceError(f"{event.node} tells no step, other all-reduces do: write --steps to cut by their number")
    return [parts[step] for step in sorted(parts)]


def _by_rhythm(events: Sequence[RankEvent], rhythm: Rhythm) -> list[list[RankEvent]]:
    """Divide the events between the last all-reduce of each step and the first of the next."""
    calls = [place for place, event in enumerate(events) if isinstance(event, AllReduceCall)][rhythm.n_skipped :]
    firsts = calls[:: rhythm.n_calls]
    lasts = calls[rhythm.n_calls - 1 :: rhythm.n_calls]
    optimize_s = _seconds(events[lasts[-1] + 1 :])
    before = [place for place in range(firsts[0]) if isinstance(events[place], AllReduceCall)]
    begin = before[-1] + 1 + _border(events[before[-1] + 1 : firsts[0]], optimize_s) if before else 0
    joints = zip(lasts, firsts[1:], strict=False)
    borders = [last + 1 + _border(events[last + 1 : first], optimize_s) for last, first in joints]
    return [list(events[start:stop]) for start, stop in pairwise([begin, *borders, len(events)])]


def _border(joint: Sequence[RankEvent], optimize_s: float) -> int:
    """Return where a step ends among the events between its last all-reduce and the first of the next step."""
    phases = [event.phase for event in joint if isinstance(event, Work)]
    if "optimize" in phases:
        return len(phases) - phases[::-1].index("optimize")
    if any(phases):
        return next((place for place, phase in enumerate(phases) if phase != "backward"), 0)
    ends_s = list(accumulate((_seconds([event]) for event in joint), initial=0.0))
    return min(range(len(ends_s)), key=lambda place: abs(ends_s[place] - optimize_s))


def _seconds(events: Sequence[RankEvent]) -> float:
    return math.fsum(event.seconds for event in events if isinstance(event, Work))


def _step(events: Sequence[RankEvent]) -> Step:
    """Add up a step. The forward pass ends at the first work that is known to belong to the backward pass."""
    nbytes = tuple(event.nbytes for event in events if isinstance(event, AllReduceCall))
    buckets_s = [0.0] * len(nbytes)
    forward_s = 0.0
    optimize_s = 0.0
    n_calls = 0
    is_backward = False
    for event in events:
        if isinstance(event, AllReduceCall):
            n_calls += 1
            continue
        is_backward = is_backward or event.phase == "backward"
        if n_calls == 0 and not is_backward:
            forward_s += event.seconds
        elif n_calls < len(nbytes):
            buckets_s[n_calls] += event.seconds
        elif event.phase == "backward" and nbytes:
            buckets_s[-1] += event.seconds
        else:
            optimize_s += event.seconds
    return Step(forward_s, tuple(buckets_s), optimize_s, nbytes)
