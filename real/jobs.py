"""The programs of a run, by their names on the command line."""

import importlib
import io
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from real import models
from real.buffers.memory import Memory
from real.checkpoints.planned import CheckpointFiles
from real.data.inputs import BatchFeed, InputReader, batch_buffers
from real.data.sample_index import check_labels
from real.execution.attempts import PerformedAttempt
from real.execution.failing import FailNode
from real.execution.gpu import Spin
from real.execution.running import MakeProgram, ProgramSpec
from real.kernels.topk import KERNELS_FROM
from real.models import TrainingJob
from real.programs.base import Program
from real.programs.binding import Binding, left_to_autograd
from real.programs.emulated import EmulatedProgram
from real.programs.module import ModuleProgram
from real.programs.optimizers import takes_ratios
from real.programs.precision import compute_in
from real.recording.timing import Sleeper
from simdist.cost import Local, Resources, Shared, Varying, price
from simdist.cost.costs import alone_s
from simdist.cost.pricing import resources_of
from simdist.cost.traffic import Traffic
from simdist.engines.peers import find_peers
from simdist.errors import ScenarioError
from simdist.plan import Plan, ops
from simdist.runs.calibrated import simulate_run
from simdist.runs.run_directory import EMULATED, NO_LINKS, RunDirectory
from simdist.runs.traffic import link_traffic
from simdist.settings.precision import Precision
from simdist.traces.peers import PeerArrivals
from simdist.traces.trace import Trace

# Takes the traffic of the run, what its numbers of resources mean, and the node that this process is on. Inside the
# block holds what holds from the beginning; its value is called with the moment when the run begins, by `now_s`.
PerformLinks = Callable[[Traffic, Resources, int], AbstractContextManager[Callable[[float], None]]]

_N_WARM_UP = 3

