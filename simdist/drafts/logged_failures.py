"""Failures of a new scenario, from logs: rates with their intervals, and the parts of a recovery.

Rates are those of the first log's program. Logs of other programs, which would count the same failures again, tell
parts of the recovery only.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simdist.drafts.described_jobs import printable
from simdist.failure_logs.intervals import event_bounds, median_event_bound, median_interval, share_bounds
from simdist.failure_logs.reading import read_failures
from simdist.failure_logs.records import LoggedEffect, LoggedFailures, LoggedTries
from simdist.settings.base import picked, plural
from simdist.settings.units import format_duration
from simdist.studies.columns import Column
from simdist.studies.tables import table_text

_OF_JOBS = ("out of memory", "error in the program", "preemption")  # more GPUs do not make them more frequent
_LASTS = "lasts"  # the part that belongs to what is planned
_PARTS = ("detect", "diagnose", "schedule", "start", "connect", "load", "warm_up")
_COMPUTED = "load"  # from the checkpoint, if it is not written
_YEAR_S = 8760 * 3600.0
_DAY_S = 86_400.0
_MOST_PER_YEAR = 10.0  # of rates that are written in percent per year
_DIGITS = 4
_MOST_TRIES = 100  # where no limit is known
_COMPONENTS = {"gpu": "GPU", "node": "node", "job": "job"}
_MEASURE = "a longer log"
_HINT = "# failures end attempts of the whole job: write train_for, e.g. 30 days, and checkpoint, e.g. {every: 30 min}"


@dataclass(frozen=True, slots=True)
class LoggedRate:
    """How often something of one cause happened.

    Args:
        cause: Its name.
        effect: What it ended.
        of: Component whose time counts: `gpu`, `node` or `job`.
        n_events: How often it was seen.
        n_ended: Jobs or ranks that it ended.
        exposure_s: Component-time; None if the log does not say it.
        file: The log.
    """

    cause: str
    effect: LoggedEffect
    of: str
    n_events: int
    n_ended: int
    exposure_s: float | None
    file: str

    @property
    def per_s(self) -> float | None:
        """Events per time of one component; of none that were seen, as likely too small as too large."""
        return _divided(self.n_events or median_event_bound(0), self.exposure_s)

    @property
    def bounds_per_s(self) -> tuple[float, float] | None:
        """The 95 % interval of the rate."""
        return None if self.exposure_s is None else _both(event_bounds(self.n_events), self.exposure_s)

    def document(self) -> dict[str, object]:
        """Return it as JSON.

        Columns:
            cause, effect, of, file (str): Name, what it ended, the component that fails, and the log.
            n_events, n_ended (int): Events, and jobs or ranks that they ended.
            exposure_s (float or null): Component-time. `null`: the log does not say it.
            rate_per_s, low_per_s, high_per_s (float or null): Of one component, and its 95 % interval.
        """
        low, high = self.bounds_per_s or (None, None)
        about = picked(self, "cause", "effect", "of", "file", "n_events", "n_ended", "exposure_s")
        return {**about, "rate_per_s": self.per_s, "low_per_s": low, "high_per_s": high}

    def counted(self) -> str:
        """Return events and component-time for people."""
        events = f"{self.n_events} {plural(self.n_events, 'event')}"
        hours = f"{_COMPONENTS[self.of]}-hours"
        return events if self.exposure_s is None else f"{events} in {self.exposure_s / 3600:,.5g} {hours}"

    def ends(self) -> tuple[str, str]:
        """Return the ends of the interval as a scenario has them; a rate of which the exposure is known."""
        assert self.per_s is not None
        assert self.bounds_per_s is not None
        low_per_s, high_per_s = self.bounds_per_s
        return _rate_text(low_per_s, self.per_s), _rate_text(high_per_s, self.per_s)


def _divided(n: float, exposure_s: float | None) -> float | None:
    return None if exposure_s is None else n / exposure_s


def _both(ends: tuple[float, float], exposure_s: float) -> tuple[float, float]:
    return ends[0] / exposure_s, ends[1] / exposure_s


@dataclass(frozen=True, slots=True)
class RecoveryPart:
    """How long a part of a recovery took.

    Args:
        part: As `failures.recovery` names it.
        samples_s: Each that was seen.
        source: How it was measured.
        file: The log.
    """

    part: str
    samples_s: tuple[float, ...]
    source: str
    file: str

    @property
    def median_s(self) -> float:
        """The median."""
        return statistics.median(self.samples_s)

    def document(self) -> dict[str, object]:
        """Return it as JSON.

        Columns:
            part, source, file (str): Key of `failures.recovery`, how it was measured, and the log.
            n (int): How often it was seen.
            median_s (float): Median.
            low_s, high_s (float or null): Its 95 % interval. `null`: fewer than 6 were seen.
            least_s, most_s (float): Shortest and longest.
        """
        low, high = median_interval(self.samples_s) or (None, None)
        found = {**picked(self, "part", "source", "file"), "n": len(self.samples_s), "median_s": self.median_s}
        return {**found, "low_s": low, "high_s": high, "least_s": min(self.samples_s), "most_s": max(self.samples_s)}


@dataclass(frozen=True, slots=True)
class DraftedFailures:
    """What logs say about failures.

    Args:
        logs: One for each program.
        rates: Of all causes, those of which the exposure is not known included.
        recovery: Parts that were seen.
    """

    logs: Sequence[LoggedFailures]
    rates: tuple[LoggedRate, ...]
    recovery: tuple[RecoveryPart, ...]

    def document(self) -> dict[str, object]:
        """Return it as JSON.

        Columns:
            rates (list): "A rate of failures".
            recovery (list): "A part of a recovery".
            tries (object): Only if a try to start again failed: `n_tries`, `n_succeeded` (int), and the 95 % interval
                `low`, `high` (float) of the share that succeeded.
            not_counted (object): How many ends of jobs are no failures, by what they are (int).
            notes (list): What the logs do not say, and what was decided (str).
        """
        return {
            "rates": [each.document() for each in self.rates],
            "recovery": [each.document() for each in self.recovery],
            **({"tries": self._tries_document(tries)} if (tries := self.tries) else {}),
            "not_counted": dict(self.logs[0].not_counted),
            "notes": list(self.notes()),
        }

    def notes(self) -> Iterator[str]:
        """Yield what the logs do not say, and what was decided."""
        yield from (f"{self.logs[0].file}: {note}" for note in self.logs[0].notes)
        ends = ", ".join(f"{n} {end}" for end, n in self.logs[0].not_counted.items())
        if ends:
            yield f"{self.logs[0].file}: not counted as failures: {ends}."
        for log in self.logs[1:]:
            yield f"{log.file}: only parts of the recovery: {self.logs[0].file} counts the failures."

    @property
    def tries(self) -> LoggedTries | None:
        """Tries to start again, by the first log that says some; None if none of them failed."""
        found = next((log.tries for log in self.logs if log.tries), None)
        return found if found and found.lost_s else None

    def _tries_document(self, tries: LoggedTries) -> dict[str, object]:
        low, high = share_bounds(tries.n_succeeded, tries.n_tries)
        return {"n_tries": tries.n_tries, "n_succeeded": tries.n_succeeded, "low": low, "high": high}

    @property
    def known(self) -> list[LoggedRate]:
        """The rates of which the log says the exposure."""
        return [rate for rate in self.rates if rate.exposure_s]

    def text(self) -> str:
        """Return rates and parts as tables."""
        tables = [table_text(f"failures in {self.logs[0].file}", _RATES, [rate.document() for rate in self.rates])]
        if self.recovery:
            parts = [each.document() for each in self.recovery]
            tables.append(table_text("parts of a recovery", _RECOVERY, parts))
        return "\n\n".join(tables)

    def lines(self) -> list[str]:
        """Return them as lines of a scenario. Without any rate, all are comments."""
        notes = [f"  # {note}" for note in self.notes()]
        unknown = [
            f"    # {each.cause}: {each.counted()}; rate unknown: how long it ran is not in {each.file}"
            for each in self.rates
            if not each.exposure_s
        ]
        causes = [f"    - {self._cause_text(rate)}" for rate in self.known]
        found = [*notes, "  causes:", *causes, *unknown, *self._recovery_lines()]
        found = [_HINT, "failures:", *map(printable, found)]
        return found if causes else [f"# {line}" for line in found]

    def _recovery_lines(self) -> Iterator[str]:
        known = [part for part in self.recovery if part.part != _LASTS]
        yield "  recovery:  # medians" if known or self.tries else "  # recovery:"
        for part in known:
            *above, key = part.part.split(".")
            value = _time_text(part.median_s)
            text = f"{above[0]}: {{{key}: {value}}}" if above else f"{key}: {value}"
            yield f"    {text}  # {_interval_text(part)}; {part.source} ({part.file})"
        if self.tries:
            yield f"    tries: {_tries_text(self.tries)}"
        seen = {part.part for part in self.recovery}
        unknown = [part for part in _PARTS if part not in seen and part != _COMPUTED]
        yield f"    # unknown: {', '.join(unknown)}. Until you write them they take no time."

    def _cause_text(self, rate: LoggedRate) -> str:
        assert rate.per_s is not None
        keys = f"cause: {rate.cause}, of: {rate.of}, rate: {_rate_text(rate.per_s, rate.per_s)}, effect: {rate.effect}"
        lasts = next((each for each in self.recovery if each.part == _LASTS), None)
        if rate.effect == "planned" and lasts is not None:
            keys += f", lasts: {_time_text(lasts.median_s)}"
        text = f"{{{keys}}}  # {rate.counted()}; 95 %: {' to '.join(rate.ends())}"
        return text if rate.n_events else f"{text}; the rate is as likely less as more"

    def range_lines(self) -> list[str]:
        """Return the intervals as entries of `uncertain`."""
        lines: list[str] = []
        for i, rate in enumerate(self.known):
            low, high = rate.ends()
            source = f"95 % interval of {rate.counted()}"
            lines.append(_range_text(f"failures.causes[{i}].rate", low, high, source))
        for part in self.recovery if self.known else ():
            ends = median_interval(part.samples_s)
            low, high = map(_time_text, ends or (0.0, 0.0))
            if low != high and part.part in _PARTS:
                source = f"95 % interval of the median of {len(part.samples_s)}"
                lines.append(_range_text(f"failures.recovery.{part.part}", low, high, source))
        if self.known and (tries := self.tries):
            low, high = map(_share_text, share_bounds(tries.n_succeeded, tries.n_tries))
            source = f"95 % interval of {tries.n_succeeded} of {tries.n_tries} tries"
            lines.append(_range_text("failures.recovery.tries.success", low, high, source))
        return lines


def _tries_text(tries: LoggedTries) -> str:
    success = _share_text(tries.n_succeeded / tries.n_tries)
    parts = {"success": success, "most": str(_MOST_TRIES), "lost": _time_text(statistics.median(tries.lost_s))}
    if tries.back_off_s:
        parts["back_off"] = _time_text(statistics.median(tries.back_off_s))
    keys = ", ".join(f"{key}: {value}" for key, value in parts.items())
    ends = " to ".join(_share_text(end) for end in share_bounds(tries.n_succeeded, tries.n_tries))
    return (
        f"{{{keys}}}  # {tries.n_succeeded} of {tries.n_tries} starts lasted a minute; 95 %: {ends}; the log tells no "
        f"limit (most)"
    )


def _share_text(share: float) -> str:
    return f"{100 * share:.{_DIGITS}g} %"


def _range_text(path: str, low: str, high: str, source: str) -> str:
    return f'  {path}: {{from: {low}, to: {high}, source: "{source}", measure: {_MEASURE}}}'


def _rate_text(per_s: float, like_per_s: float) -> str:
    """Return a rate as a scenario has it, in the unit that suits another one."""
    if like_per_s * _YEAR_S < _MOST_PER_YEAR:
        return f"{100 * per_s * _YEAR_S:.{_DIGITS}g} % per year"
    return f"{per_s * _DAY_S:.{_DIGITS}g} per day"


def _time_text(seconds: float) -> str:
    """Return a time as a scenario has it."""
    return format_duration(seconds, _DIGITS).replace(",", "")


def _interval_text(part: RecoveryPart) -> str:
    ends = median_interval(part.samples_s)
    n = len(part.samples_s)
    if ends is not None:
        return f"of {n}; 95 %: {format_duration(ends[0])} to {format_duration(ends[1])}"
    least_to_most = f"{format_duration(min(part.samples_s))} to {format_duration(max(part.samples_s))}"
    return f"of {n}, {least_to_most}; fewer than 6 have no 95 % interval"


_RATES = (
    Column("cause"),
    Column("of"),
    Column("events", "n_events", form=str),
    Column("component-hours", "exposure_s", form=lambda seconds: f"{seconds / 3600:,.5g}"),
    Column("rate", "rate_per_s", "rate_per_s", form=_rate_text),
    Column("at least", "low_per_s", "rate_per_s", form=_rate_text),
    Column("at most", "high_per_s", "rate_per_s", form=_rate_text),
)
_RECOVERY = (
    Column("part"),
    Column("seen", "n", form=str),
    Column("median", "median_s", form=format_duration),
    Column("at least", "low_s", form=format_duration),
    Column("at most", "high_s", form=format_duration),
    Column("from", "source"),
)


def draft_failures(paths: Sequence[Path]) -> DraftedFailures:
    """Return what logs say about failures.

    Args:
        paths: Logs of Slurm, torchrun or ml-goodput-measurement.

    Raises:
        ScenarioError: One cannot be read, is damaged, or says nothing.
    """
    logs = read_failures(paths)
    return DraftedFailures(logs, tuple(_rates(logs[0])), tuple(_parts(logs)))


def _rates(log: LoggedFailures) -> Iterator[LoggedRate]:
    seen: Mapping[str, LoggedEffect] = {each.cause: each.effect for each in log.interruptions}
    for cause, effect in {**log.expected, **seen}.items():
        of = _component(cause, effect, log)
        exposure_s = {"job": log.exposure.job_s, "node": log.exposure.node_s, "gpu": log.exposure.gpu_s}[of]
        events = [each for each in log.interruptions if each.cause == cause]
        n_ended = sum(each.n_ended for each in events)
        yield LoggedRate(cause, effect, of, len(events), n_ended, exposure_s, log.file)


def _component(cause: str, effect: LoggedEffect, log: LoggedFailures) -> str:
    """Return the component that fails: the smallest of which the time is known, and that the cause belongs to."""
    if cause in _OF_JOBS:
        return "job"
    if effect != "node" and log.exposure.gpu_s is not None:
        return "gpu"
    return "job" if log.exposure.node_s is None else "node"


def _parts(logs: Sequence[LoggedFailures]) -> Iterator[RecoveryPart]:
    """Yield each part once, from the first log that says it."""
    seen: set[str] = set()
    for log in logs:
        for part, samples_s in log.recovery_s.items():
            if part not in seen:
                seen.add(part)
                yield RecoveryPart(part, samples_s, log.sources[part], log.file)
