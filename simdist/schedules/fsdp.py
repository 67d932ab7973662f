"""FSDP: all ranks share one copy of the model."""

from typing import ClassVar, Literal, final

from simdist.schedules.labels import LabelForm, written
from simdist.schedules.sharded import SHARDED_TRAITS, ShardedSchedule
from simdist.schedules.sync import Sync
from simdist.settings.base import unchecked_copy


@final
class FSDP(ShardedSchedule):
    """Shard the model over all ranks, and average gradients in every step.

    Source:
        See `ShardedSchedule`.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"reshard_after_forward": True, "wrap": "blocks"},
        {"communicators": 2, "reduce_buffers": 2, "forward_prefetch": 2, "backward_prefetch": 2},
        {"accumulation": "local", "reshard_after_backward": False},
        {"param_dtype": "bfloat16", "reduce_dtype": "float32", "keep_last_unit": True},
    )

    place: ClassVar[int] = 12

    label_form: ClassVar[LabelForm] = ("fsdp", SHARDED_TRAITS)
    kind: Literal["fsdp"] = "fsdp"

    def default_label(self) -> str:
        """Return the label, such as `fsdp` or `fsdp-keep`."""
        return written(self, self.label_form)

    def sharers(self, world_size: int) -> int:
        """Return all ranks."""
        return world_size

    def between_copies(self) -> Sync:
        """Return synchronous SGD: there is only one copy."""
        return unchecked_copy(Sync(), label=self.name, algorithm=self.algorithm)
