"""Make the index of a folder of images: `python -m real.data.indexing FOLDER`."""

import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from real.data.sample_index import write_entries
from real.processes.exit_codes import run_command
from simdist.errors import RunError, ScenarioError
from simdist.files import open_regular
from simdist.plan.index import INDEX, Entry, refuse_name

_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".raw")


def index_folder(folder: Path) -> Iterator[Entry]:
    """Yield the lines of a folder of images, one sub-folder per class, numbered like torchvision's ImageFolder.

    Labels number the sub-folders in the order of their names. Samples are ordered by class, then folder, then name.

    Raises:
        ScenarioError: There is no class, a class without an image, an empty file, or a name that cannot be listed.
        RunError: A file cannot be read.
    """
    if not folder.is_dir():
        raise ScenarioError(f"{folder}: is no folder")
    classes = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise ScenarioError(f"{folder}: has no sub-folders; there must be one per class, with its images")
    n_samples = 0
    for label, name in enumerate(classes):
        before = n_samples
        for path in _images(folder / name):
            yield _entry(folder, path, label)
            n_samples += 1
        if n_samples == before:
            raise ScenarioError(f"{folder / name}: has no image ({' '.join(_SUFFIXES)}); every sub-folder is a class")


def main(args: Sequence[str] | None = None) -> int:
    """Run `python -m real.data.indexing` and return its exit code."""
    return run_command(_command, args, program="real.data.indexing")


@click.command(help=f"Write {INDEX} into FOLDER, which has one sub-folder per class with its images.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help=f"Replace {INDEX}.")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def _command(folder: Path, force: bool, debug: bool) -> int:
    path = folder / INDEX
    if path.exists() and not force:
        raise ScenarioError(f"{path}: is there already; --force replaces it")
    click.echo(f"{path}: {write_entries(index_folder(folder), path)} samples")
    return 0


def _images(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(files) if name.lower().endswith(_SUFFIXES))


def _entry(folder: Path, path: Path, label: int) -> Entry:
    name = path.relative_to(folder).as_posix()
    refuse_name(name, str(folder))
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from error
    if not content:
        raise ScenarioError(f"{path}: is empty; take it away, or put the image there")
    return Entry(name, label, len(content), zlib.crc32(content))


if __name__ == "__main__":
    sys.exit(main())
