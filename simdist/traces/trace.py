"""Traces, simulated or measured: the times of every operation instance on every rank.

A trace is three arrays over `[operation instance, rank]`, in seconds from the start, and the plan they belong to. Row
i is instance i of `simdist.plan.walk`, so two traces of one plan are compared by subtraction; traces of different
plans are refused. NaN means that it did not run. A reader need not know what wrote it.

    ready_s   the host has reached it, its stream is free and the buffers it needs are there
    start_s   it began; a collective begins when its last member is ready, so start - ready is waiting for others
    end_s     it was done
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simdist.errors import PlanError, TraceError
from simdist.plan import STREAMS, Plan, stream_of

if TYPE_CHECKING:
    import pandas as pd


_FORMAT = "simdist-trace-1"
_ARRAYS = ("ready_s", "start_s", "end_s")
_WRITERS = "`simdist simulate -o RUN` writes one, `torchrun ... -m real RUN` a measured one"


@dataclass(frozen=True)
class Trace:
    """Times of every operation instance on every rank.

    Args:
        plan: The plan that was executed.
        ready_s: float64 `[plan.n_instances, plan.world_size]`.
        start_s: Likewise.
        end_s: Likewise.
        source: Who wrote it, such as `simulated by des`.
    """

    plan: Plan
    ready_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    source: str

    def __post_init__(self) -> None:
        shape = (self.plan.n_instances, self.plan.world_size)
        for name in _ARRAYS:
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float64:
                raise TraceError(
                    f"{name} is {array.dtype} {array.shape}; a trace of plan {self.plan.name} has float64 {shape}: "
                    f"operation instances x ranks"
                )

    @property
    def makespan_s(self) -> float:
        """Seconds until the last operation is done."""
        return float(np.nanmax(self.end_s, initial=0.0))

    def difference_s(self, other: "Trace") -> NDArray[np.float64]:
        """Return how much later each operation ends here than in `other`, `[n_instances, world_size]`.

        Raises:
            TraceError: They are traces of different plans.
        """
        if self.plan.digest() != other.plan.digest():
            raise TraceError(
                f"traces of different plans: {self.plan.name} ({self.plan.digest()[:12]}) and {other.plan.name} "
                f"({other.plan.digest()[:12]}); only traces of one plan can be compared row by row"
            )
        return self.end_s - other.end_s

    def save(self, path: Path | str) -> None:
        """Write to an .npz file; equal traces give equal bytes."""
        arrays = {"ready_s": self.ready_s, "start_s": self.start_s, "end_s": self.end_s}
        from simdist.plan.codec import dumps

        write_with_header(path, {"format": _FORMAT, "source": self.source, "plan": dumps(self.plan)}, arrays)

    @classmethod
    def load(cls, path: Path | str) -> "Trace":
        """Read from an .npz file.

        Raises:
            TraceError: It cannot be read, is no trace, or is damaged.
        """
        from simdist.plan.codec import loads

        header, (ready_s, start_s, end_s) = read_with_header(path, _FORMAT, _ARRAYS, what="a trace", hint=_WRITERS)
        try:
            plan = loads(str(header.get("plan")), name="plan")
            return cls(plan, ready_s, start_s, end_s, source=str(header.get("source")))
        except (PlanError, TraceError, IndexError) as error:
            raise TraceError(f"{path}: {error}") from None

    def frame(self) -> "pd.DataFrame":
        """Return one row per operation instance and rank: step, position, rank, op, stream, ready_s, start_s, end_s."""
        import pandas as pd

        from simdist.plan.text import op_name

        step, position, body = self._places()
        names = [[op_name(op) for op in ops] for ops in self.plan.bodies]
        streams = [[stream_of(op) for op in ops] for ops in self.plan.bodies]
        ranks = self.plan.world_size
        op = [names[b][p] for b, p in zip(body, position, strict=True)]
        stream = [streams[b][p] for b, p in zip(body, position, strict=True)]
        return pd.DataFrame(
            {
                "step": np.repeat(step, ranks),
                "position": np.repeat(position, ranks),
                "rank": np.tile(np.arange(ranks), len(step)),
                "op": pd.Categorical(np.repeat(op, ranks)),
                "stream": pd.Categorical(np.repeat(stream, ranks), categories=list(STREAMS)),
                **{name: getattr(self, name).ravel() for name in _ARRAYS},
            }
        )

    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return step, position and body of every instance."""
        lengths = np.array([len(body) for body in self.plan.bodies])
        bodies = np.fromiter(self.plan.body_of_steps(), dtype=np.int64, count=self.plan.n_steps)
        step = np.repeat(np.arange(len(bodies)), lengths[bodies])
        position = np.arange(len(step)) - self.plan.first_instances()[step]
        return step, position, bodies[step]


def write_with_header(
    path: Path | str, header: Mapping[str, object], arrays: Mapping[str, NDArray[np.generic]]
) -> None:
    """Write arrays, and what they are, to an .npz file; equal contents give equal bytes."""
    text = json.dumps(header).encode()
    write_npz(path, {"header": np.frombuffer(text, dtype=np.uint8), **arrays})


def read_with_header(
    path: Path | str, file_format: str, names: Sequence[str], *, what: str, hint: str
) -> tuple[dict[str, object], list[NDArray[Any]]]:
    """Read what `write_with_header` wrote.

    Args:
        path: The file.
        file_format: The header's `format`.
        names: Of the arrays.
        what: Contents that the file should have, for messages.
        hint: The command that writes such a file, for messages.

    Returns:
        The header, and the arrays in the order of their names.

    Raises:
        TraceError: The file cannot be read, or is of another format.
    """
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            header = json.loads(archive["header"].tobytes())
            arrays = [np.asarray(archive[name]) for name in names]
    except Exception as error:  # of a dozen kinds: numpy, zipfile and tokenize each have their own for damaged files
        raise TraceError(f"{path}: cannot be read as {what} ({error}); {hint}") from None
    if not isinstance(header, dict) or header.get("format") != file_format:
        raise TraceError(f"{path}: not a {file_format} file; {hint}")
    return header, arrays


def write_npz(file: Path | str | IO[bytes], arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Write arrays, in their order, as an .npz file with a fixed date, so that equal arrays give equal bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0)), member.getvalue())
