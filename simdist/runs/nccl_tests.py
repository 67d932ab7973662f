"""Tables of nccl-tests: what they measured, what the simulator says, and the cluster that they tell.

`all_reduce_perf` and its siblings print a line for each size. The columns are named by a comment, and the ranks with
their hosts by others. Sizes are those of the whole buffer. Times out of place count.

The numbers of a line depend on each other, so a shifted column or a cut line contradicts itself:

    size  = count * bytes of the type, times the ranks where the count is that of one of them
    algbw = size / time
    busbw = algbw * a factor of the collective and the number of ranks

Source:
    NVIDIA/nccl-tests, src/common.cu and doc/PERFORMANCE.md.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

from pydantic import ValidationError

from simdist.cost import Shared, price
from simdist.errors import ScenarioError
from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Plan, Reduce, ReduceScatter
from simdist.plan.group import Group
from simdist.plan.ops import Collective
from simdist.scenario import Cluster, Link, TablePoint, Tensor, Workload
from simdist.scenario.uncertain import Range
from simdist.settings.units import format_nbytes, format_seconds, read_number, read_whole
from simdist.traces.collectives import bus_factor

_NumberT = TypeVar("_NumberT", int, float)

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "sendrecv")

#: Those that NCCL performs by rings, an all_reduce of a large buffer among others.
RINGS = ("all_reduce", "reduce_scatter", "all_gather")

#: Sources of ranges of numbers that tables told begin with it.
CALIBRATED = "nccl-tests"

_ITEM_NBYTES = 4
_IDLE = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)
_PREFIX = re.compile(r"^\[[^\]]*\](<std\w+>:?)?\s*")  # of mpirun --tag-output
_RANK = re.compile(r"Rank\s+(\d+)\s.*?Pid\s+(\d+) on\s+(\S+)\s+device")
_PROGRAM = re.compile(rf"\b({'|'.join(OPS)})_perf")
_MOST_LATENCY_S = 1e-3
_MOST_NBYTES = 10**15
_LEAST_US = 1e-3
_MOST_US = 1e9
_MOST_GBps = 1e6
_BW_UNIT = 1e3  # a byte per microsecond is 0.001 GB/s
_TYPE_NBYTES = (
    dict.fromkeys(["int8", "char", "uint8", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"], 1)
    | dict.fromkeys(["half", "bfloat16"], 2)
    | dict.fromkeys(["int32", "int", "uint32", "float"], 4)
    | dict.fromkeys(["int64", "uint64", "double"], 8)
)
_NOT_MEASURED = "N/A"
_N_HALVINGS = 50
_MOST_STEP_S = 1e-3
_SOME_STEP_S = 1e-5
_NEAR = 4  # sizes that the range of a number is told by, as a factor on the size that tells the number
_LEAST_OFF = 0.01  # least distance of the ends of a range from the value, as a share
_OVERHEAD = "collectives.overhead"
_QUEUED = (
    "calls of nccl-tests are queued, so the table does not tell the host's time per call: if a program in PyTorch "
    "waits for each result, add 20 to 30 us to collectives.overhead"
)
_MOST_OFF = 0.5
_USUAL_OVERHEAD_S = 2.5e-6  # of a collective, as in the presets: kernels back to back
_MEASURE = "several tables of nccl-tests, each with more iterations (-n)"


@dataclass(frozen=True, slots=True)
class NcclTable:
    """What one program of nccl-tests measured.

    Args:
        op: The collective, or `sendrecv`.
        rows: `(nbytes, seconds)` by size.
        bus_factor: The least and the most that busbw / algbw is, as printed digits leave it open.
        nodes: Hosts; None if the text does not list the ranks.
        gpus_per_node: Ranks of each; None likewise.
        one_process: Whether one process drives all GPUs of a host.
    """

    op: str
    rows: tuple[tuple[int, float], ...]
    bus_factor: tuple[float, float] = (0.0, math.inf)
    nodes: int | None = None
    gpus_per_node: int | None = None
    one_process: bool = False


def parse_nccl_table(text: str, *, name: str, op: str | None = None) -> NcclTable:
    """Return the table in the output of a program.

    Args:
        text: The output.
        name: Of the file, for errors.
        op: The collective; if None, that of the program that the text names.

    Raises:
        ScenarioError: There is no table in it, or it does not say which collective it is of.
    """
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    measured = list(_rows(lines, name))
    rows = sorted({each.nbytes: each.seconds for each in measured if each.nbytes}.items())
    if not rows:
        raise ScenarioError(
            f"{name}: no log of Slurm, torchrun or ml-goodput-measurement, and no table of nccl-tests, which has a "
            f"comment `# size count type ... time algbw busbw` and a line for each size; give the whole output of e.g. "
            f"all_reduce_perf -b 8 -e 8G -f 2"
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
        _common_factor(measured),
        nodes=len(hosts) or None,
        gpus_per_node=len(ranks) // len(hosts) if ranks else None,
        one_process=len(ranks) > len(hosts) and len({pid for _, pid in ranks.values()}) == len(hosts),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a table: its size and time, the least and the most of busbw / algbw, and where it stands."""

    nbytes: int
    seconds: float
    bus_factor: tuple[float, float]
    where: str


