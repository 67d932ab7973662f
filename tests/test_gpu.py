"""The executor on one GPU: order, times, values and whole runs. Skipped where there is none: `pytest -m gpu`.

NCCL needs a GPU for each rank, so it runs with one rank here; several ranks share the GPU under gloo.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from plans import legal_plans
from processes import run, start
from test_executor import STEP, Nobody, Pretended
from traces import plan_of
from trainings import CPU, Training, in_virtual_world, loss

from real import models
from real.executor import Executor, Lanes
from real.launch import connect
from real.memory import Memory
from real.programs.base import Program
from real.programs.binding import Binding
from real.programs.module import ModuleProgram
from real.recorder import Recorder
from real.timing import now_s
from real.worlds import ProcessWorld, groups_of
from simdist import rundir
from simdist.errors import RunError
from simdist.plan import Delay, Forward, Load, Plan, Wait, walk
from simdist.schedules import InputPath, Schedule
from simdist.schedules.hierarchical_sgd import HierarchicalSGD
from simdist.schedules.sync import Sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]

GPU = torch.device("cuda", 0)
ENQUEUED = Lanes(GPU, collectives_block=False)
BLOCKING = Lanes(GPU, collectives_block=True)
both_modes = pytest.mark.parametrize("lanes", [ENQUEUED, BLOCKING], ids=["nccl's lanes", "gloo's lanes"])
MARK_S = 50e-6
"""Times of the GPU and of the host, or after two marks of the GPU's clock, may differ by this."""
CYCLES = 200_000
SYNC = Sync(first_bucket_size=100, bucket_size=400)


class Spinning(Pretended):
    """Keeps the current CUDA stream busy for a moment at every operation."""

    def __init__(self) -> None:
        super().__init__(lambda op: torch.cuda._sleep(CYCLES))

    def backward(self, buckets, complete) -> None:
        for _ in buckets:
            torch.cuda._sleep(CYCLES)
            complete()


def execute(plan: Plan, program: Program, lanes: Lanes, delay_s: float = 0.0, watch: Nobody | None = None):
    recorder = Recorder(plan)
    Executor(
        plan,
        rank=0,
        delays={channel: np.full((plan.n_steps, plan.world_size), delay_s) for channel in ("host", "compute", "io")},
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=recorder,
        watch=watch or Nobody(),
    ).run()
    return recorder.times_s


@both_modes
@settings(max_examples=30, deadline=None)
@given(plan=legal_plans(max_times=2, max_runs=2))
def test_every_instance_runs_once_and_after_what_it_depends_on(lanes: Lanes, plan: Plan) -> None:
    ready_s, _, end_s = execute(plan, Spinning(), lanes)
    assert not np.isnan([ready_s, end_s]).any()
    last_of: dict[str, float] = {}
    for instance in walk(plan):
        ready, end = ready_s[instance.index], end_s[instance.index]
        for before in instance.after:
            assert ready >= end_s[before] - MARK_S, f"{instance} began before {before} was done"
        assert ready >= last_of.get(instance.stream, ready) - MARK_S, f"{instance} overtook its own stream"
        assert end >= ready - MARK_S
        last_of[instance.stream] = end


def test_the_host_runs_ahead_of_the_gpu() -> None:
    class Long(Spinning):
        def forward(self, op: Forward, step: int) -> None:
            torch.cuda._sleep(500 * CYCLES)

    plan = plan_of((STEP[0], Load("batch")), world_size=1)
    ready_s, _, end_s = execute(plan, Long(), ENQUEUED)
    assert ready_s[1] < end_s[0], "the host waited for the GPU although the plan does not say so"


def test_a_collective_overlaps_the_rest_of_the_backward_pass() -> None:
    class Long(Spinning):
        def perform(self, op, memory) -> None:
            torch.cuda._sleep(100 * CYCLES)

    plan = plan_of(STEP, world_size=1)
    ready_s, _, end_s = execute(plan, Long(), ENQUEUED)
    first_reduced, second_gradient = 4, 5
    assert ready_s[second_gradient] < end_s[first_reduced]


