"""Traces, simulated or measured: the times of each operation instance on each rank.

A trace is three arrays over `[operation instance, rank]`, in seconds from the start, and their plan. Row i is instance
i of `simdist.plan.walk`, so two traces of one plan are compared by subtraction. Traces of different plans are refused.
NaN means that the instance did not run. Readers do not need to know the writer.

    ready_s   the host has reached it, its stream is free, and its buffers are available
    start_s   it began; a collective begins when its last member is ready, so start - ready is waiting for others
    end_s     it ended
"""

import io
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from simdist.arrays import Declared, open_arrays
from simdist.display import Pictured
from simdist.errors import PlanError, TraceError, require
from simdist.files import MAX_DOCUMENT_NBYTES
from simdist.plan import Plan, lane_of
from simdist.plan.walk import drops_late
from simdist.traces.links import LinkTable, read_links

if TYPE_CHECKING:
    import pandas as pd


_FORMAT = "simdist-trace-1"
#: The arrays of a trace.
TIMES_OF_TRACE = ("ready_s", "start_s", "end_s")
_CheckedT = TypeVar("_CheckedT")
_Absent: TypeAlias = Mapping[int, tuple[tuple[int, int], ...]]
_WRITERS = "`simdist simulate -o RUN` writes one, `torchrun ... -m real RUN` a measured one"


