"""Global top-k: pairs of ranks merge their largest entries, then pairs of pairs, until all hold the same k."""

from dataclasses import replace
from typing import ClassVar, Literal, final

from simdist.plan import AllGather, Broadcast, Buffer, Group, Merge, Op, Select, algorithms
from simdist.plan.lanes import COMM
from simdist.schedules.gradient import GRADIENT_TRAITS, Exchange
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import LabelForm, piece, written
from simdist.schedules.sparse import SPARSE_TRAITS, SparseSchedule


@final
class GTopK(SparseSchedule):
    """Keep the k largest entries of each pairwise sum, in log2 P rounds. A rank sends k entries per round.

    In round j, ranks 2^j apart exchange the k entries that they hold, and keep the k largest of the sum. Both then hold
    and drop the same entries as all others of their 2^(j+1) ranks. Each adds its share of the dropped entries, one
    2^(j+1)-th, to its residual, so that nothing is lost.

    In the paper, one rank of each pair sends, and the result is broadcast down a tree. Here both send at the same time,
    over links of both directions, so no broadcast is needed: half the rounds. `broadcast: true` adds one, to reproduce
    the paper's times. The authors' code also keeps other residuals. A rank takes back its entries with indices that are
    not in the result. Entries that a merge dropped are lost if other ranks bring their indices into the result.

    Source:
        Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
        ICDCS 2019, arXiv 1901.04359; github.com/hclhkbu/gtopkssgd (allreducer.py, which selects from the whole
        gradient).
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"density": 1.0, "broadcast": True, "warmup_steps": 1},
        {"density": 0.01, "bucket_nbytes": 1_000_000, "compression": "fp16"},
    )

    place: ClassVar[int] = 90

    label_form: ClassVar[LabelForm] = (
        "gtopk",
        (*SPARSE_TRAITS, piece("broadcast", [(True, "-broadcast")]), *GRADIENT_TRAITS),
    )
    kind: Literal["gtopk"] = "gtopk"
    broadcast: bool = False
    """Broadcast the result from rank 0, down a binomial tree if `algorithm` is `auto`."""

    def default_label(self) -> str:
        """Return the label, such as `gtopk-0.001` or `gtopk-0.001-broadcast`."""
        return written(self, self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what does not fit: a number of ranks that is not a power of two, or an algorithm without broadcast."""
        found = super().problems(shape)
        if shape.world_size & (shape.world_size - 1):
            found.append(
                ("kind", f"gtopk merges pairs, and needs a power of two; the world has {shape.world_size} ranks")
            )
        if self.broadcast and not algorithms.carries(self.algorithm, Broadcast):
            found.append(("algorithm", f"{self.algorithm} does not broadcast: write auto, or broadcast: false"))
        return found

    def sent(self, grad: Buffer, job: Job) -> Buffer:
        """Return the bucket itself: entries are converted when they are selected."""
        return grad

    def received(self, world_size: int, ranks_per_node: int) -> tuple[float, float]:
        """Return log2 P rounds, and one more for the broadcast; and the 2 (P - 1) / P of a ring's all-reduce."""
        n_rounds = (world_size - 1).bit_length()
        return n_rounds + (self.broadcast and world_size > 1), 2 * (world_size - 1) / world_size

    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Select, then exchange and merge in rounds, then scatter."""
        top, residual = self.selected(sent, number, job)
        pair = replace(top, name=f"pair.{number}", count=2 * top.count)
        ops: list[Op] = [Select(sent.name, top.name, residual.name, top.count, self.method)]
        distance = 1
        while distance < job.world_size:
            ops += [
                AllGather(top.name, pair.name, Group(2, stride=distance), algorithm=self.algorithm),
                Merge(pair.name, top.name, residual.name, divisor=2 * distance, lane=COMM),
            ]
            distance *= 2
        if self.broadcast:
            algorithm = "tree" if self.algorithm == "auto" else self.algorithm
            ops.append(Broadcast(top.name, Group(job.world_size), algorithm=algorithm))
        finish, wide = self.scattered(top, sent, number, job)
        return Exchange(tuple(ops), finish, (top, residual, pair, *wide))
