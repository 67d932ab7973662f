"""Disturbances: settings of the random and recorded delays that hold ranks up. `simdist.scenario.sampling` draws them.

Every delay is seconds per step and rank, added on one channel: `host` (the CPU sleeps before it enqueues the backward
pass), `compute` (the GPU is slow), `io` (loading is slow), `backward` (the GPU is slow in the backward pass) or
`overlap` (likewise, where gradients are exchanged meanwhile).

A disturbance of a user's own extends `CustomDisturbance`. A scenario names it as `kind: "module:Class"`, or by the name
of an entry point of group `simdist.disturbances`.
"""

import abc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Protocol, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

from simdist.plan.ops import Channel
from simdist.scenario.cluster import Selection
from simdist.scenario.effects import Uses
from simdist.scenario.recordings import RecordingFile, TableForm, read_table
from simdist.settings.base import Fault, folder_of, refuse, shown
from simdist.settings.plugins import DISTURBANCES, OpenKinds, is_reference, load_reference, written_kind
from simdist.settings.units import Factor, Fraction, PerSecond, Seconds, SecondsRange, Whole, WholeRange

_FORM = TableForm(
    array="host",
    csv="write lines of numbers in seconds, one per step, one column per rank, separated by commas; "
    "begin a header with #",
    npz="write seconds, [n_steps, world_size], with numpy.savez(file, seconds)",
    values="delays are seconds, finite and 0 or more",
    place="step {}, rank {}",
)
_LENGTHS = TableForm(
    array="lengths",
    csv="write lines of numbers, the lengths of sequences; begin a header with #",
    npz="write lengths of sequences, two-dimensional, with numpy.savez(file, lengths=lengths)",
    values="lengths are finite and above 0",
    place="row {}, column {}",
)
#: How lengths are dealt to the micro-batches of a step.
Balance: TypeAlias = Literal["sorted", "round_robin", "greedy"]
_MOST_BETWEEN = 10**6  # steps from one pause to the next


class _Disturbance(Selection):
    on: Channel = "host"

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return True

    def ranks_remark(self, world_size: int) -> str | None:
        """Say that it was recorded with another number of ranks, if so: the seed then draws which ranks are played."""
        return None

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return False

    @property
    def first_step(self) -> int:
        """The first step in which it may delay."""
        return 0

    @property
    def falls_anywhere(self) -> bool:
        """Whether what comes once in a step falls into any of its micro-batches, and not into the first one."""
        return self.is_random

    def unused(self, uses: Uses, place: str) -> Iterator[str]:
        """Yield a sentence for each setting without effect.

        Args:
            uses: What the scenario uses.
            place: The path of the disturbance in it.
        """
        if self.on == "io" and uses.source != "storage":
            yield f"{place} has no effect: it is on io, and with input.source {uses.source} nothing is loaded"
        if self.never_delays:
            yield f"{place} has no effect: it never delays"
        elif self.first_step >= uses.n_steps:
            begin = f"it begins in step {self.first_step} of {uses.n_steps}, counted from 0"
            yield f"{place} has no effect: {begin}"

    def kind_in_files(self) -> str:
        """Return the `kind` by which a scenario finds the class again: `module:Class` for one of a user."""
        return written_kind(type(self), DISTURBANCES)