def _rows(lines: list[str], name: str) -> Iterator[_Line]:
    """Yield the lines of numbers below a comment that names the columns."""
    columns: list[str] = []
    for number, line in enumerate(lines, start=1):
        words = line.lstrip("#").split()
        if line.startswith("#"):
            is_header = words[:2] == ["size", "count"] and "time" in words
            columns = words if is_header else columns
        elif columns and words and _is_number(words[0]):
            yield _row(words, columns, f"{name}:{number}")


def _is_number(word: str) -> bool:
    """Tell whether a line that begins with a word is one of the table, and not what NCCL logs in between."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _row(words: list[str], columns: list[str], where: str) -> _Line:
    if len(words) != len(columns):
        at = min(len(words), len(columns))
        more = f"{words[at]!r} has no name" if len(words) > at else f"no {columns[at]}"
        raise ScenarioError(
            f"{where}: column {at + 1}: {more}: {len(words)} columns, {len(columns)} names: is the line cut or shifted?"
        )
    nbytes = _cell(words, columns, 0, where, lambda text: read_whole(text, 0, _MOST_NBYTES))
    count = _cell(words, columns, 1, where, lambda text: read_whole(text, 0, _MOST_NBYTES))
    _check_count(nbytes, count, dict(zip(columns, words, strict=True)).get("type", ""), where)
    out_of_place, *in_place = (at for at, column in enumerate(columns) if column == "time")
    found = _measured(words, columns, out_of_place, nbytes, where)
    for at in in_place:
        if words[at] != _NOT_MEASURED:
            _measured(words, columns, at, nbytes, where)
    return found


def _cell(words: list[str], columns: list[str], at: int, where: str, read: Callable[[str], _NumberT]) -> _NumberT:
    try:
        return read(words[at])
    except ValueError as error:
        raise ScenarioError(f"{where}: column {at + 1} ({columns[at]}): {error}") from None


def _check_count(nbytes: int, count: int, kind: str, where: str) -> None:
    """Refuse a size that is no multiple of its elements."""
    of_count = count * _TYPE_NBYTES.get(kind, 1)
    if nbytes % of_count if of_count else nbytes:
        raise ScenarioError(f"{where}: column 2 (count): {count} of {kind or 'any type'} beside a size of {nbytes} B")


def _measured(words: list[str], columns: list[str], at: int, nbytes: int, where: str) -> _Line:
    """Return the time in a column; refuse one that contradicts the bandwidths behind it."""
    least = _LEAST_US if nbytes else 0.0
    time_us = _cell(words, columns, at, where, lambda text: read_number(text, least, _MOST_US))
    if columns[at + 1 : at + 3] != ["algbw", "busbw"]:
        raise ScenarioError(f"{where}: column {at + 2}: algbw and busbw stand behind a time, as nccl-tests prints it")
    algbw, busbw = (_cell(words, columns, at + i, where, lambda text: read_number(text, 0, _MOST_GBps)) for i in (1, 2))
    low = algbw - _last_digit(words[at + 1])
    high = algbw + _last_digit(words[at + 1])
    least_us = max(time_us - _last_digit(words[at]), _LEAST_US)
    slowest = nbytes / (time_us + _last_digit(words[at])) / _BW_UNIT
    if high < slowest or low > nbytes / least_us / _BW_UNIT:
        raise ScenarioError(
            f"{where}: column {at + 2} (algbw): {words[at + 1]} GB/s, but {nbytes} B in {words[at]} us are "
            f"{nbytes / time_us / _BW_UNIT:.2f} GB/s: a shifted column, or CPU times (-C)"
        )
    off = _last_digit(words[at + 2])
    factors = (max(0.0, busbw - off) / high, (busbw + off) / low if low > 0 else math.inf)
    return _Line(nbytes, 1e-6 * time_us, factors, f"{where}: column {at + 3} (busbw)")


def _last_digit(text: str) -> float:
    """Return one of the last digit of a printed number."""
    return float(Decimal(1).scaleb(int(Decimal(text).as_tuple().exponent)))


def _common_factor(rows: list[_Line]) -> tuple[float, float]:
    """Return the least and the most of busbw / algbw that all lines allow."""
    low = 0.0
    high = math.inf
    for each in rows:
        low = max(low, each.bus_factor[0])
        high = min(high, each.bus_factor[1])
        if low > high:
            least, most = each.bus_factor
            raise ScenarioError(f"{each.where}: is {least:.3f} to {most:.3f} times algbw, unlike in the lines above")
    return low, high


def placed(table: NcclTable, cluster: Cluster, *, nodes: int | None, gpus_per_node: int | None) -> Cluster:
    """Return the cluster with as many nodes and GPUs as the table was measured on.

    Args:
        table: Lists the ranks, or not.
        cluster: All else. Its own numbers count where nothing else tells them.
        nodes: Given by the user, first of all.
        gpus_per_node: Likewise.

    Raises:
        ScenarioError: One rank alone has no collective. Or the cluster cannot have so many, or the bandwidths of the
            table are of another number of ranks.
    """
    n_nodes = nodes or table.nodes or cluster.nodes
    n_gpus = gpus_per_node or table.gpus_per_node or cluster.gpus_per_node
    if n_nodes * n_gpus < 2:
        raise ScenarioError("nccl-tests: one rank communicates with nobody: measure two or more")
    factor = bus_factor(table.op, n_nodes * n_gpus)
    low, high = table.bus_factor
    if not low <= factor <= high:
        raise ScenarioError(
            f"nccl-tests: busbw is {low:.3f} to {high:.3f} times algbw, but {factor:.3f} in an {table.op} of "
            f"{n_nodes} x {n_gpus} ranks: write --op, --nodes and --gpus-per-node as measured"
        )
    try:
        return cluster.model_copy(update={"nodes": n_nodes, "gpus_per_node": n_gpus})
    except ValidationError as error:
        raise ScenarioError(
            f"{cluster.name or 'cluster'} with {n_nodes} nodes of {n_gpus} GPUs: {_first(error)}"
        ) from None


def simulated_s(cluster: Cluster, op: str, nbytes: int) -> float:
    """Return the seconds of a collective over all GPUs, or of a message between two of them."""
    world_size = cluster.world_size
    if op == "sendrecv":
        group = _pair(cluster)
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


def _pair(cluster: Cluster) -> Group:
    """Return pairs of GPUs with the network between them, or the fabric in one domain."""
    stride = cluster.gpus_per_node * cluster.topology.nodes_per_domain if cluster.n_domains > 1 else 1
    if cluster.world_size % (2 * stride):
        of = "domains of GPUs" if cluster.n_domains > 1 else "GPUs"
        raise ScenarioError(
            f"sendrecv: {cluster.world_size // stride} {of} form no pairs: measure an even number of them"
        )
    return Group(2, stride=stride)


def fitted(table: NcclTable, cluster: Cluster) -> tuple[Cluster, list[str]]:
    """Return the cluster that a table tells, and notes on what it does not tell.

    The largest buffer tells the efficiency of the slower link: of the network, or of the fabric of one domain. The
    smallest one tells the latency of the network, or the overhead of a collective in one domain. A number that is told
    has a range of what the table leaves open. A table of `sendrecv` becomes the link's table.
    """
    where = "network" if cluster.n_domains > 1 else "fabric"
    if table.op == "sendrecv":
        notes = ["the times of messages include launches of one process for all GPUs"] if table.one_process else []
        return _with_table(table, cluster, where), notes
    link: Link = getattr(cluster, where)
    if link.table is not None or link == Link.ideal():
        raise ScenarioError(
            f"cluster.{where}: a table or an ideal link has no efficiency: choose a cluster with a line"
        )
    notes = []
    told = _told(table, cluster, f"{where}.efficiency", row=-1, fast=1.0, slow=0.01)
    if told is None:
        size = format_nbytes(table.rows[-1][0])
        notes.append(f"{where}.efficiency stays {link.efficiency:g}: {size} does not depend on it alone")
    best = told or cluster
    path = "network.latency" if where == "network" else _OVERHEAD
    if table.one_process:
        notes.append(f"{path} stays: the smallest size tells the launches of one process")
        notes.append("collectives.launch is of one process for all GPUs: set it to 0 s for a process per GPU")
        return best, notes
    told = _told(table, best, path, row=0, fast=0.0, slow=_MOST_LATENCY_S)
    if told is None:
        size = format_nbytes(table.rows[0][0])
        notes.append(f"{path} stays: no value from 0 to 1 ms gives the time of {size}")
    notes.append(_QUEUED)
    return told or best, notes


def tells_ring_step(one: NcclTable, other: NcclTable) -> bool:
    """Tell whether two tables are of rings between machines, over different numbers of GPUs."""
    sizes = [(each.nodes or 1) * (each.gpus_per_node or 1) for each in (one, other)]
    return sizes[0] != sizes[1] and all(each.op in RINGS and (each.nodes or 1) > 1 for each in (one, other))


def with_ring_step(tables: tuple[NcclTable, NcclTable], cluster: Cluster) -> tuple[Cluster, list[str]]:
    """Return the cluster with the step of a ring that the largest buffers of two tables tell, and notes.

    Steps and bytes add up. On more GPUs there are more steps and as many bytes. So the difference tells the step, and
    what is left the efficiency of the network.

    Args:
        tables: Of two numbers of GPUs, see `tells_ring_step`.
        cluster: What the tables leave open.
    """
    few, many = sorted(tables, key=lambda table: (table.nodes or 1) * (table.gpus_per_node or 1))
    step_s = ring_step_s(few, many, cluster)
    path = "network.ring_step"
    start = _with_number(cluster, path, max(0.0, step_s))
    best = _told(few, _placed_like(few, start), "network.efficiency", row=-1, fast=1.0, slow=0.01)
    best = best and _told(many, _placed_like(many, best), path, row=-1, fast=0.0, slow=_MOST_STEP_S)
    if best is None:
        note = f"{path} stays: no value gives the times of the largest sizes of {few.op} and {many.op}"
        return cluster, [note]
    return best, []


def ring_step_s(few: NcclTable, many: NcclTable, cluster: Cluster) -> float:
    """Return the step of a ring with which the largest buffers of both tables have one efficiency of the network.

    A time is t + a step_s + b / efficiency, so three simulations of each table tell its terms.
    """
    rows = []
    seconds = []
    for table in (few, many):
        placed_like = _placed_like(table, cluster.model_copy(update={"uncertain": {}}))
        nbytes, measured_s = table.rows[-1]
        base_s, slower_s, stepped_s = (
            simulated_s(
                _with_number(_with_number(placed_like, "network.efficiency", share), "network.ring_step", step_s),
                table.op,
                nbytes,
            )
            for share, step_s in ((1.0, 0.0), (0.5, 0.0), (1.0, _SOME_STEP_S))
        )
        rows.append([(stepped_s - base_s) / _SOME_STEP_S, slower_s - base_s])
        seconds.append(measured_s - 2 * base_s + slower_s)
    (a, b), (c, d) = rows
    return (seconds[0] * d - seconds[1] * b) / (a * d - b * c) if a * d != b * c else 0.0


def _placed_like(table: NcclTable, cluster: Cluster) -> Cluster:
    return placed(table, cluster, nodes=table.nodes, gpus_per_node=table.gpus_per_node)


def _told(table: NcclTable, cluster: Cluster, path: str, *, row: int, fast: float, slow: float) -> Cluster | None:
    """Return the cluster with the number that a row tells, and its range; None if no value gives the row's time."""
    nbytes, measured_s = table.rows[row]
    replaced = {path, path.replace(".efficiency", ".bandwidth")}
    ranges = {name: each for name, each in cluster.uncertain.items() if name not in replaced}
    free = cluster.model_copy(update={"uncertain": ranges})
    found = _bisected(lambda value: _with_number(free, path, value), table.op, nbytes, measured_s, fast, slow)
    if found is None:
        return None
    value = float(f"{found:.3g}")
    best = _with_number(free, path, value)
    near = [each for each in table.rows if nbytes / _NEAR <= each[0] <= nbytes * _NEAR]
    misses = [simulated_s(best, table.op, size) / seconds - 1 for size, seconds in near]
    missed = math.sqrt(math.fsum(miss * miss for miss in misses) / len(misses))
    return best.model_copy(update={"uncertain": ranges | _range(path, value, missed)})


