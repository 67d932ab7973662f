"""A training job as files of other programs describe it."""

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

from simdist.errors import ScenarioError
from simdist.settings.base import plural, shown
from simdist.settings.precision import Precision

#: Settings of a schedule, as a file has them.
ScheduleSettings: TypeAlias = tuple[tuple[str, object], ...]

GUESS = "guess"
_NAMES_OF_MODEL = ("preset", "file", "transformer")


@dataclass(frozen=True, slots=True)
class WorkloadKey:
    """A key of the workload.

    Args:
        key: Its name.
        value: As a file has it.
        source: What states it; begins with `guess` if nothing does.
    """

    key: str
    value: object
    source: str

    @property
    def is_guessed(self) -> bool:
        """Nothing states it."""
        return self.source.startswith(GUESS)


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a job.

    Args:
        nodes: Number of machines; None for as many as its ranks fill.
        per_node: Ranks of each; None likewise.
        source: What states them.
    """

    nodes: int | None
    per_node: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Mesh:
    """How ranks share the copies of a model.

    Args:
        replicate: Number of copies; None for as many as there are ranks.
        shard: Ranks that share one copy; None for all that are there, `node` for those of a machine.
        where: Keys that state it, for people.
        settings: Settings of a schedule that shards.
        whole: Settings of synchronous SGD, if every rank has a copy.
    """

    replicate: int | None
    shard: int | Literal["node"] | None
    where: str = ""
    settings: ScheduleSettings = ()
    whole: ScheduleSettings = ()

    @property
    def world_size(self) -> int | None:
        """Ranks of the job; None if any number will do."""
        if self.replicate is None or not isinstance(self.shard, int):
            return None
        return self.replicate * self.shard

    def shard_among(self, world_size: int, per_node: int) -> int:
        """Return how many ranks share one copy.

        Raises:
            ScenarioError: So many ranks do not form such a mesh.
        """
        if self.replicate is None:
            shard = per_node if self.shard == "node" else self.shard or 1
            copies = "copies"
            fits = world_size % shard == 0
        else:
            shard = self.shard if isinstance(self.shard, int) else world_size // self.replicate
            copies = f"{self.replicate} {plural(self.replicate, 'replica')}"
            fits = self.replicate * shard == world_size
        if not fits:
            each = "" if self.shard is None else f", each on {shard} ranks,"
            raise ScenarioError(
                f"{self.where}: {copies}{each} do not fit {world_size:,} ranks: "
                f"change --nodes, --gpus-per-node or the file"
            )
        return shard


@dataclass(frozen=True, slots=True)
class DescribedJob:
    """A model, how it is trained, or both.

    Args:
        workload: Keys of the workload, but for its utilization, number of passes and batch.
        precision: Of forward and backward pass; None if nothing states it.
        precision_source: What states it.
        batch_size: Sequences per GPU and pass; None if nothing states it.
        batch_size_source: What states it.
        samples_per_step: Sequences of all ranks in a step; None if nothing states them.
        samples_source: What states them.
        passes: Passes of a step; None if nothing states them.
        passes_source: What states them.
        sequence: Tokens of a sample, of a file that has no model; None if it does not state them.
        sequence_source: What states them.
        machines: Where it runs; None if nothing states it.
        mesh: How ranks share copies; None if nothing states it.
        is_compiled: With torch.compile; None if nothing states it.
        remarks: What the scenario leaves out.
    """

    workload: tuple[WorkloadKey, ...] = ()
    precision: Precision | None = None
    precision_source: str = ""
    batch_size: int | None = None
    batch_size_source: str = ""
    samples_per_step: int | None = None
    samples_source: str = ""
    passes: int | None = None
    passes_source: str = ""
    sequence: int | None = None
    sequence_source: str = ""
    machines: Machines | None = None
    mesh: Mesh | None = None
    is_compiled: bool | None = None
    remarks: tuple[str, ...] = ()

    @property
    def has_model(self) -> bool:
        """It names a model."""
        return any(each.key in _NAMES_OF_MODEL for each in self.workload)

    @property
    def n_ranks(self) -> int | None:
        """Ranks of the mesh, or those whose passes are the samples of a step; None if any number will do."""
        if self.mesh is not None and self.mesh.world_size is not None:
            return self.mesh.world_size
        if self.samples_per_step is None or self.batch_size is None or self.passes is None:
            return None
        return max(1, self.samples_per_step // (self.batch_size * self.passes))

    def fitting_nodes(self, nodes: int, per_node: int) -> int:
        """Return the most machines, at most `nodes`, among whose passes the samples of a step divide; or else 1."""
        if self.samples_per_step is None:
            return nodes
        per_node_pass = per_node * (self.batch_size or 1)
        return next((n for n in range(nodes, 1, -1) if self.samples_per_step % (n * per_node_pass) == 0), 1)

    def batch_of(self, world_size: int) -> tuple[int, str]:
        """Return the sequences per GPU and pass, and what states them."""
        if self.batch_size is not None:
            return self.batch_size, self.batch_size_source
        if self.samples_per_step is None:
            return 1, GUESS
        n_passes = world_size * (self.passes or 1)
        return max(1, self.samples_per_step // n_passes), f"{self.samples_source} / {n_passes:,} passes"

    def micro_batches(self, batch_size: int, world_size: int) -> tuple[int, str]:
        """Return the passes of a step, and what states them.

        Raises:
            ScenarioError: The samples of a step are no whole number of passes, or not the passes that are stated.
        """
        if self.samples_per_step is None:
            return self.passes or 1, self.passes_source
        per_pass = batch_size * world_size
        n_passes = self.samples_per_step // per_pass
        if self.samples_per_step % per_pass:
            raise ScenarioError(
                f"{self.samples_source}: {self.samples_per_step:,} sequences are no multiple of {per_pass:,}, "
                f"those of a pass of {world_size:,} ranks: change it, --batch-size, --nodes or --gpus-per-node"
            )
        if self.passes not in (None, n_passes):
            raise ScenarioError(
                f"{self.samples_source}: {self.samples_per_step:,} sequences are {n_passes} passes of {per_pass:,}, "
                f"not {self.passes_source} {self.passes}: change one of them, --batch-size, --nodes or --gpus-per-node"
            )
        return n_passes, self.samples_source


def combined_job(first: DescribedJob, second: DescribedJob) -> DescribedJob:
    """Return the job that two files describe together.

    Raises:
        ScenarioError: Both state the same thing differently.
    """
    changes: dict[str, object] = {"remarks": (*first.remarks, *second.remarks), "workload": _both_keys(first, second)}
    for name in (each.name for each in fields(DescribedJob)):
        if name not in changes and not name.endswith("_source"):
            source = f"{name.removesuffix('_per_step')}_source"
            owner = _owner(first, second, name, source)
            changes |= {each: getattr(owner, each) for each in (name, source) if hasattr(owner, each)}
    return replace(first, **changes)  # type: ignore[arg-type]  # names and types are those of the fields


def _owner(first: DescribedJob, second: DescribedJob, name: str, source: str) -> DescribedJob:
    """Return the job whose value of an attribute counts: what is stated replaces a guess."""
    values = (getattr(first, name), getattr(second, name))
    guessed = [str(getattr(each, source, "")).startswith(GUESS) for each in (first, second)]
    if values[1] is None or guessed[1]:
        return second if values[0] is None else first
    if values[0] is None or guessed[0] or values[0] == values[1]:
        return second
    raise ScenarioError(f"--from: two files state {name.replace('_', ' ')}: leave it out of one")


def _both_keys(first: DescribedJob, second: DescribedJob) -> tuple[WorkloadKey, ...]:
    """Return the keys of both; what is stated replaces a guess."""
    found: dict[str, WorkloadKey] = {}
    for each in (*first.workload, *second.workload):
        known = found.get(each.key)
        if known is not None and not known.is_guessed and not each.is_guessed and known.value != each.value:
            raise ScenarioError(
                f"--from: {each.key} is {shown(each.value)} ({each.source}) and {shown(known.value)} ({known.source}): "
                f"leave one of them out"
            )
        if known is None or known.is_guessed:
            found[each.key] = each
    if (
        len([key for key in found if key in ("preset", "file")]) > 1
        or sum(job.has_model for job in (first, second)) > 1
    ):
        raise ScenarioError("--from: two files have a model: leave one of them out")
    return tuple(found.values())
