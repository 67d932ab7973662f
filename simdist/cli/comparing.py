"""`simdist compare`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simdist.cli import finished, inputs
from simdist.cli.data_text import percent, shown_epochs
from simdist.cli.session import Session
from simdist.cli.tables import factor_with_interval, seconds_in_state, seconds_with_interval, table_text
from simdist.engines import Engine
from simdist.plan import LEVELS
from simdist.progress import ProgressBar
from simdist.runs.building import build
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.studies.comparison import EpochMeans, Row, ScheduleTimes, find_baseline, measure, row
from simdist.traces.breakdown import STATES


@dataclass(frozen=True)
class _Comparison:
    """What is compared, and where finished schedules are kept."""

    session: Session
    name: str
    scenario: Scenario
    baseline: Schedule
    n_seeds: int
    engine: Engine
    kept: finished.Finished | None
    anew: bool

    def rows(self, bar: ProgressBar) -> list[Row]:
        """Measure the baseline, then the others; return the rows in the order of the scenario."""
        keys: dict[str, str] = {}
        try:
            rows = {row.schedule: row for row in self._rows(bar, keys)}
        except KeyboardInterrupt:
            on_disk = self.kept.read() if self.kept else {}
            self.session.saved += [f"{label} in {self._file}" for label, key in keys.items() if key in on_disk]
            raise
        return [rows[schedule.name] for schedule in self.scenario.schedules]

    def _rows(self, bar: ProgressBar, keys: dict[str, str]) -> Iterator[Row]:
        others = [schedule for schedule in self.scenario.schedules if schedule is not self.baseline]
        base: ScheduleTimes | None = None
        for number, schedule in enumerate((self.baseline, *others)):
            with inputs.naming(f"{self.name}: {schedule.name}"):
                keys[schedule.name], measured, is_new = self._measure(schedule, number, bar)
            base = base or measured
            found = row(measured, base)
            if self.kept and is_new:
                self.kept.append(keys[schedule.name], self.scenario, self.baseline.name, found, measured)
            yield found

    @property
    def _file(self) -> Path | None:
        return self.kept.path if self.kept else None

    def _measure(self, schedule: Schedule, number: int, bar: ProgressBar) -> tuple[str, ScheduleTimes, bool]:
        """Return the key under which a measurement is kept, the measurement, and whether it was made now."""

        def progress(label: str, done: int, total: int) -> None:
            bar.update(label, number + done / total, len(self.scenario.schedules))

        progress(schedule.name, 0, 1)
        built = build(self.scenario, schedule)
        key = finished.key(self.scenario, built, n_seeds=self.n_seeds, engine=self.engine) if self.kept else ""
        known = self.kept.get(key) if self.kept and not self.anew else None
        if self.kept and known:
            self.session.say(f"{schedule.name}: measured before, taken from {self._file}")
            return key, known, False
        measured = measure(self.scenario, built, n_seeds=self.n_seeds, engine=self.engine, progress=progress)
        return key, measured, True


def compare(
    session: Session,
    name: str,
    *,
    baseline: str,
    n_seeds: int,
    engine: Engine,
    plot: Path | None,
    output: Path | None,
    anew: bool,
) -> None:
    """Measure all schedules, keep each that is finished, print and draw the table."""
    inputs.check_picture(plot)
    scenario = inputs.read_scenario(session, name)
    reference = find_baseline(scenario, baseline)
    kept = finished.Finished(output) if output else None
    with ProgressBar(sys.stderr) as bar:
        rows = _Comparison(session, name, scenario, reference, n_seeds, engine, kept, anew).rows(bar)
    title = _title(scenario, reference.name, n_seeds)
    document = {"scenario": scenario.name, "baseline": reference.name, "rows": [each.document() for each in rows]}
    header = ("schedule", "step time", "speed-up", *STATES, "engine")
    tables = [table_text(title, header, [_cells(each) for each in rows], words=("schedule", "engine"))]
    if any(each.epochs for each in rows):
        tables.append(_epochs_text(rows, reference.name))
    session.result(document, "\n\n".join(tables))
    if plot:
        _draw(session, title, rows, plot)


def _title(scenario: Scenario, baseline: str, n_seeds: int) -> str:
    counts = f"{scenario.cluster.world_size:,} ranks, {scenario.steps:,} steps, {n_seeds} seed{'s' * (n_seeds > 1)}"
    return f"{scenario.name}: {counts}; speed-up over {baseline}{', 95 % confidence' * (n_seeds > 1)}"


def _cells(row: Row) -> list[str]:
    return [
        row.schedule,
        seconds_with_interval(row.step_s, row.step_s_ci95),
        factor_with_interval(row.speedup, row.speedup_ci95),
        *(seconds_in_state(time_s) for time_s in (row.compute_s, row.comm_s, row.wait_s, row.io_s, row.host_s)),
        row.engine,
    ]


def _epochs_text(rows: list[Row], baseline: str) -> str:
    """Return the table of epochs: of each schedule the first ones and the last."""
    header = ("schedule", "epoch", "time", "speed-up", "stalled", *LEVELS)
    (base,) = (row.epochs for row in rows if row.schedule == baseline)
    cells = [line for row in rows for line in _epoch_cells(row, base)]
    title = "epochs: time, share of it stalled for want of a batch, samples by level"
    return table_text(title, header, cells, words=("schedule", "epoch"))


def _epoch_cells(row: Row, base: tuple[EpochMeans, ...]) -> Iterator[list[str]]:
    if row.staging_s:
        yield [row.schedule, "staging", seconds_in_state(row.staging_s), *[""] * (2 + len(LEVELS))]
    for each in shown_epochs(row.epochs):
        if each is None:
            yield [row.schedule, "...", *[""] * (3 + len(LEVELS))]
        else:
            speedup = factor_with_interval(base[each.epoch].seconds / each.seconds, None) if each.seconds else "-"
            stalled = percent(each.stall_s / each.seconds if each.seconds else 0.0)
            hits = (percent(each.hits[level]) for level in LEVELS)
            yield [row.schedule, str(each.epoch), seconds_in_state(each.seconds), speedup, stalled, *hits]


def _draw(session: Session, title: str, rows: list[Row], plot: Path) -> None:
    from simdist.report import save, speedup_figure

    save(speedup_figure(rows, title=title), plot)
    session.wrote(plot)
