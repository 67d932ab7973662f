"""Tables of the operations of a job with data and pipeline parallelism, one row each, from CSV or Parquet.

The columns are those of the traces that Lin et al. published with their analyzer
(github.com/ByteDance-Seed/StragglerAnalysis, Apache-2.0). The analyzer also defines the dependencies.
"""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.errors import TraceError, naming_file, require
from simdist.files import lines_of, open_regular
from simdist.settings.base import shown
from simdist.whatif.ideal import Cause

if TYPE_CHECKING:
    import pandas as pd

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
#: The workers that start an operation together: one worker, the two ends of a transfer, the data-parallel ranks of a
#: stage, the stages of a data-parallel rank, or all workers.
Members: TypeAlias = Literal["alone", "ends", "stage", "pipeline", "all"]

SUFFIXES = (".csv", ".parquet")
UNKNOWN = -1

_REQUIRED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
_OPTIONAL = ("rank", "seq_id", "mc", "mb_id", "gmc")
_OF_OPERATIONS = ("dp_rank", "stage", "kind", "start_s", "duration_s", "chunk", "model_chunk", "micro_batch")
_MOST_ROWS = 10_000_000  # 4 GB
_MOST_NBYTES = 64 << 20  # of a column of Parquet
_CELL_NBYTES = 64  # in addition, for each row
_LONGEST_S = 3600.0  # longer than any plausible step
_MOST_S = 1e16  # 300 million years; also microseconds since 1970


@dataclass(frozen=True, slots=True)
class OperationKind:
    """A known kind of operation.

    Args:
        channel: The part of the machine that it occupies.
        members: The workers that start it together.
    """

    channel: Cause
    members: Members = "alone"


#: The values of the column `optype` and their dependencies, after Lin et al.
KINDS: dict[str, OperationKind] = {
    "forward-compute": OperationKind("compute"),
    "backward-compute": OperationKind("compute"),
    "forward-send": OperationKind("communication", "ends"),
    "forward-recv": OperationKind("communication", "ends"),
    "backward-send": OperationKind("communication", "ends"),
    "backward-recv": OperationKind("communication", "ends"),
    "params-all-gather": OperationKind("communication", "stage"),
    "grads-reduce-scatter": OperationKind("communication", "stage"),
    "separate-grads-all-reduce": OperationKind("communication", "stage"),
    "embedding-grads-all-reduce": OperationKind("communication", "pipeline"),
    "layernorm-grads-all-reduce": OperationKind("communication"),  # among tensor-parallel ranks; one of them is traced
    "optimizer-clip-main-grad": OperationKind("communication", "all"),
    "optimizer": OperationKind("compute"),
    "gc": OperationKind("host"),
}
OTHER = OperationKind("compute")


@dataclass(frozen=True)
class OperationTable:
    """The operations of a job, by step, data-parallel rank, stage and start.

    Args:
        path: The file.
        kinds: Names of the kinds of operation.
        step_numbers: The job's own numbers of the steps, ascending, `[n_steps]`.
        ranks: Number of each worker, `[n_dp_ranks, n_stages]`.
        dp_ranks: Numbers of the data-parallel ranks, `[n_dp_ranks]`.
        step: Index of the step of each operation, `[n]`.
        dp_rank: Index of its data-parallel rank, `[n]`.
        stage: Index of its stage, `[n]`.
        kind: Index of its kind, `[n]`.
        start_s: When it started, from the first start of its step, `[n]`.
        duration_s: How long it took, including waiting, `[n]`.
        chunk: The part of the stage's layers that it works on, `UNKNOWN` or from 0, `[n]`.
        model_chunk: Number of that part in the whole model, `UNKNOWN` or from 0, `[n]`.
        micro_batch: Its micro-batch, `UNKNOWN` or from 0, `[n]`.
        resolution_s: Largest shift of times due to rounding in the file.
        notes: Notes on omissions and assumptions.
    """

    path: Path
    kinds: tuple[str, ...]
    step_numbers: Ints
    ranks: Ints
    dp_ranks: Ints
    step: Ints
    dp_rank: Ints
    stage: Ints
    kind: Ints
    start_s: Floats
    duration_s: Floats
    chunk: Ints
    model_chunk: Ints
    micro_batch: Ints
    resolution_s: float
    notes: tuple[str, ...] = ()

    @property
    def n_workers(self) -> int:
        """Workers: data-parallel ranks times stages."""
        return self.ranks.size

    @property
    def worker(self) -> Ints:
        """Index of the worker of each operation, in the order of `ranks`, `[n]`."""
        return np.asarray(self.dp_rank * self.ranks.shape[1] + self.stage)

    @property
    def end_s(self) -> Floats:
        """When each operation ended, from the first start of its step, `[n]`."""
        return self.start_s + self.duration_s

    def of_kind(self, *names: str) -> NDArray[np.bool_]:
        """Tell which operations are of some kinds, `[n]`."""
        return np.isin(self.kind, [index for index, name in enumerate(self.kinds) if name in names])

    def only(self, kept: NDArray[np.bool_], *notes: str) -> "OperationTable":
        """Return a table of some of the operations, with notes on the others."""
        numbers, step = np.unique(self.step[kept], return_inverse=True)
        return replace(
            self,
            step_numbers=self.step_numbers[numbers],
            step=step.astype(np.int64),
            **{name: getattr(self, name)[kept] for name in _OF_OPERATIONS},
            notes=tuple(dict.fromkeys([*self.notes, *notes])),
        )


