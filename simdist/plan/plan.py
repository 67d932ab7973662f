"""The plan: the operations of every rank, in order, on buffers. Both backends interpret this and nothing else.

A *body* is one step's host program, the same on every rank. So all ranks issue their collectives in the same order and
cannot deadlock. `bodies` are the distinct steps. `order` gives the body of each step. A plan has no `if`: the schedule
has already decided rules such as "every 4 steps after warm-up, the widest level wins".

Execution follows CUDA. The host walks the body and enqueues each operation on its stream. An operation starts when the
host has reached it, its stream is free and the buffers it needs are ready: max(host, stream, dependencies).
`simdist.plan.walk` derives the dependencies. They are never stated, so none can be forgotten.

>>> from simdist.plan.group import Group
>>> from simdist.plan.ops import AllReduce, Backward, Forward, Optimize
>>> step = (Forward(("param",), ("loss",)), Backward(("loss", "param"), "grad"),
...         AllReduce("grad", Group(2)), Optimize(("param",), ("grad",)))
>>> buffers = tuple(Buffer(name, 10) for name in ("param", "loss", "grad"))
>>> plan = Plan.from_steps("tiny", world_size=2, buffers=buffers, steps=[step] * 100)
>>> plan.n_steps, len(plan.bodies), plan.order
(100, 1, (Run(bodies=(0,), times=100),))
"""

import dataclasses
import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.errors import PlanError
from simdist.plan.group import Group, group_fields
from simdist.plan.lanes import Lane, all_lanes
from simdist.plan.ops import ALONE, AllReduce, Enter, Load, Op, Save, lane_of

DType: TypeAlias = Literal["float64", "float32", "float16", "bfloat16", "uint8"]
Body: TypeAlias = tuple[Op, ...]
Shuffle: TypeAlias = Literal["global", "node", "none"]
Eviction: TypeAlias = Literal["none", "lru"]

_FORMAT = "simdist-plan-1"
#: Fields that few operations set. Files and digests omit them at these values.
_UNWRITTEN: dict[str, object] = {
    "padding": 0,
    "drop": 0,
    "servers": None,
    "server": None,
    "ratios": None,
    "divisor": 1,
    "read": (),
    "keep": (),
    "adds": False,
    "dst": None,
    "lane": None,
    "workers": 0,
    "to": "storage",
    "by": {"size": 1, "stride": 1},
    "slices": (),
    "rest": None,
    "seed": None,
    "shared_by": {"size": 1, "stride": 1},
    "sharded_over": {"size": 1, "stride": 1},
    "optimizer": "inner",
    "micro_batch": None,
}
ITEM_NBYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
INDEX_NBYTES = 4  # int32 indices of sparse buffers
MAX_SAMPLES = 2**31  # each epoch draws a random number for every sample
MAX_SAMPLE_FILE_NBYTES = 2**40
MAX_DATASET_NBYTES = 2**62  # of all files; sums are int64


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory that every rank has.

    Args:
        name: Unique in the plan, such as `grad.3`.
        count: Elements. Of a sparse buffer, its values; it holds as many indices.
        dtype: Element type.
        tensors: Half-open range of the model's tensors that the buffer holds data of; None for other data.
        place: Memory that holds it.
        sparse: It holds `count` values and `count` int32 indices.
        initialized: It has contents before the first step (parameters, residuals, data in memory).
        padding: Number of elements at the end that belong to no tensor.
        sharded_over: Groups whose members hold one slice each: member j holds the j-th of `size` equal slices of the
            tensors, which are padded to a multiple of it. `count` is that of a slice.
    """

    name: str
    count: int
    dtype: DType = "float32"
    tensors: tuple[int, int] | None = None
    place: Literal["device", "host"] = "device"
    sparse: bool = False
    initialized: bool = False
    padding: int = 0
    sharded_over: Group = ALONE

    @property
    def nbytes(self) -> int:
        """Size in bytes, including the indices of a sparse buffer."""
        return self.count * (ITEM_NBYTES[self.dtype] + (INDEX_NBYTES if self.sparse else 0))


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of steps: the sequence `bodies` (indices), `times` times over."""

    bodies: tuple[int, ...]
    times: int = 1

    @property
    def n_steps(self) -> int:
        """Steps in this stretch."""
        return len(self.bodies) * self.times


