"""What one rank's trace says of data-parallel training: its work and its collectives, in program order.

A node that a host operation launched stands where that operation stands, so that a kernel which ran late, because
communication held it up, still counts where the program has it. Other nodes stand in the order of their ids.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from simdist.chakra.files import read_trace
from simdist.chakra.schema import CollectiveType, Metadata, Node, NodeType
from simdist.errors import TraceError, UnsupportedError

Phase: TypeAlias = Literal["forward", "backward", "optimize"]

_PHASES: tuple[tuple[re.Pattern[str], Phase], ...] = (
    (re.compile(r"optimizer\.|^(optimize|trust_ratios)\b", re.IGNORECASE), "optimize"),
    (re.compile(r"backward", re.IGNORECASE), "backward"),
    (re.compile(r"\bforward\b", re.IGNORECASE), "forward"),
)
"""Names of phases, and of the host operations that launch them: those of PyTorch's autograd, modules and optimizers."""

_GROUP = re.compile(r'\{[^{}]*"pg_name"[^{}]*\}')
_LEFT_OUT = (CollectiveType.BROADCAST, CollectiveType.BARRIER)
_HINT = "only training that all-reduces its gradients over all ranks in every step can be imported"


@dataclass(frozen=True, slots=True)
class Work:
    """Computes on the device.

    Args:
        seconds: For how long.
        phase: Of what; None if the trace does not tell.
        step: Of which step; None if the trace does not tell.
    """

    seconds: float
    phase: Phase | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """Reduces a gradient bucket over a group.

    Args:
        node: The node, for messages.
        nbytes: Bytes of the bucket.
        group: What the trace calls the process group.
        step: Of which step; None if the trace does not tell.
    """

    node: str
    nbytes: int
    group: str
    step: int | None


Event: TypeAlias = Work | Call


@dataclass(frozen=True, slots=True)
class Recording:
    """One rank's trace.

    Args:
        path: The file, for messages.
        rank: From the trace or from the name of the file; None if neither tells.
        world_size: None if the trace does not tell.
        groups: Ranks of the process groups that the trace describes, by name.
        events: Work and all-reduces, in program order.
        left_out: How many nodes of what kind were left out.
    """

    path: Path
    rank: int | None
    world_size: int | None
    groups: dict[str, tuple[int, ...]]
    events: tuple[Event, ...]
    left_out: Counter[str]


def read_recording(path: Path) -> Recording:
    """Read one rank's trace, node by node.

    Raises:
        TraceError: It cannot be read, or is damaged.
        UnsupportedError: It does not all-reduce gradients, or does something else besides.
    """
    messages = read_trace(path)
    head = next(messages)
    reader = _Reader(path)
    for node in messages:
        if isinstance(node, Node):
            reader.add(node)
    events = tuple(event for _, _, event in sorted(reader.events, key=lambda each: each[:2]))
    if not any(isinstance(event, Call) for event in events):
        raise UnsupportedError(f"{path}: has no all-reduce among {reader.n_nodes:,} nodes: {_HINT}")
    facts = _facts(head) if isinstance(head, Metadata) else {}
    rank = facts.get("simdist_rank", _rank_of_name(path))
    return Recording(path, rank, facts.get("simdist_world_size"), reader.groups, events, reader.left_out)


def _facts(head: Metadata) -> dict[str, int]:
    return {each.name: each.value for each in head.attributes if isinstance(each.value, int)}


def _rank_of_name(path: Path) -> int | None:
    found = re.search(r"\.(\d{1,9})\.et(\.gz)?$", path.name)
    return int(found[1]) if found else None


class _Reader:
    """Takes the nodes of a trace one by one and keeps what counts."""

    def __init__(self, path: Path) -> None:
        self.events: list[tuple[int, int, Event]] = []  # where it stands in the program, its id
        self.groups: dict[str, tuple[int, ...]] = {}
        self.left_out: Counter[str] = Counter()
        self.n_nodes = 0
        self._path = path
        self._hosts: dict[int, Phase | None] = {}  # host operations by id

    def add(self, node: Node) -> None:
        self.n_nodes += 1
        match node.type:
            case NodeType.METADATA:
                self.groups.update(_groups(node.inputs.values))
            case NodeType.COMP if node.find("is_cpu_op") is True:
                self._add_host(node)
            case NodeType.COMP:
                self._add_work(node)
            case NodeType.COMM_COLL:
                self._add_collective(node)
            case NodeType.MEM_LOAD | NodeType.MEM_STORE:
                self.left_out["loads and saves"] += 1
            case NodeType.COMM_SEND | NodeType.COMM_RECV:
                word = "sends to" if node.type == NodeType.COMM_SEND else "receives from"
                raise UnsupportedError(f"{self._where(node)} {word} one rank: {_HINT}")
            case _:
                self.left_out["nodes of unknown type"] += 1

    def _add_host(self, node: Node) -> None:
        if node.find("simdist_op") == "delay":
            self.left_out["delays"] += 1
        self._hosts[node.id] = self._phase(node)

    def _add_work(self, node: Node) -> None:
        if node.find("simdist_op") == "delay":
            self.left_out["delays"] += 1
            return
        seconds = node.find("simdist_duration_s")
        if not isinstance(seconds, float):
            seconds = node.duration_us * 1e-6
        if not 0 <= seconds < float("inf"):
            raise TraceError(f"{self._where(node)}: simdist_duration_s is {seconds}; it is seconds, 0 or more")
        self._keep(node, Work(seconds, self._phase(node), _step(node)))

    def _add_collective(self, node: Node) -> None:
        kind, nbytes, group = node.find("comm_type"), node.find("comm_size"), node.find("pg_name")
        if kind in _LEFT_OUT:
            self.left_out["broadcasts and barriers"] += 1
            return
        if kind != CollectiveType.ALL_REDUCE:
            raise UnsupportedError(f"{self._where(node)} is {_collective_text(kind)}: {_HINT}")
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise TraceError(f"{self._where(node)}: comm_size is {nbytes!r}; it is the bytes of the buffer, 1 or more")
        self._keep(node, Call(self._where(node), nbytes, str(group or ""), _step(node)))

    def _keep(self, node: Node, event: Event) -> None:
        launched_by = next((dep for dep in node.ctrl_deps if dep in self._hosts), node.id)
        self.events.append((launched_by, node.id, event))

    def _phase(self, node: Node) -> Phase | None:
        """Return the phase that the name tells, or that of the host operation that this node was called from."""
        for pattern, phase in _PHASES:
            if pattern.search(node.name):
                return phase
        return next((self._hosts[dep] for dep in node.ctrl_deps if dep in self._hosts), None)

    def _where(self, node: Node) -> str:
        name = node.name if len(node.name) <= 60 else node.name[:57] + "..."
        return f"{self._path}: node {node.id} {name!r}"


def _collective_text(kind: object) -> str:
    names = {int(each): each.name.lower().replace("_", "-") for each in CollectiveType}
    return f"of kind {names[kind]}" if isinstance(kind, int) and kind in names else f"of comm_type {kind!r}"


def _step(node: Node) -> int | None:
    step = node.find("simdist_step")
    return step if isinstance(step, int) else None


def _groups(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the process groups in the text of PyTorch's `process_group:init`, and nothing of what is no such text."""
    for found in _GROUP.finditer(text):
        try:
            group = json.loads(found[0])
        except ValueError:
            continue
        ranks = group.get("ranks")
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            yield str(group["pg_name"]), tuple(sorted(ranks))