@both_modes
def test_a_delay_of_the_gpu_comes_back_within_2_ms_and_does_not_hold_up_the_host(lanes: Lanes) -> None:
    plan = plan_of(*[(Delay("compute"), Load("batch"))] * 10, world_size=1)
    ready_s, _, end_s = execute(plan, Spinning(), lanes, delay_s=0.05)
    assert (end_s - ready_s)[::2] == pytest.approx(0.05, abs=0.002)
    assert end_s[-1] < end_s[0] + 0.05, "the host waited for the delays of the GPU"


@both_modes
def test_the_clocks_of_gpu_and_host_agree_on_how_long_a_run_takes(lanes: Lanes) -> None:
    job = models.build("resnet18", batch_size=8, device=GPU, dtype=torch.float32, seed=0)

    class Inference(Spinning):
        def forward(self, op: Forward, step: int) -> None:
            with torch.no_grad():
                job.module(job.batch(step, 0)[0].to(GPU, non_blocking=True))

    program = Inference()
    program.forward(STEP[0], 0)
    torch.cuda.synchronize()
    plan = plan_of(*[(Delay("compute"), Forward(("param",), ("loss",)))] * 20, (Wait("loss"),), world_size=1)
    recorder = Recorder(plan)
    executor = Executor(
        plan,
        rank=0,
        delays={"compute": np.full((plan.n_steps, 1), 0.05)},
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=recorder,
        watch=Nobody(),
    )
    begin_s = now_s()
    executor.run()
    by_host_s = now_s() - begin_s
    ready_s, _, end_s = recorder.times_s
    assert end_s.max() - ready_s.min() == pytest.approx(by_host_s, rel=0.05)
    assert ready_s.min() - begin_s > -MARK_S


def test_a_host_that_waits_for_a_stuck_gpu_stops_when_another_rank_fails() -> None:
    class Stuck(Spinning):
        def forward(self, op: Forward, step: int) -> None:
            torch.cuda._sleep(20_000 * CYCLES)  # seconds

    watch = Nobody()
    threading.Timer(0.3, watch.failed.set).start()
    begin_s = time.monotonic()
    with pytest.raises(RunError, match="rank 7 failed: it rained"):
        execute(plan_of((STEP[0], Wait("loss")), world_size=1), Stuck(), ENQUEUED, watch=watch)
    assert time.monotonic() - begin_s < 1.5
    torch.cuda.synchronize()


def train(schedule: Schedule, backend: str, path: InputPath, folder: str) -> None:
    """Train on this rank, on the GPU, and leave the parameters in a file."""
    training = Training(dtype=torch.float32)
    with connect(backend=backend, device="cuda", timeout_s=60.0) as connection:
        rank, device = connection.place.rank, connection.device
        plan = schedule.plan(training.job(connection.place.world_size, 12, path=path))
        module, optimizer = training.make(rank)
        module.to(device)
        memory = Memory(plan, device, Binding.buffers_of(plan))
        program = ModuleProgram(
            plan,
            module,
            loss,
            optimizer,
            lambda step: tuple(each.pin_memory() for each in training.batch(step, rank)),
            memory,
            device=device,
        )
        world = ProcessWorld(groups_of(plan), timeout_s=60.0)
        world.warm_up(plan, device)
        recorder = Recorder(plan)
        Executor(
            plan,
            rank=rank,
            delays={},
            world=world,
            program=program,
            memory=memory,
            lanes=Lanes(device, collectives_block=connection.backend == "gloo"),
            recorder=recorder,
            watch=connection.guard,
        ).run()
        assert not np.isnan(recorder.times_s).any()
        vector = torch.cat([each.detach().flatten() for each in module.parameters()])
        np.save(Path(folder, f"{rank}.npy"), vector.cpu().numpy())


