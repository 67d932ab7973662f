"""Disturbances: settings of the random and recorded delays that hold ranks up. `simdist.scenario.sampling` draws them.

Every delay is seconds per step and rank, added on one channel: `host` (the CPU sleeps before it enqueues the backward
pass), `compute` (the GPU is slow) or `io` (loading is slow).
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, assert_never, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator, model_validator

from simdist.arrays import ArrayError, Declared, open_arrays
from simdist.files import open_regular, read_content
from simdist.plan.ops import Channel
from simdist.scenario.cluster import Selection
from simdist.settings.base import Fault, FromFile, Settings, refuse, shown
from simdist.settings.units import Factor, Fraction, Seconds, Whole

_NAME = "write the name of a .npz or .csv file"
_CSV = (
    "write lines of numbers in seconds, one per step, one column per rank, separated by commas; begin a header with #"
)
_NPZ = "write seconds, [n_steps, world_size], with numpy.savez(file, seconds)"
_DELAYS = "delays are seconds, finite and 0 or more"


class _Disturbance(Selection):
    on: Channel = "host"

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return True


class Transient(_Disturbance):
    """In each step, each rank is late by `delay_s` with a probability, independently."""

    kind: Literal["transient"] = "transient"
    probability: Fraction
    delay_s: Seconds


class Persistent(_Disturbance):
    """Ranks are late in every step: by `delay_s`, or by (factor - 1) times their forward and backward seconds."""

    kind: Literal["persistent"] = "persistent"
    factor: Annotated[Factor, Field(ge=1)] | None = None
    delay_s: Seconds | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.factor is None) == (self.delay_s is None):
            refuse("Persistent", [(("factor",), "write either factor, e.g. 1.5, or delay, e.g. 20 ms")])
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference: they do not."""
        return False


class Jitter(_Disturbance):
    """Lognormal: median * exp(sigma * z) with standard normal z."""

    kind: Literal["jitter"] = "jitter"
    median_s: Seconds
    sigma: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False, examples=[0.5])]


class Exponential(_Disturbance):
    """Exponential with the given mean: -mean * log(u)."""

    kind: Literal["exponential"] = "exponential"
    mean_s: Seconds


class HeavyTail(_Disturbance):
    """Pareto (type I), with a probability: scale * u^(-1/shape), so `scale_s` or more; mean infinite if shape <= 1."""

    kind: Literal["heavy_tail"] = "heavy_tail"
    scale_s: Seconds
    shape: Annotated[float, Field(ge=0.1, le=1e6, allow_inf_nan=False, examples=[1.5])]
    probability: Fraction = 1.0


class Bursts(_Disturbance):
    """Each rank is on or off, a Markov chain that starts stationary; while on, it is late by `delay_s` in every step.

    `enter` and `leave` are the probabilities per step to turn on and off: on for 1 / leave steps in the mean, and in a
    share enter / (enter + leave) of all steps.
    """

    kind: Literal["bursts"] = "bursts"
    enter: Fraction
    leave: Fraction
    delay_s: Seconds

    @model_validator(mode="after")
    def _moves(self) -> Self:
        if self.enter == self.leave == 0:
            refuse("Bursts", [(("enter",), "with enter and leave both 0 no state is stationary: write e.g. enter: 1%")])
        return self


class Recorded(_Disturbance):
    """Seconds of every step and rank from a file, array `[n_steps, world_size]`.

    `.csv`: a line per step, a column per rank, `#` for comments. `.npz`: one array, or several of which the one named
    like the channel counts.

    Without `resample_steps` the recording is played as it is, the same for every seed. With it, every seed puts its run
    together from blocks of so many consecutive recorded steps, begun anywhere in the recording and drawn with
    replacement; after the last recorded step the first one follows. All ranks of a step stay together, and all
    recordings of a scenario draw the same blocks. So seeds tell how much a result depends on which steps were recorded,
    and a run may be longer than the recording.

    Source:
        Politis & Romano, A Circular Block-Resampling Procedure for Stationary Data, 1992.
    """

    kind: Literal["recorded"] = "recorded"
    file: Path
    resample_steps: Annotated[Whole, Field(ge=1)] | None = None

    @field_validator("file", mode="before")
    @classmethod
    def _beside_the_scenario(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str | Path) or Path(value).suffix not in (".npz", ".csv"):
            raise ValueError(f"{shown(value)} is no recording: {_NAME}")
        folder = info.context.folder if isinstance(info.context, FromFile) else Path()
        return (folder / value).absolute()

    @model_validator(mode="after")
    def _readable(self) -> Self:
        read_recorded(self)
        return self

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.resample_steps is not None

    def shape_faults(self, n_steps: int, world_size: int) -> list[Fault]:
        """Return a fault if the recording does not cover the run."""
        rows, columns = read_recorded(self).shape
        if self.resample_steps is not None:
            return self._resampling_faults(rows, columns, world_size)
        if rows >= n_steps and columns == world_size:
            return []
        found, needed = f"[{rows} steps, {columns} ranks]", f"[{n_steps} steps, {world_size} ranks]"
        return [(("file",), f"{self.file.name} holds {found}, the run needs {needed}: as many ranks, no fewer steps")]

    def _resampling_faults(self, rows: int, columns: int, world_size: int) -> list[Fault]:
        if columns != world_size:
            return [
                (("file",), f"{self.file.name} holds {columns} ranks, the cluster has {world_size}: record as many")
            ]
        if self.resample_steps and self.resample_steps > rows:
            fault = f"blocks of {self.resample_steps} steps; {self.file.name} holds {rows}: write {rows} or less"
            return [(("resample_steps",), fault)]
        return []


