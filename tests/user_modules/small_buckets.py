"""Schedules as users write them, which extend one that ships by another default."""

from typing import ClassVar, Literal

from pydantic import Field

from simdist.schedules.sync import Sync
from simdist.settings.units import Nbytes


class SmallBuckets(Sync):
    """Synchronous SGD in buckets of 1 MB."""

    examples: ClassVar[tuple[dict[str, object], ...]] = ({}, {"compression": "fp16"})

    kind: Literal["small_buckets"] = "small_buckets"  # type: ignore[assignment]
    bucket_nbytes: Nbytes | None = Field(default=1_000_000, alias="bucket_size")

    def default_label(self) -> str:
        """Return the label."""
        return f"small-buckets{self.traits}"


class SameKind(Sync):
    """Another class of the kind of one that ships: a file names it by its module."""

    bucket_nbytes: Nbytes | None = Field(default=1_000_000, alias="bucket_size")
