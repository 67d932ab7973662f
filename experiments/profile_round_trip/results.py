"""Predictions and measurements of each job: as files that are kept, and as tables of the page."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Timing:
    """Steps of a schedule, predicted and measured.

    Args:
        schedule: Its label.
        measured_s: Seconds per step of each window.
        predicted_s: Seconds per step.
        interval: The speed-up over sync that `simdist whatif` states, with 95 %; None if it recommends nothing.
    """

    schedule: str
    measured_s: tuple[float, ...]
    predicted_s: float
    interval: tuple[float, float] | None = None

    @property
    def step_s(self) -> float:
        """Measured seconds per step, the median of the windows."""
        return median(self.measured_s)

    @property
    def error(self) -> float:
        """Share of the measured step by which the prediction is longer."""
        return self.predicted_s / self.step_s - 1


@dataclass(frozen=True, slots=True)
class Delay:
    """A delay as it was injected and as it was found.

    Args:
        kind: `transient` or `persistent`.
        rank: Who is late.
        step: When, by the profiler's numbers; None of a persistent one.
        injected_s: 0 if it was not injected.
        found_s: 0 if it was not found.
    """

    kind: str
    rank: int
    step: int | None
    injected_s: float
    found_s: float

    @property
    def is_right(self) -> bool:
        """Whether it was both injected and found."""
        return self.injected_s > 0 and self.found_s > 0

    @property
    def error(self) -> float:
        """Share of the injected delay by which the one that was found is longer."""
        return self.found_s / self.injected_s - 1


@dataclass(frozen=True, slots=True)
class Computing:
    """The median step of a rank without an exchange: what import takes it for, and what it is.

    Args:
        schedule: The averaging schedule that was measured, which exchanges in few of its steps.
        imported_s: Seconds that the traces of sync tell.
        profiled_s: Seconds in the profiled window of the schedule.
        plain_s: Seconds in the windows before it.
    """

    schedule: str
    imported_s: float
    profiled_s: float
    plain_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a case.

    Args:
        case: Its name.
        timings: Of each schedule, sync first.
        profiled_s: Seconds per step of sync while it was profiled.
        computing: Steps without an exchange; None if no averaging schedule was profiled.
        delays: Injected ones and found ones.
    """

    case: str
    timings: tuple[Timing, ...]
    profiled_s: float
    computing: Computing | None
    delays: tuple[Delay, ...]

    @property
    def spread(self) -> float:
        """Share by which the longest window of sync was longer than the shortest, none of them profiled."""
        windows_s = self.timings[0].measured_s
        return max(windows_s) / min(windows_s) - 1

    @property
    def profiled_error(self) -> float:
        """Share by which the predicted step of sync is longer than the one that was profiled, and imported."""
        return self.timings[0].predicted_s / self.profiled_s - 1

    @property
    def profiler_share(self) -> float:
        """Share by which the window of sync with the profiler was longer than the median of those without."""
        return self.profiled_s / self.timings[0].step_s - 1

    def timing(self, schedule: str) -> Timing:
        """Return the steps of a schedule."""
        return next(each for each in self.timings if each.schedule == schedule)

    def speedups(self, timing: Timing) -> tuple[float, float]:
        """Return how many times as fast as sync a schedule is, as predicted and as measured."""
        sync = self.timings[0]
        return sync.predicted_s / timing.predicted_s, sync.step_s / timing.step_s

    def speedup_error(self, timing: Timing) -> float:
        """Return the share of the measured speed-up by which the predicted one is greater."""
        predicted, measured = self.speedups(timing)
        return predicted / measured - 1


def save(result: Result, path: Path) -> None:
    """Write a result."""
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Result:
    """Read a result."""
    content = json.loads(path.read_text(encoding="utf-8"))
    timings = tuple(
        Timing(each["schedule"], tuple(each["measured_s"]), each["predicted_s"], tuple(each["interval"] or ()) or None)
        for each in content["timings"]
    )
    computing = Computing(**content["computing"]) if content["computing"] else None
    delays = tuple(Delay(**each) for each in content["delays"])
    return Result(content["case"], timings, content["profiled_s"], computing, delays)


def timing_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield steps and speed-ups of every case and schedule."""
    yield (
        "| job | schedule | ms per step, measured | predicted | error | speed-up, measured | predicted | error "
        "| `whatif`, 95 % |"
    )
    for result in results:
        for timing in result.timings:
            line = (
                f"| {result.case} | `{timing.schedule}` | {1e3 * timing.step_s:.1f} | {1e3 * timing.predicted_s:.1f} "
            )
            line += f"| {timing.error:+.1%} |"
            if timing is result.timings[0]:
                yield f"{line} | | | |"
                continue
            predicted, measured = result.speedups(timing)
            line += f" {measured:.2f} | {predicted:.2f} | {result.speedup_error(timing):+.1%} |"
            stated = "{:.2f} to {:.2f}".format(*timing.interval) if timing.interval else "nothing recommended"
            yield f"{line} {stated} |"


def profiler_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield what the profiler costs: steps of sync with it and without it."""
    yield "| job | ms per step of `sync`: not profiled | profiled | predicted | error against profiled |"
    for result in results:
        sync = result.timings[0]
        windows = ", ".join(f"{1e3 * each:.1f}" for each in sync.measured_s)
        yield (
            f"| {result.case} | {windows} | {1e3 * result.profiled_s:.1f} | {1e3 * sync.predicted_s:.1f} "
            f"| {result.profiled_error:+.1%} |"
        )


