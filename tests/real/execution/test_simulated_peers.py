"""One real rank among simulated peers does as it does among real ones."""

import statistics
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
from pretended import CPU, Pretended  # noqa: E402
from processes import run as run_ranks  # noqa: E402

from real import jobs  # noqa: E402
from real.buffers.memory import Memory  # noqa: E402
from real.cli import main  # noqa: E402
from real.collectives.equals import combine_equal  # noqa: E402
from real.execution import simulated_peers  # noqa: E402
from real.execution.one_rank import perform_among_simulated  # noqa: E402
from real.execution.running import ProgramSpec  # noqa: E402
from real.execution.simulated_peers import SimulatedPeers  # noqa: E402
from real.jobs import buffers_of  # noqa: E402
from simdist.engines.peers import find_peers, trace_of_rank  # noqa: E402
from simdist.plan import COLLECTIVES, AllGather, AllReduce, Broadcast, Buffer, Plan, Reduce, ReduceScatter  # noqa: E402
from simdist.plan.group import Group  # noqa: E402
from simdist.plan.lanes import AVERAGE  # noqa: E402
from simdist.plan.walk import walk  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.runs.calibrated import simulate_run  # noqa: E402
from simdist.runs.run_directory import RunDirectory  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.studies.validated_run import validate_run  # noqa: E402
from simdist.traces.peers import PeerArrivals  # noqa: E402
from simdist.traces.trace import Trace  # noqa: E402
from simdist.traces.waiting import attribute_waiting  # noqa: E402

RANK = 2
SCENARIO = """\
cluster:
  {nodes: 2, gpus_per_node: 2, fabric: ideal, network: {latency: 100 us, bandwidth: 1 GB/s}}
workload:
  tensors:
    - {name: first, count: 1024}
    - {name: second, count: 1024}
  batch_size: 4
  forward: 60 ms
  backward: 120 ms
  optimize: 4 ms
seed: 3
steps: 4
schedules:
  - {kind: sync, first_bucket_size: 4 kB, bucket_size: 4 kB}
  - {kind: local_sgd, period: 2}
  - {kind: hierarchical_sgd, levels: {2: 2, 4: world}, intra_node_gradients: false}
  - {kind: fsdp}
  - {kind: hsdp, shard: 2}
  - {kind: hitopk, density: 0.1}
"""
SHORT_S = 0.1  # waits below may be noise
# Never equally late, so that noise does not decide who is last.
LATE = """\
disturbances:
  - {kind: transient, on: host, ranks: [1], probability: 0.5, delay: 250 ms}
  - {kind: transient, on: host, ranks: [2], probability: 0.5, delay: 400 ms}
"""


def write(folder: Path, text: str = SCENARIO) -> list[RunDirectory]:
    """Write the run directory of each schedule."""
    scenario = loads(text)
    for schedule in scenario.schedules:
        one = scenario.model_copy(update={"schedules": (schedule,)})
        run_directory.write(folder / schedule.name, one, build(one, schedule).plan, delays(one))
    return [run_directory.read(path) for path in run_directory.find(folder)]


def perform(*args: object) -> None:
    sys.exit(main([str(arg) for arg in args]))


def real_traces(folder: Path) -> list[Trace]:
    """Perform the runs in a folder with four processes."""
    endings = run_ranks(perform, 4, folder, "--force")
    assert {ending.code for ending in endings.values()} == {0}, endings
    return [run_directory.read_trace(path / run_directory.REAL) for path in run_directory.find(folder)]


def among(trace: Trace, run: RunDirectory) -> Trace:
    """Perform a run with one rank, whose peers take the times of a trace."""
    spec = jobs.program_spec(RANK, CPU, run, None, None, name="emulated", precision="fp32", saved=jobs.Saved(None))
    done = perform_among_simulated(run.plan, run.delays, spec, find_peers(trace, RANK), device=CPU)
    return trace_of_rank(trace, RANK, done.times_s, done.ends_s, "real")


def end_s(trace: Trace) -> float:
    return float(trace.end_s[:, RANK].max())


