"""Frames of results: one row for each record, and one number or word in each cell."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from simdist.errors import require

if TYPE_CHECKING:
    import pandas as pd

_INTERVAL = "_ci95"  # ends the names of 95 % intervals


def frame_of_records(records: Iterable[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return records as a pandas frame; an interval such as `step_s_ci95` becomes `step_s_low` and `step_s_high`.

    A column without any value is one of numbers, all NaN.

    Raises:
        UnsupportedError: pandas is not installed.
    """
    require("pandas", extra="tables", what="a frame of results")
    import pandas as pd

    found = pd.DataFrame([_flat(each) for each in records])
    missing = [name for name in found.columns if found[name].isna().all()]
    return found.astype(dict.fromkeys(missing, "float64"))


def _flat(record: Mapping[str, Any]) -> dict[str, object]:
    """Return a record with each interval in two cells."""
    flat: dict[str, object] = {}
    for key, cell in record.items():
        if key.endswith(_INTERVAL):
            low, high = cell or (None, None)
            flat[key.replace(_INTERVAL, "_low")] = low
            flat[key.replace(_INTERVAL, "_high")] = high
        else:
            flat[key] = cell
    return flat