def sharded_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield steps of jobs under `fully_shard`."""
    yield "| job | schedule | ms per step: not profiled | profiled | predicted | error | error against profiled |"
    for result in results:
        timing = result.timings[0]
        windows = ", ".join(f"{1e3 * each:.1f}" for each in timing.measured_s)
        times = f"{windows} | {1e3 * result.profiled_s:.1f} | {1e3 * timing.predicted_s:.1f}"
        errors = f"{timing.error:+.1%} | {result.profiled_error:+.1%}"
        yield f"| {result.case} | `{timing.schedule}` | {times} | {errors} |"


def sharded_summary(results: Sequence[Result]) -> Iterator[str]:
    """Yield the answers in short, of jobs under `fully_shard`."""
    errors = _range_text([result.timings[0].error for result in results])
    profiled = _range_text([result.profiled_error for result in results])
    yield (
        f"* {len(results)} jobs under `fully_shard` on CPUs, where every collective blocks its host: step predicted "
        f"{errors} off, of steps that were profiled {profiled} off. {_stragglers_text(results)}."
    )


def computing_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield by how much an averaging schedule is predicted too slow, and the parts of it that were measured."""
    yield (
        "| job | schedule | ms per step without an exchange: from the traces of `sync` | profiled | not profiled "
        "| step, predicted - measured, ms | for the profiler | for computing beside exchanges | for the rest |"
    )
    for result in results:
        if result.computing is None:
            continue
        found, timing = result.computing, result.timing(result.computing.schedule)
        profiler_s, beside_s = found.profiled_s - found.plain_s, found.imported_s - found.profiled_s
        error_s = timing.predicted_s - timing.step_s
        times_s = (found.imported_s, found.profiled_s, found.plain_s)
        parts_s = (error_s, profiler_s, beside_s, error_s - profiler_s - beside_s)
        cells = [*(f"{1e3 * each:.1f}" for each in times_s), *(f"{1e3 * each:+.1f}" for each in parts_s)]
        yield f"| {result.case} | `{found.schedule}` | {' | '.join(cells)} |"


def straggler_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield every delay that was injected or found."""
    yield "| job | kind | rank | step | injected, ms | found, ms | error |"
    for result in results:
        for each in result.delays:
            step = "all" if each.step is None else each.step
            injected, found = (f"{1e3 * each_s:.1f}" if each_s else "-" for each_s in (each.injected_s, each.found_s))
            error = f"{each.error:+.1%}" if each.is_right else ""
            yield f"| {result.case} | {each.kind} | {each.rank} | {step} | {injected} | {found} | {error} |"


def summary(asleep: Sequence[Result], convnets: Sequence[Result]) -> Iterator[str]:
    """Yield the answers in short, of emulated devices and of real arithmetic."""
    yield f"* {len(asleep)} jobs whose layers sleep: {_errors_text(asleep)}."
    speedups = [
        (timing.interval, result.speedups(timing)[1])
        for result in asleep
        for timing in result.timings[1:]
        if timing.interval
    ]
    inside = sum(low <= measured <= high for (low, high), measured in speedups)
    above = sum(measured > high for (_, high), measured in speedups)
    yield (
        f"* Of the {len(speedups)} measured speed-ups of these, {inside} are in the interval of 95 % that `simdist "
        f"whatif` states, {above} above it, {len(speedups) - inside - above} below."
    )
    yield f"* {_stragglers_text(asleep)}."
    if convnets:
        spread = max(result.spread for result in convnets)
        profiled = _range_text([result.profiled_error for result in convnets])
        longer = _range_text([result.profiler_share for result in convnets])
        yield (
            f"* {len(convnets)} jobs that compute in earnest on two shared cores: {_errors_text(convnets)}; of the "
            f"steps that were profiled {profiled} off, and the profiler's own window is {longer} longer than one "
            f"without it; two windows without it differ by up to {spread:.0%}. {_stragglers_text(convnets)}. "
            f"`simdist whatif` recommends a schedule for {sum(map(_is_advised, convnets))} of them."
        )


def _is_advised(result: Result) -> bool:
    return any(timing.interval for timing in result.timings)


def _errors_text(results: Sequence[Result]) -> str:
    syncs = [result.timings[0].error for result in results]
    speedups = [result.speedup_error(timing) for result in results for timing in result.timings[1:]]
    return (
        f"step of `sync` predicted {_range_text(syncs)} off, speed-ups over `sync` {_range_text(speedups)}, "
        f"in {len(speedups)} runs"
    )


def _range_text(errors: Sequence[float]) -> str:
    return f"{min(errors):+.1%}" if len(errors) == 1 else f"{min(errors):+.1%} to {max(errors):+.1%}"


def _stragglers_text(results: Sequence[Result]) -> str:
    """Say how many injected stragglers were found, and what else."""
    delays = [each for result in results for each in result.delays]
    injected = [each for each in delays if each.injected_s]
    right = [each for each in injected if each.is_right]
    sizes = f", with sizes at most {max((each.error for each in right), key=abs):+.1%} off" if right else ""
    others = len(delays) - len(injected)
    return (
        f"Of {len(injected)} injected stragglers, {len(right)} were found by rank and step{sizes}; found besides: "
        f"{others or 'none'}"
    )
