"""The executor on CUDA streams that a test pretends: the order of collectives, and the streams that take memory."""

import pytest
from pretended import GPU, Cuda, PooledMemory, Pretended, QuietWatch
from sharded import plan_of

from real.execution.executor import Executor
from real.execution.streams import Lanes
from real.recording.recorder import Recorder
from simdist.plan import COLLECTIVES, Op, Plan
from simdist.plan.walk import walk
from simdist.schedules import FSDP, HSDP
from simdist.schedules.sharded import ShardedSchedule

SCHEDULES: dict[str, ShardedSchedule] = {
    "fsdp": FSDP(),
    "two communicators": FSDP(communicators=2),
    "hsdp": HSDP(shard=2, all_reduce="last"),
    "local averages": HSDP(shard=2, between="local-2"),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def performed(plan: Plan, cuda: Cuda, rank: int) -> tuple[list[Op], PooledMemory, int]:
    """Perform a plan on a rank; return its collectives in the order of issue, its memory, and the most bytes."""
    issued: list[Op] = []
    memory = PooledMemory(plan, lambda: cuda.current)
    executor = Executor(
        plan,
        rank=rank,
        delays={},
        world=Pretended(issued.append),
        program=Pretended(),
        memory=memory,
        lanes=Lanes(GPU, collectives_block=False),
        recorder=Recorder(plan),
        watch=QuietWatch(),
        gives_back=True,
    )
    executor.prepare()
    executor.run()
    return issued, memory, executor.peak_nbytes


each_schedule = pytest.mark.parametrize("name", SCHEDULES)


@each_schedule
def test_all_ranks_issue_collectives_in_program_order(cuda: Cuda, name: str) -> None:
    """Also those of several communicators, so that NCCL cannot deadlock."""
    plan = plan_of(SCHEDULES[name], 4, micro_batches=2, n_steps=3)
    in_program_order = [each.op for each in walk(plan) if isinstance(each.op, COLLECTIVES)]
    assert len({op.lane.communicator for op in in_program_order}) > (name != "fsdp")
    for rank in range(plan.world_size):
        assert performed(plan, cuda, rank)[0] == in_program_order


@each_schedule
def test_the_stream_that_writes_a_buffer_takes_its_memory(cuda: Cuda, name: str) -> None:
    plan = plan_of(SCHEDULES[name], 4, micro_batches=2, n_steps=3)
    _, memory, peak_nbytes = performed(plan, cuda, 0)
    kept_nbytes = sum(buffer.nbytes for buffer in plan.buffers if buffer.initialized)
    assert memory.held_nbytes == kept_nbytes
    assert kept_nbytes < peak_nbytes < 0.6 * sum(buffer.nbytes for buffer in plan.buffers)
    assert memory.takers["unit.1"] == memory.takers["grad.1"] == {cuda.default}
    (gathering,) = memory.takers["gathered.1"]
    (copying_in,) = memory.takers["slice.1"]
    assert len({gathering, copying_in, cuda.default}) == 3
