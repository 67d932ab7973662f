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
from drawn_plans import legal_plans
from hypothesis import given
from pretended import STEP, Pretended, QuietWatch
from processes import run, start
from tiers import examples
from traces import plan_of
from trainings import CPU, Training, in_virtual_world, loss

from real import models
from real.buffers import transforms
from real.buffers.memory import Memory
from real.collectives.worlds import ProcessWorld, groups_of
from real.execution.executor import Executor
from real.execution.streams import Lanes
from real.processes.launch import connect
from real.programs.base import Program
from real.programs.binding import Binding
from real.programs.module import ModuleProgram
from real.recording.recorder import Recorder
from real.recording.timing import now_s
from simdist.errors import RunError
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    Backward,
    Buffer,
    Delay,
    Densify,
    Forward,
    Group,
    Load,
    Plan,
    Select,
    Wait,
)
from simdist.plan.walk import walk
from simdist.runs import run_directory
from simdist.schedules import GradientSchedule, InputPath, Schedule, kinds
from simdist.schedules.fusion import Fusion, fuse
from simdist.schedules.hierarchical_sgd import HierarchicalSGD
from simdist.schedules.sparse import SparseSchedule
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
SYNC = Sync(first_bucket_nbytes=100, bucket_nbytes=400)


class Spinning(Pretended):
    """Keeps the current CUDA stream busy for a moment at every operation."""

    def __init__(self) -> None:
        super().__init__(lambda op: torch.cuda._sleep(CYCLES))

    def backward(self, buckets, complete) -> None:
        for _ in buckets:
            torch.cuda._sleep(CYCLES)
            complete()


def execute(plan: Plan, program: Program, lanes: Lanes, delay_s: float = 0.0, watch: QuietWatch | None = None):
    recorder = Recorder(plan)
    Executor(
        plan,
        rank=0,
        delays={channel: np.full((1, plan.n_steps, plan.world_size), delay_s) for channel in ("host", "compute", "io")},
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=recorder,
        watch=watch or QuietWatch(),
    ).run()
    return recorder.times_s


@pytest.mark.alone
@both_modes
@examples(30)
@given(plan=legal_plans(max_times=2, max_runs=2))
def test_every_instance_runs_once_and_after_what_it_depends_on(lanes: Lanes, plan: Plan) -> None:
    ready_s, _, end_s = execute(plan, Spinning(), lanes)
    assert not np.isnan([ready_s, end_s]).any()
    last_of: dict[str, float] = {}
    for instance in walk(plan):
        ready, end = ready_s[instance.index], end_s[instance.index]
        for before in instance.after:
            assert ready >= end_s[before] - MARK_S, f"{instance} began before {before} was done"
        assert ready >= last_of.get(instance.lane.stream, ready) - MARK_S, f"{instance} overtook its own stream"
        assert end >= ready - MARK_S
        last_of[instance.lane.stream] = end


@pytest.mark.alone
def test_the_host_runs_ahead_of_the_gpu() -> None:
    class Long(Spinning):
        def perform(self, op, step) -> None:
            torch.cuda._sleep((500 if isinstance(op, Forward) else 1) * CYCLES)

    plan = plan_of((STEP[0], Load("batch")), world_size=1)
    ready_s, _, end_s = execute(plan, Long(), ENQUEUED)
    assert ready_s[1] < end_s[0], "the host waited for the GPU although the plan does not say so"


@pytest.mark.alone
def test_a_collective_overlaps_the_rest_of_the_backward_pass() -> None:
    class Long(Spinning):
        def perform(self, op, memory) -> None:
            torch.cuda._sleep((100 if isinstance(op, COLLECTIVES) else 1) * CYCLES)

    plan = plan_of(STEP, world_size=1)
    ready_s, _, end_s = execute(plan, Long(), ENQUEUED)
    first_reduced, second_gradient = 4, 5
    assert ready_s[second_gradient] < end_s[first_reduced]


@pytest.mark.alone
@both_modes
def test_a_delay_of_the_gpu_comes_back_within_2_ms_and_does_not_hold_up_the_host(lanes: Lanes) -> None:
    plan = plan_of(*[(Delay("compute"), Load("batch"))] * 10, world_size=1)
    ready_s, _, end_s = execute(plan, Spinning(), lanes, delay_s=0.05)
    assert (end_s - ready_s)[::2] == pytest.approx(0.05, abs=0.002)
    assert end_s[-1] < end_s[0] + 0.05, "the host waited for the delays of the GPU"