def is_table(name: str) -> bool:
    """Tell from the suffix of a file whether it is a table."""
    return Path(name).suffix.lower() in SUFFIXES and not Path(name).is_dir()


def read_table(path: Path, *, steps: range | None = None) -> OperationTable:
    """Read a table of operations.

    Args:
        path: A .csv or .parquet file.
        steps: Numbers of the steps to analyse; all by default.

    Raises:
        TraceError: The file cannot be read, lacks a column, or has an invalid row.
        UnsupportedError: The file is Parquet, and a package is missing.
    """
    frame = _checked(path, _frame(path))
    if steps is not None:
        chosen = frame[(frame["step"] >= steps.start) & (frame["step"] < steps.stop)]
        if chosen.empty:
            there = f"{frame['step'].min():.0f} to {frame['step'].max():.0f}"
            raise TraceError(f"{path}: --steps {steps.start}:{steps.stop}: the steps in the table are {there}")
        frame = chosen
    return _table(path, frame)


def _frame(path: Path) -> "pd.DataFrame":
    """Read the known columns; a missing optional column is unknown in every row."""
    require("pandas", extra="tables", what="a table of operations")
    import pandas as pd

    if not path.is_file():
        raise TraceError(f"{path}: {'is no regular file' if path.exists() else 'there is no such file'}")
    try:
        with naming_file(path, "read", TraceError):
            if path.suffix.lower() == ".parquet":
                frame = _read_parquet(path)
            else:
                known = {*_REQUIRED, *_OPTIONAL}
                with open_regular(path) as file:
                    for _ in lines_of(file):  # refuses lines that are too long
                        pass
                frame = pd.read_csv(path, usecols=known.__contains__, nrows=_MOST_ROWS + 1, low_memory=False)
    except (ValueError, pd.errors.ParserError) as error:  # the errors of pyarrow are also ValueErrors
        raise TraceError(
            f"{path}: is no table of {path.suffix.lower()[1:]}: {str(error).partition(chr(10))[0]}"
        ) from None
    if missing := [name for name in _REQUIRED if name not in frame.columns]:
        has = ", ".join(frame.columns) or "none"
        raise TraceError(f"{path}: lacks {', '.join(missing)}: needs {', '.join(_REQUIRED)}; it has of these {has}")
    if not 0 < len(frame) <= _MOST_ROWS:
        many = f"more than {_MOST_ROWS:,} rows, what memory holds: write fewer steps"
        raise TraceError(f"{path}: has {many if len(frame) else 'no rows: write one for each operation'}")
    return frame.assign(**{name: UNKNOWN for name in _OPTIONAL if name not in frame.columns})


def _read_parquet(path: Path) -> "pd.DataFrame":
    require("pyarrow", extra="parquet", what=f"{path}: a Parquet file")
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    if file.metadata.num_rows > _MOST_ROWS:
        raise TraceError(f"{path}: has {file.metadata.num_rows:,} rows, memory holds {_MOST_ROWS:,}: write fewer steps")
    known = [name for name in file.schema_arrow.names if name in (*_REQUIRED, *_OPTIONAL)]
    for group, column in product(range(file.num_row_groups), range(file.metadata.num_columns)):
        facts = file.metadata.row_group(group).column(column)
        if facts.total_uncompressed_size > _MOST_NBYTES + _CELL_NBYTES * file.metadata.num_rows:
            raise TraceError(
                f"{path}: column {facts.path_in_schema} holds {facts.total_uncompressed_size:,} bytes, too many"
            )
    frame: pd.DataFrame = file.read(known).to_pandas()
    return frame


