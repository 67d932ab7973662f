"""The study of `--study storage`: policies, shapes, predictions, and their comparison with runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from data_set import SampleSet
from pydantic import TypeAdapter
from study import HERE, RESULTS

from simdist.cost import price
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run as run_engine
from simdist.plan import Plan
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.scenario import Cluster, Scenario, dump_cluster, load, load_cluster
from simdist.scenario.data import DataSettings
from simdist.schedules.job import Policy
from simdist.settings.units import BytesPerSecond
from simdist.studies.epochs import find_epochs
from simdist.traces.reads import Reads, differences, expected

NAME = "storage"
N_EPOCHS = 3
FILES = SampleSet(n_samples=480, nbytes=110_000, sigma=0.4, format="jpeg")
TINY_FILES = SampleSet(n_samples=32, nbytes=16_000, sigma=0.4, format="jpeg")
SAMPLE_NBYTES = 3 * 224 * 224
_CLUSTER, _FILES, _OUTAGE = (RESULTS / f"{NAME}-{name}" for name in ("cluster.yaml", "files.json", "outage.json"))
ROOM = 0.5  # of a node's even part of the data set, in a level that is too small


@dataclass(frozen=True)
class Shape:
    """An emulated cluster with a file server.

    Args:
        nodes: Network namespaces with ranks.
        ranks_per_node: Processes in each.
        rate: Of the link of each node, per direction, as a scenario has it.
        server_rate: Of the file server's link.
    """

    nodes: int
    ranks_per_node: int
    rate: str
    server_rate: str

    @property
    def name(self) -> str:
        """Name it, for files."""
        rates = f"{self.rate}-{self.server_rate}".replace(" ", "").replace("/", "p").lower()
        return f"{self.nodes}x{self.ranks_per_node}-{rates}"

    @property
    def title(self) -> str:
        """Name it, for people."""
        ranks = "1 rank" if self.ranks_per_node == 1 else f"{self.ranks_per_node} ranks"
        return f"{self.nodes} nodes x {ranks} at {self.rate}, server at {self.server_rate}"


CALIBRATED = Shape(2, 2, "400 Mbit/s", "80 Mbit/s")
TRANSFERRED = Shape(4, 1, "600 Mbit/s", "100 Mbit/s")
SHAPES = (CALIBRATED, TRANSFERRED)
TINY = Shape(2, 1, "400 Mbit/s", "80 Mbit/s")


@dataclass(frozen=True)
class Case:
    """A way to read the data set.

    Args:
        policy: See `simdist.schedules.job`.
        start: With `warm`, disks hold what the same run has left there before.
        small: A level that has room for `ROOM` of a node's part only.
        eviction: Of that level.
        prefetch: Batches that are read ahead.
        readers: Files that a rank reads at the same time.
        sleeps: Loads read nothing, they sleep for what they take undisturbed: what is wrong then is not the loads.
    """

    policy: Policy
    start: Literal["cold", "warm"] = "cold"
    small: Literal["memory", "disk"] | None = None
    eviction: Literal["none", "lru"] = "none"
    prefetch: int = 2
    readers: int = 4
    sleeps: bool = False

    @property
    def name(self) -> str:
        """Name it, for people and folders."""
        usual = Case(self.policy)
        full = "keep" if self.eviction == "none" else self.eviction
        parts = [
            self.policy,
            "warm" if self.start == "warm" else "",
            f"small {self.small} {full}" if self.small else "",
            f"prefetch {self.prefetch}" if self.prefetch != usual.prefetch else "",
            f"{self.readers} reader{'s' if self.readers > 1 else ''}" if self.readers != usual.readers else "",
            "nothing read" if self.sleeps else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def folder(self) -> str:
        """Name its folder."""
        return self.name.replace(", ", "-").replace(" ", "-")


POLICY_CASES = (
    Case("naive"),
    Case("files"),
    Case("memory"),
    Case("datacache"),
    Case("staged"),
    Case("files", start="warm"),
    Case("datacache", start="warm"),
    Case("files", small="disk"),
    Case("files", small="disk", eviction="lru"),
    Case("memory", small="memory"),
    Case("memory", small="memory", eviction="lru"),
    Case("datacache", small="memory"),
    Case("files", start="warm", sleeps=True),
)
KNOB_CASES = (
    Case("naive", prefetch=1),
    Case("naive", prefetch=4),
    Case("files", prefetch=1),
    Case("files", prefetch=4),
    Case("naive", readers=1),
    Case("files", readers=1),
)
CASES = {CALIBRATED: (*POLICY_CASES, *KNOB_CASES), TRANSFERRED: POLICY_CASES}
INTERRUPTED = Case("datacache")


@dataclass(frozen=True)
class Calibrated:
    """Measurements before any run.

    Args:
        cluster: Links and levels of storage.
        decode_s: CPU seconds of decoding a sample.
        files_nbytes: Bytes of every file of the data set.
    """

    cluster: Cluster
    decode_s: float
    files_nbytes: tuple[int, ...]


@dataclass(frozen=True)
class EpochResult:
    """An epoch, predicted and measured.

    Args:
        predicted_s: Its seconds in the simulation.
        measured_s: In the real run.
        predicted_stall_s: Seconds of data stalls of the run.
        measured_stall_s: Likewise.
        predicted_hits: Samples from each of `LEVELS`.
        measured_hits: Likewise.
    """

    predicted_s: float
    measured_s: float
    predicted_stall_s: float
    measured_stall_s: float
    predicted_hits: tuple[int, ...]
    measured_hits: tuple[int, ...]

    @property
    def error(self) -> float:
        """Error of the seconds."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Result:
    """One case, predicted and measured.

    Args:
        case: Its name.
        staging_s: Predicted and measured seconds before the first epoch; 0 where nothing is staged.
        epochs: In order.
        differences: In what the counts of any load and rank differ from the plan's; nothing if they are identical.
    """

    case: str
    staging_s: tuple[float, float]
    epochs: tuple[EpochResult, ...]
    differences: tuple[str, ...]

    def row(self) -> dict[str, object]:
        """Return it for JSON."""
        return asdict(self)

    def stall_s(self, which: Literal["predicted", "measured"]) -> float:
        """Return the seconds of data stalls, in all epochs."""
        if which == "predicted":
            return sum(epoch.predicted_stall_s for epoch in self.epochs)
        return sum(epoch.measured_stall_s for epoch in self.epochs)