@dataclass(frozen=True, slots=True)
class Dataset:
    """The data set that loads read, the order of its samples, and the contents of a node's caches.

    A sample is a file on a storage server that all nodes share, its *raw* form. Decoded, it is a tensor of
    `sample_nbytes`. A `Load` lists the levels of storage that it may read, in order of preference, and the levels where
    its node keeps samples. The plan alone determines where each sample is found (`simdist.caching`).

    Args:
        n_samples: Samples. An epoch reads each at most once and omits an incomplete last batch.
        batch_size: Samples of one rank and step, over all its micro-batches.
        ranks_per_node: Ranks of one node. They are consecutive and share its disk and memory.
        sample_nbytes: Bytes of a decoded sample.
        file_nbytes: Bytes of the file of every sample, or one number for all.
        shuffle: `global`: each epoch deals all samples to all ranks; `node`: each node has its own part of the
            samples, which each epoch deals to its ranks; `none`: in order, the same in every epoch.
        seed: Seed of the shuffling.
        disk_nbytes: Capacity of a node's disk; None: unlimited.
        memory_nbytes: Capacity of a node's memory; None: unlimited.
        eviction: Policy of a level that is full. `lru` evicts the least recently used sample.
        warm: The disks start with the files that an earlier run of this plan left.
        readers: Files that a rank reads at the same time.
        decoders: Samples that a rank decodes at the same time.
        workers: Processes of a rank that load batches in turn, as those of torch's DataLoader. Each reads and decodes
            the samples of a batch one after the other. 0: readers and decoders share each batch.
    """

    n_samples: int
    batch_size: int
    ranks_per_node: int
    sample_nbytes: int
    file_nbytes: tuple[int, ...]
    shuffle: Shuffle = "global"
    seed: int = 0
    disk_nbytes: int | None = None
    memory_nbytes: int | None = None
    eviction: Eviction = "none"
    warm: bool = False
    readers: int = 8
    decoders: int = 1
    workers: int = 0

    def steps_per_epoch(self, world_size: int) -> int:
        """Return the number of batches of all ranks in an epoch.

        >>> Dataset(100, 4, 2, 10, (5,)).steps_per_epoch(world_size=8)
        3
        """
        return self.n_samples // (self.batch_size * world_size)

    def files_nbytes(self) -> NDArray[np.int64]:
        """Return the bytes of the file of every sample, `[n_samples]`."""
        return np.broadcast_to(np.array(self.file_nbytes, dtype=np.int64), self.n_samples)


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything that `world_size` ranks do in `n_steps` steps.

    `name` labels the plan for people. It is not part of the digest.
    """

    name: str
    world_size: int
    buffers: tuple[Buffer, ...]
    bodies: tuple[Body, ...]
    order: tuple[Run, ...]
    dataset: Dataset | None = None

    @classmethod
    def from_steps(
        cls,
        name: str,
        *,
        world_size: int,
        buffers: Sequence[Buffer],
        steps: Iterable[Body],
        dataset: Dataset | None = None,
    ) -> "Plan":
        """Build a plan from the program of every step, in order. Equal steps become one body."""
        bodies: list[Body] = []
        numbers: dict[Body, int] = {}  # empty while there is one body, whose hash is work
        of_objects: dict[int, int] = {}  # the bodies by identity: schedules often repeat the same object
        sequence = []
        for body in steps:
            number = of_objects.get(id(body))
            if number is None:
                if bodies:
                    numbers.setdefault(bodies[0], 0)
                    number = numbers.setdefault(body, len(bodies))
                else:
                    number = 0
                if number == len(bodies):
                    of_objects[id(body)] = number
                    bodies.append(body)
            sequence.append(number)
        order = _fold(np.asarray(sequence, dtype=np.int64))
        return cls(name, world_size, tuple(buffers), tuple(bodies), order, dataset)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of a rank: those of every plan, then others in the order of their first operation."""
        return all_lanes(lane_of(op) for body in self.bodies for op in body)

    @cached_property
    def distinct_ops(self) -> tuple[Op, ...]:
        """The operations of all bodies, each once."""
        return tuple(dict.fromkeys(op for body in self.bodies for op in body))

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams of a rank by their names in tables and pictures, each once."""
        return tuple(dict.fromkeys(lane.stream for lane in self.lanes))

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return sum(run.n_steps for run in self.order)

    @property
    def n_instances(self) -> int:
        """Number of operation instances: rows of a trace."""
        return sum(run.times * sum(len(self.bodies[body]) for body in run.bodies) for run in self.order)

    def repeated(self, cycle: range, n_steps: int) -> "Plan":
        """Return a plan of `n_steps` steps that repeats the cycle from its first step on, without listing the steps.

        Args:
            cycle: Steps of this plan: the first period.
            n_steps: Any number.

        Raises:
            PlanError: This plan is not longer than the cycle, or does not repeat it.

        >>> from simdist.plan import Forward
        >>> body = (Forward(("param",), ("loss",)),)
        >>> plan = Plan.from_steps("tiny", world_size=1, buffers=(), steps=[body, (), body, ()])
        >>> plan.repeated(range(0, 2), 1_000_001).order
        (Run(bodies=(0, 1), times=500000), Run(bodies=(0,), times=1))
        """
        numbers = list(self.body_of_steps())
        if len(numbers) <= cycle.stop or numbers[cycle.stop :] != numbers[cycle.start : -len(cycle)]:
            raise PlanError(f"plan {self.name}: its steps do not repeat every {len(cycle)}, from step {cycle.start} on")
        if n_steps <= len(numbers):
            steps = [self.bodies[number] for number in numbers[:n_steps]]
            return Plan.from_steps(
                self.name, world_size=self.world_size, buffers=self.buffers, steps=steps, dataset=self.dataset
            )
        period = tuple(numbers[cycle.start : cycle.stop])
        times, left = divmod(n_steps - cycle.start, len(period))
        begin, end = (_fold(np.array(part, dtype=np.int64)) for part in (numbers[: cycle.start], period[:left]))
        return dataclasses.replace(self, order=(*begin, Run(period, times), *end))

    def body_of_steps(self) -> Iterator[int]:
        """Yield the body's number for every step."""
        for run in self.order:
            for _ in range(run.times):
                yield from run.bodies

    def first_instances(self) -> NDArray[np.int64]:
        """Return the index of each step's first instance, shape `[n_steps + 1]`; the last entry is `n_instances`."""
        lengths = np.array([len(body) for body in self.bodies], dtype=np.int64)
        bodies = np.fromiter(self.body_of_steps(), dtype=np.int64, count=self.n_steps)
        return np.concatenate(([0], np.cumsum(lengths[bodies])))

    def loads(self) -> Iterator[Load]:
        """Yield the loads of all steps in program order: number k of them loads batch k."""
        of_body = [[op for op in body if isinstance(op, Load)] for body in self.bodies]
        for body in self.body_of_steps():
            yield from of_body[body]

    @property
    def gradients_used(self) -> float:
        """Share of batches with gradients that updates use. Batches of absent or late ranks are unused."""
        n_unused = [
            sum(
                len(op.absent) if isinstance(op, Enter) else op.drop for op in body if isinstance(op, Enter | AllReduce)
            )
            for body in self.bodies
        ]
        return 1 - sum(n_unused[body] for body in self.body_of_steps()) / max(1, self.n_steps * self.world_size)

    @property
    def has_saves(self) -> bool:
        """Whether checkpoints are written."""
        return any(isinstance(op, Save) for body in self.bodies for op in body)

    def buffer(self, name: str) -> Buffer:
        """Return the buffer of that name. Raise KeyError if there is none (`simdist.plan.check` reports it better)."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of buffers, bodies, order and data set, without the name."""
        document = self.document()
        del document["name"]
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """Return the content of `plan.json`, in dicts and lists. Each operation is tagged with its class in `op`."""
        return {
            "format": _FORMAT,
            "name": self.name,
            "world_size": self.world_size,
            "buffers": [_fields_of(buffer) for buffer in self.buffers],
            "bodies": [[{"op": type(op).__name__, **_fields_of(op)} for op in body] for body in self.bodies],
            "order": [dataclasses.asdict(run) for run in self.order],
            **({"dataset": _fields_of(self.dataset)} if self.dataset else {}),
        }

    def __repr__(self) -> str:
        return f"<plan {self.name}: {self.n_steps:,} steps on {self.world_size:,} ranks>"