@pytest.mark.alone
@both_modes
def test_the_clocks_of_gpu_and_host_agree_on_how_long_a_run_takes(lanes: Lanes) -> None:
    job = models.build_job("resnet18", batch_size=8, device=GPU, dtype=torch.float32, seed=0)

    class Inference(Spinning):
        def perform(self, op, step) -> None:
            with torch.no_grad():
                job.module(job.batch(step, 0)[0].to(GPU, non_blocking=True))

    program = Inference()
    program.perform(STEP[0], 0)
    torch.cuda.synchronize()
    plan = plan_of(*[(Delay("compute"), Forward(("param",), ("loss",)))] * 20, (Wait("loss"),), world_size=1)
    recorder = Recorder(plan)
    executor = Executor(
        plan,
        rank=0,
        delays={"compute": np.full((1, plan.n_steps, 1), 0.05)},
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=recorder,
        watch=QuietWatch(),
    )
    begin_s = now_s()
    executor.run()
    by_host_s = now_s() - begin_s
    ready_s, _, end_s = recorder.times_s
    assert end_s.max() - ready_s.min() == pytest.approx(by_host_s, rel=0.05)
    assert ready_s.min() - begin_s > -MARK_S


@pytest.mark.alone
def test_a_host_that_waits_for_a_stuck_gpu_stops_when_another_rank_fails() -> None:
    class Stuck(Spinning):
        def perform(self, op, step) -> None:
            torch.cuda._sleep(20_000 * CYCLES)  # seconds

    watch = QuietWatch()
    threading.Timer(0.3, watch.failed.set).start()
    begin_s = time.monotonic()
    with pytest.raises(RunError, match="rank 7 failed: it rained"):
        execute(plan_of((STEP[0], Wait("loss")), world_size=1), Stuck(), ENQUEUED, watch=watch)
    assert time.monotonic() - begin_s < 1.5
    torch.cuda.synchronize()


