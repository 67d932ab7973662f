"""Does hierarchical top-k beat dense and flat sparse communication on a cloud cluster, and by how much?

    python experiments/hitopk_communication/run.py              print the answer: step times on 128 GPUs
    python experiments/hitopk_communication/run.py --write      write them, and the figure, into the README

Published: Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
arXiv 2010.10458: 16 machines with 8 V100 each, 25 Gbit/s, 25 to 40 % faster than other systems.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from simdist.cost import Shared
from simdist.cost.plain import linear_s, plain_ring_s
from simdist.report import markdown_table, page_command
from simdist.runs.building import build
from simdist.scenario import Link, Scenario, load
from simdist.scenario.workload import WorkloadLaunches
from simdist.schedules import Schedule
from simdist.studies.comparison import Row, compare
from simdist.studies.measuring import measure

HERE = Path(__file__).parent
MODELS = {"ResNet-50": load(HERE / "scenario.yaml"), "BERT-large": load(HERE / "bert-large.yaml")}
BATCHES = (32, 64, 128, 256)
DENSITY = 1e-3
DENSITIES = tuple(float(density) for density in np.geomspace(1e-4, 0.2, 12))

N_PARAMETERS = 25_557_032  # ResNet-50
N_NODES, N_PER_NODE, N_GPUS = 16, 8, 128
PAIR_NBYTES = 4 + 4  # a float32 and an int32
DERIVED_NBYTES = {
    "hitopk": (N_NODES - 1) * DENSITY * N_PARAMETERS * PAIR_NBYTES,
    "naive-ag": (N_GPUS - 1) * DENSITY * N_PARAMETERS * PAIR_NBYTES,
    "torus": 2 * (N_NODES - 1) / N_NODES * 4 * N_PARAMETERS,
    "ring": 2 * (N_GPUS - 1) / N_GPUS * 4 * N_PARAMETERS,
}
"""Schedule -> bytes that leave a node's NIC in a step, by the formulas of the paper."""

MEASURED = {  # Tencent Cloud, TACO Train on GN10Xp (8 V100, 25 Gbit/s): documentation, product 1573, summary for torch
    "Horovod, TCP": (847, "ring"),
    "Horovod, HARP": (1644, "ring"),
    "LightCC (2-D all-reduce, top-k), HARP": (3562, "hitopk"),
}
"""System -> images per second of VGG-16 on 16 GPUs, and the schedule that comes closest."""


def named(scenario: Scenario, label: str) -> Schedule:
    """Return a schedule of a scenario by its label, without buckets: the gradient is sent as a whole."""
    (schedule,) = (each for each in scenario.schedules if each.name == label)
    return schedule.model_copy(update={"bucket_nbytes": None})