def waits(trace: Trace, like: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return in each step how long the rank waited and who caused waits, where the rank and its peers meet."""
    known = np.isfinite(like.end_s)
    ready_s, start_s, ends_s = (np.where(known, each, np.nan) for each in (trace.ready_s, trace.start_s, trace.end_s))
    found = attribute_waiting(Trace(trace.plan, ready_s, start_s, ends_s, trace.source))
    return found.suffered_s[:, RANK], found.caused_s


def noise_s(trace: Trace, nominal: Trace) -> float:
    """Return by how much the rank's operations took longer than they should, and began later than they could.

    A loaded machine wakes threads late.
    """
    late_s = 0.0
    previous: dict[str, int] = {}
    ready_s, end_s = trace.ready_s[:, RANK], trace.end_s[:, RANK]
    asked_s = (nominal.end_s - nominal.start_s)[:, RANK]
    for each in walk(trace.plan):
        before = [*each.after, *([previous[each.lane.name]] if each.lane.name in previous else [])]
        late_s += ready_s[each.index] - max((end_s[row] for row in before), default=0.0)
        if not isinstance(each.op, COLLECTIVES):
            late_s += end_s[each.index] - ready_s[each.index] - asked_s[each.index]
        previous[each.lane.name] = each.index
    return float(late_s)


@pytest.mark.sentinel
@pytest.mark.parametrize("late", ["", LATE], ids=["undisturbed", "stragglers"])
def test_a_rank_takes_as_long_and_waits_for_the_same_as_among_real_ranks(tmp_path: Path, late: str) -> None:
    """The peers take the times of the real ranks, so nothing but the meetings differs, and noise that is measured."""
    runs = write(tmp_path, SCENARIO + late)
    reals = real_traces(tmp_path)
    errors = []
    n_late = 0
    for real, run in zip(reals, runs, strict=True):
        one = among(real, run)
        nominal = simulate_run(run, None, real=None)
        of_noise_s = noise_s(one, nominal) + noise_s(real, nominal)
        errors.append(max(0.0, abs(end_s(one) - end_s(real)) - of_noise_s) / end_s(real))
        (ours_s, by_ours), (theirs_s, by_theirs) = waits(one, one), waits(real, one)
        assert ours_s == pytest.approx(theirs_s, abs=SHORT_S / 2 + of_noise_s)
        late_steps = by_theirs.max(axis=1) > SHORT_S + of_noise_s
        assert (by_ours.argmax(axis=1) == by_theirs.argmax(axis=1))[late_steps].all()
        n_late += int(late_steps.sum())
    assert statistics.median(errors) <= 0.03
    assert max(errors) <= 0.06
    assert n_late >= (6 if late else 0)


def test_the_command_writes_a_trace_that_says_which_rank_was_real(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = SCENARIO.replace("60 ms", "1 ms").replace("120 ms", "2 ms").replace("4 ms", "1 ms")
    runs = write(tmp_path, quick)
    assert main([str(tmp_path), "--rank", "3", "--peers", "simulated", "--schedule", "fsdp"]) == 0
    assert "1 of 4 ranks, 4 steps" in capsys.readouterr().out
    path = runs[0].path
    trace = run_directory.read_trace(path / run_directory.REAL)
    assert trace.real_rank == 3
    assert np.isfinite(trace.end_s[:, 3]).all()
    report = run_directory.read_real_report(path, trace)
    assert report is not None
    assert report["backend"] == "simulated"
    found = validate_run(runs[0])
    assert found.validation.n_steps == 4
    assert "makespan of rank 3, the network is not tested" in found.text(None)
    assert found.document()["real_rank"] == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rank", "1"], "--rank N and --peers simulated belong together"),
        (["--peers", "simulated"], "--rank N and --peers simulated belong together"),
        (["--rank", "4", "--peers", "simulated"], "has ranks 0 to 3"),
        (["--rank", "1", "--peers", "simulated", "--backend", "gloo"], "--backend: needs real peers"),
        (["--rank", "1", "--peers", "simulated", "--data", "/set"], "--data: needs real peers"),
    ],
)
def test_the_command_refuses_what_needs_other_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    write(tmp_path)
    assert main([str(tmp_path), "--schedule", "sync", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_failure_of_one_stream_ends_the_run(tmp_path: Path) -> None:
    run = write(tmp_path)[-1]

    def fail(_op: object) -> None:
        raise ValueError("it rained")

    spec = ProgramSpec("fails", buffers_of(run.plan, None, with_data=False), lambda _memory, _failed: Pretended(fail))
    peers = find_peers(simulate_run(run, None, real=None), RANK)
    with pytest.raises(ValueError, match="it rained"):
        perform_among_simulated(run.plan, run.delays, spec, peers, device=CPU)


class Clock:
    """A clock that goes on only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)


def two_collectives(second: Any = None) -> Plan:
    op = AllReduce("grad", Group(2))
    buffers = (Buffer("grad", 4, initialized=True), Buffer("flat", 4, initialized=True))
    return Plan.from_steps("two", world_size=2, buffers=buffers, steps=[(op, second or op)])