def pinned(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch from which copies to the GPU overlap."""
    inputs, targets = batch
    return inputs.pin_memory(), targets.pin_memory()


def train(plan: Plan, training: Training, backend: str, folder: str) -> None:
    """Train on this rank, on the GPU, and leave the parameters in a file."""
    with connect(backend=backend, device="cuda", timeout_s=60.0) as connection:
        rank, device = connection.place.rank, connection.device
        module, optimizer = training.make(rank)
        module.to(device)
        memory = Memory(plan, device, Binding.buffers_of(plan))
        program = ModuleProgram(
            plan,
            module,
            loss,
            optimizer,
            lambda step: pinned(training.batch(step, rank)),
            memory,
            device=device,
            rank=rank,
        )
        transforms.warm_up_transforms(plan, memory)
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
    training = Training(dtype=torch.float32)
    plan = schedule.plan(training.job(world_size, 12, path=path))
    found = trained(plan, training, backend, tmp_path)
    np.testing.assert_allclose(found, in_virtual_world(plan, training)[0], rtol=1e-5, atol=1e-5)


def trained(plan: Plan, training: Training, backend: str, folder: Path) -> np.ndarray:
    """Return the parameters that all ranks end with, `[world_size, n]`."""
    endings = run(train, plan.world_size, plan, training, backend, str(folder), timeout_s=180.0)
    assert all(ending.code == 0 for ending in endings.values()), endings
    return np.stack([np.load(folder / f"{rank}.npy") for rank in range(plan.world_size)])


def gradient_plan(cls: type[GradientSchedule], training: Training, **more: object) -> Plan:
    """Return the plan of four ranks on two nodes, in several buckets; of the sparse, a tenth is sent."""
    sparse = {"density": 0.1} if issubclass(cls, SparseSchedule) else {}
    settings = {"first_bucket_nbytes": 100, "bucket_nbytes": 400, "warmup_steps": 0, **sparse, **more}
    own = {name: value for name, value in settings.items() if name in cls.model_fields}
    return cls(**{**cls.examples[0], **own}).plan(training.job(4, 12, ranks_per_node=2))


GRADIENT = [cls for cls in kinds().values() if issubclass(cls, GradientSchedule)]
SPARSE = [cls for cls in GRADIENT if issubclass(cls, SparseSchedule)]
each_gradient = pytest.mark.parametrize("cls", GRADIENT, ids=[cls.__name__ for cls in GRADIENT])
each_sparse = pytest.mark.parametrize("cls", SPARSE, ids=[cls.__name__ for cls in SPARSE])


@each_gradient
def test_every_way_of_gradients_gives_the_values_of_the_cpu(cls: type[GradientSchedule], tmp_path: Path) -> None:
    """In double precision, so that both select the same."""
    training = Training()
    plan = gradient_plan(cls, training, method="exact")
    expected, _ = in_virtual_world(plan, training)
    np.testing.assert_allclose(trained(plan, training, "gloo", tmp_path), expected, rtol=1e-9, atol=1e-9)


@each_gradient
def test_shared_trust_ratios_give_the_values_of_the_cpu(cls: type[GradientSchedule], tmp_path: Path) -> None:
    training = Training(optimizer="lars")
    plan = gradient_plan(cls, training, method="exact", parallel_optimizer=True)
    expected, _ = in_virtual_world(plan, training)
    found = trained(plan, training, "gloo", tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)  # ratios are single precision
    assert (found == found[0]).all()


@pytest.mark.parametrize("cycle_s", [None, 2e-3], ids=["without cycles", "with cycles"])
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_fused_gradients_give_the_values_of_the_cpu(compression: str, cycle_s: float | None, tmp_path: Path) -> None:
    training = Training(dtype=torch.float32)
    plan = Sync(first_bucket_nbytes=0, bucket_nbytes=0, compression=compression).plan(training.job(4, 12))
    gradients = [op.dst for op in plan.bodies[0] if isinstance(op, Backward)]
    ready_s = {name: 1e-3 * number for number, name in enumerate(gradients)}
    fused = fuse(plan, Fusion(buffer_nbytes=700, cycle_s=cycle_s), ready_s)
    expected, _ = in_virtual_world(fused, training)
    tolerance = 1e-5 if compression == "none" else 1e-2  # half precision rounds with every addition
    np.testing.assert_allclose(trained(fused, training, "gloo", tmp_path), expected, rtol=tolerance, atol=tolerance)


@each_sparse
@pytest.mark.parametrize("method", ["exact", "mstopk", "dgc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ranks_that_compress_have_the_same_parameters_to_the_last_bit(
    cls: type[SparseSchedule], method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    training = Training(dtype=dtype)
    found = trained(gradient_plan(cls, training, method=method), training, "gloo", tmp_path)
    assert np.isfinite(found).all()
    assert (found == found[0]).all()


def test_gathered_selections_are_added_up_in_the_order_of_the_cpu() -> None:
    """To the last bit: the selections of 7 ranks, which overlap, in single precision."""
    n_ranks, k, count = 7, 300, 1000
    steps = [(Select("grad", "top", "rest", k), AllGather("top", "all", Group(n_ranks)), Densify("all", "sum", 7))]
    buffers = (
        Buffer("grad", count, initialized=True),
        Buffer("rest", count, initialized=True),
        Buffer("top", k, sparse=True),
        Buffer("all", n_ranks * k, sparse=True),
        Buffer("sum", count),
    )
    plan = Plan.from_steps("one", world_size=n_ranks, buffers=buffers, steps=steps)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(n_ranks * k, generator=generator)
    indices = torch.cat([torch.randperm(count, generator=generator)[:k] for _ in range(n_ranks)])
    sums = []
    for device in (CPU, GPU, GPU):
        memory = Memory(plan, device, {"all", "sum"})
        memory.sparse("all").values.copy_(values)
        memory.sparse("all").indices.copy_(indices)
        transforms.transform(memory, steps[0][-1], step=0, rank=0)
        sums.append(memory.dense("sum").cpu())
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[1], sums[2])


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
    trace = run_directory.read_trace(path / run_directory.REAL)
    assert not np.isnan([trace.ready_s, trace.start_s, trace.end_s]).any()
    assert (trace.end_s >= trace.start_s).all()
    assert json.loads((path / run_directory.REPORT).read_text())["backend"] == backend


def reduce_on_and_on() -> None:
    with connect(backend="gloo", device="cuda", timeout_s=30.0) as connection:
        plan = plan_of(*[STEP] * 100_000, world_size=2, count=1000)
        memory = Memory(plan, connection.device, {buffer.name for buffer in plan.buffers})
        print("running", flush=True)
        executor = Executor(
            plan,
            rank=connection.place.rank,
            delays={"host": np.full((1, plan.n_steps, 2), 1e-3)},
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