class Draws(Protocol):
    """Steps of a run, and the random numbers that belong to them.

    Attributes:
        start: First step that is asked for.
        stop: Step after the last one.
        ranks: int64 `[n_ranks]`, those that the disturbance selects.
        ranks_per_node: Consecutive ranks that share a node.
        compute_s: Forward and backward seconds of a step of each of these ranks, `[n_ranks]`.
        micro_batches: Those of a step that are delayed on their own.
    """

    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def stop(self) -> int: ...  # noqa: D102
    @property
    def ranks(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def ranks_per_node(self) -> int: ...  # noqa: D102
    @property
    def compute_s(self) -> NDArray[np.float64]: ...  # noqa: D102
    @property
    def micro_batches(self) -> int: ...  # noqa: D102

    def uniforms(self, lane: int = 0, *, start: int | None = None) -> NDArray[np.float64]:
        """Return a number above 0 and below 1 for each step, rank and seed, `[n_steps, n_ranks, n_seeds]`.

        A number belongs to its place: it is the same whatever else is asked for.

        Args:
            lane: Tells several numbers of one place apart; 0 or more.
            start: First step, if it is not that of the draws: earlier steps have numbers, too.
        """
        ...


class CustomDisturbance(_Disturbance, abc.ABC):
    """A disturbance of a user's own: it says how long the delays of some steps are.

    A subclass sets `kind`, a `Literal` field with a name for people, and adds its settings as fields.
    """

    kind: str

    @abc.abstractmethod
    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        """Return the delays of steps `draws.start` to `draws.stop`.

        They follow from the places of the numbers, so that a longer run, or one drawn in other chunks, has the same.

        Returns:
            Seconds, finite and 0 or more, that broadcast to `[n_steps, n_ranks, n_seeds]`: each falls into one
            micro-batch of its step. Or with four axes, `[n_steps, micro_batches, n_ranks, n_seeds]`.
        """


class Transient(_Disturbance):
    """In each step, each rank is late by `delay_s` with a probability, independently."""

    kind: Literal["transient"] = "transient"
    probability: Fraction
    delay_s: Seconds

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.probability == 0 or self.delay_s == 0


class Persistent(_Disturbance):
    """Ranks are late in every step: by `delay_s`, or by (factor - 1) times their forward and backward seconds.

    Args:
        factor: Of forward and backward seconds.
        delay_s: Seconds, instead of a factor.
        sets_in: First step that is late. A range [a, b] grows linearly, from nothing in step a to all of it in step b.
    """

    kind: Literal["persistent"] = "persistent"
    factor: Annotated[Factor, Field(ge=1)] | None = None
    delay_s: Seconds | None = None
    sets_in: WholeRange | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.factor is None) == (self.delay_s is None):
            refuse("Persistent", [(("factor",), "write either factor, e.g. 1.5, or delay, e.g. 20 ms")])
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference: they do not."""
        return False

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return not self.delay_s and self.factor in (None, 1)

    @property
    def first_step(self) -> int:
        """The first step in which it may delay."""
        return self.sets_in[0] if self.sets_in else 0


class Jitter(_Disturbance):
    """Lognormal: median * exp(sigma * z) with standard normal z."""

    kind: Literal["jitter"] = "jitter"
    median_s: Seconds
    sigma: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False, examples=[0.5])]

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.median_s == 0


class Exponential(_Disturbance):
    """Exponential with the given mean: -mean * log(u)."""

    kind: Literal["exponential"] = "exponential"
    mean_s: Seconds

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.mean_s == 0


class HeavyTail(_Disturbance):
    """Pareto (type I), with a probability: scale * u^(-1/shape), so `scale_s` or more; mean infinite if shape <= 1."""

    kind: Literal["heavy_tail"] = "heavy_tail"
    scale_s: Seconds
    shape: Annotated[float, Field(ge=0.1, le=1e6, allow_inf_nan=False, examples=[1.5])]
    probability: Fraction = 1.0

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.probability == 0 or self.scale_s == 0


class Bursts(_Disturbance):
    """Each rank is on or off, a Markov chain that starts stationary; while on, it is late by `delay_s` in every step.

    `enter` and `leave` are the probabilities per step to turn on and off: on for 1 / leave steps in the mean, and in a
    share enter / (enter + leave) of all steps.
    """

    kind: Literal["bursts"] = "bursts"
    enter: Fraction
    leave: Fraction
    delay_s: Seconds

    @model_validator(mode="after")
    def _moves(self) -> Self:
        if self.enter == self.leave == 0:
            refuse("Bursts", [(("enter",), "with enter and leave both 0 no state is stationary: write e.g. enter: 1%")])
        return self

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.enter == 0 or self.delay_s == 0


def _between(every: tuple[int, int]) -> tuple[int, int]:
    low, high = every
    wrong = low if low < 1 else high
    if low < 1 or high > _MOST_BETWEEN:
        raise ValueError(f"{wrong}: write steps from 1 to {_MOST_BETWEEN}, e.g. 250")
    return every


class Pauses(_Disturbance):
    """Each rank pauses in one step of many: garbage collection, evaluation on rank 0, loaders that restart each epoch.

    A range of values means that each whole number, or each time, in it is as likely as any other. Each pause of each
    rank draws its own.

    Args:
        every: Steps from one pause of a rank to its next.
        first: Step of the first pause. None begins at a random moment between two pauses.
        delay_s: Length of a pause.
        covered_s: Work that the device still has when the pause begins. That much of the pause delays nothing. It is
            for hosts that pause while their device computes. If the plan's host runs ahead, the engines find out
            what is hidden, and this is 0.
    """

    kind: Literal["pauses"] = "pauses"
    every: Annotated[WholeRange, AfterValidator(_between)]
    first: WholeRange | None = None
    delay_s: SecondsRange
    covered_s: SecondsRange = (0.0, 0.0)

    @model_validator(mode="after")
    def _of_hosts(self) -> Self:
        if self.covered_s[1] > 0 and self.on != "host":
            message = f"pauses of {self.on} are not covered by work of the device: leave covered out, or write on: host"
            refuse("Pauses", [(("covered",), message)])
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        ranges = (self.every, self.delay_s, self.covered_s)
        return self.first is None or self.first[0] < self.first[1] or any(low < high for low, high in ranges)

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.delay_s[1] <= self.covered_s[0]

    @property
    def first_step(self) -> int:
        """The first step in which it may delay."""
        return self.first[0] if self.first else 0

    @property
    def falls_anywhere(self) -> bool:
        """Whether pauses fall into any micro-batch. Those at fixed steps are of ranks that pause between two steps."""
        if self.first is None:
            return self.is_random
        return self.every[0] < self.every[1] or self.first[0] < self.first[1]

    def unused(self, uses: Uses, place: str) -> Iterator[str]:
        """Yield a sentence for each setting without effect, or if work that hides pauses counts twice."""
        found = list(super().unused(uses, place))
        yield from found
        if not found and self.covered_s[1] > 0 and uses.hides_pauses:
            yield (
                f"{place}.covered hides a part of pauses, and so does a host that is ahead of its device: leave "
                f"covered out, or write host.waits_for: loss and host.run_ahead_steps: 0"
            )


class UnevenWork(_Disturbance):
    """Micro-batches differ in work, because their sequences differ in length.

    The workload's forward and backward seconds are those of a micro-batch of the shortest length. A micro-batch whose
    length is r times the shortest takes (1 - q) r + q r^2 times as long, with q = `quadratic`. It is delayed by what it
    takes longer.

    Args:
        lengths: Shortest and longest length; each length in between is as likely as any other.
        file: Lengths of sequences, instead of a range.
        order: `drawn`: each micro-batch of each rank draws one length of the file. `recorded`: row by row, a
            micro-batch each, of all ranks; a step takes as many rows as it has micro-batches.
        quadratic: Share of the shortest micro-batch's time that grows with the square of the length, as attention.
        balance: How the lengths of a step are dealt to its micro-batches, see `simdist.scenario.pauses_and_work.dealt`.
            None leaves them where they were drawn.
    """

    kind: Literal["uneven_work"] = "uneven_work"
    on: Channel = "compute"
    lengths: WholeRange | None = None
    file: RecordingFile | None = None
    order: Literal["drawn", "recorded"] = "drawn"
    quadratic: Fraction = 0.0
    balance: Balance | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.lengths is None) == (self.file is None):
            hint = "write either lengths, e.g. [512, 4096], or file, e.g. lengths.csv"
            refuse("UnevenWork", [(("lengths",), hint)])
        if self.lengths is not None and self.lengths[0] < 1:
            refuse("UnevenWork", [(("lengths",), f"{self.lengths[0]}: write lengths of 1 or more, e.g. [512, 4096]")])
        if self.file is None and self.order == "recorded":
            refuse(
                "UnevenWork", [(("order",), "recorded: lengths of a range are drawn: write file, or leave order out")]
            )
        if self.file is not None:
            read_lengths(self.file)
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.order == "drawn" and (self.lengths is None or self.lengths[0] < self.lengths[1])

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.lengths is not None and self.lengths[0] == self.lengths[1]

    def shape_faults(self, n_rows: int) -> list[Fault]:
        """Return a fault if recorded lengths do not cover the micro-batches of a run."""
        if self.file is None or self.order == "drawn":
            return []
        n_recorded = len(read_lengths(self.file))
        if n_recorded >= n_rows:
            return []
        needed = f"the run has {n_rows}: record as many, or write order: drawn"
        return [(("file",), f"{self.file.name} holds {n_recorded} micro-batches, {needed}")]

    def ranks_remark(self, world_size: int) -> str | None:
        """Say that lengths were recorded with another number of ranks, if so."""
        if self.file is None or self.order == "drawn":
            return None
        return _ranks_remark(self.file, read_lengths(self.file), world_size)


def _listed(value: object) -> object:
    """Read an array of numpy as a list."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _function(value: object, info: ValidationInfo) -> Callable[..., object]:
    """Return a function from Python, or one that a file names."""
    form = "module:function, such as delays:quantile"
    found = value
    if isinstance(value, str) and is_reference(value):
        found = load_reference(value, folder_of(info), form=form, is_wanted=callable)
    if not callable(found):
        raise ValueError(f"{shown(value)}: write a function, or its name in a file, such as delays:quantile")
    return found