@pytest.mark.parametrize("path", [InputPath(), InputPath("storage")], ids=["synthetic", "storage"])
@pytest.mark.parametrize(
    ("backend", "world_size", "schedule"),
    [
        ("nccl", 1, SYNC),
        ("gloo", 1, SYNC),
        ("gloo", 4, SYNC),
        ("gloo", 4, HierarchicalSGD(levels={2: 2, 4: 4}, warmup_steps=3)),
    ],
    ids=["nccl", "gloo", "gloo of 4", "gloo of 4, hierarchical"],
)
def test_training_gives_the_values_of_the_cpu(
    backend: str, world_size: int, schedule: Schedule, path: InputPath, tmp_path: Path
) -> None:
    endings = run(train, world_size, schedule, backend, path, str(tmp_path), timeout_s=180.0)
    assert all(ending.code == 0 for ending in endings.values()), endings
    training = Training(dtype=torch.float32)
    expected, _ = in_virtual_world(schedule.plan(training.job(world_size, 12, path=path)), training)
    for rank in range(world_size):
        np.testing.assert_allclose(np.load(tmp_path / f"{rank}.npy"), expected[rank], rtol=1e-5, atol=1e-5)


SCENARIO = """
cluster:
  nodes: 1
  gpus_per_node: {n}
  fabric: {{latency: 100 us, bandwidth: 1 GB/s}}
  network: ideal
  device: {{name: GPU, memory_bandwidth: 1 TB/s}}
workload: {{preset: resnet18, batch_size: 8, forward: 5 ms, backward: 10 ms, optimize: 1 ms}}
schedules: [{{kind: sync}}]
steps: 5
"""


def written_run(folder: Path, world_size: int) -> Path:
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO.format(n=world_size))
    command = [sys.executable, "-m", "simdist", "plan", str(scenario), "-o", str(folder / "run")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / "run"


@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 2)])
def test_the_command_line_performs_a_plan_of_resnet18(backend: str, world_size: int, tmp_path: Path) -> None:
    path = written_run(tmp_path, world_size)
    command = [sys.executable, "-m", "real", path, "--program", "resnet18", "--backend", backend, "--device", "cuda"]
    endings = run(list(map(str, command)), world_size, timeout_s=300.0)
    assert all(ending.code == 0 for ending in endings.values()), endings
    trace = rundir.read_trace(path / rundir.REAL)
    assert not np.isnan([trace.ready_s, trace.start_s, trace.end_s]).any()
    assert (trace.end_s >= trace.start_s).all()
    assert json.loads((path / rundir.REPORT).read_text())["backend"] == backend


def reduce_on_and_on() -> None:
    with connect(backend="gloo", device="cuda", timeout_s=30.0) as connection:
        plan = plan_of(*[STEP] * 100_000, world_size=2, count=1000)
        memory = Memory(plan, connection.device, {buffer.name for buffer in plan.buffers})
        print("running", flush=True)
        executor = Executor(
            plan,
            rank=connection.place.rank,
            delays={"host": np.full((plan.n_steps, 2), 1e-3)},
            world=ProcessWorld(groups_of(plan), timeout_s=30.0),
            program=Spinning(),
            memory=memory,
            lanes=Lanes(connection.device, collectives_block=True),
            recorder=Recorder(plan),
            watch=connection.guard,
        )
        try:
            executor.run()
        except RuntimeError as error:
            raise connection.guard.explain(error, "the run") from error


def test_a_killed_rank_is_named_by_the_others() -> None:
    with start(reduce_on_and_on, 2, timeout_s=120.0) as ranks:
        ranks.until("running")
        time.sleep(1.0)
        ranks.signal(1, signal.SIGKILL)
        ending = ranks.wait([0])[0]
    assert ending.code != 0
    assert "rank 1" in ending.output