def _checked(path: Path, frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return the columns as numbers, kinds as categories; empty optional values are unknown."""
    known = f"one of {', '.join(KINDS)}"
    kinds = frame["optype"].astype("category").cat.remove_unused_categories()
    _refuse_row(path, frame, "optype", kinds.isna(), known)
    for name in map(str, kinds.cat.categories):
        plain = name.strip().lower().replace("_", "-").replace(" ", "-")
        if name not in KINDS and (plain in KINDS or "send" in plain or "recv" in plain):
            _refuse_row(path, frame, "optype", kinds == name, plain if plain in KINDS else known)
    if not set(kinds.cat.categories) & set(KINDS):
        _refuse_row(path, frame, "optype", ~kinds.isna(), known)
    numbers = {name: _numbers(path, frame, name) for name in (*_REQUIRED, *_OPTIONAL) if name != "optype"}
    is_single = any(frame[name].dtype == np.float32 for name in ("start_ts", "duration"))
    latest = np.float32(np.abs(numbers["start_ts"]).max() + numbers["duration"].max())
    found = frame.assign(optype=kinds, resolution=float(np.spacing(latest)) if is_single else 0.0, **numbers)
    twice = found.duplicated(["step", "dp_rank", "stage", "optype", "seq_id"]) & (found["seq_id"] != UNKNOWN)
    right = "another number, the worker has one of that kind with it in the step; of tensor-parallel ranks write one"
    _refuse_row(path, frame, "seq_id", twice, right)
    if (found["rank"] != UNKNOWN).all():
        differs = found["rank"] != found.groupby(["dp_rank", "stage"])["rank"].transform("first")
        _refuse_row(path, frame, "rank", differs, "that of the other rows of its dp_rank and stage")
    return found


def _numbers(path: Path, frame: "pd.DataFrame", name: str) -> Floats | Ints:
    values = _floats(frame[name])
    is_time = np.abs(values) <= _MOST_S
    match name:
        case "start_ts":
            wrong = ~is_time
            right = f"seconds, at most {_MOST_S:g}"
        case "duration":
            wrong = ~(is_time & (values >= 0))
            right = f"seconds, 0 or more: it ends after it starts; at most {_MOST_S:g}"
        case _:
            least = 0
            right = "a whole number, 0 or more"
            if np.any(values >= 2**31):
                right += ", below 2^31"
            if name in _OPTIONAL:
                least = UNKNOWN
                values = np.where(frame[name].isna(), UNKNOWN, values)
                right += f", or {UNKNOWN} if it is unknown"
            wrong = ~((values >= least) & (values < 2**31) & (values == np.floor(values)))
    _refuse_row(path, frame, name, wrong, right)
    return values if name in ("start_ts", "duration") else values.astype(np.int64)


def _floats(column: "pd.Series") -> Floats:
    """Return a column as numbers; NaN for text, infinity for whole numbers that no float holds."""
    import pandas as pd

    try:
        return np.asarray(pd.to_numeric(column, errors="coerce"), dtype=np.float64)
    except OverflowError:
        return np.array([_float(value) for value in column])


def _float(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return np.nan


def _refuse_row(
    path: Path, frame: "pd.DataFrame", name: str, wrong: "NDArray[np.bool_] | pd.Series", right: str
) -> None:
    if wrong.any():
        row = int(np.argmax(np.asarray(wrong)))
        value = frame[name].iloc[row]
        text = "nothing" if value != value else shown(value) if isinstance(value, str | int) else str(value)
        raise TraceError(f"{path}: row {row + 1}, column {name}: {text}: write {right}")


def _table(path: Path, frame: "pd.DataFrame") -> OperationTable:
    """Number steps and workers, and sort the rows."""
    start_s = frame["start_ts"] - frame.groupby("step")["start_ts"].transform("min")
    frame = frame.assign(start_ts=start_s, end_ts=start_s + frame["duration"])
    frame = frame.sort_values(["step", "dp_rank", "stage", "start_ts", "end_ts", "seq_id"])
    steps, step = np.unique(frame["step"], return_inverse=True)
    dp_ranks, dp_rank = np.unique(frame["dp_rank"], return_inverse=True)
    stages, stage = np.unique(frame["stage"], return_inverse=True)
    if stages[-1] != len(stages) - 1:
        gone = min(set(range(len(stages))) - set(stages.tolist()))
        raise TraceError(f"{path}: stage {gone} has no rows, stage {stages[-1]} has some: write those of all stages")
    ranks = np.arange(len(dp_ranks) * len(stages)).reshape(len(stages), len(dp_ranks)).T.copy()
    if (frame["rank"] != UNKNOWN).all():
        ranks[dp_rank, stage] = frame["rank"]
        numbers, counts = np.unique(ranks, return_counts=True)
        if counts.max() > 1:
            rank = numbers[counts.argmax()]
            raise TraceError(f"{path}: rank {rank} has several pairs of dp_rank and stage: write a rank for each pair")
    kind = frame["optype"].cat.remove_unused_categories().cat
    kinds = tuple(map(str, kind.categories))
    doubts = list[str]()
    if float(frame.groupby("step")["end_ts"].max().median()) > _LONGEST_S:
        doubts.append("steps take hours: start_ts and duration must be in seconds")
    if "forward-compute" in kinds and "backward-compute" not in kinds:
        doubts.append(
            "warning: no backward-compute: write all computing, or the time between operations is not explained"
        )
    what = f"no known kind of operation: taken as computing, which waits for no other worker; known: {', '.join(KINDS)}"
    return OperationTable(
        path=path,
        kinds=kinds,
        step_numbers=steps,
        ranks=ranks,
        dp_ranks=dp_ranks,
        step=step,
        dp_rank=dp_rank,
        stage=stage,
        kind=np.asarray(kind.codes, dtype=np.int64),
        start_s=np.asarray(frame["start_ts"]),
        duration_s=np.asarray(frame["duration"]),
        chunk=np.asarray(frame["mc"]),
        model_chunk=np.asarray(frame["gmc"]),
        micro_batch=np.asarray(frame["mb_id"]),
        resolution_s=float(frame["resolution"].iloc[0]),
        notes=(*doubts, *(f"{name}: {what}" for name in kinds if name not in KINDS)),
    )
