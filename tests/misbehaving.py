"""A schedule that does what no schedule should, for tests of what happens then.

`folder(path)` writes it to where `simdist.schedules` finds it, in this process and in all that it starts.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import simdist.schedules

SCHEDULE = '''\
"""Local SGD that misbehaves."""

import os
import sys
import time
from pathlib import Path
from typing import Literal

from simdist.schedules.local_sgd import LocalSGD


class Misbehaving(LocalSGD):
    kind: Literal["misbehaving"] = "misbehaving"
    does: Literal["nothing", "raises", "leaves", "exits", "loops", "hangs", "waits", "needs"] = "nothing"
    gate: str = ""

    def write(self, job):
        match self.does:
            case "raises":
                raise ZeroDivisionError("a defect")
            case "leaves":
                sys.exit("left")
            case "exits":
                os._exit(7)
            case "loops":
                while True:
                    pass
            case "hangs":
                sum(range(10**18))  # in C, where no signal comes through
            case "waits":
                while not Path(self.gate).exists():
                    time.sleep(0.01)
            case "needs":
                if not Path(self.gate).exists():
                    raise OSError("the gate is shut")
        return super().write(job)
'''
CUSTOMIZE = """\
import simdist.schedules
simdist.schedules.__path__.append({folder!r})
"""


@contextlib.contextmanager
def folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the schedule there, and let this process and those that it starts find it."""
    kinds = path / "kinds"
    kinds.mkdir()
    (kinds / "misbehaving_kind.py").write_text(SCHEDULE, encoding="utf-8")
    (path / "sitecustomize.py").write_text(CUSTOMIZE.format(folder=str(kinds)), encoding="utf-8")
    source = str(Path(simdist.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), source, os.environ.get("PYTHONPATH", "")]))
    simdist.schedules.__path__.append(str(kinds))
    try:
        yield
    finally:
        simdist.schedules.__path__.remove(str(kinds))
        sys.modules.pop("simdist.schedules.misbehaving_kind", None)
        vars(simdist.schedules).pop("misbehaving_kind", None)