#: A function from numbers above 0 and below 1 to seconds, elementwise; in files `module:function`.
_Quantile: TypeAlias = Annotated[
    Callable[..., object],
    PlainValidator(_function),
    PlainSerializer(lambda function: f"{function.__module__}:{function.__qualname__}"),
]


class Drawn(_Disturbance):
    """Delays from a distribution of your own: in each step, each rank draws one, independently.

    Args:
        values: Seconds; each is as likely as any other. In Python also an array.
        quantile: Instead of values, the quantile function: it takes numbers above 0 and below 1, an array, and returns
            as many seconds. In Python a function, such as `scipy.stats.gamma(2, scale=0.01).ppf`; in files
            `module:function`. A run directory or a sweep needs the name of a function in a module.

    >>> Drawn(values=np.array([0.0, 0.0, 0.1])).values
    (0.0, 0.0, 0.1)
    """

    kind: Literal["drawn"] = "drawn"
    values: Annotated[tuple[Seconds, ...], BeforeValidator(_listed), Field(min_length=1)] | None = None
    quantile: _Quantile | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.values is None) == (self.quantile is None):
            refuse("Drawn", [(("values",), "write either values, e.g. [0 s, 0 s, 50 ms], or quantile, a function")])
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.values is None or len(set(self.values)) > 1

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.values is not None and not any(self.values)