@dataclass(frozen=True)
class Outage:
    """A run during which the file server was away.

    Args:
        away_s: For how long.
        usual_s: Measured seconds of each epoch of the same run without an outage.
        result: Of the run; predicted is that nothing happens.
    """

    away_s: float
    usual_s: tuple[float, ...]
    result: Result


def rate_bps(rate: str) -> float:
    """Return a rate in bits per second."""
    return 8 * TypeAdapter(BytesPerSecond).validate_python(rate)


def cluster_of(shape: Shape, calibrated: Cluster) -> Cluster:
    """Return what was calibrated in another shape, with other rates and nothing else changed.

    The file server keeps its share of its link; a client without a limit of its own has none.
    """
    storage, usual = calibrated.storage, load(HERE / "storage.yaml").cluster
    assert storage is not None
    share = storage.bandwidth_Bps / rate_bps(CALIBRATED.server_rate)
    network = calibrated.network.model_copy(update={"bandwidth_Bps": rate_bps(shape.rate) / 8})
    served = storage.model_copy(update={"bandwidth_Bps": share * rate_bps(shape.server_rate)})
    return calibrated.model_copy(
        update={
            "nodes": shape.nodes,
            "gpus_per_node": shape.ranks_per_node,
            "network": network,
            "storage": served,
            "device": usual.device,  # emulated: it sleeps, whatever this machine could do
        }
    )


