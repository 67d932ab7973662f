"""Measured schedules on disk, so that an interrupted comparison loses only the one it was at.

`rows.jsonl` holds a record a line, with a checksum: the row of the table as it was printed, and the samples of every
seed, which give the same row again, to the last bit, or that against another baseline. A record is found by its key, a
hash of all that its numbers follow from.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, final

import numpy as np

from simdist import __version__
from simdist.errors import naming_file
from simdist.files import read_jsonl, with_checksum
from simdist.runs.building import Built
from simdist.scenario import Scenario
from simdist.studies.comparison import EpochMeans, Row, ScheduleTimes

_ADD = " add"  # after the name of what adds to a step: a sample of its own


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

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the records that are complete on disk, by key.

        Raises:
            RunError: The file cannot be read.
        """
        return {record["key"]: record for record in read_jsonl(self.path) if "key" in record} if self.path else {}

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
        samples, drawn = (
            {name: np.array(values) for name, values in record.get(part, {}).items()} for part in ("samples", "drawn")
        )
        added_s = {what: samples.pop(f"{what}{_ADD}") for what in record.get("added_s", {})}
        return ScheduleTimes(
            record["schedule"],
            record["engine"],
            samples.pop("step"),
            samples,
            tuple(EpochMeans(**each) for each in record.get("epochs", ())),
            record.get("staging_s", 0.0),
            added_s,
            record.get("links_s", {}),
            drawn,
            record.get("gradients_used", 1.0),
            {int(rank): share for rank, share in record.get("late", {}).items()},
        )

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
            file.write(with_checksum(json.dumps(record).encode()))
            file.flush()
            os.fsync(file.fileno())