# Takes batch_size, device, dtype and seed, and `lars=True` for a plan with trust ratios, as `real.models.build_job`
# does after the name.
Build = Callable[..., TrainingJob]


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoints of a run.

    Args:
        url: URL of the folder that they are written to. Without one, a program that sleeps does so for them as well,
            unless the run has failures, and a model writes to the run directory.
        attempt: With failures: the checkpoint to go on from.
    """

    url: str | None
    attempt: PerformedAttempt | None = None

    def files(self, run: RunDirectory, build: Build | None, rank: int) -> CheckpointFiles:
        """Return the files of a rank."""
        settings = run.scenario.checkpoint
        keep = settings.keep if settings else None
        return CheckpointFiles(self.url or str(run.path / "saved"), rank, ".bin" if build is None else ".pt", keep)

    def load(self, restore: Callable[[bytes], object]) -> None:
        """Give the file to go on from, if there is one, to what restores it."""
        if self.attempt and self.attempt.first_step:
            with self.attempt.loading():
                restore(self.attempt.content())


def find_build(name: str) -> Build | None:
    """Return what builds the job of that name; None for `emulated`, which has none.

    Args:
        name: `emulated`; a model of `real.models`; or `MODULE:FUNCTION`, which is imported.

    Raises:
        ScenarioError: There is no such program.
    """
    if name == EMULATED:
        return None
    if name in models.names():
        return partial(models.build_job, name)
    if ":" not in name:
        known = ", ".join((EMULATED, *models.names()))
        raise ScenarioError(f"--program {name}: there is no such program; there are {known}, or MODULE:FUNCTION")
    build: Build = _imported("--program", name, like="real.models.build_job")
    return build


def find_links(name: str | None) -> PerformLinks | None:
    """Return what performs the links of a run.

    Args:
        name: `MODULE:FUNCTION`, which is imported; None or `none` if nothing does.

    Raises:
        ScenarioError: There is no such function.
    """
    if name in (None, NO_LINKS):
        return None
    if ":" not in name:
        raise ScenarioError(f"--links {name}: write MODULE:FUNCTION, or {NO_LINKS} to leave out what links do")
    perform: PerformLinks = _imported("--links", name, like="real.jobs.PerformLinks")
    return perform


def find_failures(name: str | None) -> FailNode | None:
    """Return what lets nodes and links fail.

    Args:
        name: `MODULE:FUNCTION`, which is imported; None if nothing does.

    Raises:
        ScenarioError: There is no such function.
    """
    if name is None:
        return None
    if ":" not in name:
        raise ScenarioError(f"--failures {name}: write MODULE:FUNCTION, or leave it out")
    fail_node: FailNode = _imported("--failures", name, like="real.execution.failing.FailNode")
    return fail_node


def check_links(run: RunDirectory, name: str | None) -> None:
    """Refuse a run whose links do what nobody said how to perform, or to leave out.

    Raises:
        ScenarioError: It names what they do, and the links.
    """
    resources, traffic = _traffic(run)
    if name is not None or traffic is None:
        return
    links: dict[str, list[str]] = {}
    for each in traffic.shares:
        links.setdefault(each.cause, []).extend(map(resources.name, each.resources))
    for other in traffic.background:
        links[other.cause] = [resources.name(int(resource)) for resource in other.stage.resources]
    told = "; ".join(f"{cause} on {', '.join(names)}" for cause, names in links.items())
    raise ScenarioError(
        f"{run.path}: {told}: nothing here can do that to links: name what can with --links MODULE:FUNCTION, or leave "
        f"it out with --links {NO_LINKS}"
    )


def open_links(
    run: RunDirectory, perform: PerformLinks | None, rank: int
) -> AbstractContextManager[Callable[[float], None] | None]:
    """Return what performs the links of a run while it is entered, on the first rank of each node."""
    node, on_node = divmod(rank, run.scenario.cluster.gpus_per_node)
    resources, traffic = _traffic(run)
    return nullcontext() if perform is None or traffic is None or on_node else perform(traffic, resources, node)


def _traffic(run: RunDirectory) -> tuple[Resources, Traffic | None]:
    resources = resources_of(run.plan, run.scenario.cluster)
    return resources, link_traffic(run.scenario, resources, run.scenario.seed, with_constant=True)


def _imported(option: str, name: str, *, like: str) -> Any:
    """Return a function that an option names as `MODULE:FUNCTION`."""
    module_name, _, function_name = name.partition(":")
    try:
        found = vars(importlib.import_module(module_name))[function_name]
    except ImportError as error:
        raise ScenarioError(f"{option} {name}: cannot import {module_name}: {error}") from None
    except KeyError:
        raise ScenarioError(f"{option} {name}: {module_name} has no {function_name}") from None
    if not callable(found):
        raise ScenarioError(f"{option} {name}: {function_name} is no function; see {like} for what it takes")
    return found


def buffers_of(plan: Plan, build: Build | None, *, with_data: bool) -> set[str]:
    """Return the buffers that need memory.

    These are all that a model has, but of a program that sleeps those that are sent; and those that data is loaded to.
    """
    loaded = batch_buffers(plan) if with_data else set()
    if build is not None:
        return loaded | (Binding.buffers_of(plan) - left_to_autograd(plan).keys())
    sent = [op for body in plan.bodies for op in body if isinstance(op, ops.COLLECTIVES)]
    return loaded | {name for op in sent for name in (*ops.reads(op), *ops.writes(op))}


def simulate_peers(run: RunDirectory, rank: int) -> tuple[Trace, PeerArrivals]:
    """Simulate a run; return its trace, and the peers of one rank.

    Raises:
        ScenarioError: The run has no such rank.
        TraceError: See `find_peers`.
    """
    if not 0 <= rank < run.plan.world_size:
        raise ScenarioError(f"--rank {rank}: {run.path} has ranks 0 to {run.plan.world_size - 1}")
    simulated = simulate_run(run, None, real=None)
    return simulated, find_peers(simulated, rank)


def program_spec(
    rank: int,
    device: torch.device,
    run: RunDirectory,
    build: Build | None,
    source: InputReader | None,
    *,
    name: str,
    precision: Precision,
    saved: Saved,
) -> ProgramSpec:
    """Return the program of this rank, which is made once there is memory.

    Args:
        rank: This rank.
        device: Where it computes.
        run: The run to perform.
        build: From `find_build`.
        source: Of samples; without one, a program that sleeps does so for loads as well, and a model has its own data.
        name: The name that `find_build` was given.
        precision: Of a model.
        saved: The checkpoints.
    """
    buffers = buffers_of(run.plan, build, with_data=source is not None)
    if build is None:
        return ProgramSpec(name, buffers, emulated_maker(rank, device, run, source, saved))
    make = model_maker(rank, device, run, build, source, precision=precision, saved=saved)
    return ProgramSpec(
        f"{name} {precision}",
        buffers,
        make,
        precision=precision,
        gives_back=True,
        kernels_from=run.scenario.cluster.device.select_kernels_from or KERNELS_FROM,
    )


def emulated_maker(
    rank: int, device: torch.device, run: RunDirectory, source: InputReader | None, saved: Saved
) -> MakeProgram:
    """Return what makes the program of this rank that sleeps; see `program_spec`."""

    def make(memory: Memory, failed: threading.Event) -> Program:
        compute, comm = (Spin(device) if device.type == "cuda" else Sleeper(failed) for _ in range(2))
        seconds, load_s = _prices(run, rank)
        feed = source and BatchFeed(run.plan, source, memory)
        saved.load(len)
        save = None
        if saved.url or saved.attempt:
            save = _saver(run.plan, saved.files(run, build=None, rank=rank), by_step=saved.attempt is not None)
        saves = {op for body in run.plan.bodies for op in body if isinstance(op, ops.Save)}
        return EmulatedProgram(
            seconds,
            compute=compute,
            comm=comm,
            interrupted=failed,
            load_s=load_s,
            feed=feed,
            save=save,
            state_nbytes=max((_saved_nbytes(run.plan, op) for op in saves), default=0),
        )

    return make


def model_maker(
    rank: int,
    device: torch.device,
    run: RunDirectory,
    build: Build,
    source: InputReader | None,
    *,
    precision: Precision,
    saved: Saved,
) -> MakeProgram:
    """Return what makes the program of this rank that trains a model; see `program_spec`."""

    def make(memory: Memory, _failed: threading.Event) -> Program:
        autocast = compute_in(precision)
        lars = {"lars": True} if takes_ratios(run.plan) else {}
        wanted = {"batch_size": run.scenario.workload.batch_size, "device": device, "dtype": torch.float32, "seed": 0}
        try:
            job = build(**wanted, **lars)
        except TypeError as error:
            raise ScenarioError(f"--program: {error}; it is called with {', '.join((*wanted, *lars))}") from error
        if not isinstance(job, TrainingJob):
            raise ScenarioError(f"--program: returned {type(job).__name__}; it should return a real.models.TrainingJob")
        if source is not None:
            _check_inputs(job.batch(0, rank)[0], source)
            if job.n_classes is not None:
                check_labels(source.sources.index, job.n_classes, source.options.url)
        program = ModuleProgram(
            run.plan,
            job.module,
            job.loss,
            job.optimizer,
            lambda step: job.batch(step, rank),
            memory,
            device=device,
            rank=rank,
            autocast=autocast,
            save=saved.files(run, build, rank).write if run.plan.has_saves else None,
            feed=source and BatchFeed(run.plan, source, memory),
            max_norm=job.max_norm,
        )
        program.warm_up(_N_WARM_UP)
        saved.load(lambda content: program.restore(torch.load(io.BytesIO(content), map_location=device)))
        return program

    return make


def _saver(plan: Plan, files: CheckpointFiles, *, by_step: bool) -> Callable[[ops.Save, int], None]:
    """Return what writes as many bytes as a checkpoint of a model would have.

    Args:
        plan: The plan.
        files: Where to.
        by_step: Each step has a file of its own; otherwise, each replaces the one before.
    """

    def save(op: ops.Save, step: int) -> None:
        if op.by.is_first(files.rank):
            name = files.name(step) if by_step else f"rank-{files.rank:05d}.bin"
            files.write_bytes(_saved_nbytes(plan, op), name)

    return save


def _saved_nbytes(plan: Plan, op: ops.Save) -> int:
    return sum(plan.buffer(each).nbytes for each in op.srcs)


def _check_inputs(inputs: torch.Tensor, source: InputReader) -> None:
    """Refuse a model that takes other samples than the data set has."""
    sample = torch.Size(source.sources.shape)
    if not inputs.is_floating_point() or inputs[0].numel() != sample.numel():
        raise ScenarioError(
            f"--program: the model takes samples of {inputs.dtype} {list(inputs.shape[1:])}, those of the data set are "
            f"images {list(sample)}; set workload.sample_size to {inputs[0].numel()} B, or choose another model"
        )


def _prices(run: RunDirectory, rank: int) -> tuple[Mapping[ops.Op, float], Callable[[ops.Load, int], float]]:
    """Price the operations of a rank that do not communicate, by the scenario's costs.

    Returns:
        Seconds of each operation that always takes as long; and (load, number) -> seconds of the others.
    """
    free = {"copy_Bps": math.inf, "collective_s": 0.0, "handover_s": 0.0}  # waking up takes what it takes here
    cluster = run.scenario.cluster.model_copy(update={"host": free})
    costs = price(run.plan, cluster, run.scenario.workload)
    seconds = {
        op: alone_s(cost, rank)
        for op, cost in costs.of.items()
        if isinstance(cost, Local) or (isinstance(cost, Shared) and not isinstance(op, ops.COLLECTIVES))
    }

    def load_s(op: ops.Load, number: int) -> float:
        cost = costs.of[op]
        assert isinstance(cost, Varying)
        return cost.transfers(number)[rank].alone_s(costs.capacity_Bps)

    return seconds, load_s
