"""The training jobs: who is late in which step, how each job is run, and what its steps took.

    steps of sync and local-8:      9 first | window | window | 8 between | window, profiled | 1 last
    of the other schedules:         9 first | window | window

Every window has the same delays. torch's averagers average in step 0 and every period after it, so that a window that
begins in step 9 or 8 steps later holds whole periods of 2, 4 and 8 steps, and ends with an average. The last step is
profiled too, and left out of everything: in it, ranks begin to write their traces.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "emulated_cluster"))

import network  # noqa: E402  of the experiment beside this one

from simdist.errors import RunError  # noqa: E402

TIMEOUT_S = 120.0  # a run takes 10 to 20 s
GRACE_S = 5.0  # between the failure of a rank and the end of the others, which may know more
PORT = 29500  # of nodes, which have their ports to themselves
RATE_BPS = 250e6  # of each node's link
FIRST_STEPS = 9  # connections, memory, and DDP's buckets, which it forms again after the first step
WINDOW_STEPS = 32
PLAIN_WINDOWS = 2  # without a profiler; their median counts
STEPS_BETWEEN = (
    8  # before the profiled window: a whole period of every schedule; in the last of them the profiler warms up
)
LATE_S = (0.06, 0.16)  # shortest and longest
SLOW_FACTOR = 1.4
LAYERS, LAYER_S = 4, 3e-3  # forward; backward takes twice as long
BATCH_SIZE = 32  # of models that compute in earnest
SEED = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """How ranks train together.

    Args:
        label: As the simulator calls it.
        options: Of train.py.
        setting: In a scenario.
        is_profiled: A window of it is run with the profiler too.
        meets: Ranks drift apart, and meet before each window.
    """

    label: str
    options: tuple[str, ...]
    setting: dict[str, object]
    is_profiled: bool = False
    meets: bool = True


SYNC = Schedule("sync", ("--schedule", "sync"), {"kind": "sync"}, is_profiled=True, meets=False)
LOCAL_4 = Schedule("local-4", ("--schedule", "local", "--periods", "4"), {"kind": "local_sgd", "period": 4})
LOCAL_8 = Schedule(
    "local-8", ("--schedule", "local", "--periods", "8"), {"kind": "local_sgd", "period": 8}, is_profiled=True
)
HSGD = Schedule(
    "hsgd-2-2,4-4",
    ("--schedule", "hsgd", "--periods", "2:2,4:4"),
    {"kind": "hierarchical_sgd", "levels": {2: 2, 4: 4}, "intra_node_gradients": False},
)

FSDP = Schedule(
    "fsdp-blocking", ("--schedule", "sharded"), {"kind": "fsdp", "blocking": True}, is_profiled=True, meets=False
)
HSDP = Schedule(
    "hsdp-2-blocking",
    ("--schedule", "sharded", "--shard", "2"),
    {"kind": "hsdp", "shard": 2, "blocking": True},
    is_profiled=True,
    meets=False,
)


@dataclass(frozen=True)
class Case:
    """A job and its stragglers.

    Args:
        name: In tables and of files.
        late_share: Of all steps of ranks; in these a rank sleeps between loss and backward pass.
        slow_rank: Computes slowly in every step; None if no rank does.
        slow_factor: How much longer the layers of that rank take.
        model: See train.py.
        world_size: Ranks, a node each.
        schedules: First the one that is profiled and imported.
        window_steps: Of a window.
        options: Of train.py, besides.
        noise_s: Mean of an exponential pause of every rank in every step, at the place of the late ones.
        stall_share: Of all steps of ranks; in these the loader stalls for as long as others are late.
        seed: Of what is drawn.
    """

    name: str
    late_share: float = 0.0
    slow_rank: int | None = None
    slow_factor: float = SLOW_FACTOR
    model: Literal["asleep", "convnet", "mlp"] = "asleep"
    world_size: int = 4
    schedules: tuple[Schedule, ...] = (SYNC, LOCAL_4, LOCAL_8, HSGD)
    window_steps: int = WINDOW_STEPS
    options: tuple[str, ...] = ()
    noise_s: float = 0.0
    stall_share: float = 0.0
    seed: int = SEED

    @property
    def slug(self) -> str:
        """The name, as files have it."""
        return self.name.replace(", ", "-").replace(" %", "").replace(" ", "-")

    @property
    def slow_s(self) -> float:
        """Seconds that the slow rank needs more than others in each step."""
        return 0.0 if self.slow_rank is None else (self.slow_factor - 1) * 3 * LAYERS * LAYER_S

    @cached_property
    def late_s(self) -> NDArray[np.float64]:
        """Seconds that each rank is late in each step of a window, `[window_steps, world_size]`."""
        draw = np.random.default_rng(self.seed)
        shape = (self.window_steps, self.world_size)
        late_s = np.where(draw.random(shape) < self.late_share, draw.uniform(*LATE_S, shape), 0.0)
        if self.noise_s:
            late_s = late_s + draw.exponential(self.noise_s, shape)
        return late_s.round(3)

    @cached_property
    def stall_s(self) -> NDArray[np.float64]:
        """Seconds that the loader of each rank stalls in each step of a window, likewise."""
        draw = np.random.default_rng(self.seed + 1_000)
        shape = (self.window_steps, self.world_size)
        return np.where(draw.random(shape) < self.stall_share, draw.uniform(*LATE_S, shape), 0.0).round(3)


AVERAGED = (SYNC, LOCAL_4, LOCAL_8)
BATCH_64 = ("--batch-size", "64", "--bucket-mb", "1")
MLP = ("--batch-size", "128", "--width", "512", "--layers", "6")

CASES = (
    Case("clean"),
    Case("transient", late_share=0.1),
    Case("persistent", slow_rank=2),
    Case("both", late_share=0.1, slow_rank=1),
)
CONVNETS = (
    Case("convnet", model="convnet", world_size=2, schedules=AVERAGED, options=("--bucket-mb", "0.1")),
    Case("convnet, transient", late_share=0.1, model="convnet", world_size=2, schedules=AVERAGED),
    Case("convnet, 64", model="convnet", world_size=2, schedules=AVERAGED, options=BATCH_64),
    Case("convnet, 4-ranks", model="convnet", schedules=AVERAGED, options=("--batch-size", "16")),
    Case("mlp", model="mlp", world_size=2, schedules=AVERAGED, options=MLP),
)

SHARDED = (
    Case("sharded", schedules=(FSDP,)),
    Case("sharded, transient", late_share=0.1, schedules=(FSDP,)),
    Case("sharded, two copies", schedules=(HSDP,)),
    Case("sharded, persistent", slow_rank=2, schedules=(HSDP,)),
    Case("sharded, mlp", model="mlp", world_size=2, schedules=(FSDP,), options=MLP),
    Case("sharded, convnet", model="convnet", world_size=2, schedules=(FSDP,)),
)

# Ordinary jobs: hosts with some noise, and one kind of trouble or two.
NOISE_S = 2e-3
UNEQUAL = ("--slowness", "1,1.1,1.25,1")
NORM = ("--batchnorm",)
TWICE = ("--accumulate", "2")
ADVISED = (
    Case("noise only", noise_s=NOISE_S, seed=2),
    Case("late 5 %", late_share=0.05, noise_s=NOISE_S, seed=3),
    Case("late 10 %", late_share=0.1, noise_s=NOISE_S, seed=4),
    Case("late 20 %", late_share=0.2, noise_s=NOISE_S, seed=5),
    Case("late 10 %, again", late_share=0.1, noise_s=NOISE_S, seed=6),
    Case("one slow rank", slow_rank=2, noise_s=NOISE_S, seed=7),
    Case("one slow rank, late 10 %", slow_rank=0, late_share=0.1, noise_s=NOISE_S, seed=8),
    Case("unequal hosts", noise_s=NOISE_S, options=UNEQUAL, seed=9),
    Case("unequal hosts, late 5 %", late_share=0.05, noise_s=NOISE_S, options=UNEQUAL, seed=10),
    Case("unequal hosts, late 10 %", late_share=0.1, noise_s=NOISE_S, options=UNEQUAL, seed=11),
    Case("BatchNorm", noise_s=NOISE_S, options=NORM, seed=12),
    Case("BatchNorm, late 5 %", late_share=0.05, noise_s=NOISE_S, options=NORM, seed=13),
    Case("BatchNorm, late 10 %", late_share=0.1, noise_s=NOISE_S, options=NORM, seed=14),
    Case("two batches a step", noise_s=NOISE_S, options=TWICE, seed=15),
    Case("two batches a step, late 10 %", late_share=0.1, noise_s=NOISE_S, options=TWICE, seed=16),
    Case("loader stalls", stall_share=0.05, noise_s=NOISE_S, seed=17),
    Case("loader stalls, late 5 %", stall_share=0.05, late_share=0.05, noise_s=NOISE_S, seed=18),
    Case("loader stalls, unequal hosts", stall_share=0.05, noise_s=NOISE_S, options=UNEQUAL, seed=19),
    Case("more noise", noise_s=3 * NOISE_S, seed=20),
    Case("more noise, late 10 %", late_share=0.1, noise_s=3 * NOISE_S, seed=21),
)

TINY_SHARDED = Case("tiny sharded", schedules=(FSDP,), window_steps=6)
TINY = Case("tiny", late_share=0.1, slow_rank=2, slow_factor=3.0, schedules=(SYNC, LOCAL_4), window_steps=12)


def first_profiled_step(case: Case) -> int:
    """Return the number of the first step of the profiled window."""
    return FIRST_STEPS + PLAIN_WINDOWS * case.window_steps + STEPS_BETWEEN


def perform(case: Case, schedule: Schedule, folder: Path, nodes: Sequence[network.Node] | None) -> None:
    """Train, in the end with a profiler if the schedule is one that is profiled.

    Args:
        case: The job.
        schedule: How its ranks train together.
        folder: For times of steps, and for traces in `traces`.
        nodes: Of an emulated cluster, one per rank; None to run all ranks on this machine, with its loopback.

    Raises:
        RunError: A rank failed, twice; it says what the ranks printed.
    """
    folder.mkdir(parents=True)
    starts = _starts(case, schedule)
    steps = starts[-1] + case.window_steps + schedule.is_profiled
    for name, window_s in (("late", case.late_s), ("stalls", case.stall_s)):
        seconds = np.zeros((steps, case.world_size))
        for start in starts:
            seconds[start : start + case.window_steps] = window_s
        np.savetxt(folder / f"{name}.csv", seconds, delimiter=",", fmt="%g")
    options = ["--model", case.model, "--layers", str(LAYERS), "--layer-ms", str(1e3 * LAYER_S), "--steps", str(steps)]
    options += [
        "--stragglers",
        str(folder / "late.csv"),
        "--stalls",
        str(folder / "stalls.csv"),
        "--times",
        str(folder / "times"),
        *schedule.options,
    ]
    if case.slow_rank is not None:
        options += ["--slow-rank", str(case.slow_rank), "--slow-factor", str(case.slow_factor)]
    if case.model != "asleep":
        options += ["--batch-size", str(BATCH_SIZE)]
    options += case.options
    if schedule.is_profiled:
        options += ["--profile", str(folder / "traces"), "--active-steps", str(case.window_steps + 1)]
    if schedule.meets:
        options += ["--barriers", ",".join(map(str, starts))]
    command = [sys.executable, str(HERE / "train.py"), *options]
    try:
        _launch(command, case.world_size, nodes, asleep=case.model == "asleep")
    except RunError as error:  # one process in some hundred aborts at its end, with all its work done
        print(f"once more: {error}", flush=True)
        _launch(command, case.world_size, nodes, asleep=case.model == "asleep")


def import_traces(case: Case, folder: Path) -> tuple[list[dict], Path]:
    """Import the traces of a case with `simdist import`; return the stragglers that it tells, and the scenario's file.

    Raises:
        RunError: It failed.
    """
    first, path = first_profiled_step(case), folder / f"{case.slug}.yaml"
    steps = f"{first}:{first + case.window_steps}"
    command = [
        "import",
        str(folder / case.schedules[0].label / "traces"),
        "--steps",
        steps,
        "-o",
        str(path),
        "--force",
        "--json",
    ]
    done = subprocess.run([sys.executable, "-m", "simdist", *command], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"simdist {' '.join(command)}:\n{done.stderr}")
    return json.loads(done.stdout)["stragglers"], path


def measured_s(case: Case, folder: Path) -> tuple[float, ...]:
    """Return seconds per step of each window that was not profiled, from what `perform` has left in a folder."""
    return tuple(_step_s(case, folder, start) for start in _plain_starts(case))


def profiled_s(case: Case, folder: Path) -> float:
    """Return seconds per step of the profiled window, likewise."""
    return _step_s(case, folder, first_profiled_step(case))


def calm_s(case: Case, folder: Path, *, profiled: bool) -> float:
    """Return seconds of the median step of a rank: of an averaging schedule, one without an exchange.

    Args:
        case: The job.
        folder: For what `perform` has left.
        profiled: Of the profiled window, instead of those before it.
    """
    starts = [first_profiled_step(case)] if profiled else _plain_starts(case)
    ended_s = _stamps_s(case, folder)[:, :, 1]
    return float(np.median([np.diff(ended_s[:, start : start + case.window_steps], axis=1) for start in starts]))


def _plain_starts(case: Case) -> list[int]:
    """Return the first steps of the windows without a profiler."""
    return [FIRST_STEPS + window * case.window_steps for window in range(PLAIN_WINDOWS)]


def _starts(case: Case, schedule: Schedule) -> list[int]:
    """Return the first steps of the windows."""
    plain = _plain_starts(case)
    return [*plain, first_profiled_step(case)] if schedule.is_profiled else plain


def _launch(command: Sequence[str], world_size: int, nodes: Sequence[network.Node] | None, *, asleep: bool) -> None:
    """Start a process per rank, wait for all, and say what failed."""
    port = PORT if nodes else _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as output:
        try:
            for rank in range(world_size):
                processes.append(_start(command, rank, world_size, nodes, output, port=port, asleep=asleep))
            codes = _codes(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        if any(code != 0 for code in codes):
            said = output.read().decode(errors="replace")
            raise RunError(f"{' '.join(command)}: exit statuses {codes}, None of ranks that did not end:\n{said}")


def _codes(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait until all have ended, or one has failed and the others had time to say so too."""
    deadline_s, has_failed = time.monotonic() + TIMEOUT_S, False
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or time.monotonic() > deadline_s:
            return codes
        if any(codes) and not has_failed:
            deadline_s, has_failed = time.monotonic() + GRACE_S, True
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _start(
    command: Sequence[str],
    rank: int,
    world_size: int,
    nodes: Sequence[network.Node] | None,
    output: IO[bytes],
    *,
    port: int,
    asleep: bool,
) -> subprocess.Popen[bytes]:
    """Start a rank as torchrun does, but without a torchrun on every node, as starting takes longer than training."""
    address = nodes[0].address if nodes else "127.0.0.1"
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if nodes is None:
        return subprocess.Popen(command, env=os.environ | environ, stdout=output, stderr=subprocess.STDOUT)
    # A host name of its own, as traces tell machines apart by it.
    named = ["unshare", "--uts", "sh", "-c", f'hostname node{rank} && exec "$@"', "sh", *command]
    scheduled = network.realtime(named) if asleep else ["chrt", "--batch", "0", *named]
    return nodes[rank].run(scheduled, environ, output=output)


def _step_s(case: Case, folder: Path, start: int) -> float:
    """Return seconds per step of a window: from the mean begin of the first one until the last rank has done the last.

    Args:
        case: The job.
        folder: Of a run.
        start: First step of the window.
    """
    stamps_s = _stamps_s(case, folder)
    began_s, ended_s = stamps_s[:, start, 0].mean(), stamps_s[:, start + case.window_steps - 1, 1].max()
    return float((ended_s - began_s) / case.window_steps)


def _stamps_s(case: Case, folder: Path) -> NDArray[np.float64]:
    """Return when steps began and ended, and how long ranks slept in them, `[ranks, steps, 3]`."""
    paths = [folder / "times" / f"rank{rank}.json" for rank in range(case.world_size)]
    return np.array([json.loads(path.read_text(encoding="utf-8")) for path in paths])
