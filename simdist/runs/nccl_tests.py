"""Tables of nccl-tests: what they measured, what the simulator says, and the cluster that they tell.

`all_reduce_perf` and its siblings print a line for each size. The columns are named by a comment, and the ranks with
their hosts by others. Sizes are those of the whole buffer. Times out of place count.

Source:
    NVIDIA/nccl-tests, src/common.cu and doc/PERFORMANCE.md.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simdist.cost import Shared, price
from simdist.errors import ScenarioError
from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Plan, Reduce, ReduceScatter
from simdist.plan.group import Group
from simdist.plan.ops import Collective
from simdist.scenario import Cluster, Link, TablePoint, Tensor, Workload
from simdist.scenario.uncertain import Range
from simdist.settings.units import format_nbytes

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "sendrecv")

_ITEM_NBYTES = 4
_IDLE = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)
_PREFIX = re.compile(r"^\[[^\]]*\](<std\w+>:?)?\s*")  # of mpirun --tag-output
_RANK = re.compile(r"Rank\s+(\d+)\s.*?Pid\s+(\d+) on\s+(\S+)\s+device")
_PROGRAM = re.compile(rf"\b({'|'.join(OPS)})_perf")
_MOST_LATENCY_S = 1e-3
_N_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class NcclTable:
    """What one program of nccl-tests measured.

    Args:
        op: The collective, or `sendrecv`.
        rows: `(nbytes, seconds)` by size.
        nodes: Hosts; None if the text does not list the ranks.
        gpus_per_node: Ranks of each; None likewise.
        one_process: Whether one process drives all GPUs of a host.
    """

    op: str
    rows: tuple[tuple[int, float], ...]
    nodes: int | None = None
    gpus_per_node: int | None = None
    one_process: bool = False


def read_table(text: str, *, name: str, op: str | None = None) -> NcclTable:
    """Return the table in the output of a program.

    Args:
        text: The output.
        name: Of the file, for errors.
        op: The collective; if None, that of the program that the text names.

    Raises:
        ScenarioError: There is no table in it, or it does not say which collective it is of.
    """
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    rows = sorted({nbytes: seconds for nbytes, seconds in _rows(lines, name) if nbytes and seconds}.items())
    if not rows:
        raise ScenarioError(
            f"{name}: no table of nccl-tests: expected a comment `# size count type ... time algbw busbw` and a line "
            f"for each size; give the whole output of e.g. all_reduce_perf -b 8 -e 8G -f 2"
        )
    found = _PROGRAM.search(text)
    if op is None and found is None:
        raise ScenarioError(f"{name}: names no collective: write it, e.g. --op all_reduce")
    ranks = {int(match[1]): (match[3], match[2]) for match in map(_RANK.search, lines) if match}
    hosts = {host for host, _ in ranks.values()}
    if ranks and len(ranks) % len(hosts):
        raise ScenarioError(f"{name}: {len(ranks)} ranks on {len(hosts)} hosts: hosts with equally many are supported")
    return NcclTable(
        op or (found[1] if found else ""),
        tuple(rows),
        nodes=len(hosts) or None,
        gpus_per_node=len(ranks) // len(hosts) if ranks else None,
        one_process=len(ranks) > len(hosts) and len({pid for _, pid in ranks.values()}) == len(hosts),
    )


def _rows(lines: list[str], name: str) -> Iterator[tuple[int, float]]:
    """Yield size and seconds of each line below a comment that names the columns."""
    time_at = None
    for number, line in enumerate(lines, start=1):
        words = line.lstrip("#").split()
        if line.startswith("#") and words[:2] == ["size", "count"] and "time" in words:
            time_at = words.index("time")
        elif time_at is not None and words and words[0].isdigit() and not line.startswith("#"):
            try:
                yield int(words[0]), 1e-6 * float(words[time_at])
            except (IndexError, ValueError):
                raise ScenarioError(f"{name}:{number}: no time in column {time_at + 1}: {line[:80]!r}") from None


def placed(table: NcclTable, cluster: Cluster, *, nodes: int | None, gpus_per_node: int | None) -> Cluster:
    """Return the cluster with as many nodes and GPUs as the table was measured on.

    Args:
        table: Lists the ranks, or not.
        cluster: All else. Its own numbers count where nothing else tells them.
        nodes: Given by the user, first of all.
        gpus_per_node: Likewise.

    Raises:
        ScenarioError: One rank alone has no collective.
    """
    n_nodes = nodes or table.nodes or cluster.nodes
    n_gpus = gpus_per_node or table.gpus_per_node or cluster.gpus_per_node
    if n_nodes * n_gpus < 2:
        raise ScenarioError("nccl-tests: one rank communicates with nobody: measure two or more")
    return cluster.model_copy(update={"nodes": n_nodes, "gpus_per_node": n_gpus})


def simulated_s(cluster: Cluster, op: str, nbytes: int) -> float:
    """Return the seconds of a collective over all GPUs, or of a message between two of them."""
    world_size = cluster.world_size
    if op == "sendrecv":
        group = Group(2, stride=cluster.gpus_per_node if cluster.nodes > 1 else 1)
        group = Group(2) if world_size % (2 * group.stride) else group
    else:
        group = Group(world_size)
    count = -(-max(nbytes // _ITEM_NBYTES, 1) // group.size) * group.size
    ops: dict[str, Callable[[], Collective]] = {
        "all_reduce": lambda: AllReduce("whole", group),
        "reduce_scatter": lambda: ReduceScatter("whole", "slice", group),
        "all_gather": lambda: AllGather("slice", "whole", group),
        "broadcast": lambda: Broadcast("whole", group),
        "reduce": lambda: Reduce("whole", group),
        "sendrecv": lambda: Broadcast("whole", group),
    }
    collective = ops[op]()
    buffers = (
        Buffer("whole", count, initialized=True),
        Buffer("slice", count // group.size, initialized=True),
    )
    plan = Plan.from_steps("one", world_size=world_size, buffers=buffers, steps=[(collective,)])
    cost = price(plan, cluster, _IDLE).of[collective]
    assert isinstance(cost, Shared)
    return float(cost.alone_s)


def fitted(table: NcclTable, cluster: Cluster) -> tuple[Cluster, list[str]]:
    """Return the cluster that a table tells, and notes on what it does not tell.

    The largest buffer tells the efficiency of the slower link: of the network, or of the fabric of one node. The
    smallest one tells the latency of the network, or the overhead of a collective in one node. A table of `sendrecv`
    becomes the link's table.
    """
    where = "network" if cluster.nodes > 1 else "fabric"
    if table.op == "sendrecv":
        return _with_table(table, cluster, where), []
    link: Link = getattr(cluster, where)
    if link.table is not None or link == Link.ideal():
        raise ScenarioError(
            f"cluster.{where}: a table or an ideal link has no efficiency: choose a cluster with a line"
        )
    notes: list[str] = []
    told = {f"{where}.efficiency", "network.latency" if where == "network" else "collective_overhead"}
    cluster = cluster.model_copy(update={"uncertain": _without(cluster, told)})

    def with_efficiency(efficiency: float) -> Cluster:
        return cluster.model_copy(update={where: link.model_copy(update={"efficiency": efficiency})})

    nbytes, measured_s = table.rows[-1]
    found = _bisected(with_efficiency, table.op, nbytes, measured_s, 1.0, 0.01)
    if found is None:
        notes.append(
            f"{where}.efficiency stays {link.efficiency:g}: {format_nbytes(nbytes)} does not depend on it alone"
        )
    best = cluster if found is None else with_efficiency(float(f"{found:.3g}"))

    def with_latency(seconds: float) -> Cluster:
        if where == "fabric":
            return best.model_copy(update={"collective_overhead_s": seconds})
        return best.model_copy(update={"network": best.network.model_copy(update={"latency_s": seconds})})

    nbytes, measured_s = table.rows[0]
    found = _bisected(with_latency, table.op, nbytes, measured_s, 0.0, _MOST_LATENCY_S)
    name = "collective_overhead" if where == "fabric" else "network.latency"
    if found is None:
        notes.append(f"{name} stays: no value from 0 to 1 ms gives the time of {format_nbytes(nbytes)}")
    else:
        best = with_latency(float(f"{found:.3g}"))
    return best, notes


def _without(cluster: Cluster, told: set[str]) -> dict[str, Range]:
    """Return the ranges of a cluster without those of numbers that a table tells."""
    return {path: each for path, each in cluster.uncertain.items() if path not in told}


def _with_table(table: NcclTable, cluster: Cluster, where: str) -> Cluster:
    """Return the cluster with the table of a link, whose times do not shrink."""
    points: list[TablePoint] = []
    longest_s = 0.0
    for nbytes, seconds in table.rows:
        longest_s = max(longest_s, seconds)
        points.append(TablePoint(nbytes=nbytes, time_s=longest_s))
    uncertain = _without(cluster, {path for path in cluster.uncertain if path.startswith(f"{where}.")})
    return cluster.model_copy(update={where: Link(table=tuple(points)), "uncertain": uncertain})


def _bisected(
    with_value: Callable[[float], Cluster], op: str, nbytes: int, measured_s: float, fast: float, slow: float
) -> float | None:
    """Return the value with which a collective takes a time; None if that is not between `fast` and `slow`."""
    if not simulated_s(with_value(fast), op, nbytes) <= measured_s <= simulated_s(with_value(slow), op, nbytes):
        return None
    for _ in range(_N_HALVINGS):
        middle = (fast + slow) / 2
        if simulated_s(with_value(middle), op, nbytes) <= measured_s:
            fast = middle
        else:
            slow = middle
    return fast


def with_launches(table: NcclTable, cluster: Cluster) -> Cluster:
    """Return the cluster with the launches of one process, told by the smallest buffer, if it drives all GPUs."""
    if not table.one_process:
        return cluster
    n_gpus = table.gpus_per_node or cluster.gpus_per_node
    return cluster.model_copy(update={"launch_s": float(f"{table.rows[0][1] / n_gpus:.3g}")})
