"""ResNet-50 on 1 to 128 V100 of AWS p3.16xlarge: published images per second beside simulated ones.

python experiments/aws_p3_scaling/run.py           print the tables
python experiments/aws_p3_scaling/run.py --write   write them into the README
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from simdist.cost import price
from simdist.cost.plain import linear_s, plain_ring_s
from simdist.report import markdown_table, page_command
from simdist.runs.building import Built, job
from simdist.scenario import Interference, Scenario, load, load_workload, presets
from simdist.schedules.sync import Sync
from simdist.studies.comparison import Row, row
from simdist.studies.draws import with_draws
from simdist.studies.measuring import measure

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
RATES = {int(n_gpus): float(rate) for n_gpus, rate in PUBLISHED["images_per_s"].items()}
"""GPUs -> images per second of all of them."""
N_SEEDS = 4


def computing(base: Scenario, one_gpu: float) -> Scenario:
    """Return it with the compute time of a GPU that does so many images per second by itself: an input."""
    step_s = base.workload.batch_size / one_gpu
    times = {"forward_s": step_s / 3, "backward_s": step_s * 2 / 3}
    return base.changed(workload=base.workload.model_copy(update=times))


def from_one_gpu() -> Scenario:
    """Return the scenario of someone who has measured one GPU."""
    return computing(load(HERE / "scenario.yaml"), RATES[1])


def scenario() -> Scenario:
    """Return the scenario of someone who has measured one GPU and one machine."""
    return with_machine(computing(load(HERE / "scenario.yaml"), RATES[1]), RATES[8])


def with_machine(base: Scenario, rate: float) -> Scenario:
    """Return it with the measured images per second of one machine."""
    return base.changed(disturbances=[Interference(machine_samples_per_s=rate)])


def simulated(base: Scenario, n_gpus: int) -> Row:
    """Simulate a number of GPUs, 8 to a machine, also under draws of what is uncertain.

    Plans are not proved here, as `simdist.runs.building.build` would do: with 161 tensors on 128 GPUs, that takes
    seconds.
    """
    cluster = base.cluster.model_copy(update={"nodes": n_gpus // base.cluster.gpus_per_node})
    scenario = base.changed(cluster=cluster)
    (schedule,) = scenario.schedules
    plan = schedule.plan(job(scenario))
    built = Built(schedule, plan, price(plan, scenario.cluster, scenario.workload), n_proved_ranks=0)
    times = with_draws(scenario, built, measure(scenario, built, n_seeds=N_SEEDS))
    return row(times, times)


def images_per_s(base: Scenario, n_gpus: int) -> float:
    """Simulate the images per second of a number of GPUs."""
    return n_gpus * base.workload.batch_size / simulated(base, n_gpus).step_s


@dataclass(frozen=True)
class Line:
    """Images per second of some GPUs: published, by formulas and simulated."""

    published: float
    simulated: float
    linear: float
    ring: float
    interval: tuple[float, float] | None

    @property
    def is_inside(self) -> bool:
        """Whether there is an interval and what was published is in it."""
        return self.interval is not None and self.interval[0] <= self.published <= self.interval[1]

    def cells(self) -> str:
        """Return what every table shows."""
        errors = [f"{rate / self.published - 1:+.1%}" for rate in (self.simulated, self.linear, self.ring)]
        shown = (
            "{:.0f} - {:.0f} | {}".format(*self.interval, "yes" if self.is_inside else "no") if self.interval else "|"
        )
        return f"{self.published:.0f} | {self.simulated:.0f} | {' | '.join(errors)} | {shown} |"


HEADINGS = "published, images/s | simulated | error | linear | plain ring | interval | inside |"


def line(base: Scenario, n_gpus: int, published: float, known: Scenario) -> Line:
    """Compute a row; formulas take the compute time of `known`."""
    n_images, found = n_gpus * base.workload.batch_size, simulated(base, n_gpus)
    cluster = base.cluster.model_copy(update={"nodes": n_gpus // base.cluster.gpus_per_node})
    linear, ring = (n_images / of(known.workload, cluster) for of in (linear_s, plain_ring_s))
    ends = tuple(n_images / step_s for step_s in reversed(found.step_s_range)) if found.step_s_range else None
    return Line(published, n_images / found.step_s, linear, ring, ends)


@cache
def rows() -> dict[int, Line]:
    """Return the rows of more than one machine, of someone who has measured one machine."""
    base = scenario()
    known = computing(base, RATES[8] / 8)
    return {n_gpus: line(base, n_gpus, rate, known) for n_gpus, rate in RATES.items() if n_gpus > 8}


@cache
def rows_from_one_gpu() -> dict[int, Line]:
    """Return the rows of someone who has measured one GPU."""
    base = from_one_gpu()
    return {n_gpus: line(base, n_gpus, rate, base) for n_gpus, rate in RATES.items() if n_gpus > 1}


@cache
def other_rows() -> dict[tuple[str, int], Line]:
    """Return the rows of other users, who published the rate of one machine.

    Two of them had machines outside a placement group, where a TCP connection carries 5 Gbit/s (EC2 User Guide,
    instance network bandwidth): a fifth of 25 Gbit/s. NCCL before 2.4 opened one for a ring.
    """
    found = {}
    for user, of in PUBLISHED["others"].items():
        rates = {int(n_gpus): float(rate) for n_gpus, rate in of["images_per_s"].items()}
        whole = load_workload(presets.path("workloads", of["model"]))
        base = load(HERE / "scenario.yaml")
        workload = whole.model_copy(update={"batch_size": of["batch"], "forward_s": 1.0, "optimize_s": 0.0})
        base = computing(base.changed(workload=workload), rates.get(1, rates[8] / 8))
        if (
            "network" in of
        ):  # a documented limit takes the place of the range; without the rate of one GPU nothing is lost
            base = with_network(base.changed(uncertain={}), efficiency=of["network"])
        if "buffer_nbytes" in of:
            base = with_fusion(base, buffer_nbytes=of["buffer_nbytes"])
        base, known = with_machine(base, rates[8]), computing(base, rates[8] / 8)
        found |= {(user, n): line(base, n, rate, known) for n, rate in rates.items() if n > 8}
    return found


def rates_table() -> Iterator[str]:
    """Yield images per second, published and simulated from the rate of one machine."""
    yield f"| GPUs | {HEADINGS} efficiency: published | simulated |"
    for n_gpus, each in rows().items():
        shares = (rate / n_gpus / RATES[1] for rate in (each.published, each.simulated))
        yield f"| {n_gpus} | {each.cells()} {' | '.join(f'{share:.1%}' for share in shares)} |"


def one_gpu_table() -> Iterator[str]:
    """Yield them from the rate of one GPU."""
    yield f"| GPUs | {HEADINGS}"
    for n_gpus, each in rows_from_one_gpu().items():
        yield f"| {n_gpus} | {each.cells()}"


def others_table() -> Iterator[str]:
    """Yield the rows of other users."""
    yield f"| user | GPUs | {HEADINGS}"
    for (user, n_gpus), each in other_rows().items():
        yield f"| {user} | {n_gpus} | {each.cells()}"


def with_network(base: Scenario, **update: float) -> Scenario:
    """Give the cluster another network."""
    network = base.cluster.network.model_copy(update=update)
    return base.changed(cluster=base.cluster.model_copy(update={"network": network}))


def with_batch(base: Scenario, batch_size: int) -> Scenario:
    """Give every GPU another batch, computed at the same rate."""
    share = batch_size / base.workload.batch_size
    times = {"forward_s": base.workload.forward_s * share, "backward_s": base.workload.backward_s * share}
    return base.changed(workload=base.workload.model_copy(update={"batch_size": batch_size, **times}))


def with_dtype(base: Scenario, dtype: str) -> Scenario:
    """Send gradients of another type."""
    return base.changed(workload=base.workload.model_copy(update={"dtype": dtype}))


def with_fusion(base: Scenario, **update: float) -> Scenario:
    """Change tensor fusion."""
    (schedule,) = base.schedules
    assert isinstance(schedule, Sync)
    assert schedule.fusion
    fusion = schedule.fusion.model_copy(update=update)
    return base.changed(schedules=(schedule.model_copy(update={"fusion": fusion}),))


KNOBS: dict[str, Callable[[Scenario], Scenario]] = {
    "as it is": lambda base: base,
    "network efficiency 0.54 (Azure, nccl-tests#83)": lambda base: with_network(base, efficiency=0.54),
    "network efficiency 0.9": lambda base: with_network(base, efficiency=0.9),
    "latency of a network hop twice": lambda base: with_network(base, latency_s=2 * base.cluster.network.latency_s),
    "fusion buffer of 32 MiB": lambda base: with_fusion(base, buffer_nbytes=32 * 1024**2),
    "fusion by cycles of 5 ms of GPU time": lambda base: with_fusion(base, cycle_s=5e-3),
    "batch of 128": lambda base: with_batch(base, 128),
    "gradients in half precision": lambda base: with_dtype(base, "float16"),
}


def knobs_table() -> Iterator[str]:
    """Yield how the rate of 32 GPUs changes with what it depends on."""
    base = scenario().changed(uncertain={})
    yield "| changed | 32 GPUs, images/s | to the published |"
    for name, change in KNOBS.items():
        rate = images_per_s(change(base), 32)
        yield f"| {name} | {rate:.0f} | {rate / RATES[32] - 1:+.1%} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "rates": markdown_table(rates_table()),
        "one gpu": markdown_table(one_gpu_table()),
        "others": markdown_table(others_table()),
        "knobs": markdown_table(knobs_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
