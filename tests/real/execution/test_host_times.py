"""The host's time for launching: recorded on a pretended GPU, where every call takes a time that a test knows."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pretended import CPU, GPU, IN_THREAD, Cuda, Pretended, QuietWatch  # noqa: E402

from real.buffers.memory import Memory  # noqa: E402
from real.execution import host_times  # noqa: E402
from real.execution.executor import Executor  # noqa: E402
from real.execution.streams import Lanes  # noqa: E402
from real.programs.base import Program  # noqa: E402
from real.programs.emulated import EmulatedProgram  # noqa: E402
from real.recording.recorder import Recorder  # noqa: E402
from simdist.plan import Backward, Instance, KernelLaunch, Op, Plan  # noqa: E402
from simdist.plan.launches import with_kernel_launches  # noqa: E402
from simdist.plan.ops import launch_kind  # noqa: E402
from simdist.plan.walk import walk  # noqa: E402
from simdist.runs import building  # noqa: E402
from simdist.scenario import loads  # noqa: E402

CALL_S = {"forward": 3.0, "backward": 5.0, "optimize": 2.0, "collective": 0.5, "copy": 0.25}
SCENARIO = """
cluster: {preset: ideal, nodes: 1, gpus_per_node: 1}
workload: {preset: resnet18, forward: 1 ms, backward: 2 ms}
input: {source: memory}
schedules: [sync]
steps: 4
"""


class Caller(Pretended):
    """Takes time for each call, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__(self.call)
        self.now_s = 100.0

    def call(self, op: Op) -> None:
        self.now_s += CALL_S[launch_kind(op)]

    def backward(self, buckets: Sequence[Backward], complete: Callable[[], object]) -> None:
        for bucket in buckets:
            self.call(bucket)
            complete()


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Caller:
    Cuda(monkeypatch)
    found = Caller()
    monkeypatch.setattr(host_times, "now_s", lambda: found.now_s)
    return found


def plan_of(*, launches: bool = True) -> Plan:
    scenario = loads(SCENARIO)
    plan = building.build(scenario, scenario.schedules[0]).plan
    return with_kernel_launches(plan, frozenset(CALL_S)) if launches else plan


def performed(plan: Plan, program: Program, lanes: Lanes) -> tuple[list[Instance], np.ndarray, np.ndarray]:
    """Return the launches of a plan, when they began and when they ended."""
    recorder = Recorder(plan)
    executor = Executor(
        plan,
        rank=0,
        delays={},
        world=program if isinstance(program, Pretended) else Pretended(),
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=recorder,
        watch=QuietWatch(),
    )
    executor.run()
    launches = [each for each in walk(plan) if isinstance(each.op, KernelLaunch)]
    rows = [each.index for each in launches]
    return launches, recorder.times_s[0, rows], recorder.times_s[2, rows]


def test_each_launch_takes_as_long_as_its_calls(caller: Caller) -> None:
    launches, begin_s, end_s = performed(plan_of(), caller, Lanes(GPU, collectives_block=False))
    assert {each.op.kind for each in launches} == CALL_S.keys()
    assert np.array_equal(end_s - begin_s, [CALL_S[each.op.kind] for each in launches])
    assert begin_s[0] == 100.0
    assert np.array_equal(begin_s[1:], end_s[:-1]), "the host does one thing after the other"


def test_without_launches_in_the_plan_nothing_is_timed(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_times, "now_s", lambda: pytest.fail("the host's clock was read"))
    assert performed(plan_of(launches=False), caller, Lanes(GPU, collectives_block=False))[0] == []


def test_an_emulated_program_spends_the_time_of_launches_on_its_host() -> None:
    plan = plan_of()
    held_s: list[float] = []
    seconds = {op: 1e-3 if isinstance(op, KernelLaunch) else 0.0 for op in plan.distinct_ops}
    program = EmulatedProgram(seconds, held_s.append, held_s.append, threading.Event())
    _, begin_s, end_s = performed(plan, program, IN_THREAD)
    assert (end_s - begin_s >= 1e-3).all()
    assert set(held_s) == {0.0}
