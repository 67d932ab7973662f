"""Hierarchical SGD against stragglers: the published experiment, simulated.

    python experiments/hsgd_stragglers/run.py              print published beside simulated, for 64, 128 and 256 GPUs
    python experiments/hsgd_stragglers/run.py --all        print every table of the README
    python experiments/hsgd_stragglers/run.py --write      write them, and the figure, into the README
    python experiments/hsgd_stragglers/run.py --seeds 2 --steps 80     a quick look

Published: Wang & Varma, Straggler Mitigation on PyTorch DDP by Hierarchical SGD, PyTorch blog, 2023-04-07. Its bars are
pictures; only the ends of each range are printed.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simdist.report import markdown_table, print_tables, write_tables
from simdist.scenario import Scenario, load
from simdist.studies.comparison import Row, compare

HERE = Path(__file__).parent
PUBLISHED = {64: (2.08, 2.45), 128: (2.57, 2.68), 256: (2.63, 3.25)}
"""GPUs -> lowest and highest speed-up of the hierarchical configurations over synchronous SGD."""
LIMITS = ("limit-persistent", "limit-frequent", "limit-mild")


@dataclass(frozen=True)
class Study:
    """How much to simulate: scenarios of a folder, shortened for tests."""

    n_seeds: int
    steps: int | None

    def scenario(self, name: str) -> Scenario:
        """Load a scenario of this experiment."""
        scenario = load(HERE / f"{name}.yaml")
        return scenario.changed(steps=self.steps) if self.steps else scenario

    def compare(self, scenario: Scenario) -> list[Row]:
        """Compare its schedules with synchronous SGD."""
        return compare(scenario, n_seeds=self.n_seeds)


Change = Callable[[Scenario], Scenario]


def hosts_wait_for_averages(scenario: Scenario) -> Scenario:
    """The host reads the loss in every step, which comes after the averages of the step before."""
    return scenario.changed(host={"waits_for": "loss"})


def hosts_wait_for_input(scenario: Scenario) -> Scenario:
    """The host reads no loss; it waits in every step while a batch is copied from pageable memory."""
    return scenario.changed(host={"run_ahead_steps": None}, input={"source": "memory", "copy": "pageable"})


def hosts_wait_for_updates(scenario: Scenario) -> Scenario:
    """The host waits for its own update in every step, before parameters are averaged."""
    return scenario.changed(host={"waits_for": "update"})


def averaging_hosts_three_ahead(scenario: Scenario) -> Scenario:
    """Hosts of averaging schedules run up to 3 steps ahead and do not wait for their device before averages."""
    return _with_averaging(scenario, {"run_ahead_steps": 3, "synchronize": False})


def all_hosts_three_ahead(scenario: Scenario) -> Scenario:
    """All hosts, also those of synchronous SGD, run up to 3 steps ahead."""
    return averaging_hosts_three_ahead(scenario).changed(host={"run_ahead_steps": 3})


def nodes_average_gradients(scenario: Scenario) -> Scenario:
    """Gradients are averaged within each node in every step, as PyTorch's hook does unless told otherwise."""
    schedules = tuple(
        schedule.model_copy(update={"intra_node_gradients": True}) if schedule.kind == "hierarchical_sgd" else schedule
        for schedule in scenario.schedules
    )
    return scenario.changed(schedules=schedules)


def _with_averaging(scenario: Scenario, update: dict[str, object]) -> Scenario:
    schedules = tuple(
        schedule if schedule.kind == "sync" else schedule.model_copy(update=update) for schedule in scenario.schedules
    )
    return scenario.changed(schedules=schedules)


EFFECTS: dict[str, tuple[str, Change | None]] = {
    "base": ("", None),
    "no communication": ("-no-communication", None),
    "host waits for averages": ("", hosts_wait_for_averages),
    "input copy blocks": ("", hosts_wait_for_input),
    "gradients averaged in node": ("", nodes_average_gradients),
    "averaging hosts 3 ahead": ("", averaging_hosts_three_ahead),
    "all hosts 3 ahead": ("", all_hosts_three_ahead),
}
"""Name of a column -> suffix of the scenario files, and what is changed in them."""


def measure_effects(study: Study) -> dict[int, dict[str, dict[str, Row]]]:
    """Return GPUs -> effect -> schedule -> row."""
    return {n_gpus: {name: measure_effect(study, n_gpus, name) for name in EFFECTS} for n_gpus in PUBLISHED}


def measure_effect(study: Study, n_gpus: int, name: str) -> dict[str, Row]:
    """Return schedule -> row of one effect."""
    suffix, change = EFFECTS[name]
    scenario = study.scenario(f"{n_gpus}{suffix}")
    return {row.schedule: row for row in study.compare(change(scenario) if change else scenario)}


Limits = dict[tuple[str, str], dict[str, Row]]
"""Situation and what the host waits for -> schedule -> row."""


