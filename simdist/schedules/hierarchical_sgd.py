"""Hierarchical SGD: average often with few neighbours, rarely with all."""

import re
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, final

from pydantic import BeforeValidator, Field, field_validator

from simdist.plan import Group
from simdist.schedules.averaging import AVERAGING_TRAITS, AveragingSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import LabelForm, Piece, piece, written
from simdist.schedules.tuning import Allowance, Axis, ChangedSettings, Levels
from simdist.settings.units import Whole, parse_whole_or

_LEVEL = r"(\d+)-(\d+|world)"


def _read_levels(text: str) -> dict[int, int | str]:
    levels = re.findall(_LEVEL, text)
    return {int(period): size if size == "world" else int(size) for period, size in levels}


_LEVELS = Piece(
    "levels",
    r"-\d+-(?:\d+|world)(?:,\d+-(?:\d+|world))*",
    lambda levels: "-" + ",".join(f"{period}-{size}" for period, size in levels.items()),
    _read_levels,
    is_required=True,
)


@final
class HierarchicalSGD(AveragingSchedule):
    """Average the parameters over groups that grow with the period. If several periods end, only the largest acts.

    `levels: {2: 8, 4: 32, 8: 64}` averages over 8 ranks at the end of every 2 steps, over 32 at the end of every 4 and
    over 64 at the end of every 8. A random straggler holds up its group, not the world.

    Source:
        Wang & Varma, Straggler Mitigation on PyTorch DDP by Hierarchical SGD, PyTorch blog, 2023; torch
        `HierarchicalModelAverager` and `post_localSGD_hook`.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"levels": {2: 4, 4: 8}},
        {"levels": {2: 2, 4: 4, 8: 8}, "intra_node_gradients": False},
        {"levels": {1: 2, 3: "world"}, "warmup_steps": 2, "synchronize": False},
        {"levels": {2: 4, 6: 8}, "phase": 0, "intra_node_gradients": False},
        {"levels": {2: 4, 4: 8}, "warmup_steps": 1, "overlap_steps": 2},
    )

    family: ClassVar[str] = "averaging"
    place: ClassVar[int] = 40
    takes_levels: ClassVar[bool] = True

    label_form: ClassVar[LabelForm] = ("hsgd", (_LEVELS, *AVERAGING_TRAITS))
    searched: ClassVar[tuple[Piece, ...]] = (piece("intra_node_gradients", [(True, "-intra")]),)

    kind: Literal["hierarchical_sgd"] = "hierarchical_sgd"
    levels: dict[Whole, Annotated[int | Literal["world"], BeforeValidator(parse_whole_or("world"))]] = Field(
        min_length=1
    )
    """Period in steps -> ranks in a group."""
    intra_node_gradients: bool = True
    """Average gradients within each node in every step, as PyTorch's post-local-SGD hook does by default."""

    @field_validator("levels")
    @classmethod
    def _grows(cls, levels: dict[int, int | str]) -> dict[int, int | str]:
        periods = list(levels)
        for period, size in levels.items():
            if period < 1:
                raise ValueError(f"period {period}; must be at least 1")
            if isinstance(size, int) and size < 2:
                raise ValueError(f"group of {size} at period {period}; a group has at least 2 ranks")
        for shorter, longer in pairwise(periods):
            if longer % shorter or longer == shorter:
                raise ValueError(
                    f"period {longer} after {shorter}; periods grow, each a multiple of the one before, "
                    f"such as {shorter}, {2 * shorter}, {4 * shorter}"
                )
        return levels

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return also the average of gradients within nodes, which candidates leave out by default."""
        has_levels = 1 < job.ranks_per_node < job.world_size
        values = (False, True) if has_levels else (False,)
        return (*super().axes(job, allowed), Axis("intra_node_gradients", values, False))

    @classmethod
    def settings_of(cls, levels: Levels, changed: ChangedSettings) -> dict[str, object] | None:
        """Return the settings of some levels. One level without gradients is local SGD."""
        settings: dict[str, object] = {"levels": dict(levels), "intra_node_gradients": False} | dict(changed)
        is_local_sgd = len(levels) == 1 and not settings["intra_node_gradients"]
        return settings if levels and not is_local_sgd else None

    def default_label(self) -> str:
        """Return the label, such as `hsgd-2-8,4-32,8-64`: period-group size."""
        return written(self, self.label_form)

    def shortest_period(self) -> int:
        """Return the shortest period."""
        return min(self.levels)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what is wrong with the levels on this cluster."""
        world_size = shape.world_size
        sizes = [(period, world_size if size == "world" else size) for period, size in self.levels.items()]
        found: list[str] = []
        for period, size in sizes:
            if world_size % size:
                legal = ", ".join(str(n) for n in range(2, world_size + 1) if world_size % n == 0)
                found.append(
                    f"group of {size} at period {period} does not divide {world_size} ranks; sizes that do: {legal}"
                )
        for (_, smaller), (period, larger) in pairwise(sizes):
            if larger <= smaller or larger % smaller:
                found.append(
                    f"group of {larger} at period {period} after a group of {smaller}; groups grow with the period, "
                    f"each a multiple of the one before"
                )
        if sizes[-1][1] != world_size:
            found.append(f"the last group has {sizes[-1][1]} ranks; it must be the world of {world_size}")
        return [*super().problems(shape), *(("levels", problem) for problem in found)]

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the largest group with a period that ends."""
        for period, size in reversed(self.levels.items()):
            if self.fires(period, step):
                return Group(shape.world_size if size == "world" else size)
        return None

    def cycle(self, job: Job) -> range:
        """Return the first of the longest periods after the warm-up. The other periods divide it."""
        return self._repeated(max(self.levels), job)

    def local_gradients(self, job: Job) -> Group | None:
        """Return the node, if it averages gradients."""
        return Group(job.ranks_per_node) if self.intra_node_gradients and job.ranks_per_node > 1 else None
