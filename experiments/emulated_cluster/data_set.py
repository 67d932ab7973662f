"""Make a labelled data set of realistic files: `python experiments/emulated_cluster/data_set.py FOLDER --samples N`.

Every sample depends on the seed and its own number only, so a larger set begins with the smaller one (with the same
releases of Pillow and its libraries, which encode). Sizes are lognormal around a median; `index.csv` is written last,
so a folder that has one is complete.
"""

import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, assert_never

import click
import numpy as np
from pictures import MOST_SAMPLES, SMALLEST_SIDE, NoiseField, jpeg_file, make_field, paint, png_file, raw_file

from real.data.sample_index import write_entries
from real.processes.exit_codes import run_command
from simdist.errors import ScenarioError, naming_file
from simdist.plan.index import INDEX, Entry
from simdist.settings.units import format_nbytes, parse_nbytes

Format: TypeAlias = Literal["jpeg", "png", "raw"]

SMALLEST_NBYTES = 4000  # what no picture is made below
SUFFIXES: dict[Format, str] = {"jpeg": ".jpg", "png": ".png", "raw": ".raw"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """Says which samples to make.

    Args:
        n_samples: How many.
        nbytes: Median size of a file, at least 4 kB; for `raw` all files are of the largest square picture that is
            not larger.
        sigma: Standard deviation of the logarithm of the size; 0 makes all of one size. Not for `raw`.
        format: `jpeg` and `png` are decoded by Pillow; `raw` is the decoded sample, uint8 `[3, side, side]`.
        n_classes: Labels are 0 to n_classes - 1, in turn.
        seed: Not negative.

    Raises:
        ScenarioError: A value is out of its range.
    """

    n_samples: int
    nbytes: int = 110_000  # ImageNet's average: 138 GB in 1,281,167 files
    sigma: float = 0.5
    format: Format = "jpeg"
    n_classes: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("samples", self.n_samples, 1, MOST_SAMPLES),
            ("size", self.nbytes, SMALLEST_NBYTES, 100_000_000),
            ("sigma", self.sigma, 0, 2),
            ("classes", self.n_classes, 1, MOST_SAMPLES),
            ("seed", self.seed, 0, 2**63 - 1),
        ):
            if not least <= value <= most:
                raise ScenarioError(f"{name} is {value}: write a number from {least} to {most}")
        if self.format == "raw" and self.sigma:
            raise ScenarioError(f"sigma is {self.sigma:g}: raw samples are all of one size; write sigma 0")

    @property
    def side(self) -> int:
        """Height and width of a raw sample."""
        return max(SMALLEST_SIDE, math.isqrt(self.nbytes // 3))


def generate(folder: Path, samples: SampleSet, *, force: bool = False) -> int:
    """Write the files of a data set, and then its index.

    Args:
        folder: Made if it is not there; files `CLASS/SAMPLE.jpg`.
        samples: To make.
        force: Replace a data set that is there; files that the new one has not, stay.

    Returns:
        Bytes of all files.

    Raises:
        ScenarioError: There is an index already.
        RunError: A file cannot be written.
    """
    index = folder / INDEX
    if index.exists() and not force:
        raise ScenarioError(f"{index}: is there already; choose another folder, or replace the set with --force")
    total = 0

    def written() -> Iterator[Entry]:
        nonlocal total
        for entry, content in contents(samples):
            path = folder / entry.name
            with naming_file(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            total += entry.nbytes
            yield entry

    with naming_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
        index.unlink(missing_ok=True)  # an interruption must not leave it beside other files
    write_entries(written(), index)
    return total


def contents(samples: SampleSet) -> Iterator[tuple[Entry, bytes]]:
    """Yield the samples' lines in the index, and their files' contents, in order."""
    field = make_field(samples.seed)
    for sample in range(samples.n_samples):
        content = _content(samples, field, sample)
        label = sample % samples.n_classes
        name = f"{label:04d}/{sample:08d}{SUFFIXES[samples.format]}"
        yield Entry(name, label, len(content), zlib.crc32(content)), content


def _content(samples: SampleSet, field: NoiseField, sample: int) -> bytes:
    rng = np.random.default_rng([samples.seed, sample])
    nbytes = max(SMALLEST_NBYTES, round(samples.nbytes * math.exp(samples.sigma * rng.standard_normal())))
    match samples.format:
        case "jpeg":
            return jpeg_file(field, rng, sample=sample, nbytes=nbytes)
        case "png":
            return png_file(field, rng, sample=sample, nbytes=nbytes)
        case "raw":
            return raw_file(paint(field, rng, sample=sample, size=(samples.side, samples.side)))
    assert_never(samples.format)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command(_command, args, program="data_set.py")


@click.command(help=f"Write a labelled data set into FOLDER: files of realistic sizes, and {INDEX}.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--samples", type=int, required=True, help="How many.")
@click.option("--size", default="110 kB", show_default=True, help="Median size of a file.")
@click.option("--sigma", type=float, default=None, help="Spread of log(size); 0: all alike.  [default: 0.5; raw: 0]")
@click.option("--format", "format_", type=click.Choice(list(SUFFIXES)), default="jpeg", show_default=True)
@click.option("--classes", type=int, default=1000, show_default=True, help="Labels are 0 to CLASSES - 1, in turn.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--force", is_flag=True, help="Replace a data set that is there.")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def _command(
    folder: Path,
    samples: int,
    size: str,
    sigma: float | None,
    format_: Format,
    classes: int,
    seed: int,
    force: bool,
    debug: bool,
) -> int:
    try:
        nbytes = parse_nbytes(size)
    except ValueError as error:
        raise ScenarioError(f"--size {error}") from error
    if sigma is None:
        sigma = 0.0 if format_ == "raw" else 0.5
    wanted = SampleSet(n_samples=samples, nbytes=nbytes, sigma=sigma, format=format_, n_classes=classes, seed=seed)
    total = generate(folder, wanted, force=force)
    shape = f" of uint8 [3, {wanted.side}, {wanted.side}]" if format_ == "raw" else ""
    click.echo(f"{folder}: {samples} {format_} files{shape}, {format_nbytes(total)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
