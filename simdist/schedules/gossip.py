"""Gossip: ranks train on their own, and pairs of them average their parameters, each time other pairs."""

from functools import lru_cache
from typing import ClassVar, Literal, final

import numpy as np
from pydantic import Field

from simdist.plan import Group
from simdist.schedules.averaging import AVERAGING_TRAITS, AveragingSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import LabelForm, piece, written
from simdist.schedules.tuning import PAIRS, Allowance, Axis, Permit
from simdist.settings.units import Whole


@final
class Gossip(AveragingSchedule):
    """Average the parameters of disjoint pairs of ranks at the end of every `period` steps.

    In a ring, a rank averages with its right and its left neighbour in turn. Random matchings are drawn before the run,
    so all ranks know them. A late rank holds up its partner only, which then holds up its next one.

    Source:
        Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv 1705.09056;
        Boyd et al., Randomized Gossip Algorithms, IEEE Transactions on Information Theory 52 (6), 2006: pairs.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"matching": "ring"},
        {"period": 2, "matchings": 3, "seed": 1, "warmup_steps": 1},
        {"matching": "ring", "period": 3, "phase": 0, "synchronize": False},
        {"matchings": 4, "overlap_steps": 1},
    )

    place: ClassVar[int] = 45
    permit: ClassVar[Permit | None] = PAIRS

    label_form: ClassVar[LabelForm] = (
        "gossip",
        (
            piece("matching", [("ring", "-ring")]),
            piece("period", before="-", default=1),
            piece("matchings", before="-of", default=8),
            piece("seed", before="-seed", default=0),
            *AVERAGING_TRAITS,
        ),
    )

    kind: Literal["gossip"] = "gossip"
    matching: Literal["random", "ring"] = "random"
    """Who averages: pairs drawn at random, or neighbours in a ring of all ranks."""
    period: Whole = Field(default=1, ge=1)
    """Steps from one average to the next."""
    matchings: Whole = Field(default=8, ge=1, le=1000)
    """Random matchings, which take turns."""
    seed: Whole = Field(default=0, ge=0)
    """Seed of the random matchings."""

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return also both ways to pair ranks."""
        return (*super().axes(job, allowed), cls.axis("matching", ("random", "ring")))

    def default_label(self) -> str:
        """Return the label, such as `gossip` or `gossip-ring-4`."""
        return written(self, self.label_form)

    def shortest_period(self) -> int:
        """Return the period."""
        return self.period

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the pairs at the end of each period."""
        if not self.fires(self.period, step):
            return None
        number = (step if self.phase is not None else step - self.warmup_steps) // self.period
        if self.matching == "ring":
            return _ring(number, shape.world_size)
        return _drawn(number % self.matchings, self.seed, shape.world_size)

    def cycle(self, job: Job) -> range:
        """Return the first steps in which every matching has its turn."""
        n_matchings = 2 if self.matching == "ring" else self.matchings
        return self._repeated(n_matchings * self.period, job)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return also an odd number of ranks."""
        found = super().problems(shape)
        if shape.world_size % 2:
            found.append(("matching", f"pairs ranks, and {shape.world_size} are odd: take an even number"))
        return found

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return a sentence if all steps are warm-up, and for settings of random matchings in a ring."""
        if self.warmup_steps >= shape.n_steps:
            return super().unused_settings(shape)
        fields = type(self).model_fields
        drawing = [name for name in ("matchings", "seed") if getattr(self, name) != fields[name].default]
        if self.matching == "ring" and drawing:
            return [f"has {' and '.join(drawing)} without effect: a ring is not drawn"]
        return []


def _ring(number: int, world_size: int) -> Group:
    """Return the pairs of neighbours: even ranks with the rank to their right, and in the next turn to their left."""
    ranks = np.roll(np.arange(world_size), -(number % 2))
    return Group.of(np.sort(ranks.reshape(-1, 2)).tolist())


@lru_cache(maxsize=1024)
def _drawn(number: int, seed: int, world_size: int) -> Group:
    """Return a matching drawn at random: all are equally likely."""
    bits = np.random.Philox(key=np.array([seed, number], dtype=np.uint64)).random_raw(world_size)
    ranks = np.argsort(bits, kind="stable")
    return Group.of(np.sort(ranks.reshape(-1, 2)).tolist())