Continuous: TypeAlias = Jitter | Exponential | HeavyTail
Disturbance: TypeAlias = Transient | Persistent | Continuous | Bursts | Recorded
#: The classes by the `kind` that scenarios call them.
KINDS: dict[str, type[Settings]] = {each.model_fields["kind"].default: each for each in get_args(Disturbance)}


def never_delays(disturbance: Disturbance) -> bool:
    """Tell whether a disturbance delays nothing, as its settings are."""
    match disturbance:
        case Transient():
            return disturbance.probability == 0 or disturbance.delay_s == 0
        case Persistent():
            return not disturbance.delay_s and disturbance.factor in (None, 1)
        case Jitter():
            return disturbance.median_s == 0
        case Exponential():
            return disturbance.mean_s == 0
        case HeavyTail():
            return disturbance.probability == 0 or disturbance.scale_s == 0
        case Bursts():
            return disturbance.enter == 0 or disturbance.delay_s == 0
        case Recorded():
            return False
        case _:
            assert_never(disturbance)


def read_recorded(recorded: Recorded) -> NDArray[np.float64]:
    """Read the seconds of a recording, shape `[n_steps, world_size]`.

    Raises:
        ValidationError: The file cannot be read, or holds something else than delays.
    """
    path = recorded.file
    try:
        _check_file(path)
        seconds = _read_npz(path, recorded.on) if path.suffix == ".npz" else _read_csv(read_content(path), path)
    except OSError as error:
        refuse("Recorded", [(("file",), f"{path}: cannot be read: {error.strerror or error}")])
    except ValueError as error:
        refuse("Recorded", [(("file",), str(error))])
    return seconds


def _check_file(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; the name is relative to the scenario")
    if not path.is_file():  # to open a pipe would wait for a writer
        raise ValueError(f"{path}: is {'a directory' if path.is_dir() else 'no regular file'}: {_NAME}")
    with open_regular(path) as file:
        is_empty = not file.read(1)
    if is_empty:
        raise ValueError(f"{path}: is empty: {_NPZ if path.suffix == '.npz' else _CSV}")


def _read_npz(path: Path, channel: Channel) -> NDArray[np.float64]:
    """Read an .npz file. ValueError tells what is wrong."""
    name, seconds = None, np.empty((0, 0))
    try:
        with open_arrays(path) as file:
            names = file.names
            name = names[0] if len(names) == 1 else channel
            is_right = name in names and _is_right(found := file.declared(name))
            if is_right:
                seconds = file.read(name)
    except OSError:
        raise
    except ArrayError as error:
        raise ValueError(f"{path}: {error}: {_NPZ}") from None
    except Exception:  # of a dozen kinds: numpy, zipfile and tokenize each have their own for damaged files
        what = "is no .npz file" if name is None else f"{name} is damaged, or holds Python objects instead of numbers"
        raise ValueError(f"{path}: {what}: {_NPZ}") from None
    if name not in names:
        raise ValueError(f"{path}: holds {', '.join(names) or 'nothing'}: write one array, or one named {channel!r}")
    if not is_right:
        raise ValueError(f"{path}: {name} holds {found.dtype} of shape {list(found.shape)}: {_NPZ}")
    wrong = np.argwhere(~((seconds >= 0) & np.isfinite(seconds)))
    if len(wrong):
        step, rank = wrong[0]
        raise ValueError(f"{path}: {seconds[step, rank]} at step {step}, rank {rank}: {_DELAYS}")
    return seconds.astype(np.float64)


def _is_right(found: Declared) -> bool:
    is_number = np.issubdtype(found.dtype, np.number) and not np.issubdtype(found.dtype, np.complexfloating)
    return len(found.shape) == 2 and is_number


def _read_csv(content: bytes, path: Path) -> NDArray[np.float64]:
    """Read a .csv file. ValueError tells what is wrong, and in which line."""
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: byte {content[error.start]:#04x} is not UTF-8 text: {_CSV}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    if not numbered:
        raise ValueError(f"{path}: is empty: {_CSV}")
    rows = [[_seconds(cell, f"{path}:{number}") for cell in line.split(",")] for number, line in numbered]
    for (number, _), row in zip(numbered, rows, strict=True):
        if len(row) != len(rows[0]):
            found = f"{len(row)} column{'s' * (len(row) > 1)}, but {len(rows[0])} in line {numbered[0][0]}"
            raise ValueError(f"{path}:{number}: {found}: write as many, one per rank")
    return np.array(rows, dtype=np.float64)


def _seconds(cell: str, where: str) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        raise ValueError(f"{where}: {shown(cell.strip())} is not a number: {_CSV}") from None
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{where}: {cell.strip()}: {_DELAYS}")
    return seconds
