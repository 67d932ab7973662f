"""Simulates run directories on their own machines, or on calibrated ones from a cluster file."""

from dataclasses import dataclass
from pathlib import Path

from simdist.cost import Costs
from simdist.engines.observers import WholeTrace
from simdist.engines.run import Progress
from simdist.engines.run import run as run_engine
from simdist.errors import PlanError, ScenarioError, UnsupportedError
from simdist.runs import run_directory
from simdist.runs.building import live_of, price_of
from simdist.runs.run_directory import RunDirectory
from simdist.scenario import Cluster, Scenario, load_cluster
from simdist.settings.base import unchecked_copy
from simdist.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Machines that were measured."""

    file: Path
    cluster: Cluster

    @classmethod
    def read(cls, file: Path) -> "Calibrated":
        """Read a cluster file.

        Raises:
            ScenarioError: It is not a cluster file.
        """
        return cls(file, load_cluster(file))


def simulate_run(
    run: RunDirectory,
    machines: Calibrated | None,
    *,
    real: Trace | None,
    progress: Progress | None = None,
) -> Trace:
    """Simulate the plan and the delays of a run directory.

    Args:
        run: The run to simulate.
        machines: Machines to use instead of those of the scenario, of the same number; those of the scenario if None.
        real: Its measurement, if there is one.
        progress: Called with the steps that are done and all steps.

    Raises:
        ScenarioError: The number of machines differs from the scenario.
        PlanError: The engine refuses the plan.
        UnsupportedError: The engine cannot simulate it.
    """
    where = f"{run.path} with {machines.file}" if machines else str(run.path)
    try:
        costs = price_run(run, machines, real=real)
        live = live_of(run.scenario, costs)
        return run_engine(run.plan, costs, run.delays, observe=WholeTrace(), live=live, progress=progress)
    except (PlanError, ScenarioError, UnsupportedError) as error:
        raise type(error)(f"{where}: {error}") from None


def price_run(run: RunDirectory, machines: Calibrated | None, *, real: Trace | None) -> Costs:
    """Return the prices of a run directory, with the arguments of `simulate_run`.

    Raises:
        ScenarioError: The number of machines differs from the scenario.
        PlanError: The plan does not fit.
    """
    return price_of(run.plan, simulated_scenario(run, machines, real=real))


def simulated_scenario(run: RunDirectory, machines: Calibrated | None, *, real: Trace | None) -> Scenario:
    """Return the scenario of a run directory on the machines to simulate, with the arguments of `simulate_run`.

    Raises:
        ScenarioError: The number of machines differs from the scenario.
    """
    if machines is None:
        return run.scenario
    return unchecked_copy(run.scenario, cluster=_cluster(run, machines, real))


def _cluster(run: RunDirectory, machines: Calibrated, real: Trace | None) -> Cluster:
    cluster = machines.cluster
    ours = run.scenario.cluster
    if (cluster.nodes, cluster.gpus_per_node) != (ours.nodes, ours.gpus_per_node):
        raise ScenarioError(
            f"{machines.file}: has {cluster.nodes} nodes x {cluster.gpus_per_node} GPUs; "
            f"{run.path / run_directory.SCENARIO} has {ours.nodes} x {ours.gpus_per_node}: "
            "write as many, or calibrate the "
            f"machines of this run"
        )
    if real is None or not real.source.endswith(run_directory.EMULATED):
        return cluster
    return cluster.model_copy(update={"device": ours.device, "slow_devices": ours.slow_devices})
