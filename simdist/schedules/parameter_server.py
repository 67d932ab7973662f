"""Parameter servers: workers push gradients to servers, which sum them, and pull the result."""

from functools import lru_cache
from typing import ClassVar, Literal, final

from pydantic import Field

from simdist.plan import AllReduce, Body, Broadcast, Buffer, Group, Reduce, Server, Servers, Wait
from simdist.plan.lanes import pull_from, push_to
from simdist.schedules import parts
from simdist.schedules.gradient import GRADIENT_TRAITS, Exchange, GradientSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import REQUIRED, LabelForm, piece, written
from simdist.schedules.tuning import FP16, SERVERS, Allowance, Axis, Permit
from simdist.settings.units import Whole


@final
class ParameterServer(GradientSchedule):
    """Average gradients in every step over servers: every rank pushes its part to each server and pulls the averages.

    With few servers, all ranks converge on the network cards of these servers. With one server on every rank and even
    parts, it is a direct reduce-scatter and all-gather. Ranks do not sum within their node first, so every GPU's
    gradients pass the node's network cards. Servers keep no parameters: every rank updates its own.

    Source:
        Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014; Jiang et al., A Unified
        Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters, OSDI 2020 (BytePS:
        even parts, servers on machines of their own); tf.train.replica_device_setter (whole tensors, round robin) and
        tf.contrib.training.GreedyLoadBalancingStrategy (`greedy`).
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"servers": 1},
        {"servers": 2, "placement": "tensors"},
        {"servers": 3, "placement": "greedy", "first_bucket_nbytes": 0, "bucket_nbytes": 0},
        {"servers": 8, "compression": "fp16"},
        {"servers": 2, "placement": "tensors", "pull": "tensor", "compression": "fp16"},
        {"servers": 3, "placement": "greedy", "pull": "step", "apart": True},
    )

    place: ClassVar[int] = 60
    permit: ClassVar[Permit | None] = SERVERS
    permits: ClassVar[tuple[Permit, ...]] = (FP16,)

    label_form: ClassVar[LabelForm] = (
        "ps",
        (
            piece("servers", before="-", default=REQUIRED),
            piece("apart", [(True, "-apart")]),
            piece("placement", [("tensors", "-tensors"), ("greedy", "-greedy")]),
            piece("pull", [("tensor", "-by-tensor"), ("step", "-by-step")]),
            *GRADIENT_TRAITS,
        ),
    )
    kind: Literal["parameter_server"] = "parameter_server"
    servers: Whole = Field(ge=1)
    """Number of servers. Server i is rank i x world // servers, rounded down, so they spread over the nodes."""
    apart: bool = False
    """Servers are machines of their own, beside the ranks. Only the simulator supports this."""
    pull: Literal["bucket", "tensor", "step"] = "bucket"
    """`bucket`: a bucket is pushed and pulled, then the next one. Otherwise, each server has a queue of tensors that
    it serves in parallel with other servers. `tensor`: a tensor is pulled once all ranks have pushed it
    (`distributed_replicated` of tf_cnn_benchmarks). `step`: once they have pushed all tensors (its
    `parameter_server`)."""
    placement: Literal["even", "tensors", "greedy"] = "even"
    """`even`: every bucket is split evenly. `tensors`: tensor t is on server t modulo their number. `greedy`: each
    tensor, in forward order, is on the server that holds the fewest elements so far."""

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the axes of the base without shared updates: servers send whole gradients to all ranks."""
        return tuple(each for each in super().axes(job, allowed) if each.name != "shared_update")

    @classmethod
    def sending_axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the numbers of servers."""
        return (cls.axis("servers", parts.server_counts(job)),)

    def default_label(self) -> str:
        """Return the label, such as `ps-4` or `ps-1-apart-tensors`."""
        return written(self, self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what does not fit: an algorithm, or more servers than ranks."""
        found = []
        if self.algorithm not in ("auto", "server"):
            found.append(("algorithm", f"{self.algorithm}: the servers are the algorithm; leave it out"))
        if self.servers > shape.world_size and not self.apart:
            most = shape.world_size
            found.append(("servers", f"{self.servers} on {most} ranks: write at most {most}, or apart: true"))
        if self.pull != "bucket" and self.placement == "even":
            found.append(("pull", f"{self.pull}: whole tensors are pulled; write placement: tensors, or greedy"))
        if self.shared_update:
            found.append(("shared_update", "servers hand whole gradients to all ranks: write sync, or torus"))
        return found

    def limits(self) -> tuple[int, int]:
        """Return the sizes at which buckets are closed. With queues, each tensor is a bucket."""
        return super().limits() if self.pull == "bucket" else (0, 0)

    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Push and pull the bucket."""
        if self.pull != "bucket":
            return self._queued(sent, number, job)
        even = parts.even_servers(sent.count, self.servers, job.world_size)
        held = even.parts if self.placement == "even" or sent.tensors is None else self._parts(sent.tensors, job)
        servers = Servers(held, () if self.apart else even.members)
        return Exchange((AllReduce(sent.name, Group(job.world_size), algorithm="server", servers=servers),))

    def _queued(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Push and pull a tensor. Buckets are numbered from the last tensor."""
        server_of = self._server_of_tensor(job.tensor_counts)[::-1]
        server = server_of[number]
        world = Group(job.world_size)
        root = server % job.world_size if self.apart else server * job.world_size // self.servers
        at = Server(server, self.apart)
        push = Reduce(sent.name, world, root, algorithm="server", server=at, lane=push_to(server))
        pull = Broadcast(sent.name, world, root, algorithm="server", server=at, lane=pull_from(server))
        if self.pull == "tensor":
            return Exchange((push, pull))
        pushed: Body = ()
        if number == len(server_of) - 1:
            kind = sent.name.split(".")[0]
            pushed = tuple(Wait(f"{kind}.{last}") for last in {at: n for n, at in enumerate(server_of)}.values())
        return Exchange((push, *pushed), (pull,))

    def _parts(self, tensors: tuple[int, int], job: Job) -> tuple[int, ...]:
        """Return the number of elements of a bucket on each server. Which elements changes neither time nor sum."""
        server_of = self._server_of_tensor(job.tensor_counts)
        held = [0] * self.servers
        for tensor in range(*tensors):
            held[server_of[tensor]] += job.tensor_counts[tensor]
        return tuple(held)

    def _server_of_tensor(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        if self.placement == "tensors":
            return tuple(tensor % self.servers for tensor in range(len(counts)))
        return _least_loaded(counts, self.servers)


@lru_cache(maxsize=4)  # every bucket of a plan asks
def _least_loaded(counts: tuple[int, ...], n_servers: int) -> tuple[int, ...]:
    """Return the server of each tensor: the one that holds the fewest elements so far."""
    load = [0] * n_servers
    chosen = []
    for count in counts:
        server = load.index(min(load))
        load[server] += count
        chosen.append(server)
    return tuple(chosen)