def measure_limits(study: Study) -> Limits:
    """Simulate the three limits, with hosts that wait for averages and hosts that wait for their own update."""
    limits: Limits = {}
    for name in LIMITS:
        scenario = study.scenario(name)
        for host, changed in (("averages", scenario), ("update", hosts_wait_for_updates(scenario))):
            limits[name, host] = {row.schedule: row for row in study.compare(changed)}
    return limits


def hierarchical(rows: dict[str, Row]) -> list[float]:
    """Return the speed-ups of the hierarchical configurations."""
    return [row.speedup for row in rows.values() if row.schedule.startswith("hsgd")]


def published_table(rows: dict[int, dict[str, Row]]) -> Iterator[str]:
    """Yield published range, simulated range and error, for each size."""
    yield "| GPUs | published | simulated | error at the bottom | error at the top |"
    for n_gpus, (low, high) in PUBLISHED.items():
        ours = hierarchical(rows[n_gpus])
        yield (
            f"| {n_gpus} | {low:.2f} - {high:.2f} | {min(ours):.2f} - {max(ours):.2f} "
            f"| {min(ours) / low - 1:+.1%} | {max(ours) / high - 1:+.1%} |"
        )


def rows_table(rows: dict[int, dict[str, Row]]) -> Iterator[str]:
    """Yield step time, its parts and speed-up of every schedule."""
    yield "| GPUs | schedule | ms per step | computing | exposed comm. | waiting | host asleep | speed-up |"
    for n_gpus, by_schedule in rows.items():
        for row in by_schedule.values():
            parts = " | ".join(f"{1e3 * part:.1f}" for part in (row.compute_s, row.comm_s, row.wait_s, row.host_s))
            interval = row.speedup_ci95
            spread = f" ± {(interval[1] - interval[0]) / 2:.2f}" if interval and row.schedule != "sync" else ""
            yield f"| {n_gpus} | `{row.schedule}` | {1e3 * row.step_s:.1f} | {parts} | {row.speedup:.2f}{spread} |"


def effects_table(effects: dict[int, dict[str, dict[str, Row]]]) -> Iterator[str]:
    """Yield the speed-up of every hierarchical configuration with each effect switched on or off."""
    yield f"| GPUs | schedule | {' | '.join(EFFECTS)} |"
    for n_gpus, by_effect in effects.items():
        for schedule in by_effect["base"]:
            if schedule.startswith("hsgd"):
                speedups = " | ".join(f"{by_effect[name][schedule].speedup:.2f}" for name in EFFECTS)
                yield f"| {n_gpus} | `{schedule}` | {speedups} |"
        steps = " | ".join(f"{1e3 * by_effect[name]['sync'].step_s:.0f}" for name in EFFECTS)
        yield f"| {n_gpus} | ms per step of `sync` | {steps} |"


def limits_table(limits: Limits) -> Iterator[str]:
    """Yield the speed-ups in the three situations in which hierarchical SGD does not help."""
    titles = ("persistent straggler", "30 % stragglers", "stragglers cost < 10 %")
    yield f"| schedule | {' | '.join(titles)} | {' | '.join(f'{title}, own update' for title in titles)} |"
    for schedule in limits[LIMITS[0], "averages"]:
        speedups = (limits[name, host][schedule].speedup for host in ("averages", "update") for name in LIMITS)
        yield f"| `{schedule}` | " + " | ".join(f"{speedup:.3f}" for speedup in speedups) + " |"


def tables(study: Study) -> dict[str, str]:
    """Return every table of the README by its name there."""
    effects = measure_effects(study)
    rows = {n_gpus: by_effect["base"] for n_gpus, by_effect in effects.items()}
    return {
        "published": markdown_table(published_table(rows)),
        "rows": markdown_table(rows_table(rows)),
        "effects": markdown_table(effects_table(effects)),
        "limits": markdown_table(limits_table(measure_limits(study))),
    }


def figure(study: Study, path: Path) -> None:
    """Draw the speed-ups on 256 GPUs."""
    from simdist.report import save, speedup_figure

    rows = study.compare(study.scenario("256"))
    save(speedup_figure(rows, title="Random 1 s stragglers on 256 GPUs, ResNet-18, simulated"), path)


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print every table")
    parser.add_argument("--write", action="store_true", help="write tables and figure into README.md")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, help="instead of the 1000 of the scenarios")
    arguments = parser.parse_args()
    study = Study(arguments.seeds, arguments.steps)
    if arguments.write:
        write_tables(HERE / "README.md", tables(study))
        figure(study, HERE / "speedups-256.png")
    elif arguments.all:
        print_tables(tables(study))
    else:
        rows = {n_gpus: measure_effect(study, n_gpus, "base") for n_gpus in PUBLISHED}
        print("Speed-up of hierarchical SGD over synchronous SGD (lowest and highest of its configurations)\n")
        print(markdown_table(published_table(rows)))


if __name__ == "__main__":
    main()