def nothing_but(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Return one step of a schedule that computes nothing, so that it takes as long as its communication."""
    nothing = {"launches": WorkloadLaunches(), "forward_s": 1e-12, "backward_s": 0.0, "optimize_s": 0.0}
    free = scenario.workload.model_copy(update=nothing)
    return scenario.changed(workload=free, schedules=[schedule], steps=1)


def at_line_rate(scenario: Scenario, *, dtype: str = "float32") -> Scenario:
    """Return the scenario with NICs at their line rate, without latencies, fabric and memory cost nothing."""
    cluster = scenario.cluster
    network = cluster.network.model_copy(update={"latency_s": 0.0, "efficiency": 1.0})
    device = cluster.device.model_copy(update={"memory_bandwidth_Bps": float("inf")})
    update = {"network": network, "device": device, "fabric": Link.ideal(), "collectives": {"overhead_s": 0.0}}
    workload = scenario.workload.model_copy(update={"dtype": dtype})
    return scenario.changed(cluster=cluster.model_copy(update=update), workload=workload)


def exchange_s(scenario: Scenario, schedule: Schedule) -> float:
    """Return the seconds in which a schedule averages a gradient: selections, messages and sums."""
    alone = nothing_but(scenario, schedule)
    return float(measure(alone, build(alone, schedule), n_seeds=1).step_s[0])


def nic_nbytes(scenario: Scenario, schedule: Schedule) -> float:
    """Return the bytes that leave the busiest NIC in a step, as the simulator's costs have them."""
    alone = nothing_but(scenario, schedule)
    built = build(alone, schedule)
    topology = built.costs.resources
    nbytes = np.zeros(topology.n_resources)
    for op in built.plan.bodies[0]:
        cost = built.costs.of[op]
        for transfer in cost.transfers if isinstance(cost, Shared) else ():
            for stage in transfer.stages:
                nbytes[stage.resources] += stage.nbytes
    return float(nbytes[topology.nic_out(np.arange(topology.n_nodes))].max())


def with_density(schedule: Schedule, density: float) -> Schedule:
    """Return a sparse schedule that sends another share of the entries."""
    return schedule.model_copy(update={"density": density})


def crossing_density(scenario: Scenario) -> float:
    """Return the density at which hierarchical top-k takes as long as the torus, by bisection."""
    hitopk, torus_s = named(scenario, "hitopk"), exchange_s(scenario, named(scenario, "torus"))
    low, high = 1e-3, 0.5
    while high - low > 1e-4 * low:
        middle = (low + high) / 2
        slower = exchange_s(scenario, with_density(hitopk, middle)) > torus_s
        low, high = (low, middle) if slower else (middle, high)
    return (low + high) / 2


def bytes_table() -> Iterator[str]:
    """Yield bytes and time per step at line rate, derived from the paper and simulated."""
    scenario = at_line_rate(MODELS["ResNet-50"])
    line_rate_Bps = scenario.cluster.network.bandwidth_Bps
    yield "| schedule | derived MB per NIC | simulated MB | derived ms | simulated ms | error |"
    for label, derived in DERIVED_NBYTES.items():
        schedule = named(scenario, label)
        ours_s, ours_nbytes = exchange_s(scenario, schedule), nic_nbytes(scenario, schedule)
        derived_s = derived / line_rate_Bps
        yield (
            f"| {label} | {derived / 1e6:.3f} | {ours_nbytes / 1e6:.3f} | {1e3 * derived_s:.3f} "
            f"| {1e3 * ours_s:.3f} | {ours_s / derived_s - 1:+.2%} |"
        )


def crossing_table() -> Iterator[str]:
    """Yield the density up to which hierarchical top-k is faster than the torus."""
    scenario = MODELS["ResNet-50"]
    yield "| values | cluster | formula | simulated |"
    for dtype, nbytes in (("float32", 4), ("float16", 2)):
        formula = 2 * nbytes / (N_NODES * (nbytes + 4))
        workload = scenario.workload.model_copy(update={"dtype": dtype})
        clusters = {
            "line rate only": at_line_rate(scenario, dtype=dtype),
            "with latencies and selection": scenario.changed(workload=workload),
        }
        for cluster, changed in clusters.items():
            yield f"| {dtype} | {cluster} | {formula:.4f} | {crossing_density(changed):.4f} |"


def answer_table() -> Iterator[str]:
    """Yield step times of both models under every schedule."""
    yield "| model | schedule | ms per step | computing | exposed comm. | exchange alone | over ring | over torus |"
    for model, scenario in MODELS.items():
        rows = {row.schedule: row for row in compare(scenario, n_seeds=1)}
        for label, row in rows.items():
            times = (row.step_s, row.compute_s, row.comm_s, exchange_s(scenario, named(scenario, label)))
            yield (
                f"| {model} | `{label}` | {' | '.join(f'{1e3 * time_s:.1f}' for time_s in times)} "
                f"| {row.speedup:.2f} | {rows['torus'].step_s / row.step_s:.2f} |"
            )


def gain(rows: Sequence[Row], label: str, rival: str) -> float:
    """Return how much faster one schedule is than another."""
    step_s = {row.schedule: row.step_s for row in rows}
    return step_s[rival] / step_s[label] - 1


def batch_table() -> Iterator[str]:
    """Yield what hierarchical top-k gains with smaller batches, which leave less time to hide communication in."""
    rivals = ("ring", "tree", "torus", "torus-fp16", "naive-ag")
    yield f"| images per GPU | computing, ms | {' | '.join(f'gain over {rival}' for rival in rivals)} |"
    scenario = MODELS["ResNet-50"]
    for batch in BATCHES:
        workload = scenario.workload.model_copy(update={"batch_size": batch})
        rows = compare(scenario.changed(workload=workload), n_seeds=1)
        gains = " | ".join(f"{gain(rows, 'hitopk', rival):+.0%}" for rival in rivals)
        yield f"| {batch} | {1e3 * rows[0].compute_s:.0f} | {gains} |"


def measured_table() -> Iterator[str]:
    """Yield what a cloud's owner measured with dense and with hierarchical top-k communication, and simulations."""
    scenario = load(HERE / "taco.yaml")
    n_images = scenario.workload.batch_size * scenario.cluster.world_size
    ours = {row.schedule: n_images / row.step_s for row in compare(scenario, n_seeds=1)}
    plain = [n_images / of(scenario.workload, scenario.cluster) for of in (linear_s, plain_ring_s)]
    yield "| system | measured, images/s | simulated as | images/s | error | linear | plain ring |"
    for system, (rate, label) in MEASURED.items():
        errors = " | ".join(f"{each / rate - 1:+.0%}" for each in (ours[label], *plain))
        yield f"| {system} | {rate} | `{label}` | {ours[label]:.0f} | {errors} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "answer": markdown_table(answer_table()),
        "batch": markdown_table(batch_table()),
        "bytes": markdown_table(bytes_table()),
        "crossing": markdown_table(crossing_table()),
        "measured": markdown_table(measured_table()),
    }


def figure(path: Path) -> None:
    """Draw how long communication takes against density."""
    from matplotlib.figure import Figure

    from simdist.report import save
    from simdist.report.palette import BLACK, BLUE, GREY, ORANGE, VERMILLION

    scenario = MODELS["ResNet-50"]
    drawing = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = drawing.subplots()
    for label, color, marker in (("naive-ag", ORANGE, "s"), ("gtopk", VERMILLION, "^"), ("hitopk", BLUE, "o")):
        schedule = named(scenario, label)
        times_ms = [1e3 * exchange_s(scenario, with_density(schedule, density)) for density in DENSITIES]
        axes.plot(DENSITIES, times_ms, color=color, marker=marker, markersize=4.5, label=label)
    for label, color, dashes in (
        ("ring", GREY, (0, ())),
        ("torus", BLACK, (0, ())),
        ("torus-fp16", BLACK, (0, (4, 3))),
    ):
        time_ms = 1e3 * exchange_s(scenario, named(scenario, label))
        axes.axhline(time_ms, color=color, linestyle=dashes, linewidth=1.3, label=label)
    axes.axvline(DENSITY, color=GREY, linestyle=(0, (1, 3)))
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="communication per step, ms")
    axes.set_title(
        "ResNet-50 on 16 x 8 V100, 25 Gbit/s TCP, simulated", loc="left", fontsize="medium", fontweight="bold"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.legend(loc="outside right upper", frameon=False)
    save(drawing, path)


def main() -> None:
    """Run the experiment."""
    page_command(str(__doc__), HERE / "README.md", tables, draw=lambda: figure(HERE / "density.png"))


if __name__ == "__main__":
    main()
