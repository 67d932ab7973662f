"""A training job as a file of another program describes it."""

from dataclasses import dataclass, field

from simdist.errors import ScenarioError
from simdist.settings.base import plural
from simdist.settings.precision import Precision


@dataclass(frozen=True, slots=True)
class WorkloadKey:
    """A key of the workload.

    Args:
        key: Its name.
        value: As a file has it.
        source: What states it.
    """

    key: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Mesh:
    """How ranks share the copies of a model.

    Args:
        replicate: Number of copies; None for as many as there are ranks.
        shard: Ranks that share one copy; None for all that are there.
        where: Keys that state it, for people.
        settings: Settings of a schedule that shards.
    """

    replicate: int | None
    shard: int | None
    where: str = ""
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def world_size(self) -> int | None:
        """Ranks of the job; None if any number will do."""
        return None if self.replicate is None or self.shard is None else self.replicate * self.shard

    def shard_among(self, world_size: int) -> int:
        """Return how many ranks share one copy.

        Raises:
            ScenarioError: So many ranks do not form such a mesh.
        """
        if self.replicate is None:
            return self.shard or 1
        shard = world_size // self.replicate if self.shard is None else self.shard
        if self.replicate * shard != world_size:
            each = "" if self.shard is None else f", each on {shard} ranks,"
            copies = f"{self.replicate} {plural(self.replicate, 'replica')}"
            raise ScenarioError(
                f"{self.where}: {copies}{each} do not fit {world_size:,} ranks: "
                f"change --nodes, --gpus-per-node or the file"
            )
        return shard


@dataclass(frozen=True, slots=True)
class DescribedJob:
    """A model and how it is trained.

    Args:
        workload: Keys of the workload, but for its utilization, number of passes and batch.
        precision: Of forward and backward pass.
        precision_source: What states it.
        batch_size: Sequences per GPU and pass; None if nothing states it.
        batch_size_source: What states it.
        samples_per_step: Sequences of all ranks in a step; None for one pass of each.
        mesh: How ranks share copies; None if nothing states it.
        is_compiled: With torch.compile.
        remarks: What the scenario leaves out.
    """

    workload: tuple[WorkloadKey, ...]
    precision: Precision = "bf16"
    precision_source: str = ""
    batch_size: int | None = None
    batch_size_source: str = ""
    samples_per_step: int | None = None
    mesh: Mesh | None = None
    is_compiled: bool = False
    remarks: tuple[str, ...] = field(default=())

    def micro_batches(self, batch_size: int, world_size: int) -> int:
        """Return the passes of a step.

        Raises:
            ScenarioError: The samples of a step are no whole number of passes.
        """
        per_pass = batch_size * world_size
        if self.samples_per_step is None:
            return 1
        if self.samples_per_step % per_pass:
            raise ScenarioError(
                f"training.global_batch_size: {self.samples_per_step:,} sequences are no multiple of {per_pass:,}, "
                f"those of a pass of {world_size:,} ranks: change it, --batch-size, --nodes or --gpus-per-node"
            )
        return self.samples_per_step // per_pass
