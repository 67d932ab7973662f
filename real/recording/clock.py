"""Synchronization of the clocks of different machines.

Rank 0 asks each other rank for its time, several times, and uses the fastest reply. If the request left at a, was
answered at b, and the reply arrived at c, the other clock is ahead by b - (a + c) / 2.
The uncertainty is (c - a) / 2. Clocks drift apart by some microseconds per second. So they are compared at the start
and at the end of a run, and corrected linearly in between. Ranks of one machine read the same clock.

Source:
    Mills, Internet Time Synchronization: the Network Time Protocol, IEEE Trans. Communications 39 (1991).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from real.collectives.byte_transfer import gather_texts
from real.processes.beats import boot_id
from real.recording.timing import now_s, sleep_s

_ReadClock = Callable[[], float]

_N_ROUNDS = 16
_START_IN_S = 0.05


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the clock of each rank is ahead of rank 0's clock.

    Args:
        at_s: Time of the comparison, by rank 0's clock.
        ahead_s: float64 `[world_size]`, seconds.
        uncertainty_s: Uncertainty of `ahead_s`; 0 on the machine of rank 0.
    """

    at_s: float
    ahead_s: NDArray[np.float64]
    uncertainty_s: NDArray[np.float64]


def compare_clocks(
    *, clock: _ReadClock = now_s, machine: str | None = None, group: dist.ProcessGroup | None = None
) -> Clocks:
    """Compare the clocks of all ranks; all ranks take part and get the result.

    Args:
        clock: Clock of this rank, in seconds.
        machine: An identity that is equal for ranks with the same clock; None detects it.
        group: A group of all ranks that can move tensors of the host.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    machines = gather_texts(machine or boot_id() or f"rank {rank}", group=group)
    result = torch.zeros(2, world_size, dtype=torch.float64)
    for other in range(1, world_size):
        if machines[other] == machines[0]:
            continue
        if rank == 0:
            result[:, other] = torch.tensor(_ask(other, clock, group), dtype=torch.float64)
        elif rank == other:
            _answer(clock, group)
    at_s = _times(clock())
    dist.broadcast(result, src=0, group=group)
    dist.broadcast(at_s, src=0, group=group)
    return Clocks(float(at_s), result[0].numpy(), result[1].numpy())


def agree_on_start_s(clocks: Clocks, *, clock: _ReadClock = now_s, group: dist.ProcessGroup | None = None) -> float:
    """Agree on a moment shortly from now, wait for it, and return it by this rank's own clock."""
    at_s = _times(clock() + _START_IN_S)
    dist.broadcast(at_s, src=0, group=group)
    start_s = float(at_s) + float(clocks.ahead_s[dist.get_rank()])
    sleep_s(start_s - clock())
    return start_s


def drift(clocks: tuple[Clocks, Clocks], rank: int) -> float:
    """Return the gain of a rank's clock on rank 0's, in seconds per second, from comparisons at start and end.

    >>> ahead_s = np.array([[0.0, 5.0], [0.0, 5.001]])
    >>> at_start, at_end = (Clocks(at_s, each, np.zeros(2)) for at_s, each in zip((100.0, 110.0), ahead_s))
    >>> round(drift((at_start, at_end), rank=1), 6)
    0.0001
    """
    passed_s = clocks[1].at_s - clocks[0].at_s
    return float(clocks[1].ahead_s[rank] - clocks[0].ahead_s[rank]) / passed_s if passed_s > 0 else 0.0


def to_common_s(times_s: NDArray[np.float64], *, start_s: float, drift: float = 0.0) -> NDArray[np.float64]:
    """Turn times of a rank's clock into seconds from the common start.

    Args:
        times_s: Times, of any shape; NaN stays NaN.
        start_s: The common start by the rank's own clock.
        drift: Gain of the clock on rank 0's clock, in seconds per second.

    >>> to_common_s(np.array([100.0, 110.0]), start_s=100.0, drift=1e-4).round(6).tolist()
    [0.0, 9.999]
    """
    return np.asarray((times_s - start_s) * (1 - drift))


def _ask(other: int, clock: _ReadClock, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Return how far the clock of a rank is ahead of this rank's clock, and the uncertainty, in seconds."""
    answers = []
    reply = _times(0.0)
    for _ in range(_N_ROUNDS):
        sent_s = clock()
        dist.send(_times(sent_s), dst=other, group=group)
        dist.recv(reply, src=other, group=group)
        back_s = clock()
        answers.append(((back_s - sent_s) / 2, float(reply) - (sent_s + back_s) / 2))
    uncertainty_s, ahead_s = min(answers)
    return ahead_s, uncertainty_s


def _answer(clock: _ReadClock, group: dist.ProcessGroup | None) -> None:
    question = _times(0.0)
    for _ in range(_N_ROUNDS):
        dist.recv(question, src=0, group=group)
        dist.send(_times(clock()), dst=0, group=group)


def _times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
