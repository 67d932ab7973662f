"""The heartbeats of all ranks, and what they say about ranks that are late or at another call."""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

from real.processes.signing import SignedStore

BEAT_S = 0.5  # from one heartbeat to the next


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The message that a rank sends to the others twice a second.

    Args:
        rank: the sender.
        count: number of beats so far; it grows while the rank lives.
        position: progress of the rank (an instance index of the plan).
        host: name of its machine, for messages.
        machine: identity of its machine and process namespace; if it is equal, a pid means the same process.
        pid: process id.
        state: `failed` and `done` are final.
        cause: the sentence that names the rank that failed first, once it is known.
        step: number of steps of its training loop that the rank has begun; None without a loop.
        n_exchanges: number of exchanges through the store that the rank has completed.
        call: the call under way that all ranks make together, as the end of a sentence; empty without one.
        needs_store: the rank has not read the final message of the rank that hosts the store, or lacks its exchanges.
        process: number of the process among those that had this rank.
    """

    rank: int
    count: int
    position: int
    host: str
    machine: str
    pid: int
    state: Literal["alive", "failed", "done"]
    cause: str
    step: int | None = None
    n_exchanges: int = 0
    call: str = ""
    needs_store: bool = True
    process: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def _named(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 3`, `ranks 3, 4`."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def ranks_have(ranks: Sequence[int]) -> str:
    """Begin a sentence about ranks: `rank 3 has`, `ranks 3, 4 have`."""
    return f"{_named(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def name_calls(calls: Mapping[int, str], steps: Mapping[int, int | None]) -> str:
    """Name the calls of ranks that have to make the same one; return an empty text if they do.

    Args:
        calls: The call of each rank, as the end of a sentence. Empty without one.
        steps: Number of steps that each rank has begun.

    >>> name_calls({0: "called worker.average() before step 0", 1: "", 2: ""}, {0: 0, 1: 4, 2: 4})
    'rank 0 called worker.average() before step 0, ranks 1, 2 did not (at step 3)'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items(), key=lambda each: (not each[1], each[0])):
        ranks_of.setdefault(call, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    parts = [f"{_named(ranks)} {call}" for call, ranks in ranks_of.items() if call]
    if idle := ranks_of.get(""):
        reached = [max(0, (steps.get(rank) or 0) - 1) for rank in idle]
        at = f"step {min(reached)}" if len(set(reached)) == 1 else f"steps {min(reached)} to {max(reached)}"
        parts.append(f"{_named(idle)} did not (at {at})")
    return ", ".join(parts)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie that its parent has not yet collected does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # not Linux, or just gone: the next beat will show it
    return state not in {"Z", "X"}


def boot_id() -> str:
    """Return an identity of the kernel, equal for processes with one clock; empty if unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def machine() -> str:
    """Return an identity that is equal for processes that see each other's pids; containers may share a host name."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@final
class BeatTable:
    """The last heartbeat of each rank.

    Args:
        store: The store that has them. Unsigned contents are ignored.
        me: The first heartbeat of this rank.
        world_size: Number of ranks.

    Attributes:
        beats: The heartbeats by rank.
        missing: Ranks without a heartbeat.
        is_full: Set when no rank is missing.
    """

    def __init__(self, store: SignedStore, me: Heartbeat, world_size: int) -> None:
        self.beats: dict[int, Heartbeat] = {}
        self.missing = list(range(world_size))
        self.is_full = threading.Event()
        self._store = store
        self._me = me
        self._keys = [f"beat/{other}" for other in range(world_size)]
        self._unset = list(range(world_size))
        self._quiet = dict.fromkeys(range(world_size), 0)  # own beats since the last beat of each rank
        self._last_count_s = time.monotonic()

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self._keys)

    @property
    def others(self) -> list[Heartbeat]:
        """The heartbeats of other ranks."""
        return [beat for beat in self.beats.values() if beat.rank != self._me.rank]

    def gone(self) -> set[int]:
        """Return the ranks whose processes are gone from this machine."""
        return {beat.rank for beat in self.others if beat.machine == self._me.machine and not is_alive(beat.pid)}

    def n_quiet(self, rank: int) -> int:
        """Return the number of own beats since the last one of a rank."""
        return self._quiet[rank]

    def write(self, beat: Heartbeat) -> None:
        """Send a heartbeat of this rank."""
        self._store.set(self._keys[beat.rank], json.dumps(asdict(beat)))

    def read(self) -> None:
        """Read the heartbeats of all ranks."""
        self._unset = [rank for rank in self._unset if not self._store.check(self._keys[rank])]
        present = sorted(set(range(len(self._keys))).difference(self._unset))
        texts = self._store.multi_get([self._keys[rank] for rank in present])
        now_s = time.monotonic()
        counts = now_s - self._last_count_s > 0.8 * BEAT_S  # extra beats say nothing about the silence of others
        self._last_count_s = now_s if counts else self._last_count_s
        for rank, text in zip(present, texts, strict=True):
            beat = Heartbeat(**json.loads(text)) if text else None
            before = self.beats.get(rank)
            if beat and (
                before is None or (before.process, before.count) < (beat.process, beat.count)
            ):  # writing an older one again needs no secret
                self.beats[rank] = beat
                self._quiet[rank] = 0
            elif before:
                self._quiet[rank] += counts
        self.missing = [rank for rank in self.missing if rank not in self.beats]
        if not self.missing:
            self.is_full.set()


def compare_calls(beats: Mapping[int, Heartbeat]) -> str:
    """Name the calls of the ranks if they differ, or else the steps that they have begun; empty if all agree."""
    calls = {rank: "has left" if beat.state == "done" else beat.call for rank, beat in beats.items()}
    differences = name_calls(calls, {rank: beat.step for rank, beat in beats.items()})
    return f"{differences}: all ranks do so before the same step" if differences else _compare_steps(beats)


def _compare_steps(beats: Mapping[int, Heartbeat]) -> str:
    """Name the ranks that have begun fewer steps than the others; empty if none has."""
    begun = {rank: beat.step for rank, beat in beats.items() if beat.step is not None}
    most = max(begun.values(), default=0)
    behind = [f"rank {rank} is at step {step}" for rank, step in sorted(begun.items()) if step < most]
    if not behind:
        return ""
    more = f", {len(behind) - 8} more are behind" if len(behind) > 8 else ""
    return f"{', '.join(behind[:8])}{more}, the others at {most} (a rank that leaves out a batch calls worker.skip())"


def name_late(beats: Mapping[int, Heartbeat]) -> str:
    """Name the ranks that are behind the others; empty if none is."""
    if differences := compare_calls(beats):
        return differences
    first = max(beat.position for beat in beats.values())
    late = [beat for beat in beats.values() if beat.position < first]
    if not late:
        return ""
    where = ", ".join(f"{beat} is at operation {beat.position}" for beat in late[:8])
    more = f" and {len(late) - 8} more" if len(late) > 8 else ""
    return f"{ranks_have([beat.rank for beat in late])} not arrived: {where}{more}, the others at {first}"
