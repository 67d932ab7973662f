"""Times of operations in the steps of a plan: passes and updates of a model, and operations of few bytes.

All ranks perform the plan, each for itself. On a GPU, the times of a trace are those of the device. Kernel launches in
the plan tell what its host takes. On a CPU, host and device are one: launching is a part of each operation.
"""

import math
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from real import models
from real.buffers import transforms
from real.buffers.memory import Memory
from real.execution.running import ProgramSpec, perform_run
from real.processes.launch import Connection
from real.programs.base import Computation, Program
from real.programs.binding import Binding
from real.programs.module import ModuleProgram
from real.programs.precision import compute_in
from simdist.errors import RunError
from simdist.plan import Body, Buffer, KernelLaunch, Plan, occurrences, ops
from simdist.plan.delays import Delays
from simdist.plan.group import Group
from simdist.plan.lanes import COMPUTE
from simdist.plan.launches import with_kernel_launches
from simdist.plan.ops import LaunchKind, launch_kind
from simdist.scenario import load_workload, presets
from simdist.scenario.cluster import DeviceFloors, HostLaunches
from simdist.scenario.workload import WorkloadLaunches
from simdist.schedules import InputPath, Job, Sync
from simdist.settings.precision import Precision
from simdist.traces.trace import Trace

_N_WARM_UP = 3
_LEAST_STEPS = 5
_MOST_STEPS = 200
_N_SMALL_STEPS = 20
_HOST_BOUND = 1.1  # of the host's time for launching
_BUSY_S = 5e-3  # a device that is busy for so long does not wait for the host that launches small operations
_SMALL = 4096  # elements
_SELECTED = 64


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of the parts of a training step: the median over ranks of each rank's median over steps.

    Args:
        forward_s: Seconds of the forward pass, including the loss.
        backward_s: Seconds of the backward pass.
        optimize_s: Seconds of the update.
        n_steps: Number of steps measured on each rank.
        spread: Excess of the slowest rank's sum over the fastest's, as a share.
        launches: The host's seconds for launching them; none on a CPU.
    """

    forward_s: float
    backward_s: float
    optimize_s: float
    n_steps: int
    spread: float
    launches: WorkloadLaunches

    @property
    def is_of_host(self) -> bool:
        """Whether the passes take about as long as launching them, so that the device may be faster."""
        return self.forward_s + self.backward_s < _HOST_BOUND * self.launches.passes_s


@dataclass(frozen=True, slots=True)
class SmallTimes:
    """Least seconds of operations on the device, and the host's seconds for launching them, none on a CPU."""

    floors: DeviceFloors
    launches: HostLaunches


def measure_step(
    connection: Connection, model: str, *, batch_size: int, precision: Precision, budget_s: float
) -> PassTimes | None:
    """Measure forward pass, backward pass and update of a model on all ranks at once; rank 0 gets the result.

    On a GPU, further steps of one sample tell the host's time: there it never waits for room in the device's queue.

    Raises:
        RunError: There is no such model.
    """
    trial = _of_steps(connection, model, batch_size, precision, _LEAST_STEPS)
    step_s = 0.0 if trial is None else max(trial.makespan_s / trial.plan.n_steps, 1e-6)
    n_steps = min(max(_LEAST_STEPS, int(budget_s / step_s)), _MOST_STEPS) if step_s else 0
    n_steps = int(connection.exchange("the number of steps", str(n_steps))[0])
    measured = _of_steps(connection, model, batch_size, precision, n_steps) if n_steps > _LEAST_STEPS else trial
    small = None
    if connection.device.type == "cuda":
        small = _of_steps(connection, model, 1, precision, _LEAST_STEPS)
    if measured is None:
        return None
    times = step_times(measured)
    return replace(times, launches=launches_of_passes(small)) if small else times


def step_times(trace: Trace) -> PassTimes:
    """Return the times of passes and updates on the device."""
    device_s = of_kinds(trace, launched=False)
    parts = np.stack([device_s[kind] for kind in ("forward", "backward", "optimize")])[:, _N_WARM_UP:]
    ranks_s = np.median(parts, axis=1)
    forward_s, backward_s, optimize_s = np.median(ranks_s, axis=1).tolist()
    sums_s = ranks_s.sum(axis=0)
    spread = float(sums_s.max() / sums_s.min() - 1)
    return PassTimes(forward_s, backward_s, optimize_s, parts.shape[1], spread, WorkloadLaunches())


def launches_of_passes(trace: Trace) -> WorkloadLaunches:
    """Return the host's times for launching passes and updates."""
    host_s = of_kinds(trace, launched=True)
    return WorkloadLaunches(
        **{f"{kind}_s": _median(host_s[kind][_N_WARM_UP:]) for kind in ("forward", "backward", "optimize")}
    )


def of_kinds(trace: Trace, *, launched: bool) -> dict[LaunchKind, NDArray[np.float64]]:
    """Return the seconds of a step in operations of each kind, float64 `[n_steps, world_size]`.

    Args:
        trace: A trace of a plan with kernel launches.
        launched: The seconds of the host that launches them, not of the operations.
    """
    found: dict[LaunchKind, NDArray[np.float64]] = {}
    for each in occurrences(trace.plan):
        is_launch = isinstance(each.op, KernelLaunch)
        kind = each.op.kind if isinstance(each.op, KernelLaunch) else launch_kind(each.op)
        if kind is None or is_launch != launched:
            continue
        of_steps_s = found.setdefault(kind, np.zeros((trace.plan.n_steps, trace.plan.world_size)))
        of_steps_s[each.steps] += trace.end_s[each.rows] - trace.start_s[each.rows]
    return found


