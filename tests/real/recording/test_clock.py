"""Clocks that are apart and drift, in one process: a rank is what torch.distributed is told that it is."""

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor

from real.recording import clock as clocks_of
from real.recording.clock import Clocks, agree_on_start_s, compare_clocks, drift, to_common_s
from real.recording.recorder import Recorder, gather_trace
from simdist.plan import AllReduce, Backward, Buffer, Forward, Group, Plan
from simdist.traces.trace import Trace

GAIN = (0.0, 1e-3, -2e-3)  # seconds of a rank's clock more than rank 0's, each second
AHEAD_S = (0.0, 5.0, -3.0)  # at rank 0's second 100, when the ranks begin together
WORLD_SIZE = len(GAIN)


def own_s(rank: int, at_s: float) -> float:
    """Return what a rank's clock shows `at_s` seconds after the common start."""
    return 100.0 + at_s * (1 + GAIN[rank]) + AHEAD_S[rank]


def compared(at_s: float) -> Clocks:
    ahead_s = np.array([own_s(rank, at_s) - own_s(0, at_s) for rank in range(WORLD_SIZE)])
    return Clocks(own_s(0, at_s), ahead_s, np.zeros(WORLD_SIZE))


@pytest.fixture
def begin_and_end() -> tuple[Clocks, Clocks]:
    return compared(0.0), compared(10.0)


def test_a_clock_that_gains_and_one_that_loses_have_drifts_of_opposite_signs(
    begin_and_end: tuple[Clocks, Clocks],
) -> None:
    assert [drift(begin_and_end, rank) for rank in range(WORLD_SIZE)] == pytest.approx(GAIN, rel=1e-9)


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_times_of_any_clock_become_those_of_rank_0(rank: int, begin_and_end: tuple[Clocks, Clocks]) -> None:
    times_s = np.array([own_s(rank, at_s) for at_s in (0.0, 4.0, 10.0)])
    common_s = to_common_s(times_s, start_s=own_s(rank, 0.0), drift=drift(begin_and_end, rank))
    assert common_s == pytest.approx([0.0, 4.0, 10.0], abs=10 * GAIN[rank] ** 2 + 1e-9)  # a line, of a quotient


def test_clocks_that_were_compared_once_do_not_drift() -> None:
    assert drift((compared(10.0), compared(10.0)), rank=1) == 0.0


# ---------------------------------------------------------------- gathered


def gathered(plan: Plan, noted_s: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Gather what ranks have noted by their own clocks, rank after rank, the first one last."""
    sent: dict[int, Tensor] = {}
    monkeypatch.setattr(dist, "get_world_size", lambda: WORLD_SIZE)
    for rank in reversed(range(WORLD_SIZE)):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "send", lambda tensor, dst, group, rank=rank: sent.update({rank: tensor}))
        monkeypatch.setattr(dist, "recv", lambda tensor, src, group: tensor.copy_(sent[src]))
        recorder = Recorder(plan)
        recorder.times_s[...] = noted_s[rank]
        trace = gather_trace(
            recorder, plan, start_s=own_s(rank, 0.0), clocks=(compared(0.0), compared(10.0)), source="a test"
        )
        assert (trace is None) == (rank > 0)
    assert trace is not None
    return trace


def test_what_happens_at_once_is_at_once_in_a_trace_whatever_the_clocks_show(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = tuple(Buffer(name, 1, initialized=name == "param") for name in ("param", "loss", "grad"))
    body = (
        Forward(("param",), ("loss",)),
        Backward(("loss", "param"), "grad"),
        AllReduce("grad", Group(WORLD_SIZE)),
    )
    plan = Plan.from_steps("three", world_size=WORLD_SIZE, buffers=buffers, steps=[body])
    ready_s = np.array([[0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [6.0, 4.0, 5.0]])  # [instance, rank]
    end_s = np.array([[2.0, 2.0, 2.0], [6.0, 4.0, 5.0], [8.0, 8.0, 8.0]])
    noted_s = [
        np.array([[[own_s(rank, at_s) for at_s in times_s[:, rank]]] for times_s in (ready_s, ready_s, end_s)])[:, 0]
        for rank in range(WORLD_SIZE)
    ]
    trace = gathered(plan, noted_s, monkeypatch)
    near = max(map(abs, GAIN)) ** 2 * 10
    assert trace.ready_s == pytest.approx(ready_s, abs=near)
    assert trace.end_s == pytest.approx(end_s, abs=near)
    assert trace.start_s[:2] == pytest.approx(ready_s[:2], abs=near)
    assert trace.start_s[2] == pytest.approx([6.0] * WORLD_SIZE, abs=near)  # when the last member is ready


# ---------------------------------------------------------------- compared


class Asked:
    """Rank 1 as rank 0 meets it: its answers take a while there and back; its clock is `ahead_s`."""

    def __init__(self, there_s: list[float], back_s: list[float], ahead_s: float) -> None:
        self.now_s, self.ahead_s = 50.0, ahead_s
        self._there_s, self._back_s = iter(there_s), iter(back_s)

    def clock(self) -> float:
        return self.now_s

    def send(self, _: Tensor, dst: int, group: object) -> None:
        assert dst == 1
        self.now_s += next(self._there_s)
        self.answer_s = self.now_s + self.ahead_s

    def recv(self, tensor: Tensor, src: int, group: object) -> None:
        assert src == 1
        tensor.fill_(self.answer_s)
        self.now_s += next(self._back_s)


@pytest.fixture
def rank_0_of_two(monkeypatch: pytest.MonkeyPatch) -> Asked:
    slow = clocks_of._N_ROUNDS - 1
    other = Asked([*[0.5] * slow, 0.01], [*[0.1] * slow, 0.01], ahead_s=7.0)

    def all_gather(found: list[Tensor], mine: Tensor, group: object = None) -> None:
        found[0].resize_(mine.shape).copy_(mine)
        found[1].resize_(mine.shape).copy_(mine + 1)

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group: None)
    monkeypatch.setattr(dist, "send", other.send)
    monkeypatch.setattr(dist, "recv", other.recv)
    return other


def test_the_fastest_answer_tells_how_far_a_clock_is_ahead(rank_0_of_two: Asked) -> None:
    clocks = compare_clocks(clock=rank_0_of_two.clock)
    assert clocks.ahead_s == pytest.approx([0.0, 7.0])  # slow answers, later there than back, would say 7.2
    assert clocks.uncertainty_s == pytest.approx([0.0, 0.01])
    assert clocks.at_s == rank_0_of_two.now_s


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_the_common_start_is_one_moment_by_every_clock(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group: tensor.fill_(100.5))  # by rank 0's clock
    monkeypatch.setattr(clocks_of, "sleep_s", slept_s.append)
    now_s = own_s(rank, 0.0)
    assert agree_on_start_s(compared(0.0), clock=lambda: now_s) == pytest.approx(100.5 + AHEAD_S[rank])
    assert slept_s == pytest.approx([0.5])
