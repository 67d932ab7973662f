"""Links that misbehave, flows of other jobs, and actors. `simdist.scenario.link_sampling` draws the first two.

A *share* is what is left of the rate of a link: 1 undisturbed, 0.5 half of it. What several disturbances leave of one
link multiplies. Times count from the start of the run; latencies stay as they are.
"""

import abc
import math
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from simdist.scenario.cluster import Cluster, Count, Selection
from simdist.scenario.effects import Uses
from simdist.scenario.recordings import RecordingFile, TableForm, read_table
from simdist.settings.base import Fault, Settings, refuse, shown
from simdist.settings.plugins import ACTORS, FixedKinds, OpenKinds, written_kind
from simdist.settings.units import Fraction, Nbytes, Seconds

if TYPE_CHECKING:
    import simpy

LinkKind: TypeAlias = Literal["nic", "nic_out", "nic_in", "fabric", "fabric_out", "fabric_in", "switch", "storage"]
_Floats: TypeAlias = NDArray[np.float64]

_OF_NODES = ("nic", "fabric")
_FORM = TableForm(
    array="shares",
    csv="write lines of a time in seconds and a share per link, separated by commas; begin a header with #",
    npz="write times in seconds and shares, [n_times, 1 + n_links], with numpy.savez(file, table)",
    values="times and shares are finite and 0 or more",
    place="row {}, column {}",
)


class CustomActor(Settings, abc.ABC):
    """A process of a user's own: it takes bandwidth, slows links down or holds ranks up while a plan is simulated.

    A subclass sets `kind`, a `Literal` field with a name for people, and adds its settings as fields.
    """

    kind: str

    @abc.abstractmethod
    def __call__(self, env: "simpy.Environment", cluster: Any) -> "Generator[simpy.Event, object, object]":
        """Yield events until it ends. Each schedule and seed starts it anew, and the last rank ends it.

        Args:
            env: The environment; its time counts in seconds from the start of the run.
            cluster: The `simdist.engines.live.LiveCluster`.
        """

    def kind_in_files(self) -> str:
        """Return the `kind` by which a scenario finds the class again."""
        return written_kind(type(self), ACTORS)


#: The classes that `kind` may name in `actors` of a scenario. None ships.
ACTOR_KINDS: OpenKinds[CustomActor] = OpenKinds("actor", ACTORS, lambda: (CustomActor,), dict, lambda _: None)


def _some(share: float) -> float:
    if share == 0:
        hint = "write e.g. 0.5 or 50%, or kind: outages for a link on which nothing passes"
        raise ValueError(f"a share of 0 blocks the link forever: {hint}")
    return share


def _endpoint(value: object) -> object:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value != "storage" and not is_number:
        raise ValueError(f"{shown(value)} is not an end of a flow: write the number of a node, or storage")
    return value


def _after_begin(end_s: float | None, info: ValidationInfo) -> float | None:
    begin_s = info.data.get("begin_s", 0.0)
    if end_s is not None and end_s <= begin_s:
        raise ValueError(f"{end_s:g} s is not after begin, {begin_s:g} s: write a later time, or leave it out")
    return end_s


_Share = Annotated[Fraction, AfterValidator(_some)]
_End = Annotated[Seconds | None, AfterValidator(_after_begin)]
_Length = Annotated[Seconds, Field(ge=1e-3)]  # less would take more events than a run has operations
Endpoint: TypeAlias = Annotated[int | Literal["storage"], BeforeValidator(_endpoint)]


class _LinkDisturbance(Selection):
    on: Literal["link"] = "link"
    link: LinkKind = Field(examples=["nic"])

    @model_validator(mode="after")
    def _of_nodes(self) -> Self:
        if self.ranks is not None:
            refuse("ranks", [(("ranks",), "'ranks' with on: link: links belong to nodes: write e.g. nodes: [0]")])
        if self.nodes is not None and not self.is_of_nodes:
            refuse("nodes", [(("nodes",), f"'nodes' with link: {self.link}: the cluster has one, leave nodes out")])
        return self

    @property
    def is_of_nodes(self) -> bool:
        """Whether every node has such a link."""
        return self.link.startswith(_OF_NODES)

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return False

    @property
    def never_slows(self) -> bool:
        """Whether it leaves its links as they are."""
        return False

    def unused(self, uses: Uses, place: str) -> Iterator[str]:
        """Yield a sentence for each reason why the disturbance has no effect."""
        if self.never_slows:
            yield f"{place} has no effect: it leaves its links as they are"
        if self.link == "storage" and not uses.storage:
            yield f"{place} {uses.nothing_is_read}"
        if self.link.startswith("nic") and not uses.nics:
            yield f"{place} has no effect: {uses.one_domain} sends nothing over its NICs"

    def places(self, n_nodes: int) -> tuple[int, ...]:
        """Return the nodes whose links are disturbed, ascending; of the switch and the storage server just 0."""
        if not self.is_of_nodes:
            return (0,)
        return tuple(range(n_nodes)) if self.nodes is None else tuple(sorted(set(self.nodes)))

    def cluster_faults(self, cluster: Cluster) -> list[Fault]:
        """Return what the cluster lacks of the links."""
        problem = _lacking(self.link, cluster)
        faults: list[Fault] = [(("link",), problem)] if problem else []
        return faults + self.range_faults(cluster.world_size, cluster.gpus_per_node)


