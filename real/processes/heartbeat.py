"""What ranks tell each other, and how to see whether a process of the same machine lives."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Beat:
    """Holds what one rank tells the others twice a second.

    Args:
        rank: who beats.
        count: beats so far; it grows while the rank lives.
        position: how far the rank is (an instance index of the plan).
        host: name of its machine, for messages.
        machine: identity of its machine and process namespace: where it is equal, a pid means the same process.
        pid: process id.
        state: `failed` and `done` are last words.
        cause: the sentence that names the rank which failed first, once that is known.
    """

    rank: int
    count: int
    position: int
    host: str
    machine: str
    pid: int
    state: Literal["alive", "failed", "done"]
    cause: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def encode(self) -> str:
        """Write the beat as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> "Beat":
        """Read what `encode` wrote."""
        return Beat(**json.loads(text))


def ranks_have(ranks: Sequence[int]) -> str:
    """Begin a sentence about ranks: `rank 3 has`, `ranks 3, 4 have`."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and is not yet collected by its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # not Linux, or just gone: the next beat knows
    return state not in {"Z", "X"}


def machine() -> str:
    """Return what is equal for processes that see each other's pids: containers may share a host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
