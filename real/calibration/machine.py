"""Measure memory and host bandwidth and the parts of a training step, on all ranks at once."""

import platform
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from real import models
from real.buffers.memory import Memory
from real.buffers.transforms import transform, warm_up_transforms
from real.calibration.steps import PassTimes
from real.collectives.byte_transfer import gather_rows
from real.execution.running import ProgramSpec, perform_run
from real.kernels.lowrank import orthonormalize
from real.kernels.thresholds import can_use_triton
from real.processes.launch import Connection
from real.programs.base import Program
from real.programs.emulated import EmulatedProgram
from real.recording.timing import Sleeper, now_s
from simdist.errors import ScenarioError
from simdist.plan import Buffer, Plan, ops
from simdist.plan.group import Group
from simdist.scenario import Device, Workload, load_workload, presets
from simdist.scenario.warnings import CALIBRATION
from simdist.settings.base import plural
from simdist.settings.precision import Precision, Utilization

# Several times the caches.
_GPU_NBYTES = 2**29
_CPU_NBYTES = 2**26
_FACTOR = (4096, 4)  # of PowerSGD
_LOG2_SELECTED = range(16, 28)  # sizes of vectors
_SELECTED_SHARE = 0.01
_N_COPIES = 10
_N_IDLE = 100
_IDLE_S = 2e-3


def _device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        rows = []
    named = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def source(connection: Connection, n_nodes: int) -> str:
    """State the source of numbers: backend, versions, machines. No date is included, so equal runs give equal files."""
    world_size = connection.place.world_size
    ranks = f"{world_size} {plural(world_size, 'rank')} on {n_nodes} {plural(n_nodes, 'node')}"
    where = f"{platform.system()}, {_device_name(connection.device)}"
    return f"{CALIBRATION}: {connection.backend}, torch {torch.__version__}, {ranks}, {where}"


def measure_device(connection: Connection) -> Device:
    """Measure copies within memory and to a GPU, PowerSGD's kernel and selections, on all ranks at once."""
    device = connection.device
    nbytes = _GPU_NBYTES if device.type == "cuda" else _CPU_NBYTES
    src, dst = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    connection.barrier("memory bandwidth")
    memory_Bps = 2 * nbytes / _median_of_ranks(_laps_s(device, lambda: dst.copy_(src)))
    factor = torch.randn(_FACTOR, device=device)
    connection.barrier("columns made orthonormal")
    column_s = _median_of_ranks(_laps_s(device, lambda: orthonormalize(factor))) / _FACTOR[1]
    found = Device(name=_device_name(device), memory_bandwidth_Bps=memory_Bps, orthonormalize_s=column_s)
    if device.type != "cuda":
        return found
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    connection.barrier("host bandwidth")
    host_Bps = nbytes / _median_of_ranks(_laps_s(device, lambda: dst.copy_(pinned, non_blocking=True)))
    connection.barrier("selections")
    found = found.model_copy(update={"host_bandwidth_Bps": host_Bps})
    if not can_use_triton(device, torch.float32):
        return found
    kernels_from = int(_median_of_ranks(fastest_from(select_s(device))))
    return found.model_copy(update={"select_kernels_from": kernels_from})


def select_s(device: torch.device, log2_sizes: Iterable[int] = _LOG2_SELECTED) -> dict[int, tuple[float, float]]:
    """Measure selections as a run performs them.

    Args:
        device: A GPU.
        log2_sizes: Sizes of the vectors.

    Returns:
        Elements -> seconds by kernels, and by `torch.topk`.
    """
    found = {}
    for count in (2**each for each in log2_sizes):
        op = ops.Select("grad", "top", "residual", int(_SELECTED_SHARE * count), "mstopk")
        dense = (Buffer(name, count, initialized=True) for name in ("grad", "residual"))
        plan = Plan.from_steps(
            "selecting", world_size=1, buffers=(*dense, Buffer("top", op.k, sparse=True)), steps=[(op,)]
        )
        kernels_s, torch_s = (_select_by(plan, op, device, kernels_from) for kernels_from in (0, count + 1))
        found[count] = kernels_s, torch_s
    return found


