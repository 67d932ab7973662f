"""What schedules share that send only the largest entries of a gradient and keep the rest for later steps."""

import abc

from pydantic import Field

from simdist.plan import Buffer
from simdist.plan.ops import SelectMethod
from simdist.schedules import parts
from simdist.schedules.gradient import GradientSchedule
from simdist.units import Fraction, Nbytes, Whole

__all__ = ["SparseSchedule"]


class SparseSchedule(GradientSchedule, abc.ABC):
    """Send the k largest magnitudes of a gradient plus the residual of earlier steps; keep the rest as residual.

    Source:
        Aji & Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Stich et al., Sparsified SGD
        with Memory, NeurIPS 2018.
    """

    density: Fraction = Field(default=0.001, gt=0)
    """Share of the entries that is sent: k = round(density x entries), at least 1."""
    method: SelectMethod = "exact"
    """How they are found: a sort, MSTopK's search for a threshold, or DGC's threshold from a sample."""
    bucket_nbytes: Nbytes | None = Field(default=None, alias="bucket_size")
    """None, as by default: the largest entries of the whole gradient are sent, after the whole backward pass."""
    warmup_steps: Whole = Field(default=0, ge=0)
    """First steps that all-reduce whole gradients instead."""

    def k_of(self, count: int) -> int:
        """Return how many of `count` entries are sent."""
        return max(1, round(self.density * count))

    def selected(self, src: Buffer, number: int) -> tuple[Buffer, Buffer]:
        """Return the sparse buffer and the residual of a selection from `src`."""
        k = self.k_of(src.count)
        residual = Buffer(f"residual.{number}", src.count, src.dtype, initialized=True)
        return Buffer(f"top.{number}", k, src.dtype, sparse=True), residual

    def warms_up(self, step: int) -> bool:
        """Tell whether `step` is one of the warm-up."""
        return step < self.warmup_steps

    def problems(self, world_size: int, ranks_per_node: int) -> list[tuple[str, str]]:
        """Return what is wrong with the algorithm."""
        return [*super().problems(world_size, ranks_per_node), *parts.slicing_problems(self.algorithm)]

    def idle(self, world_size: int, ranks_per_node: int, n_steps: int) -> list[str]:
        """Return whether it never sends less than everything."""
        if self.warmup_steps >= n_steps:
            return [f"warms up in all of the {n_steps} steps: it is synchronous SGD"]
        return []

    @property
    def traits(self) -> str:
        """What is added to a default label: density, and the method unless it is exact."""
        method = "" if self.method == "exact" else f"-{self.method}"
        return f"-{self.density:g}{method}{super().traits}"
