"""Studies on the emulated cluster: scenarios, predictions, comparisons, tables."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from pydantic import TypeAdapter

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run as run_engine
from simdist.plan.delays import Delays
from simdist.runs import run_directory
from simdist.runs.building import build, delays, live_of, price_of
from simdist.scenario import Cluster, Scenario, load, load_cluster
from simdist.scenario.cluster import Storage
from simdist.schedules import Schedule
from simdist.schedules.hierarchical_sgd import HierarchicalSGD
from simdist.settings.units import BytesPerSecond
from simdist.studies import ranking
from simdist.studies.held import with_links
from simdist.studies.ranking import PairOrder, StepTime
from simdist.studies.validation import Validation, validate
from simdist.traces.links import link_in_words
from simdist.traces.trace import Trace
from simdist.traces.waiting import attribute_waiting

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MODEL_NBYTES = {"0.5 MB": 500_000, "2 MB": 2_000_000, "4 MB": 4_000_000, "8 MB": 8_000_000}
MATTERS_S = 0.05
SLEEPS_S = 0.032  # forward, backward and optimize of scenario.yaml
NONE, LATE = "none", "4 % late by 100 ms"
_CARD = {"on": "link", "link": "nic", "nodes": (1,)}
_CHECKPOINT = {"every": 10, "what": "parameters", "ranks": "all"}
TROUBLES: dict[str, Mapping[str, object]] = {
    NONE: {},
    LATE: {"disturbances": ({"kind": "transient", "on": "host", "probability": 0.04, "delay_s": 0.1},)},
    "half the rate": {"disturbances": ({"kind": "persistent", **_CARD, "share": 0.5},)},
    "down for 2 s": {"disturbances": ({"kind": "outages", **_CARD, "at_s": 2.0, "lasts_s": 2.0},)},
    "jitter": {"disturbances": ({"kind": "jitter", **_CARD, "period_s": 0.2, "median": 0.6, "sigma": 0.5},)},
    "another job": {"background": ({"kind": "on_off", "source": 0, "to": 1, "on_s": 1.0, "off_s": 1.0},)},
    "checkpoints, blocking": {"checkpoint": {**_CHECKPOINT, "mode": "blocking"}},
    "checkpoints, async": {"checkpoint": {**_CHECKPOINT, "mode": "async"}},
}
"""What disturbs a run: changes of its scenario."""


@dataclass(frozen=True)
class Shape:
    """An emulated cluster.

    Args:
        nodes: Network namespaces.
        ranks_per_node: Processes in each.
        rate: Of the link of each node, per direction, as a scenario has it.
    """

    nodes: int
    ranks_per_node: int
    rate: str

    @property
    def name(self) -> str:
        """Name it, for files."""
        return f"{self.nodes}x{self.ranks_per_node}-{self.rate.replace(' ', '').replace('/', 'p').lower()}"

    @property
    def title(self) -> str:
        """Name it, for people."""
        return f"{self.nodes} nodes x {self.ranks_per_node} ranks, {self.rate}"


CALIBRATED = Shape(4, 2, "400 Mbit/s")
TRANSFERRED = Shape(2, 4, "1 Gbit/s")
FEWER = Shape(4, 1, "800 Mbit/s")
SHAPES = (CALIBRATED, TRANSFERRED)


@dataclass(frozen=True)
class Study:
    """A study to run.

    Args:
        name: Of its files and tables.
        file: Scenario with the schedules that are compared.
        models: Sizes of the model, of MODEL_NBYTES.
        troubles: Which of TROUBLES.
        fair: Whether other jobs' flows share links fairly, and links are disturbed.
        server_rate: Of the link of a server that checkpoints are written to, if there is one.
        steps: As many as the scenario says, if None.
        shapes: The first one is calibrated.
        tiny_shapes: The same, where it is only to be seen that all works.
        links: How links are made, and ranks scheduled.
        computing: Seconds of computation, as a multiple of those in `file`.
        sleeps_s: What of a step is forward, backward and optimize.
    """

    name: str
    file: str
    models: tuple[str, ...]
    troubles: tuple[str, ...]
    fair: bool = False
    server_rate: str | None = None
    steps: int | None = None
    shapes: tuple[Shape, ...] = SHAPES
    tiny_shapes: tuple[Shape, ...] = SHAPES
    links: Literal["tuned", "ordinary"] = "tuned"
    computing: float = 1.0
    sleeps_s: float = SLEEPS_S

    def path(self, shape: Shape) -> Path:
        """Return the file of its results on a shape."""
        return RESULTS / f"{self.name}-{shape.name}.json"

    def tiny(self) -> "Study":
        """Return a few steps of it, to see that it works."""
        return replace(self, models=self.models[:1], steps=10 if self.server_rate else 4)


SYNCHRONIZATION = Study(
    "synchronization", "scenario.yaml", ("0.5 MB", "2 MB", "8 MB"), (NONE, LATE), shapes=(*SHAPES, FEWER), steps=40
)
COMMUNICATION = Study(
    "communication",
    "communication.yaml",
    ("2 MB", "8 MB"),
    (NONE,),
    steps=20,
    shapes=(*SHAPES, FEWER),
    tiny_shapes=(Shape(2, 2, "400 Mbit/s"),),  # 4 ranks are enough for its schedules
)
LINKS = Study(
    "links",
    "links.yaml",
    ("2 MB",),
    (NONE, "half the rate", "down for 2 s", "jitter", "another job"),
    fair=True,
    tiny_shapes=(CALIBRATED,),
)
CHECKPOINTS = Study(
    "checkpoints",
    "links.yaml",
    ("2 MB",),
    ("checkpoints, blocking", "checkpoints, async"),
    server_rate="200 Mbit/s",
    steps=60,
    tiny_shapes=(CALIBRATED,),
)
RIVALS = Study("rivals", "rivals.yaml", ("0.5 MB", "2 MB"), (NONE, LATE), steps=40)
SHARDED = Study(
    "sharded", "sharded.yaml", ("4 MB", "8 MB"), (NONE, LATE), steps=20, tiny_shapes=(CALIBRATED,), sleeps_s=0.248
)
SHARDED_SHORT = replace(
    SHARDED, name="sharded-short", models=("8 MB",), troubles=(NONE,), computing=1 / 8, sleeps_s=SHARDED.sleeps_s / 8
)
ORDINARY = tuple(
    replace(study, name=f"{study.name}-ordinary", links="ordinary") for study in (SYNCHRONIZATION, COMMUNICATION)
)
STUDIES = {
    study.name: study
    for study in (SYNCHRONIZATION, COMMUNICATION, RIVALS, SHARDED, SHARDED_SHORT, *ORDINARY, LINKS, CHECKPOINTS)
}


@dataclass(frozen=True)
class Result:
    """One run, measured, and what was predicted before."""

    model: str
    trouble: str
    schedule: str
    steps: int
    predicted_s: float
    measured_s: float
    kinds: dict[str, tuple[float, float, int]]
    """Operation and group -> predicted median, measured median, count."""
    injected_difference_s: float
    charged: tuple[int, int]
    """Injected delays that made others wait in the simulation, and how many of them did so in the measurement."""
    held: dict[str, tuple[float, float]]
    """Link -> seconds for which it held operations up, of all ranks together, predicted and measured."""

    @property
    def error(self) -> float:
        """Error of the makespan."""
        return self.predicted_s / self.measured_s - 1

    def error_beyond_sleeps(self, sleeps_s: float) -> float | None:
        """Error of what a run takes beyond its sleeps, so many seconds a step; None where stragglers sleep, too."""
        if self.trouble == LATE:
            return None
        slept_s = self.steps * sleeps_s
        return (self.predicted_s - slept_s) / (self.measured_s - slept_s) - 1

    def row(self) -> dict[str, object]:
        """Return it for JSON."""
        return asdict(self)


def rate_bps(rate: str) -> float:
    """Return a rate as scenarios have it in bits per second."""
    return 8 * TypeAdapter(BytesPerSecond).validate_python(rate)


def cluster_of(shape: Shape, calibrated: Cluster, study: Study) -> Cluster:
    """Return the calibrated links in another shape, with another rate and nothing else changed.

    The link of a server has the efficiency of the others.
    """
    scenario = load(HERE / "scenario.yaml")
    network = calibrated.network.model_copy(update={"bandwidth_Bps": rate_bps(shape.rate) / 8})
    server_Bps = rate_bps(study.server_rate) / 8 * network.efficiency if study.server_rate else None
    return calibrated.model_copy(
        update={
            "nodes": shape.nodes,
            "gpus_per_node": shape.ranks_per_node,
            "network": network,
            "storage": Storage(latency_s=0.0, bandwidth_Bps=server_Bps) if server_Bps else None,
            "device": scenario.cluster.device,  # emulated: it sleeps, whatever this machine could do
        }
    )


def scenarios(cluster: Cluster, study: Study) -> Iterator[tuple[str, str, Scenario]]:
    """Yield model, trouble and scenario of every comparison."""
    base = load(HERE / study.file)
    for model, trouble in product(study.models, study.troubles):
        count = MODEL_NBYTES[model] // 4 // len(base.workload.tensors)
        tensors = tuple(tensor.model_copy(update={"count": count}) for tensor in base.workload.tensors)
        yield (
            model,
            trouble,
            base.changed(
                name=f"{model}, trouble: {trouble}",
                cluster=cluster,
                workload=base.workload.model_copy(update={"tensors": tensors, **_computation(base, study)}),
                steps=study.steps or base.steps,
                schedules=tuple(_for_ranks(schedule, cluster.world_size) for schedule in base.schedules),
                **{"disturbances": (), **TROUBLES[trouble]},
            ),
        )


def _computation(scenario: Scenario, study: Study) -> dict[str, float]:
    """Return the seconds of computation of a study that changes them."""
    if study.computing == 1.0:
        return {}
    workload = scenario.workload
    seconds = {
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s,
        "optimize_s": workload.optimize_s,
    }
    return {name: study.computing * value for name, value in seconds.items() if value is not None}


def _for_ranks(schedule: Schedule, world_size: int) -> Schedule:
    """Return a schedule without the groups that so many ranks are too few for."""
    if isinstance(schedule, HierarchicalSGD):
        levels = {period: size for period, size in schedule.levels.items() if size == "world" or size <= world_size}
        return schedule.model_copy(update={"levels": levels})
    return schedule


def write_runs(folder: Path, cluster: Cluster, study: Study) -> list[Path]:
    """Write the run directories of all scenarios; return the folder of each scenario."""
    folders = []
    for number, (_, _, scenario) in enumerate(scenarios(cluster, study)):
        folders.append(folder / f"{number}")
        for schedule in scenario.schedules:
            built = build(scenario, schedule)
            alone = scenario.model_copy(update={"schedules": (schedule,)})
            run_directory.write(folders[-1] / schedule.name, alone, built.plan, delays(scenario))
    return folders


def compare(folders: Iterable[Path], cluster: Cluster, study: Study) -> list[Result]:
    """Compare what was measured in every run with a simulation on `cluster`."""
    results = []
    for folder, (model, trouble, scenario) in zip(folders, scenarios(cluster, study), strict=True):
        for schedule in scenario.schedules:
            run = run_directory.read(folder / schedule.name)
            costs = price_of(run.plan, scenario)
            live = live_of(scenario, costs)
            simulated = run_engine(run.plan, costs, run.delays, observe=WholeTrace(), live=live)
            measured = run_directory.read_trace(run.path / run_directory.REAL, plan=run.plan)
            compared = validate(with_links(run, measured, costs), simulated, run.delays, costs)
            results.append(_result(model, trouble, compared, charged(measured, simulated, run.delays)))
    return results


def charged(measured: Trace, simulated: Trace, delays: Delays) -> tuple[int, int]:
    """Count the injected delays for which others waited in the simulation, and those charged so in the measurement.

    That is: the same rank in the same step, with at least half and at most twice the seconds. Ranks that are late by
    equal delays come last together in a simulation and share the charge, while of real ones a single one is last; they
    do not count.
    """
    if not delays:
        return 0, 0
    predicted_s, measured_s = (attribute_waiting(trace).caused_s for trace in (simulated, measured))
    shared = np.isclose(predicted_s[:, :, None], predicted_s[:, None, :], rtol=1e-6).sum(axis=2) > 1
    is_late = np.any([of_channel[0] > 0 for of_channel in delays.values()], axis=0)
    late = is_late & (predicted_s > MATTERS_S) & ~shared
    return int(late.sum()), int((late & (measured_s > predicted_s / 2) & (measured_s < 2 * predicted_s)).sum())


def _result(model: str, trouble: str, compared: Validation, charges: tuple[int, int]) -> Result:
    kinds = {
        f"{kind.op} {kind.group}".strip(): (kind.simulated_s, kind.measured_s, kind.count) for kind in compared.kinds
    }
    difference_s = max((abs(each.difference_s) for each in compared.injections), default=0.0)
    return Result(
        model,
        trouble,
        compared.schedule,
        compared.n_steps,
        compared.simulated_s,
        compared.measured_s,
        kinds,
        difference_s,
        charges,
        {each.link: (each.simulated_s, each.measured_s) for each in compared.links},
    )


def save(study: Study, shape: Shape, results: list[Result]) -> None:
    """Write the results of a study on a shape to their file."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps([result.row() for result in results], indent=1) + "\n"
    study.path(shape).write_text(text, encoding="utf-8")


