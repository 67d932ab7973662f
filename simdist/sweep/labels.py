"""What schedules are called, known before anything is computed, so that a row that fails has a name as well."""

from typing import final

from pydantic import ValidationError

from simdist.schedules import kinds
from simdist.sweep.keys import canonical
from simdist.sweep.paths import ANYWHERE


@final
class Labels:
    """Labels and kinds of schedules as scenario files have them, each read once.

    >>> labels = Labels()
    >>> labels.of({"kind": "local_sgd", "period": 4}), labels.of({"kind": "local_sgd", "period": "often"})
    (('local-4', 'local_sgd'), ('local_sgd', 'local_sgd'))
    """

    def __init__(self) -> None:
        """Know none yet."""
        self._kinds = kinds()
        self._known: dict[str, tuple[str, str]] = {}

    def of(self, schedule: object) -> tuple[str, str]:
        """Return the label of a schedule and its kind; for one that is wrong, what it says of them."""
        text = canonical(schedule)
        if text not in self._known:
            self._known[text] = self._read(schedule)
        return self._known[text]

    def _read(self, schedule: object) -> tuple[str, str]:
        settings = schedule if isinstance(schedule, dict) else {}
        kind, label = str(settings.get("kind", "")), str(settings.get("label", ""))
        if kind not in self._kinds:
            return label or kind, kind
        try:
            return self._kinds[kind].model_validate(settings, context=ANYWHERE).name, kind
        except ValidationError:
            return label or kind, kind
