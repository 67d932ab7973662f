"""Files that are there as a whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simdist.errors import naming_file


@contextmanager
def replacing(path: Path, *, on_disk: bool = False) -> Iterator[Path]:
    """Give the file to write, which then replaces `path`; an interruption leaves the old one or none.

    It has a name of its own, because several processes may write one directory at the same time.

    Args:
        path: The file to replace.
        on_disk: Go on only when its contents and its name are on the disk, so that they outlive the machine, too.

    Raises:
        RunError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with naming_file(path):
        try:
            yield part
            if on_disk:
                _sync(part, os.O_RDWR)
            os.replace(part, path)
            if on_disk and os.name == "posix":  # other systems open no folders
                _sync(path.parent, os.O_RDONLY)
        finally:
            part.unlink(missing_ok=True)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
