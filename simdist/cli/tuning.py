"""`simdist tune`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import final

from simdist.cli import finished, inputs
from simdist.cli.session import Session
from simdist.cli.tuning_text import tuned_document, tuned_text
from simdist.errors import RunError, ScenarioError
from simdist.progress import ProgressBar
from simdist.runs.building import Built, dataset
from simdist.scenario import Recorded, Scenario, dump
from simdist.schedules import Schedule
from simdist.settings.base import shown
from simdist.settings.units import parse_fraction, parse_nbytes
from simdist.studies import comparison
from simdist.studies.comparison import Row, ScheduleTimes, row
from simdist.tune import Constraints, Extras, Tuned, Wanted
from simdist.tune import tune as find
from simdist.tune.candidates import unlike
from simdist.tune.tuning import baseline_of

_FEW_PERIODS = 10  # in fewer, a last one that is cut off saves a schedule an average that others pay for


@dataclass(frozen=True, slots=True)
class Asked:
    """The options as they were written.

    Args:
        global_every: Steps.
        group_every: Each such as `8:2`.
        max_bytes: Such as `20 MB`, like the next two.
        memory: On the device.
        host_memory: On the host.
        min_density: Such as `0.001` or `1%`.
        only: Kinds of schedules.
        allow: Of `fp16` and `servers`.
        baseline: Label or kind.
        n_seeds: Of the finalists; None leaves it to the search.
        n_search_seeds: Of the search.
        evaluations: At most.
        is_exhaustive: All, however many.
        seed: Of the search.
        output: Directory for what was evaluated.
        scenario_file: To write.
        plot: Picture to write.
    """

    global_every: int = 8
    group_every: tuple[str, ...] = ()
    max_bytes: str | None = None
    memory: str | None = None
    host_memory: str | None = None
    min_density: str | None = None
    only: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    baseline: str = "sync"
    n_seeds: int | None = None
    n_search_seeds: int = 5
    evaluations: int | None = None
    is_exhaustive: bool = False
    seed: int = 0
    output: Path | None = None
    scenario_file: Path | None = None
    plot: Path | None = None

    def wanted(self) -> Wanted:
        """Read the options.

        Raises:
            ScenarioError: One is no size, share or pair.
        """
        sizes = {"--max-bytes": self.max_bytes, "--memory": self.memory, "--host-memory": self.host_memory}
        max_nbytes, memory_nbytes, host_memory_nbytes = (_size(name, text) for name, text in sizes.items())
        return Wanted(
            Constraints(
                self.global_every, tuple(map(_pair, self.group_every)), max_nbytes, memory_nbytes, host_memory_nbytes
            ),
            Extras(self.only, _density(self.min_density), "fp16" in self.allow, "servers" in self.allow),
            self.baseline,
            self.n_seeds,
            self.n_search_seeds,
            self.evaluations,
            self.is_exhaustive,
            self.seed,
        )


def tune(session: Session, name: str, asked: Asked) -> None:
    """Find the fastest schedule of a scenario, say whether to change to it, and write what was asked for.

    Args:
        session: This run of the command line.
        name: Of the scenario.
        asked: The options.
    """
    inputs.check_picture(asked.plot)
    _check_free(asked.scenario_file)
    wanted = asked.wanted()
    scenario = inputs.read_scenario(session, name, is_compared=True)
    baseline = baseline_of(scenario, wanted.baseline)
    _warn(session, scenario, wanted)
    kept = _Kept(session, baseline, finished.Finished(asked.output) if asked.output else None)
    with ProgressBar(sys.stderr) as bar, kept, inputs.naming(name):
        tuned = find(scenario, wanted, measure=kept.measure, progress=bar.update)
    if tuned.runs.remark:
        session.say(f"warning: {name}: {tuned.runs.remark}")
    session.result(tuned_document(tuned, wanted), tuned_text(tuned, wanted))
    if asked.scenario_file:
        _write(session, scenario, tuned, asked.scenario_file)
    if asked.plot:
        _draw(session, tuned, asked.plot)


def _check_free(path: Path | None) -> None:
    """Refuse to write over a scenario, such as the one that is tuned, before the work is done."""
    if path and path.exists():
        raise ScenarioError(f"--write {path}: is there already: write another name")
    if path and not path.parent.is_dir():
        raise ScenarioError(f"--write {path}: there is no directory {path.parent}: make it first")


def _size(name: str, text: str | None) -> float:
    try:
        return float("inf") if text is None else parse_nbytes(text)
    except ValueError as error:
        raise ScenarioError(f"{name}: {error}") from None


def _density(text: str | None) -> float | None:
    try:
        density = None if text is None else parse_fraction(text)
    except ValueError as error:
        raise ScenarioError(f"--min-density: {error}") from None
    if density == 0:
        raise ScenarioError("--min-density 0: nothing would be sent; write e.g. 0.001")
    return density


def _pair(text: str) -> tuple[int, int]:
    ranks, _, steps = text.partition(":")
    if not (ranks.isdecimal() and steps.isdecimal() and int(ranks) >= 2 and int(steps) >= 1):
        raise ScenarioError(
            f"--group-every {shown(text)}: write RANKS:STEPS, 2 ranks and 1 step or more, such as 8:2: groups of 8 "
            f"ranks or more exchange every 2 steps"
        )
    return int(ranks), int(steps)


@final
class _Kept:
    """Measures, keeps what is measured, and knows the fastest so far for who does not want to wait longer."""

    def __init__(self, session: Session, baseline: Schedule, kept: finished.Finished | None) -> None:
        self._session, self._baseline, self._kept = session, baseline, kept
        self._first: dict[tuple[int, int], ScheduleTimes] = {}  # by seed and number of seeds: the baseline comes first
        self._fastest: Row | None = None
        self._n_kept = 0

    def __enter__(self) -> None:
        """Measure from now on."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Say after Ctrl-C what was found."""
        if kind is not KeyboardInterrupt:
            return
        if self._kept and self._n_kept:
            self._session.saved.append(f"{self._n_kept} evaluations in {self._kept.path}")
        if self._fastest:
            found = f"{self._fastest.schedule}, {self._fastest.speedup:.2f} times as fast as {self._baseline.name}"
            self._session.say(f"fastest so far, with the seeds of the search: {found}")

    def measure(self, scenario: Scenario, built: Built, n_seeds: int) -> ScheduleTimes:
        """Simulate a plan with so many seeds, unless it was before."""
        key = finished.key(scenario, built, n_seeds=n_seeds, engine="auto") if self._kept else ""
        known = self._kept.get(key) if self._kept else None
        measured = known or comparison.measure(scenario, built, n_seeds=n_seeds)
        found = row(measured, self._first.setdefault((scenario.seed, n_seeds), measured))
        if self._fastest is None or found.step_s < self._fastest.step_s:
            self._fastest = found
        if self._kept:
            self._n_kept += 1
            if known is None:
                self._kept.append(key, scenario, self._baseline.name, found, measured)
        return measured