class LinkPersistent(_LinkDisturbance):
    """Links have a share of their rate, for the whole run or from `begin_s` to `end_s`."""

    kind: Literal["persistent"] = "persistent"
    share: _Share
    begin_s: Seconds = 0.0
    end_s: _End = None

    @property
    def is_whole_run(self) -> bool:
        """Whether the share is the same for ever: then it is a slower link, and both engines know its times."""
        return self.begin_s == 0 and self.end_s is None

    @property
    def never_slows(self) -> bool:
        """Whether it leaves its links as they are."""
        return self.share == 1


class LinkJitter(_LinkDisturbance):
    """A share drawn anew every `period_s`, lognormal: min(1, median * exp(sigma * z)) with standard normal z."""

    kind: Literal["jitter"] = "jitter"
    period_s: _Length
    median: _Share
    sigma: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False, examples=[0.5])]

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.sigma > 0

    @property
    def never_slows(self) -> bool:
        """Whether it leaves its links as they are."""
        return self.median == 1 and self.sigma == 0


class LinkBursts(_LinkDisturbance):
    """Each link is on or off, a Markov chain per `period_s` that starts stationary; while on, a share is left.

    `enter` and `leave` are the probabilities per period to turn on and off.
    """

    kind: Literal["bursts"] = "bursts"
    period_s: _Length
    enter: Fraction
    leave: Fraction
    share: _Share

    @model_validator(mode="after")
    def _moves(self) -> Self:
        if self.enter == self.leave == 0:
            refuse("Bursts", [(("enter",), "with enter and leave both 0 no state is stationary: write e.g. enter: 1%")])
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return True

    @property
    def never_slows(self) -> bool:
        """Whether it leaves its links as they are."""
        return self.enter == 0 or self.share == 1


class LinkOutages(_LinkDisturbance):
    """Nothing passes for a while; what was in flight then goes on where it stopped.

    Either at `at_s` for `lasts_s`, again every `every_s` if that is given; or random, up for `up_s` and down for
    `down_s` in the mean, both exponential, up or down at the start as in the long run.
    """

    kind: Literal["outages"] = "outages"
    at_s: Seconds | None = None
    lasts_s: _Length | None = None
    every_s: _Length | None = None
    up_s: _Length | None = None
    down_s: _Length | None = None

    @model_validator(mode="after")
    def _either(self) -> Self:
        is_fixed = self.at_s is not None and self.lasts_s is not None and self.up_s is self.down_s is None
        is_drawn = self.up_s is not None and self.down_s is not None
        if not is_fixed and (not is_drawn or {self.at_s, self.lasts_s, self.every_s} != {None}):
            hint = "write either at and lasts, e.g. at: 3 s, lasts: 2 s, or up and down, e.g. up: 60 s, down: 2 s"
            refuse("Outages", [(("at",), hint)])
        if self.every_s is not None and self.lasts_s is not None and self.every_s <= self.lasts_s:
            refuse("Outages", [(("every",), f"an outage of {self.lasts_s:g} s every {self.every_s:g} s never ends")])
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.up_s is not None


class LinkRecorded(_LinkDisturbance):
    """Shares over time from a file: a row per change, a time in seconds and the share of every link from then on.

    The links are those of `nodes` in ascending order, or of all nodes. The first time is 0, and times ascend.
    """

    kind: Literal["recorded"] = "recorded"
    file: RecordingFile

    @model_validator(mode="after")
    def _readable(self) -> Self:
        self.table()
        return self

    def table(self) -> _Floats:
        """Return times in seconds and shares, `[n_times, 1 + n_links]`.

        Raises:
            ValidationError: The file cannot be read, or holds something else.
        """
        return read_table(self.file, _FORM, problems=_table_problems)

    @property
    def never_slows(self) -> bool:
        """Whether it leaves its links as they are."""
        return bool((self.table()[:, 1:] == 1).all())

    def cluster_faults(self, cluster: Cluster) -> list[Fault]:
        """Return what the cluster lacks of the links, or the recording."""
        n_links = len(self.places(cluster.nodes))
        n_found = self.table().shape[1] - 1
        faults = super().cluster_faults(cluster)
        if not faults and n_links != n_found:
            fault = f"{self.file.name} holds {n_found} links besides the time, the disturbance has {n_links}"
            return [(("file",), f"{fault}: write a column for each")]
        return faults


