"""How fast is the reference engine where hundreds of ranks read from one server, each batch different?

    python benchmarks/readers.py            tables; exit code 1 if a target is missed
    python benchmarks/readers.py --quick    tiny sizes, to see that it works; seconds
    python benchmarks/readers.py --json     the numbers for machines

In every step each rank loads a batch, copies it to its device, trains on it, and averages gradients with the others.
The bytes of a load from the server, from the disk of its node and from memory are drawn by rank and step, so that no
two loads end together. They share the server, the NIC of the node (with the all-reduce), its disk and its memory; a
rank's own readers and decoders limit it, too. `server` makes training wait for the server, `compute` the server for
training; in `alone` every load takes its time alone, even if others read. An instance is one operation executed by one
rank. Seconds are those of the processor and belong to the machine; `over alone` compares runs of one process.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import benchmark_parser, conclude, shown
from simdist.cost import Costs, Local, OpCost, Resources, Shared, Stage, Transfer, Varying
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.plan import AllReduce, Backward, Buffer, Copy, Forward, Load, Op, Optimize, Plan, Wait
from simdist.plan.group import Group

TARGET_S = 20.0
PREFETCH = 4
BATCH, FILE_NBYTES, SAMPLE_NBYTES = 64, 110e3, 150e3
COMPUTE_S = {"server": 0.1, "compute": 0.6, "alone": 0.1}  # of a step; the server takes about 0.3 s

SHARED_BY_ALL_PER_S = np.array([3e9, 60e3])  # server: bytes, operations
SHARED_BY_NODE_PER_S = np.array([12.5e9, 12.5e9, 3e9, 2e9, 1e9, 10e9])  # NIC in, NIC out, client, disk, memory
N_ALL, N_NODE, N_OWN = 2, 6, 2  # resources; a rank's own are its readers and decoders, in seconds of work


@dataclass(frozen=True)
class Sizes:
    """How much to run."""

    shapes: tuple[tuple[int, int], ...] = ((32, 8), (256, 1))
    steps: int = 1000


QUICK = Sizes(((2, 2), (4, 1)), 8)


def training(world_size: int, n_steps: int) -> Plan:
    """Return a plan that loads batches ahead, and averages gradients over all ranks."""
    batches = [f"batch.{turn}" for turn in range(PREFETCH)]
    buffers = (
        Buffer("param", 1000, initialized=True),
        *(Buffer(batch, 1000, "uint8", place="host") for batch in batches),
        *(Buffer("input", 1000, "uint8"), Buffer("loss", 1), Buffer("grad", 1000)),
    )
    steps = []
    for step in range(n_steps):
        upcoming = range(PREFETCH) if step == 0 else range(step + PREFETCH - 1, step + PREFETCH)
        loads = tuple(Load(batches[number % PREFETCH]) for number in upcoming if number < n_steps)
        batch = batches[step % PREFETCH]
        train = (Forward(("param", "input"), ("loss",)), Backward(("param", "loss"), "grad"))
        average = (AllReduce("grad", Group(world_size)), Optimize(("param",), ("grad",)))
        steps.append((*loads, Wait(batch), Copy(batch, "input"), *train, *average))
    return Plan.from_steps("readers", world_size=world_size, buffers=buffers, steps=steps)


class Reading:
    """Loads of ranks on nodes, drawn with their number as seed."""

    def __init__(self, n_nodes: int, ranks_per_node: int) -> None:
        self._ranks = np.arange(n_nodes * ranks_per_node)
        nodes = self._ranks // ranks_per_node
        by_all = np.broadcast_to(np.arange(N_ALL), (len(nodes), N_ALL))
        by_node = N_ALL + nodes[:, None] * N_NODE + np.array([0, 2, 3, 4, 5])
        own = N_ALL + n_nodes * N_NODE + self._ranks[:, None] * N_OWN + np.arange(N_OWN)
        self._resources = np.concatenate([by_all, by_node, own], axis=1)
        self.capacity_per_s = np.concatenate(
            [SHARED_BY_ALL_PER_S, np.tile(SHARED_BY_NODE_PER_S, n_nodes), np.ones(N_OWN * len(nodes))]
        )
        self.nics = N_ALL + (np.arange(n_nodes)[:, None] * N_NODE + np.array([0, 1])).ravel()

    def transfers(self, number: int) -> tuple[Transfer, ...]:
        """Return what every rank reads in one load."""
        rng = np.random.default_rng(number)
        n = len(self._ranks)
        n_missed = rng.binomial(BATCH, 0.5, n)
        n_on_disk = rng.binomial(BATCH - n_missed, 0.5)
        n_in_memory = BATCH - n_missed - n_on_disk
        missed_nbytes = n_missed * FILE_NBYTES * rng.lognormal(0.0, 0.1, n)
        disk_nbytes = n_on_disk * FILE_NBYTES * rng.lognormal(0.0, 0.1, n)
        reading_s = (n_missed * 2e-3 + n_on_disk * 2e-4) / 4
        decoding_s = (n_missed + n_on_disk) * 4e-3 / 4
        columns = [missed_nbytes, n_missed * 3.0, missed_nbytes, missed_nbytes, disk_nbytes, missed_nbytes]
        columns += [n_in_memory * SAMPLE_NBYTES, reading_s, decoding_s]
        rows = np.stack(columns, axis=1)
        latency_s = 1e-3
        return tuple(
            Transfer((Stage(latency_s, resources[row > 0], row[row > 0]),))
            for resources, row in zip(self._resources, rows, strict=True)
        )


def costs(plan: Plan, shape: tuple[int, int], case: str) -> Costs:
    """Return what the plan costs on nodes x ranks."""
    reading = Reading(*shape)
    nbytes = np.full(len(reading.nics), 400e6)
    average = Transfer((Stage(1e-4, reading.nics, nbytes),))
    alone_s = [each.alone_s(reading.capacity_per_s) for each in reading.transfers(0)]
    loads: OpCost = Varying(Group(1), reading.transfers)
    if case == "alone":
        loads = Shared(Group(1), (Transfer(()),) * len(alone_s), np.array(alone_s))

    def cost(op: Op) -> OpCost:
        match op:
            case Load():
                return loads
            case AllReduce():
                return Shared.of(op.group, [average], reading.capacity_per_s)
            case Forward() | Backward():
                return Local(COMPUTE_S[case] / 2)
            case _:
                return Local(0.0 if isinstance(op, Wait) else 1e-3)

    of = {op: cost(op) for body in plan.bodies for op in body}
    contested = frozenset(op for op in of if isinstance(op, Load | AllReduce) and case != "alone")
    return Costs(Resources(*shape, 0, 1), reading.capacity_per_s, of, contested)


def measure(sizes: Sizes) -> list[dict[str, object]]:
    """Simulate training on every shape, for a server that all wait for, one that waits for all, and readers alone."""
    rows: list[dict[str, object]] = []
    for shape in sizes.shapes:
        plan = training(shape[0] * shape[1], sizes.steps)
        seconds = {
            case: processor_s(
                lambda: run(plan, costs(plan, shape, case), {}, observe=WholeTrace(), engine="des")  # noqa: B023
            )
            for case in COMPUTE_S
        }
        for case, each_s in seconds.items():
            n_instances = plan.n_instances * plan.world_size
            rows.append(
                {
                    "nodes x ranks": f"{shape[0]} x {shape[1]}",
                    "case": case,
                    "instances": n_instances,
                    "seconds": each_s,
                    "instances_per_s": n_instances / each_s,
                    "us_per_load": 1e6 * each_s / (sizes.steps * plan.world_size),
                    "over_alone": each_s / seconds["alone"],
                }
            )
    return rows


def processor_s(run: Callable[[], object]) -> float:
    """Return the processor seconds of a run."""
    began_s = time.process_time()
    run()
    return time.process_time() - began_s


def verdict(rows: list[dict[str, object]]) -> dict[str, object]:
    """Compare with the target, which is stated for the full sizes."""
    reached = max(row["seconds"] for row in rows)  # type: ignore[type-var]
    return {"what": "seconds", "target": f"< {shown(TARGET_S)}", "reached": reached, "holds": reached < TARGET_S}  # type: ignore[operator]


def main() -> int:
    """Run everything and print it; return 1 if the target of the full sizes is missed."""
    options = benchmark_parser(__doc__).parse_args()
    sizes = QUICK if options.quick else Sizes()
    rows = measure(sizes)
    tables = {f"reference engine, one server for all, {sizes.steps} steps": rows}
    return conclude(options, sizes, {"readers": rows}, tables, [verdict(rows)])


if __name__ == "__main__":
    sys.exit(main())
