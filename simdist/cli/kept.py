"""Measured schedules on disk, so that an interrupted comparison loses only the one it was at.

`rows.jsonl` holds a record a line: the row of the table as it was printed, and the samples of every seed, which give
the same row again, to the last bit, or that against another baseline. A record is found by its key, a hash of all that
its numbers follow from. A record begins with its line's break, so that one torn by a crash does not swallow the next.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Literal, Self, final

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from simdist import __version__
from simdist.errors import naming_file
from simdist.files import lines_of, open_regular
from simdist.plan import LEVELS
from simdist.runs.building import Built
from simdist.scenario import Scenario
from simdist.studies.comparison import EpochMeans, Row, ScheduleTimes
from simdist.traces.breakdown import STATES

_SAMPLES = {"step", *STATES}
_ADD = " add"  # after the name of what adds to a step: a sample of its own


class _Record(BaseModel, strict=True, allow_inf_nan=False):
    """Fields that a line of the file must have."""

    key: str
    schedule: str
    engine: Literal["des", "fast"]
    seeds: Annotated[int, Field(gt=0)]
    samples: dict[str, list[float]]
    epochs: list[EpochMeans] = []
    staging_s: float = 0.0
    added_s: dict[str, float] = {}
    links_s: dict[str, float] = {}
    drawn: dict[str, list[float]] = {}

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        """Refuse a record without the seconds of every seed, or with but a part of what belongs to epochs."""
        expected = _SAMPLES | {f"{what}{_ADD}" for what in self.added_s}
        if self.samples.keys() != expected or any(len(values) != self.seeds for values in self.samples.values()):
            raise ValueError("other samples")
        if not all(self.samples["step"]) or len({"epochs", "staging_s"} & self.model_fields_set) == 1:
            raise ValueError("no times")
        if any(tuple(epoch.hits) != LEVELS for epoch in self.epochs):
            raise ValueError("other levels")
        return self


@final
class KeptSchedules:
    """The file of measured schedules in a directory; without one, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        """Make the directory; read what was measured before.

        Raises:
            RunError: The file cannot be read, or the directory cannot be made.
        """
        self.path = folder / "rows.jsonl" if folder else None
        if folder:
            with naming_file(folder, "made a directory"):
                folder.mkdir(parents=True, exist_ok=True)
        self._records = self.read()

    def read(self) -> dict[str, _Record]:
        """Return the records that are complete on disk, by key.

        Raises:
            RunError: The file cannot be read.
        """
        if self.path is None or not self.path.exists():
            return {}
        with naming_file(self.path, "read"), open_regular(self.path) as file:
            return {record.key: record for record in map(_record, lines_of(file)) if record}

    def key(self, scenario: Scenario, built: Built, *, n_seeds: int, engine: str) -> str:
        """Return a hash of what a measurement follows from: scenario, recordings, plan, seeds, engine and this version.

        It is empty if nothing is kept.
        """
        if self.path is None:
            return ""
        digest = hashlib.sha256(f"{__version__} {n_seeds} {engine}".encode())
        one = scenario.model_copy(update={"schedules": (built.schedule,)})
        from simdist.runs import run_directory

        for name, content in run_directory.contents(one, built.plan, {}).items():
            digest.update(f"\n{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def get(self, key: str) -> ScheduleTimes | None:
        """Return what was measured under a key."""
        record = self._records.get(key)
        if record is None:
            return None
        samples = {name: np.array(values, dtype=np.float64) for name, values in record.samples.items()}
        step_s, epochs = samples.pop("step"), tuple(record.epochs)
        added_s = {what: samples.pop(f"{what}{_ADD}") for what in record.added_s}
        ends = record.staging_s, added_s, record.links_s
        drawn = {name: np.array(values) for name, values in record.drawn.items()}
        return ScheduleTimes(record.schedule, record.engine, step_s, samples, epochs, *ends, drawn)

    def append(self, key: str, scenario: Scenario, baseline: str, row: Row, measured: ScheduleTimes) -> None:
        """Save a measured schedule, if schedules are kept.

        Raises:
            RunError: It cannot be written.
        """
        if self.path is None:
            return
        samples = {"step": measured.step_s, **measured.states_s}
        samples |= {f"{what}{_ADD}": seconds for what, seconds in measured.added_s.items()}
        record = {
            "key": key,
            "scenario": scenario.name,
            "baseline": baseline,
            **row.document(),
            "samples": {name: values.tolist() for name, values in samples.items()},
        }
        if measured.drawn:
            record["drawn"] = {name: values.tolist() for name, values in measured.drawn.items()}
        with naming_file(self.path), self.path.open("ab") as file:
            file.write(b"\n" + json.dumps(record).encode())
            file.flush()
            os.fsync(file.fileno())


def _record(line: bytes) -> _Record | None:
    """Read a line; None if it is empty, torn or damaged."""
    try:
        return _Record.model_validate_json(line)
    except ValidationError:
        return None