def _select_by(plan: Plan, op: ops.Select, device: torch.device, kernels_from: int) -> float:
    memory = Memory(plan, device, {buffer.name for buffer in plan.buffers}, kernels_from=kernels_from)
    memory.dense("grad").normal_()
    warm_up_transforms(plan, memory)
    return _laps_s(device, lambda: transform(memory, op, step=0, rank=0))


def fastest_from(seconds: Mapping[int, tuple[float, float]]) -> int:
    """Return the smallest size from which the first of two ways is not slower at any size; beyond all if it never is.

    >>> fastest_from({1024: (2e-6, 1e-6), 2048: (2e-6, 2e-6), 4096: (2e-6, 4e-6)})
    2048
    """
    best = 2 * max(seconds)
    for count in sorted(seconds, reverse=True):
        first_s, second_s = seconds[count]
        if first_s > second_s:
            break
        best = count
    return best


def measure_handover(connection: Connection) -> float:
    """Return the overhead of an operation in seconds, on all ranks at once.

    It performs steps in which operations only sleep and need no other rank.
    """
    one = Group(1)
    step = (
        ops.Forward(("param",), ("loss",)),
        ops.Wait("loss"),
        ops.Backward(("loss", "param"), "grad"),
        ops.AllReduce("grad", one),
        ops.Optimize(("param",), ("grad",)),
    )
    buffers = tuple(Buffer(name, 1, initialized=True) for name in ("param", "loss", "grad"))
    plan = Plan.from_steps(
        "handing over", world_size=connection.place.world_size, buffers=buffers, steps=[step] * _N_IDLE
    )
    slept_s: dict[ops.Op, float] = {op: _IDLE_S for op in step if not isinstance(op, ops.Wait | ops.AllReduce)}

    def program(memory: Memory, failed: threading.Event) -> Program:
        return EmulatedProgram(slept_s, Sleeper(failed), Sleeper(failed), failed)

    with tempfile.TemporaryDirectory() as folder:
        spec = ProgramSpec("idle", buffers=(), make=program)
        done = perform_run(connection, plan, {}, spec, parts=Path(folder))
        connection.barrier("handing over")
    if done is None:
        return 0.0
    return max(0.0, done[0].makespan_s / _N_IDLE - len(slept_s) * _IDLE_S) / len(step)


def measured_workload(
    model: str, *, batch_size: int, precision: Precision, times: PassTimes, measured: str
) -> Workload:
    """Return the preset of a model with measured times, self-contained."""
    preset = load_workload(presets.path("workloads", model))
    return preset.model_copy(
        update={
            "source": f"preset {model}; times: {measured}, {precision}, median of {times.n_steps} steps",
            "batch_size": batch_size,
            "measured_batch_size": batch_size,
            "precision": precision,
            "forward_s": times.forward_s,
            "backward_s": times.backward_s,
            "optimize_s": times.optimize_s,
            "launches": times.launches,
            "utilization": Utilization(),
        }
    )


def model_nbytes(model: str) -> int:
    """Return the bytes of all parameters of the preset of a model, which some schedules send at once."""
    return load_workload(presets.path("workloads", model)).nbytes


def preset_batch_size(model: str) -> int:
    """Return the batch size of the preset of a model.

    Raises:
        ScenarioError: There is no such preset.
    """
    if model not in models.names():
        raise ScenarioError(f"--model {model}: there is no such model; there are {', '.join(models.names())}")
    return load_workload(presets.path("workloads", model)).batch_size


class _Timer:
    """Records times on the host, or with events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        self._times = []
        self._events = []
        self.lap()

    def lap(self) -> None:
        if self._device.type != "cuda":
            self._times.append(now_s())
            return
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()

    def laps_s(self) -> tuple[float, ...]:
        if self._device.type != "cuda":
            return tuple(end - begin for begin, end in zip(self._times, self._times[1:], strict=False))
        torch.cuda.synchronize(self._device)
        return tuple(a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False))


def _laps_s(device: torch.device, act: Callable[[], object]) -> float:
    """Return the median seconds of a function on this rank."""
    timer = _Timer(device)
    laps_s = []
    for _ in range(_N_COPIES + 1):
        timer.start()
        act()
        timer.lap()
        laps_s.append(timer.laps_s()[0])
    return statistics.median(laps_s[1:])


def _median_of_ranks(seconds: float) -> float:
    return float(gather_rows(torch.tensor([seconds], dtype=torch.float64))[:, 0].quantile(0.5))
