"""Twenty ordinary jobs: is the gain of the advised schedule in the interval that was stated?

    python experiments/profile_round_trip/advised.py            run all jobs and print the table (root; 20 minutes)
    python experiments/profile_round_trip/advised.py --write    also record the results, and write the page
    python experiments/profile_round_trip/advised.py --tables   print the table of the recorded results (anybody); with
                                                                --write, write it into the page again

Each job is trained with DDP and profiled, its traces are imported, and `simdist whatif` compares three schedules with
it. The fastest of them is trained then, in the same steps with the same delays. Nothing else should compute on the
machine meanwhile.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "emulated_cluster")]

import network  # noqa: E402
import round_trip_jobs  # noqa: E402
from round_trip_jobs import ADVISED, HSGD, LOCAL_4, LOCAL_8, RATE_BPS, SYNC, Case, Schedule  # noqa: E402

from simdist.report import markdown_table, print_tables, write_tables  # noqa: E402
from simdist.scenario import Scenario, load  # noqa: E402
from simdist.stragglers.gains import find_gains  # noqa: E402

RESULTS = HERE / "results" / "advised.json"
PAGE = HERE / "README.md"
COMPARED = (LOCAL_4, LOCAL_8, HSGD)


@dataclass(frozen=True, slots=True)
class Advice:
    """What was advised for a job, and what it gained.

    Args:
        job: Its name.
        schedule: Label of the fastest schedule that was compared.
        is_sure: Whether it was said to be surely faster.
        stated: Interval of its speed-up over sync, of 95 %.
        predicted: Its speed-up.
        sync_s: Measured seconds per step of each window of sync.
        measured_s: The same of the schedule.
    """

    job: str
    schedule: str
    is_sure: bool
    stated: tuple[float, float]
    predicted: float
    sync_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Measured speed-up over sync."""
        return median(self.sync_s) / median(self.measured_s)

    @property
    def is_inside(self) -> bool:
        """Whether the measured speed-up is in the stated interval."""
        low, high = self.stated
        return low <= self.gain <= high


def advise(case: Case, scenario: Scenario) -> tuple[Schedule, bool, tuple[float, float], float]:
    """Return the fastest schedule, whether it is surely faster, the stated interval of its gain, and the gain."""
    others = scenario.changed(schedules=[each.setting for each in COMPARED]).schedules
    gains = find_gains(scenario, others, baseline=scenario.schedules[0], n_runs=200)
    fastest = max(gains.rows, key=lambda row: row.speedup)
    if fastest.interval is None:
        raise SystemExit(f"{case.name}: no interval is stated: {gains.problem or fastest.problem}")
    schedule = next(each for each in COMPARED if each.label == fastest.schedule)
    return schedule, gains.problem is None and fastest.is_sure, fastest.interval, fastest.speedup


def run(cases: Sequence[Case], folder: Path) -> Iterator[Advice]:
    """Train, import, advise, and train under the advice."""
    with network.cluster(max(case.world_size for case in cases), rate_bps=RATE_BPS) as nodes:
        for case in cases:
            place = folder / case.slug
            round_trip_jobs.perform(case, SYNC, place / SYNC.label, nodes)
            schedule, is_sure, stated, predicted = advise(case, load(round_trip_jobs.import_traces(case, place)[1]))
            round_trip_jobs.perform(case, schedule, place / schedule.label, nodes)
            measured = [round_trip_jobs.measured_s(case, place / label) for label in (SYNC.label, schedule.label)]
            found = Advice(case.name, schedule.label, is_sure, stated, predicted, *measured)
            print(f"{case.name}: {found.gain:.3f} in {stated[0]:.3f} to {stated[1]:.3f}: {found.is_inside}", flush=True)
            yield found


def tables(results: Sequence[Advice]) -> dict[str, str]:
    """Return the table and its summary by their names in the README."""
    lines = [
        "| job | fastest of three | ms per step of `sync`, measured | of the schedule | speed-up, measured | predicted "
        "| `whatif`, 95 % | inside |",
    ]
    for each in results:
        times = " | ".join(f"{1e3 * median(seconds):.1f}" for seconds in (each.sync_s, each.measured_s))
        low, high = each.stated
        inside = "yes" if each.is_inside else "above" if each.gain > high else "below"
        lines.append(
            f"| {each.job} | `{each.schedule}`{'' if each.is_sure else ', not surely'} | {times} | {each.gain:.2f} "
            f"| {each.predicted:.2f} | {low:.2f} to {high:.2f} | {inside} |"
        )
    inside = sum(each.is_inside for each in results)
    above = sum(each.gain > each.stated[1] for each in results)
    widths = [each.stated[1] - each.stated[0] for each in results]
    summary = (
        f"* In {inside} of {len(results)} ordinary jobs, the measured gain of the advised schedule is in the stated "
        f"interval; in {above} it is above it, in {len(results) - inside - above} below. The median interval is "
        f"{median(widths):.2f} wide."
    )
    return {"advised summary": summary, "advised": markdown_table(lines)}


def read() -> list[Advice]:
    """Read the recorded results."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    sequences = ("stated", "sync_s", "measured_s")
    return [Advice(**{key: tuple(each[key]) if key in sequences else each[key] for key in each}) for each in rows]


def main() -> int:
    """Run the jobs, or print what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the results, and write the table into the page")
    parser.add_argument("--tables", action="store_true", help="print the table of the recorded results")
    parser.add_argument("--keep", type=Path, help="leave traces, times and scenarios in this folder")
    arguments = parser.parse_args()
    if arguments.tables:
        found = read()
    elif missing := network.missing():
        print(f"skipped: {missing}")
        return 0
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = list(run(ADVISED, arguments.keep or Path(folder)))
        if arguments.write:
            rows = [asdict(each) for each in found]
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        write_tables(PAGE, tables(found))
    print_tables(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