@dataclass(frozen=True, repr=False)
class Trace(Pictured):
    """Times of each operation instance on each rank.

    Args:
        plan: The plan that was executed.
        ready_s: float64 `[plan.n_instances, plan.world_size]`.
        start_s: float64 `[plan.n_instances, plan.world_size]`.
        end_s: float64 `[plan.n_instances, plan.world_size]`.
        source: Writer, such as `simulated by des`.
        run: Unique name of a measured run; else empty.
        links: Changes of misbehaving links; empty without any.
        late: Row -> late ranks. For an all-reduce that drops late ranks, these are the dropped ranks. For an `Enter`,
            these are the ranks that sat the step out because the others had completed it.
        real_rank: The only real rank, if its peers were simulated. They have times in its collectives only.
        absent: Rank -> stretches of steps, first and last, that the others performed without it.
    """

    plan: Plan
    ready_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    source: str
    run: str = ""
    links: LinkTable = field(default_factory=dict)
    late: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    real_rank: int | None = None
    absent: _Absent = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in zip(TIMES_OF_TRACE, (self.ready_s, self.start_s, self.end_s), strict=True):
            _check_shape(self.plan, name, Declared(array.dtype, array.shape))

    @property
    def makespan_s(self) -> float:
        """Seconds until the last operation is done."""
        return float(np.nanmax(self.end_s, initial=0.0))

    def difference_s(self, other: "Trace") -> NDArray[np.float64]:
        """Return how much later each operation ends here than in `other`, `[n_instances, world_size]`.

        Raises:
            TraceError: The traces belong to different plans.
        """
        if self.plan.digest() != other.plan.digest():
            raise TraceError(
                f"traces of different plans: {self.plan.name} ({self.plan.digest()[:12]}) and {other.plan.name} "
                f"({other.plan.digest()[:12]}); only traces of one plan can be compared row by row"
            )
        return self.end_s - other.end_s

    def save(self, path: Path | str) -> None:
        """Write to an .npz file; equal traces give equal bytes.

        Columns:
            header (uint8 [length]): JSON as bytes: `format` (`simdist-trace-1`), `source` (program that wrote it),
                `run` (unique name of a measurement), `links` (of misbehaving links: time from which, share of the rate
                that is left, flows of other jobs), `late` (of dropped ranks: row of an all-reduce -> ranks that were
                too late, row of an `enter` -> ranks that sat the step out), `real_rank` (the only real rank among
                simulated peers), `absent` (rank -> stretches of steps that others performed without it, the last step
                excluded) and `plan` (as in `plan.json`).
            ready_s, start_s, end_s (float64 [instances, world_size]): The host, the stream and buffers are ready for
                it; it began (a collective when its last member is ready); it ended.
        """
        arrays = {"ready_s": self.ready_s, "start_s": self.start_s, "end_s": self.end_s}
        from simdist.plan.codec import dumps

        late = {str(row): ranks for row, ranks in sorted(self.late.items())}
        only = {} if self.real_rank is None else {"real_rank": self.real_rank}
        absent = {str(rank): steps for rank, steps in sorted(self.absent.items())}
        named = (("run", self.run), ("links", self.links), ("late", late), ("absent", absent))
        some = {key: value for key, value in named if value} | only
        write_with_header(path, {"format": _FORMAT, "source": self.source, **some, "plan": dumps(self.plan)}, arrays)

    @classmethod
    def load(cls, path: Path | str) -> "Trace":
        """Read from an .npz file.

        Raises:
            TraceError: The file cannot be read, is not a trace, or is damaged.
        """
        from simdist.plan.codec import loads

        def check(
            header: dict[str, object], declared: Mapping[str, Declared]
        ) -> tuple[Plan, str, str, LinkTable, Mapping[int, tuple[int, ...]], int | None, _Absent]:
            plan = loads(str(header.get("plan")), name="plan")
            for name, found in declared.items():
                _check_shape(plan, name, found)
            links = read_links(header.get("links", {}))
            late = _read_late(header.get("late", {}), plan)
            real_rank = _read_rank(header.get("real_rank"), plan)
            absent = _read_absent(header.get("absent", {}), plan)
            return plan, str(header.get("source")), str(header.get("run", "")), links, late, real_rank, absent

        (plan, source, run, links, late, real_rank, absent), (ready_s, start_s, end_s) = read_with_header(
            path, _FORMAT, TIMES_OF_TRACE, check, what="a trace", hint=_WRITERS
        )
        trace = cls(plan, ready_s, start_s, end_s, source, run, links, late, real_rank, absent)
        if problem := trace._disorder():
            raise TraceError(f"{path}: {problem}")
        return trace

    def _disorder(self) -> str:
        """Describe an operation with impossible times; empty if there is none."""
        is_ordered = (self.ready_s <= self.start_s) & (self.start_s <= self.end_s)
        is_ordered &= np.isfinite(self.ready_s) & np.isfinite(self.end_s)
        if is_ordered.all():
            return ""
        begins = (self.ready_s <= self.start_s) | np.isnan(self.start_s)
        ends = (self.start_s <= self.end_s) | np.isnan(self.end_s)
        is_ordered |= begins & ends & ~np.isinf(self.ready_s) & ~np.isinf(self.start_s) & ~np.isinf(self.end_s)
        if is_ordered.all():  # an operation that did not finish has no end
            return ""
        from simdist.plan.text import op_name

        row, rank = np.argwhere(~is_ordered)[0].tolist()
        step, position, body = (int(each[row]) for each in self._places())
        ready_s, start_s, end_s = (float(each[row, rank]) for each in (self.ready_s, self.start_s, self.end_s))
        return (
            f"{op_name(self.plan.bodies[body][position])} of step {step}, position {position}, on rank {rank} has "
            f"ready_s {ready_s:g}, start_s {start_s:g}, end_s {end_s:g}; times are finite, "
            f"ready_s <= start_s <= end_s, and NaN from where on it did not run"
        )

    def frame(self) -> "pd.DataFrame":
        """Return one row per operation instance and rank: step, position, rank, op, stream, ready_s, start_s, end_s.

        Columns:
            step, position, rank (int64): Step, place in the step's body, rank.
            op (category): Name, such as `all_reduce`.
            stream (category): `host`, `compute`, `comm`, `average`, `io` or `save`.
            ready_s, start_s, end_s (float64): See "Arrays of a trace".
        """
        require("pandas", extra="tables", what="Trace.frame")
        import pandas as pd

        from simdist.plan.text import op_name

        step, position, body = self._places()
        names = [[op_name(op) for op in ops] for ops in self.plan.bodies]
        streams = [[lane_of(op).stream for op in ops] for ops in self.plan.bodies]
        ranks = self.plan.world_size
        op = [names[b][p] for b, p in zip(body, position, strict=True)]
        stream = [streams[b][p] for b, p in zip(body, position, strict=True)]
        return pd.DataFrame(
            {
                "step": np.repeat(step, ranks),
                "position": np.repeat(position, ranks),
                "rank": np.tile(np.arange(ranks), len(step)),
                "op": pd.Categorical(np.repeat(op, ranks)),
                "stream": pd.Categorical(np.repeat(stream, ranks), categories=list(self.plan.streams)),
                **{name: getattr(self, name).ravel() for name in TIMES_OF_TRACE},
            }
        )

    def __repr__(self) -> str:
        return f"<trace of {self.plan.name}: {self.plan.world_size:,} ranks, {self.makespan_s:.4g} s, by {self.source}>"

    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return step, position and body of every instance."""
        lengths = np.array([len(body) for body in self.plan.bodies])
        bodies = np.fromiter(self.plan.body_of_steps(), dtype=np.int64, count=self.plan.n_steps)
        step = np.repeat(np.arange(len(bodies)), lengths[bodies])
        position = np.arange(len(step)) - self.plan.first_instances()[step]
        return step, position, bodies[step]


def ended_with_its_last_result(trace: Trace) -> Trace:
    """Remove work of ranks that were too late for the last result, from the moment when the others have finished."""
    if not trace.late:
        return trace
    end_s = np.delete(trace.end_s, trace.late[max(trace.late)], axis=1).max()
    ready_s, start_s, ends_s = (np.minimum(each, end_s) for each in (trace.ready_s, trace.start_s, trace.end_s))
    return replace(trace, ready_s=ready_s, start_s=start_s, end_s=ends_s)


def late_shares(trace: Trace) -> dict[int, float]:
    """Return the share of late-dropping updates for which each rank was late; ranks that never were are omitted."""
    rows = drops_late(trace.plan)
    counts = Counter(rank for row in rows for rank in trace.late.get(row, ()))
    return {rank: n / len(rows) for rank, n in sorted(counts.items())}


def _read_late(raw: object, plan: Plan) -> dict[int, tuple[int, ...]]:
    """Read the late ranks."""
    try:
        late = {int(row): tuple(ranks) for row, ranks in raw.items()}  # type: ignore[attr-defined]
        named = {rank for ranks in late.values() for rank in ranks}
        if late.keys() <= {*range(plan.n_instances)} and named <= {*range(plan.world_size)}:
            return late
    except (AttributeError, TypeError, ValueError):
        pass
    raise TraceError("`late` is no table of the plan's all-reduces and the ranks that were late there")


def _read_absent(raw: object, plan: Plan) -> _Absent:
    """Read the ranks that were absent."""
    try:
        absent = {
            int(rank): tuple((int(first), int(last)) for first, last in steps)
            for rank, steps in raw.items()  # type: ignore[attr-defined]
        }
        stretches = [each for steps in absent.values() for each in steps]
        if absent.keys() <= {*range(plan.world_size)} and all(0 <= a <= b <= plan.n_steps for a, b in stretches):
            return absent
    except (AttributeError, TypeError, ValueError):
        pass
    raise TraceError("`absent` is no table of ranks and of the steps that they were absent from")


def _read_rank(raw: object, plan: Plan) -> int | None:
    """Read the only real rank."""
    if raw is None or (isinstance(raw, int) and 0 <= raw < plan.world_size):
        return raw
    raise TraceError(f"`real_rank` is {raw!r}; the plan has ranks 0 to {plan.world_size - 1}")


def write_with_header(
    path: Path | str, header: Mapping[str, object], arrays: Mapping[str, NDArray[np.generic]]
) -> None:
    """Write arrays and a header to an .npz file; equal contents give equal bytes."""
    write_npz(path, {"header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays})


def _check_shape(plan: Plan, name: str, found: Declared) -> None:
    shape = (plan.n_instances, plan.world_size)
    if found.shape != shape or found.dtype != np.float64:
        raise TraceError(
            f"{name} is {found.dtype} {found.shape}; a trace of plan {plan.name} has float64 {shape}: operation "
            f"instances x ranks"
        )


def read_with_header(
    path: Path | str,
    file_format: str,
    names: Sequence[str],
    check: Callable[[dict[str, object], Mapping[str, Declared]], _CheckedT],
    *,
    what: str,
    hint: str,
) -> tuple[_CheckedT, list[NDArray[Any]]]:
    """Read a file of `write_with_header`.

    Args:
        path: The file.
        file_format: The header's `format`.
        names: Names of the arrays.
        check: Takes the header and the declared types and shapes of the arrays before they are read.
        what: Expected contents of the file, for messages.
        hint: The command that writes such a file, for messages.

    Returns:
        The result of `check`, and the arrays in the order of their names.

    Raises:
        TraceError: The file cannot be read, is of another format, or is refused by `check`.
    """
    try:
        with open_arrays(path) as file:
            header = json.loads(file.read("header", most_nbytes=MAX_DOCUMENT_NBYTES).tobytes())
            declared = {name: file.declared(name) for name in names}
            if not isinstance(header, dict) or header.get("format") != file_format:
                raise TraceError(f"not a {file_format} file; {hint}")
            checked = check(header, declared)
            return checked, [file.read(name, most_nbytes=declared[name].nbytes) for name in names]
    except (PlanError, TraceError, IndexError) as error:
        raise TraceError(f"{path}: {error}") from None
    except Exception as error:  # a dozen types: numpy, zipfile and tokenize each raise their own for damaged files
        raise TraceError(f"{path}: cannot be read as {what} ({error}); {hint}") from None


def write_npz(file: Path | str | IO[bytes], arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Write arrays, in their order, as an .npz file with a fixed date, so that equal arrays give equal bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0)), member.getvalue())