def recorded(study: Study, shape: Shape) -> list[Result]:
    """Read the results of a study on a shape."""
    return TypeAdapter(list[Result]).validate_json(study.path(shape).read_bytes())


def is_recorded(study: Study) -> bool:
    """Tell whether there are results of a study on all of its shapes."""
    return all(study.path(shape).exists() for shape in study.shapes)


def cluster_path(study: Study) -> Path:
    """Return the file of the links that a study's predictions are made with."""
    return RESULTS / f"{study.name}-cluster.yaml"


def recorded_cluster(study: Study, shape: Shape) -> Cluster:
    """Return the cluster that a study's predictions for a shape are made with."""
    return cluster_of(shape, load_cluster(cluster_path(study)), study)


def summary(shape: Shape, results: list[Result]) -> str:
    """Say in a line how well the makespans were predicted."""
    errors = [abs(result.error) for result in results]
    worst = max(results, key=lambda result: abs(result.error))
    found = (
        f"{shape.title}: makespan error median {median(errors):.1%}, worst {worst.error:+.1%} ({worst.schedule}, "
        f"{worst.model}, trouble: {worst.trouble}); order: {order(results).counts}"
    )
    if degrees := best_degrees(results):
        found = f"{found}; {_degrees_in_words(degrees)}"
    if named := [result for result in results if result.held]:
        right = sum(is_named(result) for result in named)
        return f"{found}; the link that misbehaves is named in {right} of {len(named)} runs, and no other"
    if not any(result.trouble == LATE for result in results):
        return found if degrees else f"{found}; the fastest is predicted right for {_winners(results)}"
    late, charged = (sum(numbers) for numbers in zip(*(result.charged for result in results), strict=True))
    return (
        f"{found}; {charged} of {late} stragglers that alone made others wait are charged with it, in the same "
        f"step; injected delays came back within {1e3 * max(result.injected_difference_s for result in results):.1f} ms"
    )


