"""Synchronous SGD: gradients are averaged over all ranks in every step."""

from itertools import accumulate
from typing import ClassVar, Literal, final

from simdist.errors import PlanError
from simdist.plan import AllReduce, Buffer, Group, Plan
from simdist.schedules import parts
from simdist.schedules.fusion import Fusion, fuse
from simdist.schedules.gradient import GRADIENT_TRAITS, Exchange, GradientSchedule, Sharing
from simdist.schedules.job import Job, Shape, degrees
from simdist.schedules.labels import LabelForm, Piece, written

_FUSION = Piece("fusion", "-fusion", lambda fusion: "-fusion" if fusion else "", lambda _: {})
_ONE_TENSOR_NBYTES = 1  # each tensor fills a bucket


@final
class Sync(GradientSchedule):
    """Average bucketed gradients over all ranks in every step. Buckets overlap with the rest of the backward pass.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"bucket_nbytes": None},
        {"compression": "fp16"},
        {"fusion": {"cycle": None}},
        {"fusion": {"buffer": "3 kB", "cycle": None}, "compression": "fp16"},
        {"shared_update": True},
        {"shared_update": True, "compression": "fp16", "bucket_nbytes": None},
        {"shared_update": 4, "compression": "fp16", "first_bucket_nbytes": 1000, "bucket_nbytes": 1_000_000},
        {"shared_update": 2, "updates_sent_by": "broadcast", "first_bucket_nbytes": 1000, "bucket_nbytes": 1_000_000},
    )

    place: ClassVar[int] = 10

    label_form: ClassVar[LabelForm] = ("sync", (_FUSION, *GRADIENT_TRAITS))
    kind: Literal["sync"] = "sync"
    fusion: Fusion | None = None
    """Replaces buckets: every tensor is ready by itself, and tensors that are ready together are fused (Horovod)."""

    def default_label(self) -> str:
        """Return the label, such as `sync` or `sync-fp16`."""
        return written(self, self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what is wrong on this cluster: bucket sizes together with fusion, which has no buckets."""
        sizes = {  # a run directory also states the defaults
            "bucket_nbytes": self.bucket_nbytes != parts.BUCKET_NBYTES,
            "first_bucket_nbytes": self.first_bucket_nbytes != parts.FIRST_BUCKET_NBYTES,
        }
        hint = "has no effect beside fusion, which sends every tensor by itself: leave it out"
        wrong = [(name, hint) for name, is_chosen in sizes.items() if self.fusion and is_chosen]
        if self.fusion and self.shared_update:
            wrong.append(
                ("shared_update", "it reduce-scatters buckets, and fusion fuses all-reduces: write one of them")
            )
        return [*super().problems(shape), *wrong]

    @classmethod
    def tried_sharings(cls, job: Job) -> tuple[Sharing, ...]:
        """Return also parts of a node, and several whole nodes."""
        return (False, *degrees(job), True)

    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """All-reduce the bucket."""
        return Exchange((AllReduce(sent.name, Group(job.world_size), algorithm=self.algorithm),))

    def write(self, job: Job) -> Plan:
        """Write the plan.

        Raises:
            PlanError: See `GradientSchedule`. Also if fusion has cycles, but it is not known when gradients are ready.
        """
        plan = super().write(job)
        return fuse(plan, self.fusion, self._ready_s(job)) if self.fusion else plan

    def limits(self) -> tuple[int, int]:
        """Return the sizes of the first bucket and of the others."""
        return (_ONE_TENSOR_NBYTES, _ONE_TENSOR_NBYTES) if self.fusion else super().limits()

    def _ready_s(self, job: Job) -> dict[str, float]:
        """Return when every gradient is complete, from the start of the backward pass."""
        if self.fusion and self.fusion.cycle_s is not None and not job.tensor_backward_s:
            raise PlanError(
                f"plan {self.name}: fusion.cycle: which gradients are ready in the same {self.fusion.cycle_s:g} s "
                f"depends on the times of the backward pass, which are not known here: build the plan from a scenario "
                f"(simdist plan SCENARIO), or write cycle: null"
            )
        ends_s = accumulate(reversed(job.tensor_backward_s))
        return {f"grad.{number}": end_s for number, end_s in enumerate(ends_s)}