def measure_small(connection: Connection) -> SmallTimes | None:
    """Measure operations of few bytes on all ranks at once; rank 0 gets the result."""
    plan = small_plan(connection.place.world_size)

    def make(memory: Memory, _failed: threading.Event) -> Program:
        transforms.warm_up_transforms(plan, memory)
        return SmallOperations(memory, connection.place.rank)

    busy_s = np.full((1, plan.n_steps, plan.world_size), _BUSY_S)
    spec = ProgramSpec("small operations", {buffer.name for buffer in plan.buffers}, make)
    trace = _performed(connection, plan, spec, {"compute": busy_s})
    return None if trace is None else small_times(trace, on_gpu=connection.device.type == "cuda")


def small_times(trace: Trace, *, on_gpu: bool) -> SmallTimes:
    """Return the least times of operations, and those of launching them if they run on a GPU."""
    device_s, host_s = (of_kinds(trace, launched=launched) for launched in (False, True))
    floors = {f"{kind}_s": _median(each) for kind, each in device_s.items() if kind != "collective"}
    launches = {f"{kind}_s": _median(each) for kind, each in host_s.items()} if on_gpu else {}
    return SmallTimes(DeviceFloors(**floors), HostLaunches(**launches))


def small_plan(world_size: int) -> Plan:
    """Return a plan of operations of few bytes, behind a delay in which the host launches them."""
    dense = tuple(Buffer(name, _SMALL, initialized=True) for name in ("one", "other", "residual"))
    sparse = tuple(Buffer(name, count, sparse=True, initialized=True) for name, count in (("many", 128), ("top", 64)))
    step: Body = (
        ops.Delay("compute"),
        ops.Copy("one", "other"),
        ops.Pack(("one", "other"), "fused", lane=COMPUTE),
        ops.Unpack("fused", ("one", "other"), lane=COMPUTE),
        ops.Select("one", "top", "residual", _SELECTED),
        ops.Merge("many", "top", "residual"),
        ops.Densify("top", "other"),
        ops.AllReduce("one", Group(world_size)),
        ops.Wait("one"),
    )
    buffers = (*dense, Buffer("fused", 2 * _SMALL, initialized=True), *sparse)
    plan = Plan.from_steps("small", world_size=world_size, buffers=buffers, steps=[step] * _N_SMALL_STEPS)
    kinds = {kind for kind in map(launch_kind, step) if kind}
    return with_kernel_launches(plan, frozenset(kinds))


class SmallOperations(Program):
    """Copies, fuses and compresses buffers, without a model.

    Args:
        memory: The buffers.
        rank: Their rank.
    """

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory = memory
        self._rank = rank

    def perform(self, op: Computation, step: int) -> None:
        """Perform an operation on the buffers."""
        match op:
            case ops.Copy():
                transforms.copy(self._memory, op, rank=self._rank)
            case ops.StageIn() | ops.TrustRatios() | ops.Optimize() | ops.Save():
                raise RunError(f"{op} is no operation on buffers alone")
            case _:
                transforms.transform(self._memory, op, step=step, rank=self._rank)

    def load(self, op: ops.Load, number: int) -> None:
        """Refuse, because there is no data."""
        raise RunError(f"{op} needs data")

    def forward(self, parts: object, step: int, complete: object) -> None:
        """Refuse, because there is no model."""
        raise RunError("a pass needs a model")

    def backward(self, buckets: object, complete: object) -> None:
        """Refuse, because there is no model."""
        raise RunError("a pass needs a model")


def _of_steps(connection: Connection, model: str, batch_size: int, precision: Precision, n_steps: int) -> Trace | None:
    """Perform steps of a model on each rank alone, after some that warm up."""
    plan = model_plan(model, n_steps + _N_WARM_UP, connection.place.world_size)
    device = connection.device
    rank = connection.place.rank

    def make(memory: Memory, _failed: threading.Event) -> Program:
        job = models.build_job(model, batch_size=batch_size, device=device, dtype=torch.float32, seed=0)
        program = ModuleProgram(
            plan,
            job.module,
            job.loss,
            job.optimizer,
            lambda step: job.batch(step, rank),
            memory,
            device=device,
            rank=rank,
            autocast=compute_in(precision),
        )
        program.warm_up(_N_WARM_UP)
        return program

    return _performed(connection, plan, ProgramSpec(model, Binding.buffers_of(plan), make), {})


def model_plan(model: str, n_steps: int, world_size: int) -> Plan:
    """Return steps of synchronous training in which each rank is alone, with kernel launches."""
    workload = load_workload(presets.path("workloads", model))
    job = Job(
        world_size=1,
        ranks_per_node=1,
        n_steps=n_steps,
        tensor_counts=workload.tensor_counts,
        input_path=InputPath(source="memory"),
        run_ahead_steps=1,
        launches=frozenset({"forward", "backward", "optimize", "collective", "copy"}),
    )
    return replace(Sync().plan(job), world_size=world_size)


def _performed(connection: Connection, plan: Plan, spec: ProgramSpec, delays: Delays) -> Trace | None:
    with tempfile.TemporaryDirectory() as folder:
        done = perform_run(connection, plan, delays, spec, parts=Path(folder))
        connection.barrier(f"{plan.name}: steps were performed")
    return done and done[0]


def _median(seconds: NDArray[np.float64]) -> float:
    """Return the median over ranks of each rank's median over steps, seconds `[n_steps, world_size]`."""
    found = float(np.median(np.median(seconds, axis=0)))
    return found if math.isfinite(found) else 0.0