def is_named(result: Result) -> bool:
    """Tell whether measured times are booked on the links of the trouble, and on no others."""
    found = {link for link, (_, measured_s) in result.held.items() if measured_s > 0}
    return bool(found) and found <= {"nic_out[0]", "nic_in[1]", "nic_out[1]"}


def _winners(results: list[Result]) -> str:
    """Say for how many of the models the schedule that was measured as the fastest was predicted to be."""
    models = dict.fromkeys(result.model for result in results)
    rows = [[result for result in results if result.model == model] for model in models]
    fastest = [
        (min(row, key=lambda each: each.measured_s), min(row, key=lambda each: each.predicted_s)) for row in rows
    ]
    return f"{sum(measured is predicted for measured, predicted in fastest)} of {len(models)} models"


DEGREES = ("hsdp-1", "hsdp-2", "hsdp-4", "fsdp")
"""Schedules that average gradients among copies of 1, 2, 4 and 8 ranks, and do not differ otherwise."""


def best_degrees(results: list[Result]) -> list[float]:
    """Return how much longer the degree that is predicted to be the best took than the one that is, in each scenario.

    0 where it is the best one. Nothing for studies without degrees.
    """
    scenarios: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.schedule in DEGREES:
            scenarios.setdefault((result.model, result.trouble), []).append(result)
    return [
        min(rows, key=lambda each: each.predicted_s).measured_s / min(each.measured_s for each in rows) - 1
        for rows in scenarios.values()
        if len(rows) == len(DEGREES)
    ]


