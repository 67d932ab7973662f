"""A file that a rank writes down what it does in, mapped into memory: the kernel keeps it if the process is gone."""

import io
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simdist.errors import RunError

ScalarT = TypeVar("ScalarT", bound=np.generic)

_ATTEMPTS = 10


def mapped(path: Path, values: NDArray[ScalarT]) -> NDArray[ScalarT]:
    """Write a .npy file and map it; its blocks are there then, because a disk without room would kill who maps it.

    A rank that is done removes the folder if it is empty, perhaps just before this one writes there: it is made anew.

    Raises:
        RunError: The file cannot be written.
    """
    content = io.BytesIO()
    np.save(content, values)
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getvalue())
            return np.lib.format.open_memmap(path, mode="r+")
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
    raise AssertionError
