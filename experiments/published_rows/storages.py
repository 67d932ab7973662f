"""Steps that read from storage: published, simulated, and the two ways in which they differ.

Where reading takes longer than computing, the error is that of the storage. Where it takes less, it is what reading
costs the step beside. So a row belongs to one of two kinds:

* `storage`: the simulated step is longer than computing. Its doubt multiplies loads.
* `input`: the simulated step is computing. Its doubt multiplies forward and backward passes.

Rows are the submissions of `experiments/mlperf_storage` and the runs of one machine of `experiments/efs_k80`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from decisions import script

from simdist.cost import Costs
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.runs.building import Built, build, delays
from simdist.scenario import Scenario
from simdist.studies.published_errors import doubted, storage_doubts
from simdist.studies.uncertainty import n_draws, places, spread
from simdist.traces.waiting import step_end_s

CACHED = "Amazon EC2, more bytes than its file system delivers"
"""Runs that cannot have read all files from storage."""
LONGER = 1.01
"""A step is longer than computing from this ratio on."""


@dataclass(frozen=True)
class Reading:
    """A published step that reads from storage.

    Args:
        family: The storage.
        name: What tells the row from others of its family.
        scenario: It, with all of a step's computing as forward pass.
        n_gpus: Number of GPUs, or of simulated ones.
        n_before: Steps before those that count.
        measured_s: Seconds of a step.
    """

    family: str
    name: str
    scenario: Scenario
    n_gpus: int
    n_before: int
    measured_s: float

    @property
    def computing_s(self) -> float:
        """Seconds that a step computes."""
        return self.scenario.workload.forward_s or 0.0

    def built(self) -> Built:
        """Return its plan with prices."""
        return build(self.scenario, self.scenario.schedules[0])

    def step_s(self, built: Built, costs: Costs) -> float:
        """Simulate, and return the seconds of a step among those that count."""
        trace = run(built.plan, costs, delays(self.scenario), observe=WholeTrace(), engine="des")
        end_s = step_end_s(trace).max(axis=1)
        return float((end_s[-1] - end_s[self.n_before - 1]) / (self.scenario.steps - self.n_before))

    def kind(self, simulated_s: float) -> str:
        """Return the kind of the row."""
        return "storage" if simulated_s >= LONGER * self.computing_s else "input"

    def interval(self, simulated_s: float, table: dict[str, Any]) -> tuple[float, float]:
        """Return the 90 % interval with the doubts of a table."""
        built = self.built()
        doubts = storage_doubts(table)
        n = n_draws(len(doubts))
        at = {each: places(each.name, seed=0, n=n) for each in doubts}
        drawn_s = [
            self.step_s(built, doubted(built.plan, built.costs, {each: at[each][i] for each in doubts}))
            for i in range(n)
        ]
        by_name = {each.name: at[each] for each in doubts}
        return spread(simulated_s, np.array(drawn_s) - simulated_s, None, by_name)[0]


def rows() -> Iterator[Reading]:
    """Yield all rows; one that is an input of the others is none."""
    yield from _submissions()
    yield from _network_file_systems()


def _submissions() -> Iterator[Reading]:
    """Yield submissions to MLPerf Storage. Utilisation leaves out reading for the first step."""
    run = script("mlperf_storage")
    for row in run.PUBLISHED["submissions"]["rows"]:
        n = row["accelerators"]
        found = run.scenario(run.LOADS[row["workload"]], row["peak_Bps"], n)
        name = f"{row['workload']}, {n} accelerators"
        yield Reading(f"MLPerf, {row['drive']}", name, found, n, 1, found.workload.forward_s / row["au"])


def _network_file_systems() -> Iterator[Reading]:
    """Yield runs that read ImageNet from a network file system or a network disk."""
    run = script("efs_k80")
    for machine, of in run.PUBLISHED["machines"].items():
        for model in run.MODELS:
            for n_gpus, real in zip(run.GPUS, of["real"][model], strict=True):
                if real is None or (machine, model, n_gpus) == run.DECODE_SOURCE:
                    continue
                found = run.scenario(machine, model, n_gpus)
                storage = found.cluster.storage
                assert storage
                family = CACHED if real * run.RECORD_NBYTES > storage.bandwidth_Bps else machine
                measured_s = n_gpus * found.workload.batch_size / real
                yield Reading(family, f"{model}, {n_gpus} GPUs", found, n_gpus, run.N_WARMUP_STEPS, measured_s)
