"""A cache of three levels for training on a cloud cluster: how long do epochs take, with it and without?

python experiments/datacache/run.py           print the tables
python experiments/datacache/run.py --write   write them, and the figure, into the README

Published: Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
arXiv 2010.10458, section 3.2 (DataCache).
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

from simdist.cost import price
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.report import markdown_table, page_command
from simdist.runs.building import delays, job
from simdist.scenario import Scenario, load
from simdist.schedules import Schedule
from simdist.schedules.sync import Sync
from simdist.traces.waiting import step_end_s

HERE = Path(__file__).parent
BASE = load(HERE / "scenario.yaml")
POLICIES = tuple(schedule.name for schedule in BASE.schedules)
NODES = (1, 2, 4, 8, 16)
N_EPOCHS = 3
KEEPS_FILES = ("files", "datacache", "staged")
"""The policies whose second run finds files on the disks."""


def on(n_nodes: int, *, shuffle: str = "global", start: str = "cold", n_epochs: int = N_EPOCHS) -> Scenario:
    """Return the scenario on some nodes."""
    cluster = BASE.cluster.model_copy(update={"nodes": n_nodes})
    assert BASE.input.data
    data = BASE.input.data.model_copy(update={"shuffle": shuffle, "start": start})
    per_epoch = data.n_samples // (cluster.world_size * BASE.workload.batch_size)
    read = BASE.input.model_copy(update={"data": data})
    return BASE.changed(cluster=cluster, input=read, steps=n_epochs * per_epoch)


def reading_nothing(scenario: Scenario) -> Scenario:
    """Return the scenario with samples that are on the GPUs already."""
    return scenario.changed(input=scenario.input.model_copy(update={"source": "device"}))


def named(policy: str) -> Schedule:
    """Return the schedule with a policy, without buckets: the gradient is sent as a whole."""
    (schedule,) = (each for each in BASE.schedules if each.name == policy)
    return schedule.model_copy(update={"bucket_nbytes": None})


def epochs_s(scenario: Scenario, schedule: Schedule) -> list[float]:
    """Simulate, and return the seconds of every epoch; what comes before the first step counts to the first.

    Plans are not proved here, as `simdist.runs.building.build` would do: a test proves one.
    """
    plan = schedule.plan(job(scenario))
    trace = run(
        plan,
        price(plan, scenario.cluster, scenario.workload),
        delays(scenario),
        observe=WholeTrace(),
        engine="des",
    )
    assert scenario.input.data
    per_epoch = scenario.input.data.n_samples // (scenario.cluster.world_size * scenario.workload.batch_size)
    end_s = step_end_s(trace).max(axis=1)[per_epoch - 1 :: per_epoch]
    return [float(seconds) for seconds in np.diff(end_s, prepend=0.0)]


@cache
def run_s(policy: str, n_nodes: int, *, shuffle: str = "global") -> tuple[float, ...]:
    """Return the seconds of every epoch under a policy."""
    return tuple(epochs_s(on(n_nodes, shuffle=shuffle), named(policy)))


@cache
def second_run_s(policy: str, n_nodes: int, *, shuffle: str = "global") -> float:
    """Return the seconds of the first epoch of a second run: as of the first run, where nothing was kept on disks.

    It deals the samples as the first run did, so all it needs of that run is the first epoch.
    """
    if policy not in KEEPS_FILES:
        return run_s(policy, n_nodes, shuffle=shuffle)[0]
    return epochs_s(on(n_nodes, shuffle=shuffle, start="warm", n_epochs=1), named(policy))[0]


@cache
def computing_s(n_nodes: int) -> float:
    """Return the seconds of an epoch whose samples are on the GPUs already."""
    return epochs_s(reading_nothing(on(n_nodes)), named("naive"))[-1]


def limits_s(n_nodes: int) -> dict[str, float]:
    """Return what an epoch takes at least, by what limits it: total amounts over rates."""
    cluster, workload, data = BASE.cluster, BASE.workload, BASE.input.data
    assert cluster.storage
    assert cluster.disk
    assert data
    scenario = on(n_nodes)
    n_samples = scenario.steps // N_EPOCHS * scenario.cluster.world_size * workload.batch_size
    nbytes = n_samples * data.sizes_nbytes()[0]
    nic_Bps = cluster.network.bandwidth_Bps * cluster.network.efficiency
    batch_decoding_s = math.ceil(workload.batch_size / BASE.input.decode_workers) * workload.decode_s
    return {
        "computing": computing_s(n_nodes),
        "decoding": scenario.steps // N_EPOCHS * batch_decoding_s,
        "server": nbytes / cluster.storage.bandwidth_Bps,
        "own disk": nbytes / n_nodes / cluster.disk.read_Bps,
        "peers' NIC": n_samples * workload.sample_nbytes * (n_nodes - 1) / n_nodes**2 / nic_Bps,
    }


def epochs_table() -> Iterator[str]:
    """Yield the seconds of three epochs, and of the first of a second run, for every policy and number of nodes."""
    yield "| nodes | policy | epoch 1 | epoch 2 | epoch 3 | second run, epoch 1 | whole run over naive |"
    for n_nodes in NODES:
        for policy in POLICIES:
            yield epochs_row(n_nodes, policy)


def epochs_row(n_nodes: int, policy: str) -> str:
    """Return the line of a policy on some nodes."""
    times_s = run_s(policy, n_nodes)
    shown = " | ".join(f"{seconds:.1f}" for seconds in (*times_s, second_run_s(policy, n_nodes)))
    return f"| {n_nodes} | `{policy}` | {shown} | {sum(run_s('naive', n_nodes)) / sum(times_s):.2f} |"


def limits_table() -> Iterator[str]:
    """Yield what an epoch takes at least, by what limits it."""
    names = list(limits_s(1))
    yield f"| nodes | {' | '.join(names)} |"
    for n_nodes in NODES:
        yield f"| {n_nodes} | {' | '.join(f'{seconds:.1f}' for seconds in limits_s(n_nodes).values())} |"


def shuffle_table() -> Iterator[str]:
    """Yield the seconds of epochs on all nodes when every node keeps to its own part of the samples."""
    yield "| policy | shuffle | epoch 1 | epoch 2 | epoch 3 | second run, epoch 1 |"
    for policy in ("files", "datacache", "staged"):
        for shuffle in ("global", "node"):
            again_s = second_run_s(policy, NODES[-1], shuffle=shuffle)
            times_s = (*run_s(policy, NODES[-1], shuffle=shuffle), again_s)
            yield f"| `{policy}` | {shuffle} | {' | '.join(f'{seconds:.1f}' for seconds in times_s)} |"


def gradients_table() -> Iterator[str]:
    """Yield the third epoch on all nodes under two ways to average gradients, which share the NIC with samples."""
    yield "| gradients | nothing read | naive | datacache, shuffle global | datacache, shuffle node |"
    n = NODES[-1]
    everywhere, ring = on(n), Sync(algorithm="ring", input={"policy": "datacache"})
    ways = {
        "`hitopk`, density 0.001": (
            computing_s(n),
            run_s("naive", n)[-1],
            run_s("datacache", n)[-1],
            run_s("datacache", n, shuffle="node")[-1],
        ),
        "ring all-reduce": (
            epochs_s(reading_nothing(everywhere), ring)[-1],
            epochs_s(everywhere, ring.model_copy(update={"input": {"policy": "naive"}}))[-1],
            epochs_s(everywhere, ring)[-1],
            epochs_s(on(n, shuffle="node"), ring)[-1],
        ),
    }
    for way, times_s in ways.items():
        yield f"| {way} | {' | '.join(f'{seconds:.1f}' for seconds in times_s)} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "epochs": markdown_table(epochs_table()),
        "limits": markdown_table(limits_table()),
        "shuffle": markdown_table(shuffle_table()),
        "gradients": markdown_table(gradients_table()),
    }


def figure(path: Path) -> None:
    """Draw the seconds of epochs over nodes, a panel for the first, the third, and the first of a second run."""
    from matplotlib.figure import Figure

    from simdist.report import save
    from simdist.report.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION

    styles = {  # from wide to narrow, so that lines on top of one another show
        "naive": (VERMILLION, "s", 4.0),
        "staged": (PURPLE, "v", 3.2),
        "files": (ORANGE, "^", 2.4),
        "memory": (GREEN, "D", 1.6),
        "datacache": (BLUE, "o", 0.9),
    }
    panels: dict[str, Callable[[str, int], float]] = {
        "epoch 1": lambda policy, n: run_s(policy, n)[0],
        "epoch 3": lambda policy, n: run_s(policy, n)[2],
        "second run, epoch 1": second_run_s,
    }
    drawing = Figure(figsize=(11.0, 4.6), layout="constrained")
    drawing.suptitle(
        "ResNet-50, half of ImageNet, 8 V100 per node, NFS of 2.5 GB/s, simulated", x=0.01, ha="left", fontweight="bold"
    )
    for axes, (title, seconds) in zip(drawing.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        for policy, (color, marker, width) in styles.items():
            times_s = [seconds(policy, n) for n in NODES]
            label = policy if title == "epoch 1" else None
            axes.plot(
                NODES, times_s, color=color, marker=marker, markersize=4 + 1.5 * width, linewidth=width, label=label
            )
        ideal_s = [computing_s(n) for n in NODES]
        label = "computing alone" if title == "epoch 1" else None
        axes.plot(NODES, ideal_s, color=BLACK, linestyle=(0, (4, 3)), linewidth=1.3, label=label)
        axes.set(xscale="log", yscale="log", xlabel="nodes", xticks=NODES, yticks=(5, 10, 20, 50, 100, 200, 500))
        axes.set_title(title, loc="left", fontsize="medium")
        axes.minorticks_off()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.grid(color="#DDDDDD", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if title == "epoch 1":
            axes.set_ylabel("seconds")
    drawing.legend(loc="outside lower center", ncols=len(styles) + 1, frameon=False)
    save(drawing, path)


def main() -> None:
    """Run the experiment."""
    page_command(str(__doc__), HERE / "README.md", tables, draw=lambda: figure(HERE / "epochs.png"))


if __name__ == "__main__":
    main()
