"""Is the network the bottleneck? The answers of another simulator, simulated.

    python experiments/netai_whatif/run.py              print their rules beside simulated, for 15 clusters
    python experiments/netai_whatif/run.py --write      write them into the README

Rules: Zhang et al., Is Network the Bottleneck of Distributed Training?, NetAI 2020; the scripts
and the measured times of the backward pass are in github.com/netx-repo/training-bottleneck, folder `simulation`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from simdist.cost import price
from simdist.report import markdown_table, page_command
from simdist.runs.building import build
from simdist.scenario import Scenario, Tensor, Workload, load
from simdist.schedules import Schedule
from simdist.studies import measuring

HERE = Path(__file__).parent
SCENARIO = load(HERE / "scenario.yaml")
GBIT_S = (100, 40, 25, 10, 1)
PUBLISHED = {  # sim_with_compression_resnet50.py, compression 1
    16: (0.9987, 0.9983, 0.9702, 0.5718, 0.0798),
    32: (0.9975, 0.9971, 0.9423, 0.5545, 0.0773),
    64: (0.9946, 0.9943, 0.9103, 0.5397, 0.0760),
}
"""Workers -> scaling factors by line rate, in the order of `GBIT_S`, as computed from the rules of the scripts."""
BUFFER_NBYTES = 64 * 1024**2  # sim_with_compression_comm.py, BackwardProc: a message is sent when so much is gathered,
TIMEOUT_S = 5e-3  # or when the backward pass has taken so long since the message before


def gathered(workload: Workload) -> Workload:
    """Return the workload with one tensor for each message of the other simulator.

    The backward pass walks the tensors from last to first. A tensor joins the message of those before it until the
    message is sent.
    """
    second_per_weight = (workload.backward_s or 0.0) / workload.flops
    messages: list[Tensor] = []
    count, weight = 0, 0.0
    for tensor in reversed(workload.tensors):
        count, weight = count + tensor.count, weight + tensor.flops
        full = 4 * count >= BUFFER_NBYTES or weight * second_per_weight >= TIMEOUT_S
        if full or tensor is workload.tensors[0]:
            messages.append(Tensor(name=f"up to {tensor.name}", count=count, flops=weight))
            count, weight = 0, 0.0
    return workload.model_copy(update={"tensors": tuple(reversed(messages))})


def by_their_rule() -> Scenario:
    """Return the scenario with the messages of the other simulator, each sent by itself as soon as it is complete."""
    alone = next(schedule for schedule in SCENARIO.schedules if schedule.name == "no-fusion")
    return SCENARIO.changed(workload=gathered(SCENARIO.workload), schedules=[alone])


def on(scenario: Scenario, n_workers: int, gbit_s: float) -> Scenario:
    """Return the scenario on so many machines with links of that rate."""
    cluster = scenario.cluster
    network = cluster.network.model_copy(update={"bandwidth_Bps": gbit_s * 1e9 / 8})
    return scenario.changed(cluster=cluster.model_copy(update={"nodes": n_workers, "network": network}))


Factors = dict[int, tuple[float, ...]]
"""Workers -> scaling factors by line rate, as in `PUBLISHED`."""


def measure(scenario: Scenario, label: str) -> Factors:
    """Return for all clusters the step time of one worker by itself over that of all, under one schedule."""
    schedule = next(each for each in scenario.schedules if each.name == label)
    return {n: tuple(_scaling_factors(scenario, schedule, n)) for n in PUBLISHED}


def _scaling_factors(scenario: Scenario, schedule: Schedule, n_workers: int) -> Iterator[float]:
    """Yield the scaling factors on links of all rates; the plan is the same on all."""
    built = build(on(scenario, n_workers, GBIT_S[0]), schedule)
    for gbit_s in GBIT_S:
        changed = on(scenario, n_workers, gbit_s)
        priced = replace(built, costs=price(built.plan, changed.cluster, changed.workload))
        measured = measuring.measure(changed, priced, n_seeds=1)
        yield float(measured.states_s["compute"][0] / measured.step_s[0])


def measure_all() -> dict[str, Factors]:
    """Return the factors by the other simulator's rule, with Horovod's cycles, and without fusion."""
    others = {label: measure(SCENARIO, label) for label in ("horovod", "no-fusion")}
    return {"simulated": measure(by_their_rule(), "no-fusion")} | others


def published_table(measured: dict[str, Factors]) -> Iterator[str]:
    """Yield scaling factors by their rules and simulated ones, and the differences, for each cluster."""
    yield f"| workers | Gbit/s | their rules |{''.join(f' {label} | error |' for label in measured)}"
    for n_workers, row in PUBLISHED.items():
        for link, (gbit_s, published) in enumerate(zip(GBIT_S, row, strict=True)):
            ours = (factors[n_workers][link] for factors in measured.values())
            columns = (f"{factor:.4f} | {factor / published - 1:+.2%}" for factor in ours)
            yield f"| {n_workers} | {gbit_s} | {published:.4f} | {' | '.join(columns)} |"


def tables(measured: dict[str, Factors]) -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {"published": markdown_table(published_table(measured))}


def main() -> None:
    """Run the experiment."""
    page_command(str(__doc__), HERE / "README.md", lambda: tables(measure_all()))


if __name__ == "__main__":
    main()
