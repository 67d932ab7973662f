"""The cost of sharing: how fast are fair rates found, and the reference engine where transfers share links?

    python benchmarks/network.py            tables; exit code 1 if a target is missed
    python benchmarks/network.py --quick    tiny sizes, to see that it works; seconds
    python benchmarks/network.py --json     the numbers for machines

`pairs` and `rows` are all-reduces among equal GPUs of 2 neighbouring nodes, or of all nodes: every node's GPUs share
its NIC, and random delays of the host keep them out of step. In `world` nothing is shared. A rank-op is one operation
executed by one rank. `flows` go between random nodes: in every 0.1 s, 8 transfers for each node start within 50 ms,
uniformly; sizes are uniform, between half and one and a half of what keeps the NICs busy for these 50 ms on average,
so that a transfer meets 45 others on 16 nodes. The network learns at the beginning of every 0.1 s when each flow
starts, as from ranks ahead of the clock; in `one by one`, an event starts each flow. Where SimGrid is installed
(Debian: libsimgrid-dev, and g++), it carries the same flows. Seconds are those of the processor, the best of several
runs; they belong to the machine.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks.tables import benchmark_parser, conclude, shown
from simdist.cost import Costs, Stage, Transfer, price
from simdist.engines.network.flows import Flow, Flows, nothing
from simdist.engines.network.fluid import FluidNetwork, Timeline
from simdist.engines.observers import WholeTrace
from simdist.engines.run import rare_collections, run
from simdist.plan import AllReduce, Buffer, Delay, Plan, Wait
from simdist.plan.group import Group
from simdist.scenario.cluster import Cluster, Link
from simdist.scenario.workload import Tensor, Workload

TARGETS = {
    "rates ms": 50.0,
    "event growth": 2.0,
    "des rank-ops/s, not shared": 100e3,
    "SimGrid's flows/s, 16 nodes": 1.5,
    "SimGrid's flows/s, 64 nodes": 1.5,
    "flows/s, 16 nodes, plain": 1e3,
}
NIC_Bps, PERIOD_S, WINDOW_S, FLOWS_OF_NODE = 12.5e9, 0.1, 0.05, 8


@dataclass(frozen=True)
class Sizes:
    """How much to run."""

    transfers: int = 1000
    links: int = 1000
    many_links: int = 300
    islands: tuple[int, ...] = (10, 100, 1000)
    flows_of_island: int = 20
    nodes: int = 16
    gpus_per_node: int = 8
    steps: int = 100
    repetitions: int = 5
    flows: tuple[tuple[int, int], ...] = ((16, 200), (64, 50))  # nodes, periods
    plain_periods: int = 20


QUICK = Sizes(30, 30, 10, (2, 4, 8), 3, 2, 2, 3, 1, ((4, 2), (6, 2)), 1)


def best_s(run: Callable[[], object], repetitions: int) -> float:
    """Return the processor seconds of the fastest of several runs: others on the machine hardly change them."""
    seconds = []
    for _ in range(repetitions):
        began_s = time.process_time()
        run()
        seconds.append(time.process_time() - began_s)
    return min(seconds)


def drawn(n_transfers: int, n_links: int, n_used: tuple[int, int]) -> list[Stage]:
    """Return stages over random links, between so many and so many of them, with random bytes on each."""
    rng = np.random.default_rng(0)
    used = (
        np.sort(rng.choice(n_links, rng.integers(*n_used, endpoint=True), replace=False)) for _ in range(n_transfers)
    )
    return [Stage(0.0, links, rng.uniform(1e5, 1e6, len(links))) for links in used]


def staircase(n_transfers: int, n_links: int, n_shared: int) -> tuple[list[Stage], np.ndarray]:
    """Return the worst case: everybody shares many links, and a link of his own stops him in a round of his own."""
    shared = np.arange(n_links, n_links + n_shared)
    own = (np.append(number % n_links, shared) for number in range(n_transfers))
    capacity_Bps = np.concatenate([np.linspace(1e6, 1e9, n_links), np.full(n_shared, 1e9 * n_transfers)])
    return [Stage(0.0, links, np.ones(len(links))) for links in own], capacity_Bps


def max_min_rates(stages: list[Stage], capacity_Bps: np.ndarray) -> np.ndarray:
    """Return the rate of each stage, in bytes per second on its most used resource."""
    sharing = Flows(capacity_Bps.tolist())
    flows = [Flow(stage, nothing) for stage in stages]
    has_bytes = [sharing.join(flow, 0.0) for flow in flows]
    sharing.settle(0.0)
    return np.array([sharing.rate_Bps(flow) if has else np.inf for flow, has in zip(flows, has_bytes, strict=True)])


def rates(sizes: Sizes) -> list[dict[str, object]]:
    """Find the rates of many concurrent transfers, sparse and dense."""
    capacity_Bps = np.random.default_rng(1).uniform(1e8, 1e9, sizes.links)
    cases = {
        "2 to 4 links each": (drawn(sizes.transfers, sizes.links, (2, 4)), capacity_Bps),
        f"{sizes.many_links} links each": (drawn(sizes.transfers, sizes.links, (sizes.many_links,) * 2), capacity_Bps),
        f"{sizes.many_links} links each, staircase": staircase(sizes.transfers, sizes.links, sizes.many_links - 1),
    }
    return [
        {
            "case": name,
            "transfers": len(stages),
            "links": len(capacities_Bps),
            "levels": len(np.unique(max_min_rates(stages, capacities_Bps))),
            "ms": 1e3 * best_s(lambda: max_min_rates(stages, capacities_Bps), sizes.repetitions),  # noqa: B023
        }
        for name, (stages, capacities_Bps) in cases.items()
    ]


def islands(sizes: Sizes) -> list[dict[str, object]]:
    """Let more and more links, each shared by the same few transfers, be busy at the same time."""
    rows = []
    for n_islands in sizes.islands:
        n_flows = n_islands * sizes.flows_of_island
        seconds = best_s(lambda: fly(n_islands, sizes.flows_of_island), sizes.repetitions)  # noqa: B023
        rows.append({"links": n_islands, "transfers": n_flows, "us_per_transfer": 1e6 * seconds / n_flows})
    return rows


def fly(n_islands: int, n_flows: int) -> None:
    """Run transfers of random sizes from random starts, some on every link."""
    rng = np.random.default_rng(0)
    env = Timeline()
    network = FluidNetwork(env, np.ones(n_islands))

    def start(link: int, start_s: float, nbytes: float) -> Callable[[object], None]:
        transfer = Transfer((Stage(start_s, np.array([link]), np.array([nbytes])),))
        return lambda _: network.start(transfer)

    for link in range(n_islands):
        for start_s, nbytes in rng.uniform(0.5, 1.0, (n_flows, 2)):
            env.timeout(0.0).callbacks.append(start(link, start_s, nbytes))
    env.run()


def averaging(sizes: Sizes, group: Group) -> tuple[Plan, Costs, dict[str, np.ndarray]]:
    """Return a plan that averages 32 MB over groups in every step, after a random delay of every rank."""
    n = sizes.nodes * sizes.gpus_per_node
    buffers = (Buffer("flat", 8_000_000, initialized=True),)
    body = (Delay("host"), AllReduce("flat", group), Wait("flat"))
    plan = Plan.from_steps("averaging", world_size=n, buffers=buffers, steps=[body] * sizes.steps)
    fabric, network = Link(latency_s=5e-6, bandwidth_Bps=1e11), Link(latency_s=1e-5, bandwidth_Bps=1.25e10)
    cluster = Cluster(nodes=sizes.nodes, gpus_per_node=sizes.gpus_per_node, fabric=fabric, network=network)
    workload = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1, backward_s=0.2)
    delays_s = np.random.default_rng(0).exponential(1e-3, (1, sizes.steps, n))
    return plan, price(plan, cluster, workload), {"host": delays_s}


def engine(sizes: Sizes) -> list[dict[str, object]]:
    """Run the reference engine where nothing, a NIC of two nodes, or all NICs are shared."""
    n, stride = sizes.nodes * sizes.gpus_per_node, sizes.gpus_per_node
    groups = {"world": Group(n), "pairs": Group(2, stride=stride), "rows": Group(sizes.nodes, stride=stride)}
    rows: list[dict[str, object]] = []
    for name, group in groups.items():
        plan, costs, delays = averaging(sizes, group)
        n_rank_ops = plan.n_instances * plan.world_size
        seconds = best_s(lambda: run(plan, costs, delays, observe=WholeTrace(), engine="des"), sizes.repetitions)  # noqa: B023
        n_transfers = sizes.steps * n // group.size
        rows.append(
            {
                "groups": name,
                "shared": bool(costs.contested),
                "rank_ops": n_rank_ops,
                "transfers": n_transfers,
                "rank_ops_per_s": n_rank_ops / seconds,
                "us_per_transfer": 1e6 * seconds / n_transfers,
            }
        )
    return rows


@dataclass(frozen=True)
class RandomFlows:
    """Transfers between nodes, in the order of their starts."""

    n_nodes: int
    start_s: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    nbytes: np.ndarray
    transfers: list[Transfer]

    @classmethod
    def draw(cls, n_nodes: int, n_periods: int) -> "RandomFlows":
        """Draw them, with a seed."""
        rng = np.random.default_rng(0)
        shape = n_periods, FLOWS_OF_NODE * n_nodes
        start_s = np.sort(np.arange(n_periods)[:, None] * PERIOD_S + rng.uniform(0, WINDOW_S, shape)).ravel()
        source = rng.integers(n_nodes, size=len(start_s))
        destination = (source + rng.integers(1, n_nodes, size=len(start_s))) % n_nodes
        nbytes = np.round(rng.uniform(0.5, 1.5, len(start_s)) * NIC_Bps * WINDOW_S / FLOWS_OF_NODE)
        used, put = np.stack([source, n_nodes + destination], axis=1), np.stack([nbytes, nbytes], axis=1)
        transfers = [Transfer((Stage(0.0, *each),)) for each in zip(used, put, strict=True)]
        return cls(n_nodes, start_s, source, destination, nbytes, transfers)

    def run(self, *, ahead: bool = True) -> np.ndarray:
        """Return when each ends.

        Args:
            ahead: The network learns at the beginning of every period which flows start in it, as it does from ranks
                that are ahead of the clock. If not, an event starts each flow.
        """
        env = Timeline()
        network = FluidNetwork(env, np.full(2 * self.n_nodes, NIC_Bps))
        end_s = np.full(len(self.start_s), np.nan)
        n_together = FLOWS_OF_NODE * self.n_nodes if ahead else 1
        start_s = self.start_s.tolist()

        def end(number: int) -> None:
            end_s[number] = env.now

        def tell(first: int, _: object) -> None:
            following = first + n_together
            for number in range(first, following):
                network.fly(self.transfers[number], partial(end, number), start_s=start_s[number])
            if following < len(start_s):
                env.call_at(start_s[following], partial(tell, following))

        env.call_at(start_s[0], partial(tell, 0))
        with rare_collections():  # as in the engine
            env.run()
        return end_s

    def run_by_simgrid(self, program: Path) -> tuple[float, np.ndarray]:
        """Return the seconds that SimGrid takes, and when each ends."""
        columns = self.start_s.tolist(), self.source.tolist(), self.destination.tolist(), self.nbytes.tolist()
        lines = [f"{start_s!r} {source} {to} {nbytes!r}" for start_s, source, to, nbytes in zip(*columns, strict=True)]
        told = "\n".join([f"{self.n_nodes} {NIC_Bps!r} {len(lines)}", *lines])
        ended = subprocess.run([program], input=told, capture_output=True, text=True, check=True)
        seconds, *end_s = map(float, ended.stdout.split())
        return seconds, np.array(end_s)


def build_simgrid(folder: Path) -> Path | None:
    """Compile `simgrid_flows.cpp`; return the program, or nothing where SimGrid or a compiler is not installed."""
    source, program = Path(__file__).with_name("simgrid_flows.cpp"), folder / "simgrid_flows"
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    command = [compiler, "-O2", "-std=c++17", source, "-lsimgrid", "-o", program]
    return program if subprocess.run(command, capture_output=True).returncode == 0 else None


def many_flows(sizes: Sizes) -> list[dict[str, object]]:
    """Let many nodes be joined by different flows, compiled, plain, and in SimGrid."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        simgrid = build_simgrid(Path(folder))
        for n_nodes, n_periods in sizes.flows:
            flows = RandomFlows.draw(n_nodes, n_periods)
            end_s = flows.run()  # compiles, or loads what is compiled
            seconds = best_s(flows.run, sizes.repetitions)
            met = np.searchsorted(flows.start_s, flows.start_s) - np.searchsorted(np.sort(end_s), flows.start_s)
            row = {"nodes": n_nodes, "flows": len(end_s), "in flight": met.mean(), "flows_per_s": len(end_s) / seconds}
            one_by_one_s = best_s(partial(flows.run, ahead=False), sizes.repetitions)
            row["one_by_one_per_s"] = len(end_s) / one_by_one_s
            if simgrid is None:
                row |= {"simgrid_per_s": "not installed", "times simgrid": "not known", "apart": "not known"}
            else:
                found = [flows.run_by_simgrid(simgrid) for _ in range(sizes.repetitions)]
                simgrid_s = min(each_s for each_s, _ in found)
                apart = float(abs(found[0][1] / end_s - 1).max())
                row |= {"simgrid_per_s": len(end_s) / simgrid_s, "times simgrid": simgrid_s / seconds}
                row["apart"] = f"{apart:.1g}"
            rows.append(row)
    return [*rows, plain(sizes)]


