"""Published jobs that failed: do their rates and recoveries, simulated, give the published answers?

    python experiments/published_goodput/run.py            print the table
    python experiments/published_goodput/run.py --write    write it into the README

Each row is a file that `simdist goodput` reads, such as experiments/published_goodput/scenarios/opt.yaml.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from simdist.report import markdown_table, page_command
from simdist.scenario import load
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import steps_in
from simdist.studies.statistics import relative_error
from simdist.studies.suffering import best_interval, for_search, steady, suffer

HERE = Path(__file__).parent
N_SEEDS = 20
UNITS = {
    "goodput": "% trains",
    "saving": "% saves checkpoints",
    "minutes": "min",
    "repeated": "repeated steps",
    "between": "h between failures",
    "best": "steps between checkpoints",
}


@dataclass(frozen=True)
class Row:
    """A published answer.

    Args:
        what: The job.
        scenario: File of its inputs.
        answer: What is compared, a key of `UNITS`.
        published: Least and most that the source states; equal unless it is a range.
        source: Of the answer.
        remark: What the source leaves open.
        simulated: The answer of the simulator.
    """

    what: str
    scenario: str
    answer: str
    published: tuple[float, float]
    source: str
    remark: str
    simulated: float

    @property
    def error(self) -> float:
        """(simulated - published) / published, with the nearest published number."""
        least, most = self.published
        return relative_error(self.simulated, min(max(self.simulated, least), most))

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        least, most = self.published
        published = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        job = f"[{self.what}](scenarios/{self.scenario}.yaml)"
        simulated = f"{self.simulated:.0f}" if self.simulated >= 100 else f"{self.simulated:.3g}"
        return (job, UNITS[self.answer], published, simulated, f"{self.error:+.0%}", self.remark)


@cache
def rows() -> tuple[Row, ...]:
    """Simulate every published answer."""
    lines = (line for line in (HERE / "published.csv").read_text(encoding="utf-8").splitlines() if line[0] != "#")
    return tuple(
        Row(
            each["what"],
            each["scenario"],
            each["answer"],
            (float(each["at_least"]), float(each["at_most"])),
            each["source"],
            each["remark"],
            simulated(each["scenario"], each["answer"]),
        )
        for each in csv.DictReader(lines)
    )


@cache
def simulated(name: str, answer: str) -> float:
    """Return an answer of the simulator, as `simdist goodput` gives it: the mean over seeds."""
    scenario = load(HERE / "scenarios" / f"{name}.yaml")
    failures = scenario.failures
    assert failures is not None
    schedule = scenario.schedules[0]
    trained = steady(scenario, schedule, partial(steps_in, schedule=schedule, n_seeds=1))
    if answer == "best":
        best = best_interval(failures, *for_search(scenario, failures, trained))
        assert best is not None
        return best
    found = suffer(failures, trained, run_seeds(scenario.seed, N_SEEDS))
    total_s = float(found.total_s.mean())
    match answer:
        case "goodput":
            return 100 * float(found.goodput.mean())
        case "saving":
            return 100 * float(found.seconds["checkpoint_save"].mean()) / total_s
        case "minutes":
            return total_s / 60
        case "repeated":
            return found.mean(lambda each: each.n_repeated)
        case "between":
            n_failures = found.mean(lambda each: sum(cause.n_failures for cause in each.by_cause.values()))
            return total_s / 3600 / n_failures
    raise ValueError(f"{answer!r} is none of {', '.join(UNITS)}")


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| job | | published | simulated | error | the source leaves open |"
    for each in rows():
        yield f"| {' | '.join(each.cells())} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {"rows": markdown_table(table())}


if __name__ == "__main__":
    page_command(__doc__ or "", HERE / "README.md", tables)
