"""HSDP: groups of ranks share a copy of the model each, and the copies average gradients or parameters."""

from typing import ClassVar, Literal, final

from pydantic import Field

from simdist.schedules.base import Schedule
from simdist.schedules.job import Job
from simdist.schedules.local_sgd import LocalSGD
from simdist.schedules.sharded import ShardedSchedule
from simdist.schedules.sync import Sync
from simdist.schedules.tuning import Allowance, Axis
from simdist.settings.units import Whole

_PERIODS = (None, 4, 16, 64)  # that `tune` tries


def _degrees(job: Job) -> tuple[int, ...]:
    """Return the numbers of ranks that may share a copy: parts of a node, or several whole nodes."""
    n = job.world_size
    node = min(job.ranks_per_node, n)
    divisors = (each for each in range(2, n) if n % each == 0)
    found = tuple(each for each in divisors if each % node == 0 or node % each == 0)
    return found or (node,)


@final
class HSDP(ShardedSchedule):
    """Shard the model over groups of consecutive ranks. Ranks with the same slice of different copies average it.

    Source:
        See `ShardedSchedule`. To average parameters instead is local SGD, and with workers of several ranks
        hierarchical SGD: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv 1808.07217.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"shard": 4},
        {"shard": 2, "all_reduce": "last", "param_dtype": "bfloat16"},
        {"shard": 4, "period": 4},
        {"shard": 2, "communicators": 2, "wrap": "blocks", "reshard_after_forward": False},
        {"shard": 1},
    )

    place: ClassVar[int] = 14

    kind: Literal["hsdp"] = "hsdp"
    shard: Whole = Field(ge=1)
    """Ranks that share a copy of the model: consecutive ones, such as those of a node."""
    all_reduce: Literal["each", "last"] = "each"
    """With several micro-batches: copies average the gradients of each of them, or their sum in the last one."""
    period: Whole | None = Field(default=None, ge=1)
    """Copies average their parameters every so many steps, instead of gradients in every step."""

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return also the ranks that share a copy, what copies exchange, and how often."""
        found = [*super().axes(job, allowed), cls.axis("shard", _degrees(job)), cls.axis("period", _PERIODS)]
        if job.micro_batches > 1:
            found.append(cls.axis("all_reduce", ("each", "last")))
        return tuple(found)

    def default_label(self) -> str:
        """Return the label, such as `hsdp-8` or `hsdp-8-local-4`."""
        local = f"-local-{self.period}" if self.period else ""
        deferred = "-last" if self.all_reduce == "last" else ""
        return f"hsdp-{self.shard}{local}{deferred}{self.traits}"

    def problems(self, world_size: int, ranks_per_node: int) -> list[tuple[str, str]]:
        """Return also a number of ranks that does not divide the world."""
        found = super().problems(world_size, ranks_per_node)
        if world_size % self.shard:
            found.append(("shard", f"{self.shard} does not divide the {world_size} ranks"))
        if self.period and self.shard == 1:
            found.append(("shard", "1 with a period: nothing is sharded: write kind: local_sgd"))
        return found

    def sharers(self, world_size: int) -> int:
        """Return the ranks that share a copy."""
        return self.shard

    def between_copies(self) -> Schedule:
        """Return local SGD with a period, or synchronous SGD."""
        if self.period:
            return LocalSGD(label=self.name, algorithm=self.algorithm, period=self.period)
        return Sync(label=self.name, algorithm=self.algorithm)

    def all_reduces(self, job: Job, micro_batch: int) -> bool:
        """Tell whether copies average their gradients in a micro-batch."""
        if self.period:
            return False
        return self.all_reduce == "each" or micro_batch == job.micro_batches - 1

    def averages(self, step: int) -> bool:
        """Tell whether a step is the last of a period."""
        return self.period is not None and step % self.period == self.period - 1

    def cycle(self, job: Job) -> range:
        """Return the first period."""
        return range(self.period or 1)
