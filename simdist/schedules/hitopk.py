"""Hierarchical top-k communication: dense within a node, the largest entries between nodes."""

from dataclasses import replace
from typing import ClassVar, Literal, final

from simdist.plan import AllGather, Body, Buffer, Densify, Op, Select
from simdist.plan.lanes import COMM
from simdist.plan.ops import SelectMethod
from simdist.schedules import parts
from simdist.schedules.gradient import GRADIENT_TRAITS, Exchange
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import LabelForm, written
from simdist.schedules.sparse import SPARSE_TRAITS, SparseSchedule


@final
class HiTopK(SparseSchedule):
    """Average within the node, send the largest entries of each GPU's slice between nodes, reassemble the slices.

    With m nodes of n GPUs, d elements and density rho: reduce-scatter in the node (d/n elements a GPU); the k = rho d/n
    largest of the slice; all-gather of k values and indices over the j-th GPUs of all nodes; sum; all-gather in the
    node. A node receives (m - 1) rho d values and indices, not (mn - n) rho d as in a flat sparse all-gather.

    Selection and sum run on the comm stream, between the collectives that they wait for. On the compute stream they
    would hold up the backward pass until the first collective was done. In the model they overlap with the backward
    pass at full speed. On a GPU both share the memory bandwidth.

    Source:
        Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
        arXiv 2010.10458 (HiTopKComm, with MSTopK).
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"density": 1.0, "method": "exact", "warmup_steps": 3},
        {"density": 0.01, "bucket_nbytes": 1_000_000, "compression": "fp16"},
    )

    place: ClassVar[int] = 80

    label_form: ClassVar[LabelForm] = ("hitopk", (*SPARSE_TRAITS, *GRADIENT_TRAITS))
    kind: Literal["hitopk"] = "hitopk"
    method: SelectMethod = "mstopk"

    def default_label(self) -> str:
        """Return the label, such as `hitopk-0.001-mstopk`."""
        return written(self, self.label_form)

    def n_slices(self, shape: Shape) -> int:
        """Return the number of GPUs per node."""
        return shape.ranks_per_node

    def received(self, world_size: int, ranks_per_node: int) -> tuple[float, float]:
        """Return the factors of a slice between m nodes: m - 1, and the 2 (m - 1) / m of a ring's all-reduce."""
        nodes = world_size // ranks_per_node
        return nodes - 1, 2 * (nodes - 1) / nodes

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return also a sentence if there is no other node to send entries to."""
        found = super().unused_settings(shape)
        if shape.ranks_per_node == shape.world_size:
            found.append("selects entries to send between nodes, and there is one node: sync sends as little")
        return found

    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Reduce-scatter, select, gather between nodes, sum, all-gather."""
        shard = parts.shard_of(sent, number, job)
        between, buffers = self._between(shard, number, job)
        ops = parts.within_nodes(sent, shard, between, job, algorithm=self.algorithm)
        return Exchange(ops, buffers=buffers if shard == sent else (shard, *buffers))

    def _between(self, shard: Buffer, number: int, job: Job) -> tuple[Body, tuple[Buffer, ...]]:
        """Return the operations that average the slice over the nodes, and their buffers. One node gathers nothing."""
        peers = parts.node_peers(job)
        top, residual = self.selected(shard, number, job)
        gathered = replace(top, name=f"gathered.{number}", count=top.count * peers.size) if peers.size > 1 else top
        ops: list[Op] = [Select(shard.name, top.name, residual.name, top.count, self.method, lane=COMM)]
        if peers.size > 1:
            ops.append(AllGather(top.name, gathered.name, peers, algorithm=self.algorithm))
        ops.append(Densify(gathered.name, shard.name, divisor=peers.size, lane=COMM))
        return tuple(ops), (top, residual, gathered) if peers.size > 1 else (top, residual)
