"""Failures: settings of what ends or disturbs a job, and of what it takes to go on. No rate has a default.

`simdist.scenario.failure_sampling` draws failures, and `simdist.runs.attempts` lets a job suffer them.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from simdist.scenario.cluster import Cluster
from simdist.scenario.effects import Uses
from simdist.scenario.uncertain import Range, check_ranges
from simdist.settings.base import Fault, Settings, nearest, refuse, shown, unchecked_copy
from simdist.settings.units import Factor, Fraction, RatePerSecond, Seconds, Whole

Component: TypeAlias = Literal["gpu", "node", "domain", "job"]
Effect: TypeAlias = Literal["process", "node", "hang", "slow", "flap", "corruption", "planned"]
#: What a job does about a failure: start all ranks again; likewise, with spare nodes; or go on with a replica less.
OnFailure: TypeAlias = Literal["restart", "spare", "continue"]
_Positive = Annotated[Seconds, Field(gt=0)]
_Count = Annotated[Whole, Field(ge=1)]
_Moments = Annotated[tuple[Seconds, ...], Field(min_length=1)]
_Gaps = tuple[_Positive, _Positive]
_Steps = Annotated[tuple[Annotated[Whole, Field(ge=0)], ...], Field(min_length=1)]
_Ranks = Annotated[tuple[Annotated[Whole, Field(ge=0)], ...], Field(min_length=1)]
_WHEN = ("rate_per_s", "every_s", "at_s", "at_steps")
_OF_EFFECTS: dict[str, tuple[Effect, ...]] = {  # keys that only some effects have
    "factor": ("slow",),
    "found_after_s": ("slow", "corruption"),
    "found_by": ("hang", "process", "node"),
    "share": ("flap",),
    "lasts_s": ("flap", "planned"),
    "notice_s": ("planned",),
    "again": ("process", "hang"),
}
_REQUIRED: dict[Effect, dict[str, str]] = {  # what each effect needs, with an example
    "process": {},
    "node": {},
    "hang": {},
    "slow": {"factor": "factor: 1.5", "found_after_s": "found_after: 2 h"},
    "flap": {"share": "share: 0", "lasts_s": "lasts: 20 s"},
    "corruption": {"found_after_s": "found_after: 6 h"},
    "planned": {},
}


def _not_certain(probability: float) -> float:
    if probability == 1:
        raise ValueError("100 %: the node would fail for ever: write less, or recovery.exclude_after: 1 and 99 %")
    return probability


def _named(cause: str) -> str:
    if not cause.strip():
        raise ValueError(f"{shown(cause)}: write a name, e.g. gpu")
    return cause


class Worst(Settings):
    """Nodes that fail more often than the others.

    Args:
        nodes: How many; the seed draws which.
        share: Of the cause's failures that they have, all together.
    """

    nodes: _Count
    share: Fraction


class SameFailureAgain(Settings):
    """A failure that comes back on the same node after a restart, unless the node is replaced.

    Args:
        probability: That it does, after each restart; below 1.
        after_s: From the restart on.
    """

    probability: Annotated[Fraction, AfterValidator(_not_certain)]
    after_s: _Positive


class FailureCause(Settings):
    """Failures of one cause: how often, of what, and what they do.

    Args:
        cause: Its name, unique in the scenario.
        of: The component that fails: each GPU, each node, each domain of `domain_nodes` nodes, or the whole job.
            Required with `rate_per_s` and `every_s`.
        rate_per_s: Failures of each component per time, independent of each other. Or one of the next three.
        every_s: Shortest and longest time from one failure of any component to the next, those between equally likely:
            failures that a test injects.
        at_s: Recorded moments, from the begin of the job.
        at_steps: Recorded steps, counted from 0. Each failure comes once, at the begin of its step.
        ranks: A rank for each of `at_s` or `at_steps`; rank 0 if absent.
        effect: `process`: it is gone, and its node stays; `node`: the node is lost; `hang`: the job stands still until
            a time-out; `slow`: steps take `factor` times as long until it is found and the node replaced; `flap`: a
            node's link has `share` of its rate for `lasts_s`; `corruption`: files are wrong from then on until it is
            found; `planned`: an interruption that is known `notice_s` before.
        domain_nodes: Consecutive nodes that fail together, with `of: domain`.
        worst: Nodes that fail more often.
        again: Failures that come back on the same node.
        factor: Of step times while slow.
        found_after_s: Until slowness, or corruption, is found.
        found_by: Name of the time-out that ends a hang, the longest if absent; or by which a lost process or node is
            noticed, `recovery.detect_s` if absent.
        link: Of a flap.
        share: Of a link's rate that is left; 0: nothing passes.
        lasts_s: Of a flap, or until the nodes of a planned interruption are back; 0 s if absent.
        notice_s: Of a planned interruption; long enough to save if absent.
    """

    cause: Annotated[str, AfterValidator(_named)]
    of: Component = "gpu"
    rate_per_s: RatePerSecond | None = Field(default=None, alias="rate")
    every_s: _Gaps | None = None
    at_s: _Moments | None = None
    at_steps: _Steps | None = None
    ranks: _Ranks | None = None
    effect: Effect
    domain_nodes: _Count | None = None
    worst: Worst | None = None
    again: SameFailureAgain | None = None
    factor: Annotated[Factor, Field(ge=1)] | None = None
    found_after_s: _Positive | None = None
    found_by: str | None = None
    link: Literal["nic", "nic_out", "nic_in", "fabric", "fabric_out", "fabric_in"] = "nic"
    share: Fraction | None = None
    lasts_s: Seconds | None = None
    notice_s: Seconds | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse("FailureCause", self._faults())
        return self

    def _faults(self) -> Iterator[Fault]:
        yield from self._faults_of_times()
        for key in (key for key, effects in _OF_EFFECTS.items() if self.effect not in effects):
            if getattr(self, key) is not None:
                name = type(self).model_fields[key].alias or key
                yield (name,), f"not with effect: {self.effect}: it belongs to {' and '.join(_OF_EFFECTS[key])}"
        for key, example in _REQUIRED[self.effect].items():
            if getattr(self, key) is None:
                name = type(self).model_fields[key].alias or key
                yield (name,), f"required with effect: {self.effect}: write e.g. {example}"
        if self.effect == "flap" and self.lasts_s == 0:
            yield ("lasts",), "0 s: a flap of no length does nothing: write e.g. lasts: 20 s"
        if self.effect == "flap" and "link" in self.model_fields_set and self.share == 0:
            yield ("link",), "with share: 0 the job stands still, whichever link it is: leave link out"
        if self.of == "domain" and self.domain_nodes is None:
            yield ("domain_nodes",), "required with of: domain: write e.g. domain_nodes: 8"
        if self.of != "domain" and self.domain_nodes is not None:
            yield ("domain_nodes",), f"not with of: {self.of}: it belongs to of: domain"
        if self.worst and (self.rate_per_s is None or self.of not in ("gpu", "node")):
            yield ("worst",), "belongs to a rate of gpu or node"
        yield from self._faults_of_ranks()

    def _faults_of_times(self) -> Iterator[Fault]:
        written = [key for key in _WHEN if getattr(self, key) is not None]
        if len(written) != 1:
            hint = "rate, e.g. 17 % per year, every, e.g. [45 min, 75 min], at, e.g. [10 days], or at_steps"
            yield ("rate",), f"how often? Write one of {hint}"
        if (self.rate_per_s is not None or self.every_s) and "of" not in self.model_fields_set:
            yield ("of",), "a rate of what? Write of: gpu, of: node, of: domain, or of: job"
        if self.every_s and self.every_s[0] > self.every_s[1]:
            yield ("every",), "the first is longer than the second: write the shortest time, then the longest"

    def _faults_of_ranks(self) -> Iterator[Fault]:
        moments = self.at_s or self.at_steps
        if self.ranks is None:
            return
        if moments is None:
            yield ("ranks",), "belong to recorded failures: write at or at_steps, or leave ranks out"
        elif len(self.ranks) != len(moments):
            yield ("ranks",), f"{len(self.ranks)} ranks for {len(moments)} failures: write one for each"

    @property
    def is_of_node(self) -> bool:
        """Whether it is the failure of a node, which may have to be replaced."""
        return self.effect in ("node", "slow", "flap")

    def n_components(self, n_nodes: int, gpus_per_node: int) -> int:
        """Return how many components of a cluster may fail."""
        match self.of:
            case "gpu":
                return n_nodes * gpus_per_node
            case "node":
                return n_nodes
            case "domain":
                assert self.domain_nodes is not None
                return math.ceil(n_nodes / self.domain_nodes)
            case "job":
                return 1

    def per_s(self, n_nodes: int, gpus_per_node: int) -> float:
        """Return the failures of all components per second, in the mean; 0 if they are recorded."""
        if self.every_s:
            return 2 / math.fsum(self.every_s)
        return (self.rate_per_s or 0.0) * self.n_components(n_nodes, gpus_per_node)

    def scaled(self, factor: float) -> Self:
        """Return the same with so many times as many failures; recorded ones stay."""
        if self.every_s:
            return unchecked_copy(self, every_s=tuple(each / factor for each in self.every_s))
        return unchecked_copy(self, rate_per_s=self.rate_per_s * factor) if self.rate_per_s else self

    def excess(self, n_nodes: int) -> float:
        """Return the share of failures that the worst nodes have beyond those of as many others; 0 without such."""
        if self.worst is None:
            return 0.0
        n_bad = self.worst.nodes
        share = self.worst.share
        return share - n_bad * (1 - share) / (n_nodes - n_bad)

    def cluster_faults(self, cluster: Cluster) -> Iterator[Fault]:
        """Yield what does not fit the cluster."""
        n_nodes = cluster.nodes
        for i, rank in enumerate(self.ranks or ()):
            if rank >= cluster.world_size:
                yield ("ranks", i), f"{rank} is out of range: the cluster has ranks 0 to {cluster.world_size - 1}"
        if self.domain_nodes is not None and self.domain_nodes > n_nodes:
            yield ("domain_nodes",), f"{self.domain_nodes}: the cluster has {n_nodes} nodes: write {n_nodes} or less"
        if self.worst is None:
            return
        if self.worst.nodes >= n_nodes:
            yield ("worst", "nodes"), f"{self.worst.nodes} of {n_nodes} nodes: write less than all"
        elif self.excess(n_nodes) < 0:
            even = f"{self.worst.nodes / n_nodes:.1%}"
            yield ("worst", "share"), f"{self.worst.share:g} is less than the {even} of any {self.worst.nodes} nodes"


class Tries(Settings):
    """Tries to start a job again, which may fail.

    Args:
        success: Probability of each.
        most: Tries until somebody has to help.
        back_off_s: Waited before the next try.
        lost_s: That a try which fails takes; start, communicators and loading if absent.
        by_hand_s: Until somebody has helped and a try succeeds; if absent, the job ends.
    """

    success: Fraction
    most: _Count
    back_off_s: Seconds = 0.0
    lost_s: Seconds | None = None
    by_hand_s: Seconds | None = None


class Alerts(Settings):
    """Flaps of one node that lead to its eviction.

    Args:
        count: How many, 2 or more.
        within_s: From the first of them to the last.
    """

    count: Annotated[Whole, Field(ge=2)]
    within_s: _Positive


class Recovery(Settings):
    """What it takes to go on after a failure, one part after the other. A part that is absent takes no time.

    Args:
        detect_s: Until somebody notices that a process is gone.
        timeouts: Time-outs by name, such as of heartbeat, collectives and watchdog. A hang ends with the longest.
        diagnose_s: Until the bad node is known.
        schedule_s: Until the scheduler has given another node.
        swap_s: Until a spare has taken the place of a node, instead.
        repair_s: After which a replaced node is a spare; absent: it does not come back.
        evicted_nodes: Nodes that are replaced for each that is lost: a whole group, to save the diagnosis.
        exclude_after: Failures of a node, with its processes only, after which it is replaced; absent: never.
        start_s: Start of processes.
        connect_s: Set-up of communicators.
        connect_per_rank_s: What it takes more for each rank.
        load_s: Loading of the checkpoint.
        warm_up_s: Compilation, cold caches and the loader's rewind, together.
        state: `checkpoint`; or `replica`: what is lost is copied from a live replica, so that no steps repeat.
        alerts: Flaps that lead to the eviction of their node.
        tries: Tries that may fail.
    """

    detect_s: Seconds | None = None
    timeouts: dict[str, _Positive] = Field(default_factory=dict)
    diagnose_s: Seconds | None = None
    schedule_s: Seconds | None = None
    swap_s: Seconds | None = None
    repair_s: Seconds | None = None
    evicted_nodes: _Count = 1
    exclude_after: _Count | None = None
    start_s: Seconds | None = None
    connect_s: Seconds | None = None
    connect_per_rank_s: Seconds | None = None
    load_s: Seconds | None = None
    warm_up_s: Seconds | None = None
    state: Literal["checkpoint", "replica"] = "checkpoint"
    alerts: Alerts | None = None
    tries: Tries | None = None

    @property
    def not_stated(self) -> tuple[str, ...]:
        """The parts that count as 0 s because nobody stated them."""
        parts = ("detect", "diagnose", "schedule", "start", "connect", "warm_up")
        return tuple(part for part in parts if getattr(self, f"{part}_s") is None)


class Failures(Settings):
    """What ends or disturbs the job, what it does about it, and what that takes.

    Args:
        source: Where its numbers are from.
        causes: One or more, with distinct names.
        recovery: What it takes to go on.
        on_failure: `restart` all ranks; likewise with `spare` nodes; or `continue` with a replica less.
        spares: Nodes that wait for others to fail.
        step_factor: Step times of this policy over those without it, such as of averages by another library. A lone
            replica averages with nobody.
        uncertain: Ranges of its numbers, by path, such as `causes[0].rate`.
    """

    source: str = ""
    causes: Annotated[tuple[FailureCause, ...], Field(min_length=1)]
    recovery: Recovery = Recovery()
    on_failure: OnFailure = "restart"
    spares: Annotated[Whole, Field(ge=0)] = 0
    step_factor: Factor = 1.0
    uncertain: dict[str, Range] = Field(default_factory=dict, exclude_if=lambda ranges: not ranges)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse("Failures", self._faults())
        check_ranges(self, self.uncertain)
        return self

    def _faults(self) -> Iterator[Fault]:
        names = [each.cause for each in self.causes]
        timeouts = self.recovery.timeouts
        for i, cause in enumerate(self.causes):
            if names.index(cause.cause) != i:
                yield ("causes", i, "cause"), f"duplicate name {shown(cause.cause)}: write another one"
            if not timeouts and (cause.effect == "hang" or cause.found_by is not None):
                key = "effect" if cause.found_by is None else "found_by"
                hint = "write failures.recovery.timeouts, e.g. {collective: 10 min}"
                yield ("causes", i, key), f"{getattr(cause, key)}: a time-out finds it: {hint}"
            elif cause.found_by is not None and cause.found_by not in timeouts:
                unknown = f"{shown(cause.found_by)} is no time-out of recovery.timeouts"
                yield ("causes", i, "found_by"), f"{unknown}: {nearest(cause.found_by, timeouts)}"
        if self.spares and self.on_failure == "restart":
            yield ("spares",), f"{self.spares} with on_failure: restart, which takes none: write on_failure: spare"

    def cluster_faults(self, cluster: Cluster) -> Iterator[Fault]:
        """Yield what does not fit the cluster."""
        for i, cause in enumerate(self.causes):
            yield from ((("causes", i, *place), message) for place, message in cause.cluster_faults(cluster))

    def unused(self, _: Uses) -> Iterator[str]:
        """Yield a sentence if the policy has no nodes that it could take."""
        if self.on_failure == "spare" and not self.spares:
            hint = "write failures.spares, e.g. 2, or on_failure: restart"
            yield f"failures.on_failure has no effect: without spares all ranks start again, as with restart: {hint}"

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return bool(self.recovery.tries) or any(cause.rate_per_s or cause.again for cause in self.causes)

    @property
    def longest_timeout_s(self) -> float:
        """The time-out that ends a hang; infinite if there is none."""
        return max(self.recovery.timeouts.values(), default=math.inf)
