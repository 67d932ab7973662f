"""What the command line of `real.calibrate` asks for, and what it must not."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from real.calibration.clusters import Form
from real.calibration.machine import Precision
from real.calibration.measure import Pace
from real.calibration.tables import OPS, OpName
from real.processes.launch import Place
from simdist.errors import ScenarioError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Data:
    """Asks for the levels that a data set is read from.

    Args:
        url: Of the data set.
        cache: Folder on the disk to measure; None: where temporary files are.
        n_readers: Threads of every rank.
        sample_nbytes: Bytes of a decoded sample.
    """

    url: str
    cache: Path | None
    n_readers: int
    sample_nbytes: int


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    cluster: Path | None
    raw: Path | None
    workload: Path | None
    ops: tuple[OpName, ...]
    sizes: tuple[int, ...]
    pace: Pace
    form: Form
    model: str | None
    batch_size: int | None
    precision: Precision
    backend: Literal["auto", "gloo", "nccl"]
    device: Literal["auto", "cpu", "cuda"]
    timeout_s: float
    force: bool
    data: Data | None = None

    @property
    def files(self) -> list[Path]:
        """What will be written."""
        return [path for path in (self.cluster, self.raw, self.workload) if path]

    @property
    def links(self) -> bool:
        """Whether to measure links: unless only a workload is wanted."""
        return self.cluster is not None or self.raw is not None or self.workload is None


def parsed(option: str, parser: Callable[[object], T], text: str) -> T:
    """Parse the value of an option.

    Raises:
        ScenarioError: Names the option.
    """
    try:
        return parser(text)
    except ValueError as error:
        raise ScenarioError(f"{option}: {error}") from None


def ops_of(text: str) -> tuple[OpName, ...]:
    """Return the collectives of a list such as "all_reduce,broadcast".

    Raises:
        ScenarioError: One does not exist.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in OPS]:
        raise ScenarioError(f"--ops: {unknown[0]!r} is no collective; there are {', '.join(OPS)}")
    return tuple(op for op in OPS if op in names)


def sizes_of(least: int, most: int) -> tuple[int, ...]:
    """Return the sizes from `least` up to `most`, each 4 times the one before.

    >>> sizes_of(1000, 20_000)
    (1000, 4000, 16000)

    Raises:
        ScenarioError: There are none.
    """
    if not 0 < least <= most:
        raise ScenarioError(f"--min-size is {least} B and --max-size {most} B: sizes go from above 0 B up")
    sizes = [least]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def check_options(options: Options, here: Place) -> None:
    """Refuse what cannot be measured, before the others are met; equal on every rank.

    Raises:
        ScenarioError: Options do not go together.
    """
    network = here.world_size > here.local_world_size
    if (options.model is None) != (options.workload is None):
        raise ScenarioError("--model and --workload go together: the model to measure, and the file to write")
    if options.links and here.world_size == 1:
        raise ScenarioError("one rank has no links to measure; start more: torchrun --nproc-per-node N")
    if options.cluster and "all_reduce" not in options.ops:
        raise ScenarioError("--ops leaves out all_reduce, from which the links of -o follow")
    if options.form.rate_Bps is not None and options.form.links == "table":
        raise ScenarioError("--rate has no meaning for a table of measured points; give --links line with it")
    if options.data and options.data.sample_nbytes < 1:
        raise ScenarioError('--sample-size is 0 B: write the bytes of a decoded sample, e.g. "150528 B"')
    if options.data and not options.cluster:
        raise ScenarioError("--data measures what a cluster file states: give -o CLUSTER with it")
    if network and options.form.links == "line" and not options.form.rate_Bps:
        raise ScenarioError('--links line states the rate of the network: give it, e.g. --rate "25 Gbit/s"')