def _range(path: str, value: float, missed: float) -> dict[str, Range]:
    """Return the range of a number by path: none, if it is 0."""
    off = min(_MOST_OFF, max(_LEAST_OFF, 2 * missed))
    if path.endswith(".efficiency"):
        ends = [f"{100 * min(1.0, end):.4g}%" for end in (value * (1 - off), value * (1 + off))]
    else:
        ends = [format_seconds(end, 4) for end in (value * (1 - off), value * (1 + off))]
    if ends[0] == ends[1]:
        return {}
    source = f"{CALIBRATED}: twice the root mean square of what sizes near by miss, {100 * missed:.2g} %, at least 1 %"
    return {path: Range.model_validate({"from": ends[0], "to": ends[1], "source": source, "measure": _MEASURE})}


def _with_number(cluster: Cluster, path: str, value: float) -> Cluster:
    if path == _OVERHEAD:
        return cluster.model_copy(update={"collectives": {"overhead_s": value}})
    where, _, key = path.partition(".")
    link: Link = getattr(cluster, where)
    attribute = {"efficiency": "efficiency", "latency": "latency_s", "ring_step": "ring_step_s"}[key]
    return cluster.model_copy(update={where: link.model_copy(update={attribute: value})})


def _with_table(table: NcclTable, cluster: Cluster, where: str) -> Cluster:
    """Return the cluster with the table of a link, whose times do not shrink.

    A table has no ranges. If the cluster loses its last one, the overhead of a collective gets one, because messages do
    not tell it: a cluster without ranges would be taken as exact.
    """
    if len(table.rows) < 2:
        raise ScenarioError(f"sendrecv: a table of the {where} needs two sizes with a time: measure more sizes")
    points: list[TablePoint] = []
    longest_s = 0.0
    for nbytes, seconds in table.rows:
        longest_s = max(longest_s, seconds)
        points.append(TablePoint(nbytes=nbytes, time_s=longest_s))
    ranges = {path: each for path, each in cluster.uncertain.items() if not path.startswith(f"{where}.")}
    if cluster.uncertain and not ranges:
        ends = {"from": "0 s", "to": format_seconds(2 * max(cluster.collectives.overhead_s, _USUAL_OVERHEAD_S), 4)}
        source = f"{CALIBRATED}: messages do not tell it: from none to twice the given or the usual one"
        measure = "all_reduce_perf of nccl-tests"
        ranges[_OVERHEAD] = Range.model_validate({**ends, "source": source, "measure": measure})
    return cluster.model_copy(update={where: Link(table=tuple(points)), "uncertain": ranges})


def _first(error: ValidationError) -> str:
    return error.errors()[0]["msg"]


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
    """Return the cluster with the launches of one process, told by the smallest buffer, if it drives all GPUs.

    Messages become a table of the link that includes the launches.
    """
    if not table.one_process or table.op == "sendrecv":
        return cluster
    n_gpus = table.gpus_per_node or cluster.gpus_per_node
    launch_s = float(f"{table.rows[0][1] / n_gpus:.3g}")
    return cluster.model_copy(update={"collectives": {"launch_s": launch_s}})
