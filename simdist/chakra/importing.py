"""Execution traces of data-parallel training, one per rank, as a scenario.

Each gradient bucket becomes one tensor, with its seconds of the backward pass. `bucket_size` of the schedule keeps the
tensors in separate buckets, as in the job. Seconds are medians over ranks and steps. Traces do not describe links, so
the user gives the cluster. Traces do not separate delays from work, so delays are not imported.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from simdist.chakra.export import WORLD
from simdist.chakra.files import groups_beside, prefix_of
from simdist.chakra.rank_traces import AllReduceCall, RankTrace, Rhythm, Step, cut, find_rhythm, names_phases, read_rank
from simdist.errors import ScenarioError, TraceError, UnsupportedError
from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.scenario import Cluster, Scenario, Tensor, Workload, dump
from simdist.settings.base import shown

_SLOW = 1.05  # times the median rank's work: a note names ranks above it
_NAMED = 5


@dataclass(frozen=True, slots=True)
class ChakraJob:
    """A training job, as its traces describe it.

    Args:
        workload: The job of one rank.
        world_size: Ranks.
        n_traces: Number of traced ranks.
        n_steps: Steps of the traces.
        notes: Facts missing from the traces, and omissions, one sentence each.
    """

    workload: Workload
    world_size: int
    n_traces: int
    n_steps: int
    notes: tuple[str, ...]


def import_traces(
    paths: Sequence[Path], *, n_steps: int | None = None, progress: Callable[[int], None] | None = None
) -> ChakraJob:
    """Read the traces of a job, one rank after the other.

    Args:
        paths: One file per rank.
        n_steps: Number of steps in the traces; detected if None.
        progress: Called with the number of files read.

    Raises:
        TraceError: A trace cannot be read or is damaged.
        UnsupportedError: The job is not data-parallel training, or its steps cannot be recognised.
        ScenarioError: Two traces belong to one rank.
    """
    job = _JobBuilder(n_steps)
    for number, path in enumerate(paths, 1):
        job.add(read_rank(path))
        if progress:
            progress(number)
    return job.imported()


class _JobBuilder:
    """Reads one rank after the other, and keeps the steps of each."""

    def __init__(self, n_steps: int | None) -> None:
        self._n_steps = n_steps
        self._rhythm: Rhythm | None = None
        self._paths: dict[int, Path] = {}
        self._calls: list[AllReduceCall] = []  # of the first trace
        self._steps: dict[int, list[Step]] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._used: dict[str, AllReduceCall] = {}  # process groups, and one call over each
        self._world_size = 0
        self._left_out: Counter[str] = Counter()
        self._notes: list[str] = []

    def add(self, trace: RankTrace) -> None:
        rank = len(self._steps) if trace.rank is None else trace.rank
        if rank in self._paths:
            raise ScenarioError(f"{trace.path}: is of rank {rank}, and so is {self._paths[rank]}: leave one out")
        if self._world_size and trace.world_size != self._world_size:
            raise TraceError(
                f"{trace.path}: is of a job of {trace.world_size} ranks, the traces before it of one of "
                f"{self._world_size}: leave it out"
            )
        calls = [event for event in trace.events if isinstance(event, AllReduceCall)]
        if not self._calls:
            self._begin(trace, calls)
        self._compare(trace.path, calls)
        self._paths[rank] = trace.path
        self._steps[rank] = cut(trace, self._rhythm)
        self._groups |= groups_beside(trace.path) | trace.groups
        self._used |= {call.group: call for call in calls}
        self._world_size = trace.world_size or 0
        self._left_out += trace.left_out

    def _begin(self, trace: RankTrace, calls: list[AllReduceCall]) -> None:
        """Derive from the first trace how all-reduces form steps."""
        self._calls = calls
        if calls[0].step is not None and self._n_steps is None:
            return
        self._rhythm = find_rhythm([call.nbytes for call in calls], self._n_steps)
        if self._rhythm is None:
            legal = [str(n) for n in range(1, len(calls) + 1) if len(calls) % n == 0]
            raise UnsupportedError(
                f"{trace.path}: {len(calls)} all-reduces are not {self._n_steps} equal steps: --steps takes "
                f"{', '.join(legal[:10])}"
            )
        if self._n_steps is None:
            found = f"{self._rhythm.n_steps} steps of {self._rhythm.n_calls} all-reduces"
            self._notes.append(f"steps are not marked; all-reduces repeat as {found}: if that is wrong, write --steps")
        if self._rhythm.n_skipped:
            self._notes.append("the first step has other all-reduces than those after it and was left out")
        if not names_phases(trace):
            self._notes.append("names tell no phases: the backward pass of the first bucket counts as forward pass")

    def _compare(self, path: Path, calls: list[AllReduceCall]) -> None:
        """Refuse a rank with other all-reduces than the first trace."""
        rule = "in data-parallel training all ranks reduce the same"
        for number, (call, first) in enumerate(zip(calls, self._calls, strict=False)):
            if call.nbytes != first.nbytes:
                ours = f"of {call.nbytes:,} bytes"
                theirs = f"that of {first.node} is of {first.nbytes:,}"
                raise UnsupportedError(f"{call.node} is all-reduce {number} of its rank, {ours}; {theirs}: {rule}")
        if len(calls) != len(self._calls):
            theirs = f"{self._calls[0].node.partition(': node')[0]} has {len(self._calls)}"
            raise UnsupportedError(f"{path}: has {len(calls)} all-reduces; {theirs}: {rule}")

    def imported(self) -> ChakraJob:
        """Combine the ranks."""
        world_size = max(self._world_size, len(self._groups.get(WORLD, ())), max(self._steps) + 1)
        self._check_groups(world_size)
        if len(self._steps) < world_size:
            self._notes.append(
                f"there are traces of {len(self._steps)} of {world_size} ranks; the others count as these"
            )
        self._notes += [f"left out: {number:,} {what}" for what, number in sorted(self._left_out.items())]
        self._note_slow_ranks()
        n_steps = min(map(len, self._steps.values()))
        return ChakraJob(self._workload(), world_size, len(self._steps), n_steps, tuple(self._notes))

    def _check_groups(self, world_size: int) -> None:
        """Refuse all-reduces over fewer ranks than the world."""
        for name, call in self._used.items():
            ranks = self._groups.get(name)
            if ranks is not None and len(ranks) < world_size:
                raise UnsupportedError(
                    f"{call.node} is over process group {shown(name)}, {len(ranks)} of {world_size} ranks: only "
                    f"training that all-reduces its gradients over all ranks in every step can be imported"
                )
            if ranks is None and name not in ("", WORLD):
                self._notes.append(f"no file says who is in process group {shown(name)}: it is taken for the world")

    def _note_slow_ranks(self) -> None:
        work_s = {rank: float(np.median([step.compute_s for step in steps])) for rank, steps in self._steps.items()}
        usual_s = float(np.median(list(work_s.values())))
        slow = sorted((rank for rank in work_s if work_s[rank] > _SLOW * usual_s), key=lambda rank: -work_s[rank])
        if slow:
            named = ", ".join(f"{rank} by {work_s[rank] / usual_s - 1:.0%}" for rank in slow[:_NAMED])
            more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
            self._notes.append(
                f"ranks that compute longer than the median count as the others: {named}{more}; cluster.slow_devices "
                f"says otherwise"
            )

    def _workload(self) -> Workload:
        steps = [step for each in self._steps.values() for step in each]
        buckets_s = np.median([step.buckets_s for step in steps], axis=0).tolist()
        sizes = steps[0].nbytes
        dtype: DType = (
            "float16" if any(size % 4 for size in sizes) and not any(size % 2 for size in sizes) else "float32"
        )
        if any(size % ITEM_NBYTES[dtype] for size in sizes):
            self._notes.append("sizes of buckets are rounded up to whole float32 elements")
        self._notes.append("batch_size is not told: it is 1")
        tensors = [
            Tensor(name=f"bucket.{number}", count=-(-size // ITEM_NBYTES[dtype]), backward_s=seconds)
            for number, (size, seconds) in enumerate(zip(sizes, buckets_s, strict=True))
        ]
        return Workload(
            name=prefix_of(next(iter(self._paths.values()))),
            source="Chakra execution traces",
            tensors=tuple(reversed(tensors)),  # in forward order
            dtype=dtype,
            batch_size=1,
            forward_s=float(np.median([step.forward_s for step in steps])),
            optimize_s=float(np.median([step.optimize_s for step in steps])),
        )


def fit_cluster(cluster: Cluster, world_size: int, *, name: str) -> Cluster:
    """Return a cluster with the number of nodes that a job needs.

    Args:
        cluster: A cluster of such nodes, of any number.
        world_size: Ranks of the job. If a node has more GPUs, the result is one node with this many.
        name: Name of the cluster, for messages.

    Raises:
        ScenarioError: Ranks do not fill its nodes, or the cluster cannot have that many.
    """
    gpus_per_node = min(cluster.gpus_per_node, world_size)
    if world_size % gpus_per_node:
        raise ScenarioError(
            f"{name}: {world_size} ranks do not fill nodes of {gpus_per_node} GPUs: write a cluster file with another "
            f"gpus_per_node"
        )
    numbers = {"nodes": world_size // gpus_per_node, "gpus_per_node": gpus_per_node}
    try:
        return Cluster.model_validate(dict(cluster) | numbers)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ScenarioError(f"{name}: does not fit {world_size} ranks: {problem}") from None


def scenario_of(job: ChakraJob, cluster: Cluster, *, name: str) -> Scenario:
    """Return the scenario: the job as traced, synchronous, with one bucket per tensor."""
    schedule = {"kind": "sync", "first_bucket_nbytes": 1, "bucket_nbytes": 1}
    workload = _in_ns(job.workload)
    settings = {"name": name, "cluster": cluster, "workload": workload, "steps": job.n_steps, "schedules": [schedule]}
    return Scenario.model_validate(settings)


def _in_ns(workload: Workload) -> Workload:
    """Round times to the nanoseconds of traces; cumulative sums are rounded, so that many buckets keep their sum."""
    ends_s = np.round(np.cumsum([0.0, *(tensor.backward_s or 0.0 for tensor in workload.tensors)]), 9)
    tensors = tuple(
        tensor.model_copy(update={"backward_s": round(float(seconds), 9)})
        for tensor, seconds in zip(workload.tensors, np.diff(ends_s), strict=True)
    )
    forward_s, optimize_s = (round(seconds or 0.0, 9) for seconds in (workload.forward_s, workload.optimize_s))
    return workload.model_copy(update={"tensors": tensors, "forward_s": forward_s, "optimize_s": optimize_s})


def scenario_text(scenario: Scenario, job: ChakraJob) -> str:
    """Return the file: notes as comments, then the scenario."""
    about = ["Imported from Chakra execution traces.", "bucket_size 1 B: every tensor is a bucket, as it was traced."]
    lines = [*about, *(f"Note: {note}." for note in job.notes)]
    return "".join(f"# {line}\n" for line in lines) + dump(scenario)
