"""Checkpoints that training writes."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from simdist.plan.group import Group
from simdist.plan.ops import ALONE, Destination
from simdist.plan.plan import MAX_DATASET_NBYTES
from simdist.scenario.cluster import Cluster
from simdist.scenario.effects import Uses
from simdist.schedules.job import Checkpoint
from simdist.settings.base import Fault, Settings, refuse, shown
from simdist.settings.units import Elapsed, Nbytes, StepsOrTime, Whole

Mode: TypeAlias = Literal["blocking", "async"]


class CheckpointSettings(Settings):
    """A file that ranks write again and again, so that training can go on from there.

    Args:
        every: Steps from one to the next; the first is written after so many. Or a time such as `30 min`, which
            `simdist.runs.checkpoint_steps` turns into steps of each schedule.
        what: `parameters`, or `state`: also one momentum of the optimizer for each of them.
        nbytes: Bytes of a rank's file, in place of `what`: a shard, or the state of another optimizer. The key is
            `size`.
        to: The storage server, the disk of the rank's node, or the memory of a peer, the next node. A copy in memory
            is lost if both nodes are.
        ranks: Who writes: the `first` of all, as most scripts around DistributedDataParallel do, or `all`, each its own
            file, as with sharded checkpoints.
        mode: `blocking`: the host waits for the file before the next step; `async`: the device copies to the host's
            memory and goes on, while that copy is written.
        keep: Newest files that are kept; all if absent. Failures that are found late need older ones.
    """

    every: Annotated[StepsOrTime, Field(examples=[100])]
    what: Literal["parameters", "state"] | None = None
    nbytes: Annotated[Nbytes, Field(ge=1, le=MAX_DATASET_NBYTES)] | None = Field(default=None, alias="size")
    to: Destination = "storage"
    ranks: Literal["first", "all"] = "first"
    mode: Mode = "blocking"
    keep: Annotated[Whole, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.what and self.nbytes:
            refuse("CheckpointSettings", [(("what",), f"{shown(self.what)} beside size: write one of them")])
        if not (self.what or self.nbytes):
            hint = "Write what: parameters, what: state, or the bytes of a rank's file, e.g. size: 2 GB"
            refuse("CheckpointSettings", [(("what",), f"what does a file hold? {hint}")])
        return self

    def faults(self, cluster: Cluster) -> Iterator[Fault]:
        """Yield what the cluster lacks."""
        if self.to == "storage" and cluster.storage is None:
            yield ("to",), "'storage': the cluster has none, write cluster.storage, or to: disk"
        if self.to == "disk" and cluster.disk is None:
            yield ("to",), "'disk': the cluster has none, write cluster.disk, e.g. {read: 2 GB/s, write: 1 GB/s}"
        if self.to == "peer" and cluster.nodes == 1:
            yield ("to",), "'peer': the cluster has one node, write to: storage or to: disk"

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence if no file is due."""
        if isinstance(self.every, int) and self.every > uses.n_steps:
            yield f"checkpoint has no effect: none is due within {uses.n_steps} steps"

    def of_job(self, world_size: int) -> Checkpoint | None:
        """Return the checkpoint of a job of so many ranks; None if it comes by time, which says no steps yet."""
        if isinstance(self.every, Elapsed):
            return None
        by = ALONE if self.ranks == "all" else Group(world_size)
        return Checkpoint(self.every, self.what or self.nbytes or 0, self.to, by, is_async=self.mode == "async")