class StepIndex:
    """Finds the steps of a plan. Memory grows with its runs, not with its steps.

    Args:
        plan: The plan.
        counts: Number of items in each body, such as instances.

    >>> from simdist.plan import Forward
    >>> body = (Forward(("param",), ("loss",)),)
    >>> plan = Plan.from_steps("tiny", world_size=1, buffers=(), steps=[body, body * 2] * 1_000)
    >>> index = StepIndex(plan, [len(body) for body in plan.bodies])
    >>> index.body(1_999), index.before(1_999), index.step(2_998), index.step(2_997)
    (1, 2998, 1999, 1998)
    """

    def __init__(self, plan: Plan, counts: Sequence[int]) -> None:
        self._runs = plan.order
        self._within = [list(accumulate((counts[body] for body in run.bodies), initial=0)) for run in plan.order]
        self._first_steps = list(accumulate((run.n_steps for run in plan.order[:-1]), initial=0))
        totals = (run.times * within[-1] for run, within in zip(plan.order[:-1], self._within, strict=False))
        self._first_items = list(accumulate(totals, initial=0))

    def body(self, step: int) -> int:
        """Return the number of a step's body."""
        run = bisect_right(self._first_steps, step) - 1
        bodies = self._runs[run].bodies
        return bodies[(step - self._first_steps[run]) % len(bodies)]

    def before(self, step: int) -> int:
        """Return the number of items before a step, or of all items for the step after the last."""
        run = bisect_right(self._first_steps, step) - 1
        times, at = divmod(step - self._first_steps[run], len(self._runs[run].bodies))
        return self._first_items[run] + times * self._within[run][-1] + self._within[run][at]

    def step(self, item: int) -> int:
        """Return the step of an item."""
        run = bisect_right(self._first_items, item) - 1
        times, at = divmod(item - self._first_items[run], self._within[run][-1])
        n_bodies = len(self._runs[run].bodies)
        return self._first_steps[run] + times * n_bodies + bisect_right(self._within[run], at) - 1


