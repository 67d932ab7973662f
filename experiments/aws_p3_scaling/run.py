"""ResNet-50 on 1 to 128 V100 of AWS p3.16xlarge: published images per second beside simulated ones.

python experiments/aws_p3_scaling/run.py           print the tables
python experiments/aws_p3_scaling/run.py --write   write them into the README
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from simdist.cost import price
from simdist.report import page_command
from simdist.runs.building import Built, job
from simdist.scenario import Scenario, load
from simdist.schedules.sync import Sync
from simdist.studies.comparison import measure

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
RATES = {int(n_gpus): float(rate) for n_gpus, rate in PUBLISHED["images_per_s"].items()}
"""GPUs -> images per second of all of them."""


def scenario() -> Scenario:
    """Return the scenario with the compute time of one GPU, which was published: an input."""
    base = load(HERE / "scenario.yaml")
    step_s = base.workload.batch_size / RATES[1]
    times = {"forward_s": step_s / 3, "backward_s": step_s * 2 / 3}
    return base.changed(workload=base.workload.model_copy(update=times))


def images_per_s(base: Scenario, n_gpus: int) -> float:
    """Simulate the images per second of a number of GPUs, 8 to a machine.

    Plans are not proved here, as `simdist.runs.building.build` would do: with 161 tensors on 128 GPUs, that takes
    seconds.
    """
    cluster = base.cluster.model_copy(update={"nodes": n_gpus // base.cluster.gpus_per_node})
    scenario = base.changed(cluster=cluster)
    (schedule,) = scenario.schedules
    plan = schedule.plan(job(scenario))
    costs = price(plan, scenario.cluster, scenario.workload)
    measured = measure(scenario, Built(schedule, plan, costs, n_proved_ranks=0), n_seeds=1)
    return n_gpus * scenario.workload.batch_size / float(measured.step_s[0])


def rates_table() -> Iterator[str]:
    """Yield images per second, published and simulated, for each number of GPUs."""
    base = scenario()
    yield (
        "| GPUs | published, images/s | simulated | error | efficiency: published | simulated "
        "| exposed, ms: published | simulated |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for n_gpus, rate in RATES.items():
        if n_gpus == 1:
            continue
        ours, batch = images_per_s(base, n_gpus), base.workload.batch_size
        exposed = (1e3 * (n_gpus * batch / each - batch / RATES[1]) for each in (rate, ours))
        shares = (each / n_gpus / RATES[1] for each in (rate, ours))
        yield (
            f"| {n_gpus} | {rate:.0f} | {ours:.0f} | {ours / rate - 1:+.1%} "
            f"| {' | '.join(f'{share:.1%}' for share in shares)} | {' | '.join(f'{ms:.1f}' for ms in exposed)} |"
        )


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
    base = scenario()
    yield "| changed | 32 GPUs, images/s | to the published |"
    yield "|---|---|---|"
    for name, change in KNOBS.items():
        rate = images_per_s(change(base), 32)
        yield f"| {name} | {rate:.0f} | {rate / RATES[32] - 1:+.1%} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {"rates": "\n".join(rates_table()), "knobs": "\n".join(knobs_table())}


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