def plain(sizes: Sizes) -> dict[str, object]:
    """Run the smaller flows without a compiler, in a process where numba cannot be imported."""
    n_nodes = sizes.flows[0][0]
    code = (
        "import sys; sys.modules['numba'] = None; from benchmarks.network import RandomFlows, best_s; "
        f"flows = RandomFlows.draw({n_nodes}, {sizes.plain_periods}); "
        f"print(len(flows.nbytes), best_s(flows.run, {sizes.repetitions}))"
    )
    root = Path(__file__).resolve().parents[1]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    n_flows, seconds = map(float, ended.stdout.split())
    about = {"nodes": f"{n_nodes}, plain", "flows": int(n_flows), "in flight": "", "flows_per_s": n_flows / seconds}
    return {**about, "one_by_one_per_s": "", "simgrid_per_s": "", "times simgrid": "", "apart": ""}


def holds(reached: object, target: float, *, is_limit: bool) -> bool:
    """Return whether a target is reached; it is if nothing was measured, because SimGrid is not installed."""
    if not isinstance(reached, int | float):
        return True
    return bool(reached < target if is_limit else reached >= target)


def verdicts(found: dict[str, list[dict[str, object]]]) -> list[dict[str, object]]:
    """Compare with the targets, which are stated for the full sizes."""
    per_transfer = [row["us_per_transfer"] for row in found["islands"]]
    reached = {
        "rates ms": max(row["ms"] for row in found["rates"]),  # type: ignore[type-var]
        "event growth": per_transfer[-1] / per_transfer[0],  # type: ignore[operator]
        "des rank-ops/s, not shared": min(row["rank_ops_per_s"] for row in found["engine"] if not row["shared"]),  # type: ignore[type-var]
    }
    smaller, larger, plainly = found["flows"]
    for nodes, row in ((16, smaller), (64, larger)):
        reached[f"SimGrid's flows/s, {nodes} nodes"] = row["times simgrid"]
    reached["flows/s, 16 nodes, plain"] = plainly["flows_per_s"]
    at_most = {"rates ms", "event growth"}
    return [
        {
            "what": what,
            "target": f"{'<' if what in at_most else '>='} {shown(target)}",
            "reached": reached[what],
            "holds": holds(reached[what], target, is_limit=what in at_most),
        }
        for what, target in TARGETS.items()
    ]


def main() -> int:
    """Run everything and print it; return 1 if a target of the full sizes is missed."""
    options = benchmark_parser(__doc__).parse_args()
    sizes = QUICK if options.quick else Sizes()
    found = {"rates": rates(sizes), "islands": islands(sizes), "engine": engine(sizes), "flows": many_flows(sizes)}
    tables = {
        "fair rates of concurrent transfers": found["rates"],
        "transfers on more and more links that share nothing": found["islands"],
        f"reference engine, {sizes.nodes} nodes x {sizes.gpus_per_node} GPUs x {sizes.steps} steps": found["engine"],
        "flows between random nodes": found["flows"],
    }
    return conclude(options, sizes, found, tables, verdicts(found))


if __name__ == "__main__":
    sys.exit(main())
