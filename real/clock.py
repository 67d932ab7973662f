"""Clocks of different machines, brought together.

Rank 0 asks every other rank what time it is, some times over, and believes the answer that came back fastest: if it
left at a, was answered at b and arrived at c, the other clock is ahead by b - (a + c) / 2, give or take (c - a) / 2.
Clocks drift apart by some microseconds a second, so they are compared at the start and at the end of a run, and
corrected along a straight line in between. Ranks of one machine read the same clock.

Source:
    Mills, Internet Time Synchronization: the Network Time Protocol, IEEE Trans. Communications 39 (1991).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from real.timing import now_s, sleep_s

__all__ = ["Clocks", "common_start_s", "compare", "to_common_s"]

_N_ROUNDS = 16
_START_IN_S = 0.05
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the clock of every rank is ahead of rank 0's.

    Args:
        at_s: When they were compared, by rank 0's clock.
        ahead_s: float64 `[world_size]`, seconds.
        uncertainty_s: Give or take; 0 where the machine is rank 0's.
    """

    at_s: float
    ahead_s: NDArray[np.float64]
    uncertainty_s: NDArray[np.float64]


def compare() -> Clocks:
    """Compare the clocks of all ranks; all take part, and all get the result."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    machines = [_times(0.0, 0.0) for _ in range(world_size)]
    dist.all_gather(machines, _machine())
    result = torch.zeros(2, world_size, dtype=torch.float64)
    for other in range(1, world_size):
        if torch.equal(machines[other], machines[0]):
            continue
        if rank == 0:
            result[:, other] = torch.tensor(_ask(other), dtype=torch.float64)
        elif rank == other:
            _answer()
    at_s = _times(now_s())
    dist.broadcast(result, src=0)
    dist.broadcast(at_s, src=0)
    return Clocks(float(at_s), result[0].numpy(), result[1].numpy())


def common_start_s(clocks: Clocks) -> float:
    """Agree on a moment shortly from now, wait for it, and return it by this rank's own clock."""
    at_s = _times(now_s() + _START_IN_S)
    dist.broadcast(at_s, src=0)
    start_s = float(at_s) + float(clocks.ahead_s[dist.get_rank()])
    sleep_s(start_s - now_s())
    return start_s


def to_common_s(times_s: NDArray[np.float64], *, start_s: float, ahead_s: tuple[float, float]) -> NDArray[np.float64]:
    """Turn times of a rank's clock into seconds from the common start.

    Args:
        times_s: Times, of any shape; NaN stays NaN.
        start_s: The common start by the rank's own clock.
        ahead_s: How far it was ahead at the start and at the end, which is the last of the times.

    >>> to_common_s(np.array([100.0, 110.0]), start_s=100.0, ahead_s=(5.0, 5.001)).round(6).tolist()
    [0.0, 9.999]
    """
    since_s = times_s - start_s
    last_s = float(np.nanmax(since_s, initial=0.0))
    drift = (ahead_s[1] - ahead_s[0]) / last_s if last_s > 0 else 0.0
    return np.asarray(since_s * (1 - drift))


def _ask(other: int) -> tuple[float, float]:
    """Return how far the clock of a rank is ahead of mine, and the uncertainty, in seconds."""
    answers = []
    reply = _times(0.0)
    for _ in range(_N_ROUNDS):
        sent_s = now_s()
        dist.send(_times(sent_s), dst=other)
        dist.recv(reply, src=other)
        back_s = now_s()
        answers.append(((back_s - sent_s) / 2, float(reply) - (sent_s + back_s) / 2))
    uncertainty_s, ahead_s = min(answers)
    return ahead_s, uncertainty_s


def _answer() -> None:
    question = _times(0.0)
    for _ in range(_N_ROUNDS):
        dist.recv(question, src=0)
        dist.send(_times(now_s()), dst=0)


def _machine() -> Tensor:
    """Return numbers that are the same for all ranks of one machine, and only for these."""
    name = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else f"rank {dist.get_rank()}".encode()
    digest = hashlib.sha256(name).digest()
    return _times(*(int.from_bytes(digest[at : at + 6], "big") for at in (0, 6)))


def _times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
