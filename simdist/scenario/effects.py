"""What a scenario uses. It decides which of its settings have an effect."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from simdist.plan.ops import Destination
from simdist.schedules.job import Policy, uses_disk, uses_memory

EffectSource: TypeAlias = Literal["device", "memory", "storage"]
WITHOUT_DATA = "has no effect: without data a batch is one request"


@dataclass(frozen=True, slots=True)
class Uses:
    """What a scenario uses. Each class of settings has a method `unused` that takes it.

    Args:
        n_steps: Simulated steps.
        source: Where batches come from.
        has_data: Whether there is a data set.
        policies: By which the schedules read the data set. Empty if nothing reads it.
        saves_to: Where checkpoints are written; None without checkpoints.
        nics: Whether something may leave a node other than by the fabric.
        n_nodes: Machines.
        hides_pauses: Whether the device still has work when its host is late.
        file_nbytes: Bytes of the smallest file of the data set; 0 without one.
        sample_nbytes: Bytes of a decoded sample.
        decodes: Whether samples take time to decode.
    """

    n_steps: int
    source: EffectSource
    has_data: bool
    policies: frozenset[Policy]
    saves_to: Destination | None
    nics: bool
    n_nodes: int
    hides_pauses: bool
    file_nbytes: int
    sample_nbytes: int
    decodes: bool

    @property
    def storage(self) -> bool:
        """Whether batches are read from storage, or checkpoints are written there."""
        return "storage" in (self.source, self.saves_to)

    @property
    def disk(self) -> bool:
        """Whether nodes keep files on their disks."""
        return any(map(uses_disk, self.policies))

    @property
    def memory(self) -> bool:
        """Whether nodes keep samples in their memories."""
        return any(map(uses_memory, self.policies))

    @property
    def one_domain(self) -> str:
        """The machines in words, if the fabric joins them all."""
        return "one node" if self.n_nodes == 1 else f"one domain of {self.n_nodes} nodes"

    @property
    def nothing_is_read(self) -> str:
        """Why a setting of reads has no effect."""
        return f"has no effect: with input.source {self.source} nothing is read"

    def unkept(self, what: str) -> Iterator[str]:
        """Yield why a setting of what nodes keep has no effect, if they do not.

        Args:
            what: `files` or `samples`.
        """
        if not self.has_data:
            yield WITHOUT_DATA
        elif self.policies and not (self.disk if what == "files" else self.memory):
            names = sorted(self.policies)
            keepers = f"the policy {names[0]} keeps" if len(names) == 1 else f"the policies {', '.join(names)} keep"
            yield f"has no effect: {keepers} no {what}"
