"""What holds ranks up: settings of the random and recorded delays. `simdist.scenario.sampling` draws them.

Every delay is seconds per step and rank, added on one channel: `host` (the CPU sleeps before it enqueues the backward
pass), `compute` (the GPU is slow) or `io` (loading is slow).
"""

import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator, model_validator

from simdist.plan.ops import Channel
from simdist.scenario.cluster import Selection
from simdist.settings import Fault, FromFile, refuse, shown
from simdist.units import Factor, Fraction, Seconds

__all__ = [
    "Bursts",
    "Disturbance",
    "Exponential",
    "HeavyTail",
    "Jitter",
    "Persistent",
    "Recorded",
    "Transient",
    "read_recorded",
]


class _Disturbance(Selection):
    on: Channel = "host"


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
    """Seconds of every step and rank from a file, array `[n_steps, world_size]`; the same for every seed.

    `.csv`: a line per step, a column per rank, `#` for comments. `.npz`: one array, or several of which the one named
    like the channel counts.
    """

    kind: Literal["recorded"] = "recorded"
    file: Path

    @field_validator("file", mode="before")
    @classmethod
    def _beside_the_scenario(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str | Path) or Path(value).suffix not in (".npz", ".csv"):
            raise ValueError(f"{shown(value)} is no recording: write the name of a .npz or .csv file")
        folder = info.context.folder if isinstance(info.context, FromFile) else Path()
        return (folder / value).absolute()

    @model_validator(mode="after")
    def _readable(self) -> Self:
        read_recorded(self)
        return self

    def shape_faults(self, n_steps: int, world_size: int) -> list[Fault]:
        """Return a fault if the recording does not cover the run."""
        rows, columns = read_recorded(self).shape
        if rows >= n_steps and columns == world_size:
            return []
        found, needed = f"[{rows} steps, {columns} ranks]", f"[{n_steps} steps, {world_size} ranks]"
        return [(("file",), f"{self.file.name} holds {found}, the run needs {needed}: as many ranks, no fewer steps")]


Disturbance: TypeAlias = Transient | Persistent | Jitter | Exponential | HeavyTail | Bursts | Recorded


def read_recorded(recorded: Recorded) -> NDArray[np.float64]:
    """Read the seconds of a recording, shape `[n_steps, world_size]`.

    Raises:
        ValidationError: The file cannot be read, or holds something else than delays.
    """
    try:
        seconds = _read_npz(recorded) if recorded.file.suffix == ".npz" else _read_csv(recorded.file)
        if seconds.ndim != 2 or not np.issubdtype(seconds.dtype, np.number) or np.iscomplexobj(seconds):
            raise ValueError(
                f"holds {seconds.dtype} of shape {list(seconds.shape)}: write seconds, [n_steps, world_size]"
            )
        bad = np.argwhere(~((seconds >= 0) & np.isfinite(seconds)))
        if len(bad):
            step, rank = bad[0]
            raise ValueError(f"{seconds[step, rank]} at step {step}, rank {rank}: delays are finite and 0 or more")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        refuse("Recorded", [(("file",), f"{shown(str(recorded.file))}: {error}")])
    return seconds.astype(np.float64)


def _read_npz(recorded: Recorded) -> NDArray[np.float64]:
    if not zipfile.is_zipfile(recorded.file):
        raise ValueError("no .npz file, or there is none: write one with numpy.savez")
    with np.load(recorded.file, allow_pickle=False) as arrays:
        names = list(arrays.files)
        name = names[0] if len(names) == 1 else recorded.on
        if name not in names:
            raise ValueError(f"holds {', '.join(names) or 'nothing'}: write one array, or one named {recorded.on!r}")
        return np.asarray(arrays[name])


def _read_csv(path: Path) -> NDArray[np.float64]:
    text = path.read_text(encoding="utf-8")
    rows = [line.split(",") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("lines of different lengths, or none: write a line per step with a column per rank")
    return np.array(rows, dtype=np.float64)