def _degrees_in_words(degrees: list[float]) -> str:
    right = sum(longer == 0 for longer in degrees)
    said = f"the best degree is predicted right in {right} of {len(degrees)} scenarios"
    return said if right == len(degrees) else f"{said}, the predicted one takes at most {max(degrees):.1%} longer"


def order(results: list[Result]) -> PairOrder:
    """Compare the order of the schedules of each scenario, as predicted and as measured; put all pairs together."""
    scenarios: dict[tuple[str, str], list[StepTime]] = {}
    for each in results:
        time = StepTime(each.schedule, each.predicted_s, each.measured_s)
        scenarios.setdefault((each.model, each.trouble), []).append(time)
    return ranking.together(map(ranking.order, scenarios.values()))


def makespan_table(results: list[Result], sleeps_s: float = SLEEPS_S) -> Iterator[str]:
    """Yield predicted and measured step time of every run; `sleeps_s` of a step are forward, backward and optimize."""
    yield "| model | trouble | schedule | predicted, ms per step | measured | error | beyond the sleeps |"
    for each in results:
        times = " | ".join(_step_ms(each, which) for which in ("predicted", "measured"))
        run = f"{each.model} | {each.trouble} | `{each.schedule}`"
        yield f"| {run} | {times} | {each.error:+.1%} | {_beyond(each, sleeps_s)} |"


