"""PeerTables with simulated peers on a GPU: Triton's interpreter runs the kernels, by a clock that a test pretends."""

import importlib.util

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pretended import CPU  # noqa: E402

from real.buffers.memory import Memory  # noqa: E402
from simdist.plan import AllGather, AllReduce, Buffer, Plan  # noqa: E402
from simdist.plan.group import Group  # noqa: E402
from simdist.plan.lanes import AVERAGE  # noqa: E402
from simdist.traces.peers import PeerArrivals  # noqa: E402

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
LOOK_NS = 10**8  # between two looks at the clock
GROUP = Group(4)
BUFFERS = (
    Buffer("grad", 100_000, initialized=True),
    Buffer("flat", 8, initialized=True),
    Buffer("slice", 2, initialized=True),
)
STEP = (AllReduce("grad", GROUP), AllReduce("flat", GROUP, lane=AVERAGE), AllGather("slice", "flat", GROUP))


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a clock go on with every look at it; return the times at which it was looked at."""
    from real.kernels import triton_meeting
    from real.kernels.triton_candidates import tl

    seen = [10**15]

    def look() -> object:
        seen.append(seen[-1] + LOOK_NS)
        return tl.full((), seen[-1], tl.int64)

    monkeypatch.setattr(triton_meeting, "_globaltimer", look)
    return seen


def peers() -> PeerArrivals:
    """Return peers of three collectives: the second depends on the first, the third on both and on no earlier end."""
    sources = np.array([[0, 0, 0], [0, 1, 0], [1, 2, 0]])
    lag_s = np.array([[1.5, -np.inf, -np.inf], [0.1, 2.0, -np.inf], [9.0, 4.0, -np.inf]])
    return PeerArrivals(2, np.arange(3), np.array([1.0, 2.0, 3.0]), sources, lag_s)


@pytest.mark.parametrize("channels", [0, 3])
@pytest.mark.parametrize("late_s", [0.0, 7.0])
def test_kernels_end_a_collective_after_its_last_member(now_ns: list[int], channels: int, late_s: float) -> None:
    from real.execution.gpu_peers import GpuPeers

    plan = Plan.from_steps("three", world_size=4, buffers=BUFFERS, steps=[STEP])
    memory = Memory(plan, CPU, [buffer.name for buffer in BUFFERS])
    memory.dense("slice").copy_(torch.tensor([3.0, 5.0]))
    known = peers()
    world = GpuPeers(plan, known, CPU, channels=channels)
    world.start()
    ends_s = [0.0]
    for number, op in enumerate(STEP):
        now_ns.append(now_ns[-1] + int(1e9 * late_s))
        world.perform(op, memory)
        arrived_s = float(world._meetings.arrived[number] - world._meetings.ends[0]) / 1e9
        ends_s.append(max(arrived_s, known.ready_s(number, ends_s)) + float(known.seconds[number]))
        assert world.ends_s()[number] == pytest.approx(ends_s[-1], abs=1e-9)
        held_until_s = (now_ns[-1] - float(world._meetings.ends[0])) / 1e9
        assert ends_s[-1] <= held_until_s
        assert channels or held_until_s <= ends_s[-1] + 1e-9 * LOOK_NS  # otherwise block after block looks at the clock
    if not channels and not late_s:  # whatever it takes to get there
        assert world.ends_s().tolist() == pytest.approx([2.5, 6.5, 14.5])
    assert memory.dense("flat").tolist() == [3.0, 5.0] * 4


def test_thread_blocks_copy_while_a_collective_takes_place_and_change_nothing(now_ns: list[int]) -> None:
    """A quarter of the bytes is copied in each quarter of the time."""
    from real.kernels import triton_meeting

    meetings = triton_meeting.PeerTables.of(peers(), CPU, scratch_nbytes=4 * 8 * triton_meeting.CHUNK)
    meetings.scratch.copy_(torch.arange(len(meetings.scratch)))
    triton_meeting.note_time(meetings.ends, 0)
    triton_meeting.note_time(meetings.arrived, 0)
    looks = len(now_ns)
    triton_meeting.hold(meetings, 0, channels=2, nbytes=4 * 8 * triton_meeting.CHUNK)
    assert torch.equal(meetings.scratch, torch.arange(len(meetings.scratch), dtype=torch.int32))
    assert len(now_ns) - looks > 20  # it looked at the clock until the end, at 2.5 s
