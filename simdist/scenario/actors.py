"""Actors of users that a scenario names: processes of the simulation beside the plan."""

import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from simdist.settings.base import Settings
from simdist.settings.plugins import ACTORS, OpenKinds, written_kind

if TYPE_CHECKING:
    import simpy


class CustomActor(Settings, abc.ABC):
    """A process of a user's own: it takes bandwidth, slows links down or holds ranks up while a plan is simulated.

    A subclass sets `kind`, a `Literal` field with a name for people, and adds its settings as fields.
    """

    kind: str

    @abc.abstractmethod
    def __call__(self, env: "simpy.Environment", cluster: Any) -> "Iterator[simpy.Event]":
        """Yield events until it ends. Each schedule and seed starts it anew, and the last rank ends it.

        Args:
            env: The environment; its time counts in seconds from the start of the run.
            cluster: The `simdist.engines.live.LiveCluster`.
        """

    def kind_in_files(self) -> str:
        """Return the `kind` by which a scenario finds the class again."""
        return written_kind(type(self), ACTORS)


#: The classes that `kind` may name in `actors` of a scenario. None ships.
KINDS: OpenKinds[CustomActor] = OpenKinds("actor", ACTORS, lambda: (CustomActor,), dict, lambda _: None)