def peers_of(lag_s: Sequence[Sequence[float]]) -> PeerArrivals:
    """Return peers that depend on the start and on the first collective; each collective takes 2 s."""
    sources = np.array([[0, 0], [0, 1]])
    return PeerArrivals(0, np.array([0, 1]), np.full(2, 2.0), sources, np.array(lag_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(simulated_peers, "now_s", lambda: found.now_s)
    monkeypatch.setattr(simulated_peers, "Sleeper", lambda _failed: found.sleep)
    return found


@pytest.mark.parametrize(
    ("own_s", "expected_s"),
    [
        ((0.0, 0.0), (5.0, 8.0)),  # peers are ready after 3 s, and 1 s after the first
        ((4.0, 0.0), (6.0, 9.0)),  # it is late for the first, so they are late for the second
        ((0.0, 4.0), (5.0, 11.0)),  # it is late for the second
    ],
)
def test_a_collective_ends_after_its_last_member(
    clock: Clock, own_s: tuple[float, float], expected_s: tuple[float, float]
) -> None:
    plan = two_collectives()
    world = SimulatedPeers(plan, peers_of([[3.0, -np.inf], [4.0, 1.0]]), threading.Event())
    memory = Memory(plan, CPU, ["grad"])
    world.start()
    for late_s, op in zip(own_s, plan.bodies[0], strict=True):
        clock.sleep(late_s)
        world.perform(op, memory)
    assert tuple(world.ends_s()) == pytest.approx(expected_s)
    assert clock.now_s == pytest.approx(100.0 + expected_s[-1])


def test_a_collective_waits_for_another_stream_that_its_peers_wait_for(clock: Clock) -> None:
    """The average of the second stream comes first here, and its peers do not get to it before the first collective."""
    plan = two_collectives(AllReduce("flat", Group(2), lane=AVERAGE))
    first, second = plan.bodies[0]
    world = SimulatedPeers(plan, peers_of([[3.0, -np.inf], [0.0, 1.0]]), threading.Event())
    memory = Memory(plan, CPU, ["grad", "flat"])
    world.start()
    thread = threading.Thread(target=world.perform, args=(second, memory))
    thread.start()
    assert np.isnan(world.ends_s()).all()
    world.perform(first, memory)
    thread.join()
    assert tuple(world.ends_s()) == pytest.approx((5.0, 8.0))


def test_peers_hold_what_the_rank_holds() -> None:
    group = Group(2, stride=2)
    buffers = (
        Buffer("whole", 4, initialized=True),
        Buffer("slice", 2, initialized=True),
        Buffer("some", 2, sparse=True, initialized=True),
        Buffer("all", 4, sparse=True, initialized=True),
    )
    plan = Plan.from_steps("values", world_size=4, buffers=buffers, steps=[(AllReduce("whole", group),)])

    def after(op: Any, name: str, rank: int = 2) -> list[float]:
        memory = Memory(plan, CPU, [buffer.name for buffer in buffers])
        memory.dense("whole").copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        memory.dense("slice").copy_(torch.tensor([5.0, 6.0]))
        memory.sparse("some").values.copy_(torch.tensor([7.0, 8.0]))
        memory.sparse("some").indices.copy_(torch.tensor([0, 3]))
        combine_equal(op, memory, rank)
        return torch.cat([each.double() for each in memory.tensors(name)]).tolist()

    assert after(AllReduce("whole", group), "whole") == [1.0, 2.0, 3.0, 4.0]
    assert after(AllReduce("whole", group, reduction="sum"), "whole") == [2.0, 4.0, 6.0, 8.0]
    assert after(Reduce("whole", group, reduction="sum", root=1), "whole") == [2.0, 4.0, 6.0, 8.0]
    assert after(Reduce("whole", group, reduction="sum", root=1), "whole", rank=0) == [1.0, 2.0, 3.0, 4.0]
    assert after(Broadcast("whole", group), "whole") == [1.0, 2.0, 3.0, 4.0]
    assert after(ReduceScatter("whole", "slice", group), "slice") == [3.0, 4.0]
    assert after(ReduceScatter("whole", "slice", group, reduction="sum"), "slice", rank=0) == [2.0, 4.0]
    assert after(AllGather("slice", "whole", group), "whole") == [5.0, 6.0, 5.0, 6.0]
    assert after(AllGather("some", "all", group), "all") == [7.0, 8.0, 7.0, 8.0, 0.0, 3.0, 0.0, 3.0]
