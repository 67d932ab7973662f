"""Two-dimensional torus all-reduce: the GPUs of a node share the node's traffic."""

from typing import ClassVar, Literal, final

from simdist.plan import AllReduce, Buffer
from simdist.schedules import parts
from simdist.schedules.gradient import GRADIENT_TRAITS, Exchange, GradientSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import LabelForm, written


@final
class Torus(GradientSchedule):
    """Average gradients over all ranks in every step. Each GPU of a node carries its share over the network.

    Reduce-scatter in the node, so that every GPU holds one slice of the node's mean; all-reduce of that slice over the
    j-th GPUs of all nodes; all-gather in the node. A node sends about as much through its NIC as in a flat ring. But m
    nodes of n GPUs need 2 (m - 1) steps between nodes instead of 2 (mn - 1).

    Source:
        Mikami et al., Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash, arXiv 1811.05233.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"bucket_nbytes": None, "compression": "fp16"},
        {"shared_update": True},
    )

    place: ClassVar[int] = 20

    label_form: ClassVar[LabelForm] = ("torus", GRADIENT_TRAITS)
    kind: Literal["torus"] = "torus"

    def default_label(self) -> str:
        """Return the label, such as `torus` or `torus-fp16`."""
        return written(self, self.label_form)

    def n_slices(self, shape: Shape) -> int:
        """Return the number of GPUs per node."""
        return shape.ranks_per_node

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what is wrong with the algorithm."""
        return [*super().problems(shape), *parts.slicing_problems(self.algorithm)]

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return also a sentence if the torus has only one dimension."""
        found = super().unused_settings(shape)
        if shape.ranks_per_node == shape.world_size:
            found.append("has one node, and nothing to share between nodes: sync does the same in one all-reduce")
        elif shape.ranks_per_node == 1:
            found.append("has one GPU a node, and nothing to share within nodes: it is sync")
        return found

    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Reduce-scatter, all-reduce and all-gather the bucket."""
        shard = parts.shard_of(sent, number, job)
        peers = parts.node_peers(job)
        between = (AllReduce(shard.name, peers, algorithm=self.algorithm),) if peers.size > 1 else ()
        ops = parts.within_nodes(sent, shard, between, job, algorithm=self.algorithm)
        return Exchange(ops, buffers=(shard,) if shard != sent else ())