def mean_of_longest(n: int) -> float:
    """Return the mean of the longest of some exponential delays of mean 1."""
    return math.fsum(1 / i for i in range(1, n + 1))


class Interference(_Disturbance):
    """What the GPUs of a machine lose beside communication: to its kernels, to shared memory, host and power, to noise.

    One GPU alone shows none of it. A step of one machine of the cluster loses `lost` times the forward and backward
    seconds of a GPU. Two extremes bound what more machines lose: all of it is the same for any number of ranks, or all
    of it is the longest of independent exponential delays, of mean `lost` times seconds / H_g for g ranks in a node, so
    that n ranks lose H_n / H_g times as much in the mean, where H_n = 1 + 1/2 + ... + 1/n.

    Args:
        lost: Share, if it is known.
        typical: The share is the median of published machines with GPUs of this generation, in the workload's
            precision.
        machine_samples_per_s: Measured samples per second of one machine, all its GPUs training synchronously; what the
            simulated machine does without this disturbance tells `lost`, see `simdist.runs.building.lost_share`.
        rate_ranks: GPUs that reached this rate together, if they are not those of one machine: some of them, or those
            of several machines, such as all that share a model.
        noise: Share of the loss that is the longest of exponential delays; the rest is constant.
    """

    kind: Literal["interference"] = "interference"
    on: Channel = "compute"
    lost: Fraction | None = None
    machine_samples_per_s: Annotated[PerSecond, Field(gt=0, allow_inf_nan=False)] | None = None
    rate_ranks: Annotated[Whole | None, Field(ge=1, le=1_000_000, exclude_if=lambda n_ranks: n_ranks is None)] = None
    typical: Annotated[bool, Field(exclude_if=lambda typical: not typical)] = False
    noise: Fraction = 0.5

    @model_validator(mode="after")
    def _one(self) -> Self:
        n_given = (self.lost is not None) + (self.machine_samples_per_s is not None) + self.typical
        if n_given != 1:
            hint = "write either lost, e.g. 5%, or machine_samples_per_s, or typical: true"
            refuse("Interference", [(("lost",), hint)])
        if self.rate_ranks is not None and not self.machine_samples_per_s:
            refuse("Interference", [(("rate_ranks",), "GPUs of which rate? Write machine_samples_per_s beside it")])
        return self

    def growth(self, n_ranks: int, ranks_per_node: int) -> float:
        """Return the mean loss of so many ranks over that of one machine."""
        return 1 - self.noise + self.noise * mean_of_longest(n_ranks) / mean_of_longest(ranks_per_node)

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.noise > 0

    @property
    def never_delays(self) -> bool:
        """Whether it delays nothing, as its settings are."""
        return self.lost == 0


