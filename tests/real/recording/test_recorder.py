"""Files that ranks map into memory are there even if others tidy up the folder in the same moment."""

from pathlib import Path

import numpy as np
import pytest

from real.recording.recorder import memmap
from simdist.errors import RunError


def test_what_is_written_to_the_map_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "parts" / "times.npy"
    values = memmap(path, np.zeros((2, 3)))
    values[1, 2] = 7.5
    assert np.load(path).tolist() == [[0, 0, 0], [0, 0, 7.5]]


def test_folder_that_another_rank_removes_in_between_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "parts" / "times.npy"
    write, removals = Path.write_bytes, iter([True, True, False])

    def write_late(self: Path, content: bytes) -> int:
        if next(removals):
            self.parent.rmdir()
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", write_late)
    assert memmap(path, np.ones(4)).tolist() == [1, 1, 1, 1]


def test_folder_that_cannot_be_made_is_one_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("in the way")
    with pytest.raises(RunError, match=r"parts/times.npy: cannot be written: (File exists|Not a directory)"):
        memmap(tmp_path / "parts" / "times.npy", np.ones(4))
