"""Synchronous SGD with backup workers: each update uses the gradients that arrive first."""

from dataclasses import replace
from functools import cache
from typing import Annotated, ClassVar, Literal, final

from pydantic import BeforeValidator, Field

from simdist.plan import AllReduce, Body, Enter, Group, Plan, Result, algorithms
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import REQUIRED, LabelForm, Piece, piece, written
from simdist.schedules.sync import Sync
from simdist.schedules.tuning import DROPPED_GRADIENTS, Allowance, Axis, Permit
from simdist.settings.units import Whole, parse_whole_or

_OF_SERVERS = ("auto", "server")
_TRANSPORT = Piece(
    "algorithm",
    r"-(?!ps-)[a-z][\w:.]*",
    lambda algorithm: "" if algorithm in _OF_SERVERS else f"-{algorithm}",
    lambda text: text[1:],
)
_BACKUP_PARTS = (8, 16, 32, 64)  # one rank in this many is dropped


@final
class BackupWorkers(Schedule):
    """Average the first n - b gradients of n ranks to arrive, by time, and drop those that arrive later.

    A late rank takes the averages of the steps that the others have completed meanwhile, updates its parameters with
    them, and continues with the newest step. So parameters are the same on all ranks. Rank 0 decides once per step
    which ranks are in time. It decides over the whole gradient, so the exchange does not overlap with the backward
    pass. The first ranks push their gradients to servers that hold even parts of it. All ranks pull the averages, late
    or not. With an all-reduce algorithm such as `ring`, the first ranks reduce among themselves, and late ranks pull
    the average from one of them. With b = 0 it is synchronous SGD with one bucket, without servers.

    Source:
        Chen et al., Revisiting Distributed Synchronous SGD, arXiv 1604.00981, section 3, algorithms 3 and 4.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"backup": 2},
        {"backup": 0},
        {"backup": 6, "servers": "world"},
        {"backup": 1, "servers": 1},
        {"backup": 2, "algorithm": "ring"},
    )

    place: ClassVar[int] = 70
    permit: ClassVar[Permit | None] = DROPPED_GRADIENTS

    label_form: ClassVar[LabelForm] = (
        "backup",
        (
            piece("backup", before="-", default=REQUIRED),
            _TRANSPORT,
            piece("servers", [("node", ""), ("world", "-ps-world")], before="-ps-"),
        ),
    )
    kind: Literal["backup_workers"] = "backup_workers"
    backup: Whole = Field(ge=0)
    """Number of ranks that an update does not wait for."""
    servers: Annotated[int | Literal["node", "world"], BeforeValidator(parse_whole_or("node", "world"))] = "node"
    """Number of servers, or one per node or rank. Server i is rank i x world // servers, as in `parameter_server`."""

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the numbers of servers (or none), and the numbers of ranks that updates do not wait for."""
        n_nodes = job.world_size // job.ranks_per_node
        servers: list[int | str] = ["node", *(count for count in parts.server_counts(job) if count != n_nodes)]
        backups = sorted({max(1, job.world_size // part) for part in _BACKUP_PARTS})
        return (cls.axis("servers", servers), cls.axis("algorithm", ["auto", "ring"]), cls.axis("backup", backups))

    def default_label(self) -> str:
        """Return the label, such as `backup-2`, `backup-2-ps-4` or `backup-2-ring`."""
        return written(self, self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what does not fit: the algorithm, a `backup` of all ranks, or the number of servers."""
        found = []
        n_in = shape.world_size - self.backup
        if algorithms.needs_power_of_two(self.algorithm) and n_in & (n_in - 1):
            without = f"the world without {self.backup} has {n_in} ranks"
            found.append(("algorithm", f"{self.algorithm} needs a power of two; {without}: choose ring"))
        if not algorithms.carries(self.algorithm, AllReduce):
            found.append(("algorithm", f"{self.algorithm} is no algorithm of all_reduce: choose ring"))
        if self.backup >= shape.world_size:
            found.append(("backup", f"{self.backup} of {shape.world_size} ranks: write at most {shape.world_size - 1}"))
        if not 1 <= self._n_servers(shape.world_size, shape.ranks_per_node) <= shape.world_size:
            wanted = f"1 to {shape.world_size}, node or world"
            found.append(("servers", f"{self.servers} on {shape.world_size} ranks: write {wanted}"))
        return found

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return a sentence if its servers or `run_ahead_steps` have no effect."""
        if self.backup and self.run_ahead_steps is not None:
            return ["waits for the update before each step, to see which is next: run_ahead_steps has no effect"]
        if self.servers == "node":
            return []
        if self.backup == 0:
            return ["waits for all ranks, which need no servers: servers has no effect"]
        return [] if self._by_servers else ["the first ranks all-reduce among themselves: servers has no effect"]

    def write(self, job: Job) -> Plan:
        """Write the plan."""
        if self.backup == 0:
            algorithm = "auto" if self._by_servers else self.algorithm
            return Sync(label=self.name, bucket_nbytes=None, algorithm=algorithm).write(job)
        buckets = parts.gradient_buckets(job, first_nbytes=parts.WHOLE_MODEL_NBYTES, nbytes=parts.WHOLE_MODEL_NBYTES)
        exchange = AllReduce("grad.0", Group(job.world_size), algorithm=self.algorithm, drop=self.backup)
        if self._by_servers:
            n_servers = self._n_servers(job.world_size, job.ranks_per_node)
            servers = parts.even_servers(sum(job.tensor_counts), n_servers, job.world_size)
            exchange = replace(exchange, algorithm="server", servers=servers)
        end = (
            *parts.last_backward(job, buckets, all_reduce=None, algorithm=self.algorithm),
            exchange,
            *parts.optimize(job, buckets),
        )

        @cache
        def body(begins_like: int) -> Body:
            return (Enter(awaits="param"), *parts.begin_step(job, begins_like, buckets), *end)

        steps = (body(parts.begins_like(job, step)) for step in range(job.n_steps))
        buffers = parts.training_buffers(job, buckets)
        return Plan.from_steps(
            self.name, world_size=job.world_size, buffers=buffers, steps=steps, dataset=job.input_path.dataset
        )

    def result(self, step: int, job: Job) -> Result:
        """Declare that every step averages the gradients of all ranks except the late ones."""
        return Result(Group(job.world_size), Group(1), job.micro_batches, drop=self.backup)

    @property
    def _by_servers(self) -> bool:
        return self.algorithm in _OF_SERVERS

    def _n_servers(self, world_size: int, ranks_per_node: int) -> int:
        counts: dict[object, int] = {"node": world_size // ranks_per_node, "world": world_size}
        return counts.get(self.servers) or int(self.servers)
