"""HSDP: groups of ranks share a copy of the model each, and the copies average gradients or parameters."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, Literal, Self, final

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from simdist.plan.algorithms import AUTO
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.job import Job, Shape, degrees
from simdist.schedules.labels import REQUIRED, LabelForm, Piece, piece, written
from simdist.schedules.local_sgd import LocalSGD
from simdist.schedules.names import KINDS, settings_of_name
from simdist.schedules.sharded import SHARDED_TRAITS, ShardedSchedule
from simdist.schedules.sync import Sync
from simdist.schedules.tuning import OUTER_OPTIMIZER, Allowance, Axis, Permit
from simdist.settings.base import unchecked_copy, validate_by_kind
from simdist.settings.units import Whole

_PERIODS = (4, 16, 64)  # that `tune` tries
_OF_HSDP = ("label", "run_ahead_steps", "input")

_BETWEEN = Piece(
    "between",
    r"-(?:(?:local|hsgd|diloco)-(?!2-comms)\d|gossip)[^+]*?",  # `-local` before `-2-comms` is local accumulation
    lambda between: f"-{between.default_label()}" if between else "",
    lambda text: settings_of_name(text[1:]),
)


@final
class HSDP(ShardedSchedule):
    """Shard the model over groups of consecutive ranks. Ranks with the same slice of different copies average it.

    Source:
        See `ShardedSchedule`. To average parameters instead is local SGD, and with workers of several ranks
        hierarchical SGD: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv 1808.07217. With an
        outer optimizer it is DiLoCo, whose workers are sharded in Jaghouar et al., INTELLECT-1, arXiv 2412.01152.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"shard": 4},
        {"shard": 2, "all_reduce": "last", "param_dtype": "bfloat16"},
        {"shard": 4, "between": "local-4"},
        {"shard": 2, "between": {"kind": "hierarchical_sgd", "levels": {2: 2, 4: "world"}, "warmup_steps": 2}},
        {"shard": 2, "between": {"kind": "diloco", "period": 4, "overlap_steps": 1, "mixing": 0.5}},
        {"shard": 2, "between": "gossip-ring"},
        {"shard": 2, "between": {"kind": "diloco", "period": 3, "ranks_per_worker": "node", "compression": "fp16"}},
        {"shard": 2, "communicators": 2, "wrap": "blocks", "reshard_after_forward": False},
        {"shard": 1},
    )

    place: ClassVar[int] = 14

    label_form: ClassVar[LabelForm] = (
        "hsdp",
        (
            piece("shard", before="-", default=REQUIRED),
            _BETWEEN,
            piece("all_reduce", [("last", "-last")]),
            *SHARDED_TRAITS,
        ),
    )
    kind: Literal["hsdp"] = "hsdp"
    shard: Whole = Field(ge=1)
    """Ranks that share a copy of the model: consecutive ones, such as those of a node."""
    all_reduce: Literal["each", "last"] = "each"
    """With several micro-batches: copies average the gradients of each of them, or their sum in the last one."""
    between: SerializeAsAny[AveragingSchedule] | None = None
    """Copies average parameters by this schedule, instead of gradients in every step: `local-8`, or a mapping such as
    `{kind: diloco, period: 100}`. It counts copies where it counts ranks."""

    permits: ClassVar[tuple[Permit, ...]] = (OUTER_OPTIMIZER,)

    @field_validator("between", mode="before")
    @classmethod
    def _averages(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        schedule = validate_by_kind(settings_of_name(value), KINDS, info)
        if not isinstance(schedule, AveragingSchedule):
            raise ValueError(
                f"{schedule.kind}: copies of the model average gradients unless `between` names a schedule that "
                f"averages parameters, such as local-8, hsgd-2-4,8-world or diloco-100: leave `between` out"
            )
        return schedule

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return also the ranks that share a copy, what copies exchange, and how often."""
        shards = degrees(job) or (job.ranks_per_node,)
        between = (None, *_betweens(job, allowed))
        found = [*super().axes(job, allowed), cls.axis("shard", shards), cls.axis("between", between)]
        if job.micro_batches > 1:
            found.append(cls.axis("all_reduce", ("each", "last")))
        return tuple(found)

    def default_label(self) -> str:
        """Return the label, such as `hsdp-8` or `hsdp-8-local-4`."""
        return written(self, self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return also a number of ranks that does not divide the world, and what copies cannot exchange."""
        found = super().problems(shape)
        if shape.world_size % self.shard:
            return [*found, ("shard", f"{self.shard} does not divide the {shape.world_size} ranks")]
        if self.between is None:
            return found
        if self.shard == 1:
            found.append(("shard", "1 with `between`: nothing is sharded: write the schedule of `between` itself"))
        fields = type(self.between).model_fields
        misplaced = [name for name in _OF_HSDP if dict(self.between)[name] != fields[name].default]
        found += [("between", f"{name}: write it beside `between`") for name in misplaced]
        if isinstance(self.between, LocalSGD) and self.between.inner_steps is not None:
            found.append(("between", "inner_steps: ranks of a copy wait for one another in every step: leave it out"))
        of_copies = self.between.problems(self._of_copies(shape))
        return [*found, *(("between", f"of copies: {name}: {problem}") for name, problem in of_copies)]

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return what `between` does not use."""
        if self.between is None:
            return []
        return self.between.unused_settings(self._of_copies(shape))

    def unused_in(self, job: Job) -> list[str]:
        """Return what `between` does not use in a job."""
        return [] if self.between is None else self.between.unused_in(self.of_copies(job))

    def sharers(self, world_size: int) -> int:
        """Return the ranks that share a copy."""
        return self.shard

    def of_one_copy(self) -> Self:
        """Return the same schedule without label and averages of parameters."""
        return unchecked_copy(self, label="", between=None)

    def between_copies(self) -> Sync | AveragingSchedule:
        """Return the schedule of averages, or synchronous SGD."""
        if self.between is None:
            return unchecked_copy(Sync(), label=self.name, algorithm=self.algorithm)
        algorithm = self.algorithm if self.between.algorithm == AUTO else self.between.algorithm
        return unchecked_copy(self.between, label=self.name, algorithm=algorithm)

    def all_reduces(self, job: Job, micro_batch: int) -> bool:
        """Tell whether copies that average gradients do so in a micro-batch."""
        return self.all_reduce == "each" or micro_batch == job.micro_batches - 1

    def _of_copies(self, shape: Shape) -> Shape:
        """Return the number of copies, and how many of them a node has, at least one."""
        return Shape(shape.world_size // self.shard, max(1, shape.ranks_per_node // self.shard), shape.n_steps)


def _betweens(job: Job, allowed: Allowance) -> Iterator[str]:
    """Yield labels of schedules between copies: averages over all copies, in two levels, and with an outer optimizer.

    The two levels are for copies of a node each: groups of about the square root of their number.
    """
    yield from (f"local-{period}" for period in _PERIODS)
    n_copies = job.world_size // min(job.ranks_per_node, job.world_size)
    sizes = [size for size in range(2, n_copies) if n_copies % size == 0]
    if sizes:
        size = min(sizes, key=lambda each: abs(math.log(each * each / n_copies)))
        yield from (f"hsgd-{often}-{size},{rarely}-world" for often, rarely in pairwise(_PERIODS))
    if allowed.permits(OUTER_OPTIMIZER):
        yield from (f"diloco-{period}" for period in _PERIODS[1:])
