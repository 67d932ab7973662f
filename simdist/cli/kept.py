"""ScheduleTimes schedules on disk, so that an interrupted comparison loses only the one it was at.

`rows.jsonl` holds a record a line: the row of the table as it was printed, and the samples of every seed, which give
the same row again, to the last bit, or that against another baseline. A record is found by its key, a hash of all that
its numbers follow from. A record begins with its line's break, so that one torn by a crash does not swallow the next.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, final

import numpy as np

from simdist import __version__
from simdist.errors import RunError
from simdist.plan import LEVELS
from simdist.runs import run_directory
from simdist.runs.building import Built
from simdist.scenario import Scenario
from simdist.studies.comparison import EpochMeans, Row, ScheduleTimes
from simdist.traces.breakdown import STATES

_SAMPLES = {"step", *STATES}


@final
class KeptSchedules:
    """The file of measured schedules in a directory; without one, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        """Make the directory; read what was measured before.

        Raises:
            RunError: The file cannot be read, or the directory cannot be made.
        """
        self.path = folder / "rows.jsonl" if folder else None
        try:
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder}: cannot be made a directory: {error.strerror or error}") from None
        try:
            self._records = self.read()
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the records that are complete on disk, by key."""
        lines = self.path.read_bytes().splitlines() if self.path and self.path.exists() else []
        return {record["key"]: record for record in map(_record, lines) if record}

    def key(self, scenario: Scenario, built: Built, *, n_seeds: int, engine: str) -> str:
        """Return a hash of what a measurement follows from: scenario, recordings, plan, seeds, engine and this version.

        It is empty if nothing is kept.
        """
        if self.path is None:
            return ""
        digest = hashlib.sha256(f"{__version__} {n_seeds} {engine}".encode())
        one = scenario.model_copy(update={"schedules": (built.schedule,)})
        for name, content in run_directory.contents(one, built.plan, {}).items():
            digest.update(f"\n{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def get(self, key: str) -> ScheduleTimes | None:
        """Return what was measured under a key."""
        record = self._records.get(key)
        if record is None:
            return None
        samples = {name: np.array(values, dtype=np.float64) for name, values in record["samples"].items()}
        epochs = tuple(EpochMeans(**epoch) for epoch in record.get("epochs", ()))
        staging_s = record.get("staging_s", 0.0)
        return ScheduleTimes(record["schedule"], record["engine"], samples.pop("step"), samples, epochs, staging_s)

    def append(self, key: str, scenario: Scenario, baseline: str, row: Row, measured: ScheduleTimes) -> None:
        """Save a measured schedule, if schedules are kept.

        Raises:
            RunError: It cannot be written.
        """
        if self.path is None:
            return
        samples = {"step": measured.step_s, **measured.states_s}
        record = {
            "key": key,
            "scenario": scenario.name,
            "baseline": baseline,
            **row.document(),
            "samples": {name: values.tolist() for name, values in samples.items()},
        }
        try:
            with self.path.open("ab") as file:
                file.write(b"\n" + json.dumps(record).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error.strerror or error}") from None


def _record(line: bytes) -> dict[str, Any] | None:
    """Read a line; None if it is empty, torn or damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match record:
        case {
            "key": str(),
            "schedule": str(),
            "engine": "des" | "fast",
            "seeds": int(n_seeds),
            "samples": dict(samples),
        }:
            sound = samples.keys() == _SAMPLES and all(_is_sound(values, n_seeds) for values in samples.values())
            return record if sound and all(samples["step"]) and _has_sound_epochs(record) else None
        case _:
            return None


def _has_sound_epochs(record: dict[str, Any]) -> bool:
    """Tell whether a record has no epochs, or all that belongs to them."""
    match record:
        case {"epochs": [*epochs], "staging_s": float()}:
            return all(map(_is_epoch, epochs))
        case _:
            return not {"epochs", "staging_s"} & record.keys()


def _is_epoch(value: object) -> bool:
    match value:
        case {"epoch": int(), "seconds": float(), "stall_s": float(), "hits": dict(hits), **rest} if not rest:
            return tuple(hits) == LEVELS and all(isinstance(share, float) for share in hits.values())
        case _:
            return False


def _is_sound(values: object, n_seeds: int) -> bool:
    """Tell whether these are seconds of every seed."""
    if not isinstance(values, list) or len(values) != n_seeds:
        return False
    return n_seeds > 0 and all(isinstance(value, float) and math.isfinite(value) for value in values)
