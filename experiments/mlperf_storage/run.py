"""MLPerf Storage: how many accelerators does a storage keep busy, by formula, simulated, and as published?

python experiments/mlperf_storage/run.py           print the tables
python experiments/mlperf_storage/run.py --write   write them into the README
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from simdist.caching import epoch_order
from simdist.report import markdown_table, page_command
from simdist.runs.building import dataset, simulate
from simdist.scenario import Scenario, load
from simdist.traces.waiting import step_end_s

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
STORAGE: dict[str, float] = {name: value for name, value in PUBLISHED["storage"].items() if name != "source"}
UNIFORM_STEPS, VARYING_STEPS = 12, 60  # records of one size repeat themselves; of varying sizes the mean counts
DEPTHS = (2, 3, 4, 8)
ROUNDING = 1e-12  # of sums of floating-point times
MANAGED = {"latency_s": 2e-3, "open_s": 2e-3}  # a managed NFS, 1 to 3 ms for 4 KiB (support.huaweicloud.com, SFS Turbo)


@dataclass(frozen=True)
class Load:
    """Demand of one simulated accelerator of the benchmark on the storage.

    Args:
        batch: Records of a step.
        compute_s: Seconds that it sleeps for a step.
        record_nbytes: Bytes of a record, on average; a file has whole bytes.
        record_sd_nbytes: Their standard deviation.
        read_threads: Records read at the same time.
        required_au: Utilisation that a submission needs.
    """

    batch: int
    compute_s: float
    record_nbytes: float
    read_threads: int
    required_au: float
    record_sd_nbytes: float = 0.0

    @property
    def demand_Bps(self) -> float:
        """Bytes per second that keep it busy."""
        return self.batch * round(self.record_nbytes) / self.compute_s

    def utilisation(self, bandwidth_Bps: float, n_accelerators: int) -> float:
        """Return the closed form: min(1, share of the storage / demand)."""
        return min(1.0, bandwidth_Bps / n_accelerators / self.demand_Bps)

    def most(self, bandwidth_Bps: float) -> int:
        """Return how many accelerators the closed form keeps at the required utilisation."""
        return math.floor(bandwidth_Bps / (self.required_au * self.demand_Bps))


LOADS = {name: Load(**row) for name, row in PUBLISHED["workloads"].items() if name != "source"}
EVEN = {name: replace(each, record_sd_nbytes=0.0) for name, each in LOADS.items()}
"""The same with records of one size."""


def scenario(
    load_: Load,
    bandwidth_Bps: float,
    n_accelerators: int,
    *,
    prefetch: int = 2,
    slower: Mapping[str, float] | None = None,
) -> Scenario:
    """Return the benchmark on some accelerators.

    Args:
        load_: Demand of each; records have one size where `record_sd_nbytes` is 0.
        bandwidth_Bps: Of the storage.
        n_accelerators: How many.
        prefetch: Batches that are read ahead.
        slower: Latencies of the storage; none if absent.
    """
    base = load(HERE / "scenario.yaml")
    assert base.cluster.storage
    assert base.input.data
    varying = load_.record_sd_nbytes > 0
    steps = VARYING_STEPS if varying else UNIFORM_STEPS
    size = _lognormal(load_) if varying else round(load_.record_nbytes)
    served = base.cluster.storage.model_copy(update={"bandwidth_Bps": bandwidth_Bps, **(slower or {})})
    return base.changed(
        cluster=base.cluster.model_copy(update={"gpus_per_node": n_accelerators, "storage": served}),
        workload=base.workload.model_copy(update={"batch_size": load_.batch, "forward_s": load_.compute_s}),
        input={
            "source": "storage",
            "prefetch": prefetch,
            "readers": load_.read_threads,
            "data": {"samples": steps * n_accelerators * load_.batch, "file_nbytes": size},
        },
        steps=steps,
    )


def _lognormal(load_: Load) -> dict[str, float]:
    """Return the lognormal distribution with the mean and standard deviation of the records."""
    variance = math.log1p((load_.record_sd_nbytes / load_.record_nbytes) ** 2)
    return {"median_nbytes": round(load_.record_nbytes * math.exp(-variance / 2)), "sigma": math.sqrt(variance)}


def utilisation(scenario: Scenario) -> float:
    """Simulate, and return the share of the time after the first step in which the accelerators compute.

    Source:
        mlcommons/storage, Rules.md: reading for the first step is left out of AU.
    """
    end_s = step_end_s(simulate(scenario, engine="des")).max(axis=1)
    assert scenario.workload.forward_s
    return float((scenario.steps - 1) * scenario.workload.forward_s / (end_s[-1] - end_s[0]))


@cache
def simulated(name: str, bandwidth_Bps: float, n_accelerators: int) -> float:
    """Return the simulated utilisation of a workload, see `scenario`."""
    return utilisation(scenario(LOADS[name], bandwidth_Bps, n_accelerators))


def simulated_most(name: str, bandwidth_Bps: float) -> int:
    """Return the largest number of accelerators that are simulated to reach the required utilisation."""
    n, required = LOADS[name].most(bandwidth_Bps), LOADS[name].required_au
    while n and simulated(name, bandwidth_Bps, n) < required:
        n -= 1
    while simulated(name, bandwidth_Bps, n + 1) >= required:
        n += 1
    return n


def most_table() -> Iterator[str]:
    """Yield how many accelerators each storage keeps busy, by formula and simulated."""
    yield "| storage | workload | demand of one, MB/s | required AU | formula | simulated | AU there | AU of one more |"
    for storage, bandwidth_Bps in STORAGE.items():
        for name, each in LOADS.items():
            n = simulated_most(name, bandwidth_Bps)
            shown = (f"{simulated(name, bandwidth_Bps, m):.1%}" if m else "-" for m in (n, n + 1))
            yield (
                f"| {storage} | {name} | {each.demand_Bps / 1e6:.1f} | {each.required_au:.0%} "
                f"| {each.most(bandwidth_Bps)} | {n} | {' | '.join(shown)} |"
            )


def formula_table() -> Iterator[str]:
    """Yield utilisation over the number of accelerators, of workloads whose records have one size."""
    storage = "FSx for Lustre 250, 24 TiB"
    yield "| workload | accelerators | share / demand | formula | simulated | difference |"
    for name in ("resnet50-a100", "resnet50-h100"):
        each = LOADS[name]
        fit = STORAGE[storage] / each.demand_Bps
        for n in (1, math.floor(fit), math.floor(fit) + 1, each.most(STORAGE[storage]), math.floor(2 * fit)):
            formula, ours = each.utilisation(STORAGE[storage], n), simulated(name, STORAGE[storage], n)
            difference = "none" if math.isclose(ours, formula, rel_tol=ROUNDING) else f"{ours - formula:+.0e}"
            yield f"| {name} | {n} | {fit / n:.3f} | {formula:.6f} | {ours:.6f} | {difference} |"


def drawn_utilisation(scenario: Scenario) -> float:
    """Return the utilisation at which the storage never pauses, for the sizes that were drawn."""
    read = dataset(scenario)
    storage, compute_s = scenario.cluster.storage, scenario.workload.forward_s
    assert read
    assert storage
    assert compute_s
    first = epoch_order(read, 0, scenario.cluster.world_size)[0]
    left_nbytes = sum(read.file_nbytes) - np.array(read.file_nbytes)[first].sum()
    return float(min(1.0, (scenario.steps - 1) * compute_s * storage.bandwidth_Bps / left_nbytes))


def varying_table() -> Iterator[str]:
    """Yield what records of varying sizes cost 3D U-Net where storage and demand are even."""
    depths = " | ".join(f"prefetch {depth}" for depth in DEPTHS)
    yield f"| accelerators | formula | one size | storage never pauses | {depths} |"
    for n in (1, 2, 4, 8, 16):
        bandwidth_Bps = n * LOADS["unet3d-h100"].demand_Bps
        runs = [scenario(LOADS["unet3d-h100"], bandwidth_Bps, n, prefetch=depth) for depth in DEPTHS]
        ours = [utilisation(scenario(EVEN["unet3d-h100"], bandwidth_Bps, n)), drawn_utilisation(runs[0])]
        ours += [utilisation(run) for run in runs]
        yield f"| {n} | 100.0% | " + " | ".join(f"{share:.1%}" for share in ours) + " |"


def latency_table() -> Iterator[str]:
    """Yield what latency costs one accelerator at a storage with bandwidth to spare."""
    bandwidth_Bps = max(STORAGE.values())
    yield "| workload | rounds | reading, ms | computing, ms | formula | computing / reading | simulated |"
    for name, each in EVEN.items():
        rounds = math.ceil(each.batch / each.read_threads)
        requests = math.ceil(each.record_nbytes / 2**20)
        reading_s = rounds * (
            MANAGED["open_s"] + requests * MANAGED["latency_s"] + round(each.record_nbytes) / bandwidth_Bps
        )
        yield (
            f"| {name} | {rounds} | {1e3 * reading_s:.1f} | {1e3 * each.compute_s:.1f} "
            f"| {each.utilisation(bandwidth_Bps, 1):.1%} | {min(1.0, each.compute_s / reading_s):.1%} "
            f"| {utilisation(scenario(each, bandwidth_Bps, 1, slower=MANAGED)):.1%} |"
        )


def published_table() -> Iterator[str]:
    """Yield submissions of single drives beside what their stated bandwidth predicts."""
    yield (
        "| drive | stated, GB/s | workload | submitted | predicted | AU published | AU predicted | points "
        "| AU x demand, GB/s |"
    )
    for row in PUBLISHED["submissions"]["rows"]:
        name, peak_Bps, n = row["workload"], row["peak_Bps"], row["accelerators"]
        ours = simulated(name, peak_Bps, n)
        used_Bps = n * row["au"] * LOADS[name].demand_Bps
        yield (
            f"| {row['drive']} | {peak_Bps / 1e9:.1f} | {name} | {n} | {simulated_most(name, peak_Bps)} "
            f"| {row['au']:.1%} | {ours:.1%} | {100 * (ours - row['au']):+.1f} | {used_Bps / 1e9:.2f} |"
        )


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "formula": markdown_table(formula_table()),
        "most": markdown_table(most_table()),
        "published": markdown_table(published_table()),
        "varying": markdown_table(varying_table()),
        "latency": markdown_table(latency_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
