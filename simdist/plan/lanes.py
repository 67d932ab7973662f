"""Lanes: where the operations of a plan run.

A rank has several lanes. The operations of one lane run in program order. Operations of different lanes run
concurrently. On a GPU a lane is a CUDA stream, on a CPU it is a thread.

An operation names its lane (`simdist.plan.ops.lane_of`). Code that interprets a plan asks for the `kind` of a lane,
never for its name. So a plan may use lanes of its own: make a `Lane` with a new name and give it to operations.

>>> prefetch = Lane("prefetch", "comm", "prefetch")
>>> prefetch.stream
'prefetch'
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

LaneKind: TypeAlias = Literal["host", "compute", "comm", "io", "save"]

KINDS: tuple[LaneKind, ...] = get_args(LaneKind)


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of operations, the same on every rank.

    Args:
        name: Unique in a plan.
        kind: What its operations do. `host`: the host's program; `compute`: kernels of the model; `comm`: collectives
            and the kernels around them; `io`: input; `save`: checkpoints. A plan has one `host` and one `compute`.
        communicator: Only for the kind `comm`: name of the process groups that its collectives use. Lanes that share
            a communicator issue their collectives in the same order on all ranks.
    """

    name: str
    kind: LaneKind
    communicator: str = ""

    @property
    def stream(self) -> str:
        """Name of the stream in tables and pictures: lanes that share a communicator share a stream."""
        return self.communicator or self.name


HOST = Lane("host", "host")
COMPUTE = Lane("compute", "compute")
COMM = Lane("comm", "comm", "comm")
IO = Lane("io", "io")
SAVE = Lane("save", "save")
#: All-reduces that overlap with other communication, such as averages that are applied some steps later.
AVERAGE = Lane("average", "comm", "average")

#: The lanes that every rank has, in the order in which tables list them.
LANES = (HOST, COMPUTE, COMM, IO, SAVE, AVERAGE)


def push_to(server: int) -> Lane:
    """Return the lane of pushes to a parameter server. They run in order, beside pushes to other servers."""
    return Lane(f"push {server}", "comm", COMM.communicator)


def pull_from(server: int) -> Lane:
    """Return the lane of pulls from a parameter server. They run in order, beside pushes and other servers' pulls."""
    return Lane(f"pull {server}", "comm", COMM.communicator)


def load_by(worker: int) -> Lane:
    """Return the lane of a worker that loads whole batches. Its loads run in order, beside those of other workers."""
    return Lane(f"load {worker}", "io")


def all_lanes(used: Iterable[Lane]) -> tuple[Lane, ...]:
    """Return `LANES`, followed by the other lanes that are used, each once."""
    return tuple(dict.fromkeys((*LANES, *used)))
