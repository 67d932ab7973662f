"""Base of schedules that send only the largest entries of a gradient and keep the rest for later steps."""

import abc
import math
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from simdist.plan import Body, Buffer, Copy, Densify
from simdist.plan.ops import SelectMethod
from simdist.plan.plan import INDEX_NBYTES, ITEM_NBYTES
from simdist.schedules import parts
from simdist.schedules.gradient import GRADIENT_TRAITS, GradientSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import REQUIRED, Piece, piece, texts
from simdist.schedules.tuning import Allowance, Axis
from simdist.settings.units import Fraction, Nbytes, Whole

_DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)  # densities that `tune` tries
SPARSE_TRAITS: tuple[Piece, ...] = (
    piece("density", before="-", default=REQUIRED),
    piece("method", [("mstopk", "-mstopk"), ("dgc", "-dgc")], silent="exact"),
)


class SparseSchedule(GradientSchedule, abc.ABC):
    """Send the k largest magnitudes of a gradient plus the residual of earlier steps. Keep the rest as residual.

    A residual accumulates small numbers until they are large. So it has the gradients' own type, whatever type is sent:
    half precision would lose values below about a two-thousandth of the sum. The rounding error of a selected value's
    conversion also stays in the residual.

    Source:
        Aji & Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Stich et al., Sparsified SGD
        with Memory, NeurIPS 2018.
    """

    sends_part: ClassVar[bool] = True
    tried_buckets_nbytes: ClassVar[tuple[int | None, ...]] = (parts.BUCKET_NBYTES, None)

    density: Fraction = Field(default=0.001, gt=0)
    """Share of entries to send: k = round(density x entries), at least 1."""
    method: SelectMethod = "exact"
    """How to find them: a sort, MSTopK's search for a threshold, or DGC's threshold from a sample."""
    bucket_nbytes: Nbytes | None = Field(default=None, alias="bucket_size")
    """None, the default: the largest entries of the whole gradient are sent, after the whole backward pass."""
    warmup_steps: Whole = Field(default=0, ge=0)
    """First steps, which all-reduce whole gradients instead."""

    @classmethod
    def sending_axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the allowed densities."""
        least = allowed.min_density
        if least is None:
            return ()
        return (cls.axis("density", (least, *(density for density in _DENSITIES if density > least))),)

    def k_of(self, count: int) -> int:
        """Return the number of entries to send out of `count`."""
        return max(1, round(self.density * count))

    def selected(self, src: Buffer, number: int, job: Job) -> tuple[Buffer, Buffer]:
        """Return the sparse buffer, in the sent type, and the residual of a selection from `src`."""
        residual = Buffer(f"residual.{number}", src.count, job.dtype, initialized=True)
        return Buffer(f"top.{number}", self.k_of(src.count), self.wire_dtype(job), sparse=True), residual

    def scattered(self, src: Buffer, dst: Buffer, number: int, job: Job) -> tuple[Body, tuple[Buffer, ...]]:
        """Return the operations that make the mean gradient, in its type, of all ranks' entries `src`, with buffers."""
        if src.dtype == dst.dtype:
            return (Densify(src.name, dst.name, divisor=job.world_size),), ()
        wide = replace(src, name=f"wide.{number}", dtype=dst.dtype)
        return (Copy(src.name, wide.name), Densify(wide.name, dst.name, divisor=job.world_size)), (wide,)

    def warms_up(self, step: int) -> bool:
        """Tell whether `step` belongs to the warm-up."""
        return step < self.warmup_steps

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what is wrong with the algorithm."""
        return [*super().problems(shape), *parts.slicing_problems(self.algorithm)]

    @abc.abstractmethod
    def received(self, world_size: int, ranks_per_node: int) -> tuple[float, float]:
        """Return how much a rank receives: in units of k entries and, without selection, in units of the gradient."""

    def cycle(self, job: Job) -> range:
        """Return the first step after the warm-up."""
        return range(self.warmup_steps, self.warmup_steps + 1)

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return a sentence if it never sends less than whole gradients."""
        if self.warmup_steps >= shape.n_steps:
            return [f"warms up in all of the {shape.n_steps} steps: it is synchronous SGD, in the same buckets"]
        value_nbytes = ITEM_NBYTES["float16" if self.compression == "fp16" else "float32"]
        sparse, dense = self.received(shape.world_size, shape.ranks_per_node)
        limit = dense * value_nbytes / (sparse * (value_nbytes + INDEX_NBYTES)) if sparse else math.inf
        if self.density >= limit:
            return [
                f"sends no less than whole gradients at density {self.density:g}: each value takes an index along; it "
                f"saves below a density of {limit:.3g}"
            ]
        return []

    @property
    def traits(self) -> str:
        """Suffix of a default label: density, and the method unless it is exact."""
        return texts(self, (*SPARSE_TRAITS, *GRADIENT_TRAITS))