class Recorded(_Disturbance):
    """Seconds of every step and rank from a file, array `[n_steps, world_size]`.

    `.csv`: a line per step, a column per rank, `#` for comments. `.npz`: one array, or several of which the one named
    like the channel counts. An array `[n_steps, n_micro_batches, world_size]` holds those of every micro-batch. One of
    steps delays their first micro-batch on compute, and their last one otherwise.

    Without `resample_steps` the recording is played as it is, the same for every seed. With it, every seed puts its run
    together from blocks of so many consecutive recorded steps, begun anywhere in the recording and drawn with
    replacement; after the last recorded step the first one follows. All ranks of a step stay together, and all
    recordings of a scenario draw the same blocks. So seeds tell how much a result depends on which steps were recorded,
    and a run may be longer than the recording.

    A recording of another number of ranks is played as `simdist.scenario.other_ranks` says.

    Source:
        Politis & Romano, A Circular Block-Resampling Procedure for Stationary Data, 1992.
    """

    kind: Literal["recorded"] = "recorded"
    file: RecordingFile
    resample_steps: Annotated[Whole, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _readable(self) -> Self:
        read_recorded(self)
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.resample_steps is not None

    def shape_faults(self, n_steps: int, micro_batches: int | None) -> list[Fault]:
        """Return a fault if the recording does not cover the run, or has other micro-batches than the workload."""
        table = read_recorded(self)
        n_recorded = len(table)
        if table.ndim == 3 and self.on != "io" and micro_batches not in (None, table.shape[1]):
            n_needed = f"the workload has {micro_batches}: record as many, or their sum, a row for each step"
            return [(("file",), f"{self.file.name} holds {table.shape[1]} micro-batches of each step, {n_needed}")]
        holds = f"{self.file.name} holds {n_recorded} steps"
        if self.resample_steps is None and n_recorded < n_steps:
            hint = f"record as many, or write resample_steps, e.g. {max(1, n_recorded // 5)}"
            return [(("file",), f"{holds}, the run has {n_steps}: {hint}")]
        if self.resample_steps is not None and self.resample_steps > n_recorded:
            fault = f"blocks of {self.resample_steps} steps; {holds.removesuffix(' steps')}: write {n_recorded} or less"
            return [(("resample_steps",), fault)]
        return []

    def ranks_remark(self, world_size: int) -> str | None:
        """Say that it was recorded with another number of ranks, if so."""
        return _ranks_remark(self.file, read_recorded(self), world_size)

    def rows_remark(self, n_steps: int, micro_batches: int) -> str | None:
        """Say that each row counts as a step, if there is one for each micro-batch of the run."""
        table = read_recorded(self)
        is_suspect = micro_batches > 1 and self.on != "io" and table.ndim == 2
        if not is_suspect or len(table) != micro_batches * n_steps:
            return None
        return (
            f"{self.file.name} holds {len(table)} rows, {micro_batches} for each of {n_steps} steps, and each row is "
            f"played as a step: if a row is a micro-batch, write an npz [n_steps, micro_batches, ranks]"
        )


Continuous: TypeAlias = Jitter | Exponential | HeavyTail
_Shipped: TypeAlias = (
    Transient | Persistent | Continuous | Bursts | Pauses | UnevenWork | Drawn | Interference | Recorded
)
Disturbance: TypeAlias = _Shipped | CustomDisturbance
_SHIPPED: dict[str, type[Disturbance]] = {each.model_fields["kind"].default: each for each in get_args(_Shipped)}
#: The classes that `kind` may name in a scenario, but for those of links.
KINDS: OpenKinds[Disturbance] = OpenKinds(
    "disturbance",
    DISTURBANCES,
    lambda: (CustomDisturbance, *_SHIPPED.values()),
    lambda: _SHIPPED,
    _SHIPPED.get,
)


def read_recorded(recorded: Recorded) -> NDArray[np.float64]:
    """Read the seconds of a recording, `[n_steps, world_size]` or `[n_steps, n_micro_batches, world_size]`.

    Raises:
        ValidationError: The file cannot be read, or holds something else than delays.
    """
    return read_table(recorded.file, replace(_FORM, array=recorded.on), dimensions=(2, 3))


def _ranks_remark(file: Path, table: NDArray[np.float64], world_size: int) -> str | None:
    """Say that a recording has another number of ranks, if so."""
    if table.shape[-1] == world_size:
        return None
    from simdist.scenario.other_ranks import remark

    return remark(file.name, table.shape[-1], world_size)


def read_lengths(file: Path) -> NDArray[np.float64]:
    """Read lengths of sequences, two-dimensional, each above 0.

    Raises:
        ValidationError: The file cannot be read, or holds something else.
    """
    return read_table(file, _LENGTHS, problems=_zero_lengths)


def _zero_lengths(table: NDArray[np.float64]) -> Iterator[str]:
    for row, column in np.argwhere(table == 0)[:1]:
        yield f"0 at {_LENGTHS.place.format(row, column)}: {_LENGTHS.values}"
