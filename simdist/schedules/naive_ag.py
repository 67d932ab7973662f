"""Sparse all-gather: every rank sends its largest entries to all others."""

from dataclasses import replace
from typing import ClassVar, Literal, final

from simdist.plan import AllGather, Buffer, Group, Select
from simdist.schedules.gradient import GRADIENT_TRAITS, Exchange
from simdist.schedules.job import Job
from simdist.schedules.labels import LabelForm, written
from simdist.schedules.sparse import SPARSE_TRAITS, SparseSchedule


@final
class NaiveAllGather(SparseSchedule):
    """Gather the largest entries of all ranks and add them up. Traffic grows with the number of ranks.

    Each of P ranks receives (P - 1) k values and as many indices.

    The selection takes time on the compute stream right after the bucket's backward pass, as on a GPU. The sums are
    scattered after the whole backward pass, so they hold up none of it.

    Source:
        Renggli et al., SparCML, SC 2019; called NaiveAG in Shi et al., MLSys 2021, arXiv 2010.10458.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"density": 1.0, "warmup_steps": 2},
        {"density": 0.01, "method": "dgc", "bucket_nbytes": 1_000_000, "compression": "fp16"},
    )

    place: ClassVar[int] = 100

    label_form: ClassVar[LabelForm] = ("naive-ag", (*SPARSE_TRAITS, *GRADIENT_TRAITS))
    kind: Literal["naive_ag"] = "naive_ag"

    def default_label(self) -> str:
        """Return the label, such as `naive-ag-0.001`."""
        return written(self, self.label_form)

    def sent(self, grad: Buffer, job: Job) -> Buffer:
        """Return the bucket itself: entries are converted when they are selected."""
        return grad

    def received(self, world_size: int, ranks_per_node: int) -> tuple[float, float]:
        """Return P - 1, and the 2 (P - 1) / P of a ring's all-reduce."""
        return world_size - 1, 2 * (world_size - 1) / world_size

    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Select, gather, scatter."""
        top, residual = self.selected(sent, number, job)
        gathered = replace(top, name=f"gathered.{number}", count=top.count * job.world_size)
        ops = (
            Select(sent.name, top.name, residual.name, top.count, self.method),
            AllGather(top.name, gathered.name, Group(job.world_size), algorithm=self.algorithm),
        )
        finish, wide = self.scattered(gathered, sent, number, job)
        return Exchange(ops, finish, (top, residual, gathered, *wide))