def _beyond(result: Result, sleeps_s: float) -> str:
    error = result.error_beyond_sleeps(sleeps_s)
    return "" if error is None else f"{error:+.0%}"


def _step_ms(result: Result, which: Literal["predicted", "measured"]) -> str:
    seconds = result.predicted_s if which == "predicted" else result.measured_s
    return f"{1e3 * seconds / result.steps:.1f}"


def held_table(results: list[Result]) -> Iterator[str]:
    """Yield for how long each link held operations up, of all ranks together."""
    yield "| trouble | schedule | link | predicted, rank-seconds | measured |"
    for each in results:
        for link, (predicted_s, measured_s) in each.held.items():
            held = f"{predicted_s:.1f} | {measured_s:.1f}"
            yield f"| {each.trouble} | `{each.schedule}` | {link_in_words(link)} | {held} |"


def kinds_table(results: list[Result]) -> Iterator[str]:
    """Yield the error of each kind of operation: the median over the runs that have it, and the worst."""
    yield "| operation | runs | median of &#124;error&#124; | largest |"
    for kind, errors in kind_errors(results).items():
        yield f"| {kind} | {len(errors)} | {median(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%} |"


def kind_errors(results: list[Result]) -> dict[str, list[float]]:
    """Return the errors of the median of each kind of operation, over the runs that have it.

    Collectives are there in all, and by group.
    """
    errors: dict[str, list[float]] = {}
    for each in results:
        for kind, (predicted_s, measured_s, _) in each.kinds.items():
            for name in dict.fromkeys((kind.split()[0], kind)):
                errors.setdefault(name, []).append(predicted_s / measured_s - 1)
    return dict(sorted(errors.items()))