class _Flows(Settings):
    """Flows of another job between two nodes, or a node and storage; each shares fairly with all others."""

    source: Endpoint = Field(alias="from", examples=[0])
    to: Endpoint = Field(examples=[1])
    flows: Count = 1

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return False

    def cluster_faults(self, cluster: Cluster) -> list[Fault]:
        """Return what the cluster lacks for the flows."""
        faults: list[Fault] = []
        for key, end in (("from", self.source), ("to", self.to)):
            if isinstance(end, int) and end >= cluster.nodes:
                faults.append(((key,), f"{end} is out of range: the cluster has nodes 0 to {cluster.nodes - 1}"))
            if end == "storage" and cluster.storage is None:
                faults.append(((key,), "storage: the cluster has none, write cluster.storage or a node"))
        if self.source == self.to:
            faults.append((("to",), f"{shown(self.to)} is where the flows come from: they pass no link"))
        problem = None if "storage" in (self.source, self.to) else _lacking("nic", cluster)
        return faults or ([(("from",), problem)] if problem else [])


class Steady(_Flows):
    """Flows without end, for the whole run or from `begin_s` to `end_s`."""

    kind: Literal["steady"] = "steady"
    begin_s: Seconds = 0.0
    end_s: _End = None


class Periodic(_Flows):
    """Transfers of `nbytes` at `begin_s` and every `every_s` after; one begins when the one before has ended."""

    kind: Literal["periodic"] = "periodic"
    nbytes: Annotated[Nbytes, Field(ge=1, alias="size")]
    every_s: _Length
    begin_s: Seconds = 0.0


class OnOff(_Flows):
    """Flows without end while on, for `on_s`, none while off, for `off_s`.

    `exponential`: these are means, on or off at the start as in the long run. `fixed`: on from `begin_s`.
    """

    kind: Literal["on_off"] = "on_off"
    on_s: _Length
    off_s: _Length
    lengths: Literal["exponential", "fixed"] = "exponential"
    begin_s: Seconds = 0.0

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.lengths == "exponential"


LinkDisturbance: TypeAlias = LinkPersistent | LinkJitter | LinkBursts | LinkOutages | LinkRecorded
TrafficPattern: TypeAlias = Steady | Periodic | OnOff
#: The classes by the `kind` that scenarios call them.
LINK_KINDS = FixedKinds({each.model_fields["kind"].default: each for each in get_args(LinkDisturbance)})
#: The same of the flows.
FLOW_KINDS = FixedKinds({each.model_fields["kind"].default: each for each in get_args(TrafficPattern)})


def _lacking(link: LinkKind, cluster: Cluster) -> str | None:
    """Say why a cluster has no such link, or none that could be slower."""
    if link == "storage" and cluster.storage is None:
        return "storage: the cluster has none, write cluster.storage"
    if link == "switch" and cluster.nodes == 1:
        return "switch: a cluster of one node has none: write cluster.nodes: 2 or more, or another link"
    if cluster.storage and link == "storage":
        where = "storage"
        is_limited = math.isfinite(cluster.storage.bandwidth_Bps)
    else:
        where = "fabric" if link.startswith("fabric") else "network"
        line = cluster.fabric if where == "fabric" else cluster.network
        is_limited = line.table is not None or math.isfinite(line.bandwidth_Bps)
    fault = f"{link}: cluster.{where} is unlimited, and so is each share of it: write its bandwidth, e.g. 25 Gbit/s"
    return None if is_limited else fault


def _table_problems(table: _Floats) -> Iterator[str]:
    """Yield what is wrong with times and shares."""
    times_s = table[:, 0]
    shares = table[:, 1:]
    if not shares.shape[1]:
        yield "holds times only"
    elif times_s[0] != 0 or (np.diff(times_s) <= 0).any():
        yield "the times in the first column begin with 0 and ascend"
    elif (shares > 1).any():
        row, link = np.argwhere(shares > 1)[0].tolist()
        yield f"{shares[row, link]:g} at {times_s[row]:g} s: shares are from 0 to 1"
    elif (shares[-1] == 0).any():
        yield "a link ends with a share of 0: it never comes back"