def scenario_of(case: Case, shape: Shape, calibrated: Calibrated, *, n_epochs: int = N_EPOCHS) -> Scenario:
    """Return the scenario of a case on a shape."""
    cluster, files_nbytes = cluster_of(shape, calibrated.cluster), calibrated.files_nbytes
    base = load(HERE / "storage.yaml")
    assert base.input.data is not None
    n_samples = len(files_nbytes)
    level, sizes = case.small, {"memory": n_samples * base.workload.sample_nbytes, "disk": sum(files_nbytes)}
    if level is not None:
        room = {"capacity_nbytes": round(ROOM * sizes[level] / shape.nodes)}
        small = {"memory": cluster.memory, "disk": cluster.disk}[level]
        assert small is not None
        cluster = cluster.model_copy(update={level: small.model_copy(update=room)})
    data = DataSettings(file_nbytes=files_nbytes, policy=case.policy, start=case.start, eviction=case.eviction, seed=1)
    return base.changed(
        name=case.name,
        cluster=cluster,
        workload=base.workload.model_copy(update={"decode_s": calibrated.decode_s}),
        input=base.input.model_copy(update={"prefetch": case.prefetch, "readers": case.readers, "data": data}),
        steps=n_epochs * (n_samples // (base.workload.batch_size * cluster.world_size)),
    )


def write_run(path: Path, scenario: Scenario) -> None:
    """Write the run directory of a case."""
    built = build(scenario, scenario.schedules[0])
    run_directory.write(path, scenario, built.plan, delays(scenario))


def compare(path: Path, case: Case) -> Result:
    """Compare what was measured in a run with a simulation of it."""
    run = run_directory.read(path)
    costs = price(run.plan, run.scenario.cluster, run.scenario.workload)
    simulated = run_engine(run.plan, costs, run.delays, observe=WholeTrace())
    if case.sleeps:
        wanted = found = _nothing(run.plan)
    else:
        wanted, found = expected(run.plan), run_directory.read_reads(run.path / run_directory.REAL_READS, plan=run.plan)
    predicted = find_epochs(simulated, wanted)
    measured = find_epochs(run_directory.read_trace(run.path / run_directory.REAL, plan=run.plan), found)
    rows = tuple(
        EpochResult(ours.seconds, theirs.seconds, ours.stall_s, theirs.stall_s, ours.n_samples, theirs.n_samples)
        for ours, theirs in zip(predicted.epochs, measured.epochs, strict=True)
    )
    return Result(case.name, (predicted.staging_s, measured.staging_s), rows, differences(found, wanted))


def _nothing(plan: Plan) -> Reads:
    """Return the counts of a run that reads nothing."""
    reads = expected(plan)
    return replace(reads, n_samples=np.zeros_like(reads.n_samples), nbytes=np.zeros_like(reads.nbytes))


def results_path(shape: Shape) -> Path:
    """Return the file of the results on a shape."""
    return RESULTS / f"{NAME}-{shape.name}.json"


def save(calibrated: Calibrated, results: Mapping[Shape, Sequence[Result]], outage: Outage) -> None:
    """Write what the pages show, and what the tests hold them to."""
    RESULTS.mkdir(exist_ok=True)
    _CLUSTER.write_text(dump_cluster(calibrated.cluster), encoding="utf-8")
    files = {"decode_s": calibrated.decode_s, "files_nbytes": calibrated.files_nbytes}
    _FILES.write_text(json.dumps(files) + "\n", encoding="utf-8")
    for shape, rows in results.items():
        results_path(shape).write_text(json.dumps([row.row() for row in rows], indent=1) + "\n", encoding="utf-8")
    _OUTAGE.write_text(json.dumps(asdict(outage), indent=1) + "\n", encoding="utf-8")


def recorded_calibration() -> Calibrated:
    """Read what the recorded predictions are made with."""
    files = json.loads(_FILES.read_text(encoding="utf-8"))
    return Calibrated(load_cluster(_CLUSTER), files["decode_s"], tuple(files["files_nbytes"]))


def recorded(shape: Shape) -> list[Result]:
    """Read the recorded results on a shape."""
    return TypeAdapter(list[Result]).validate_json(results_path(shape).read_bytes())


def recorded_outage() -> Outage:
    """Read the recorded run through an outage."""
    return TypeAdapter(Outage).validate_json(_OUTAGE.read_bytes())