def _fields_of(item: Buffer | Op | Dataset) -> dict[str, Any]:
    """Return the fields to write to a file, without those at their usual values, such as most operations' lane."""
    found = dataclasses.asdict(item, dict_factory=group_fields)
    usual = {name: value for name, value in _UNWRITTEN.items() if name in found}
    for field in dataclasses.fields(item):
        if isinstance(field.default, Lane):
            usual[field.name] = dataclasses.asdict(field.default)
    return {name: value for name, value in found.items() if name not in usual or value != usual[name]}


def _fold(sequence: NDArray[np.int64]) -> tuple[Run, ...]:
    """Write a sequence as few runs: at each place use the shortest pattern that repeats furthest."""
    runs: list[Run] = []
    literal: list[int] = []
    at = 0
    while at < len(sequence):
        period, times = _best_repeat(sequence[at:])
        if times == 1:
            literal.append(int(sequence[at]))
            at += 1
            continue
        if literal:
            runs.append(Run(tuple(literal)))
            literal = []
        runs.append(Run(tuple(int(body) for body in sequence[at : at + period]), times))
        at += period * times
    if literal:
        runs.append(Run(tuple(literal)))
    return tuple(runs)


def _best_repeat(rest: NDArray[np.int64], max_period: int = 4096) -> tuple[int, int]:
    best = (1, 1)
    period = 1
    while period <= min(max_period, len(rest) // 2):
        if rest[0] != rest[period] or (rest[:period] != rest[period : 2 * period]).any():
            period += 1
            continue  # it does not repeat even once
        equal = _n_equal(rest[period:], rest[:-period])
        times = 1 + equal // period
        if period * times > math.prod(best):
            best = (period, times)
        if period * times >= len(rest) - period:
            break
        period = max(period, equal) + 1  # if two periods both hold for the length of their sum, neither goes further
    return best


def _n_equal(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return for how long two sequences are equal, without comparing what comes long after the first difference."""
    end = 1024
    while (one[:end] == other[:end]).all():
        if end >= len(one):
            return len(one)
        end *= 2
    return int(np.argmin(one[:end] == other[:end]))