def _warn(session: Session, scenario: Scenario, wanted: Wanted) -> None:
    every = wanted.constraints.global_every
    if dataset(scenario) is not None and scenario.steps < _FEW_PERIODS * every:
        session.say(
            f"warning: {scenario.steps} steps of a data set hold fewer than {_FEW_PERIODS} periods of {every} steps, "
            f"so the last steps decide; write steps: {_FEW_PERIODS * every} or more, or a smaller --global-every"
        )
    if any(isinstance(each, Recorded) for each in scenario.disturbances):
        session.say("recorded disturbances: every seed draws blocks of the recorded steps anew")


def _write(session: Session, scenario: Scenario, tuned: Tuned, path: Path) -> None:
    """Write the scenario with the baseline and the other finalists."""
    schedules: list[Schedule] = []
    for each in sorted(tuned.finalists, key=lambda each: not each.is_baseline):
        label = unlike([schedule.name for schedule in schedules], each.schedule.name)
        changed = {} if label == each.schedule.name else {"label": label}
        schedules.append(each.schedule.model_copy(update=changed))
    text = dump(scenario.changed(schedules=schedules))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
    session.wrote(path)


def _draw(session: Session, tuned: Tuned, path: Path) -> None:
    from simdist.report import save
    from simdist.report.tuning import front_figure

    save(front_figure(tuned), path)
    session.wrote(path)
