"""Sweeps that tests run, and the files and processes of a sweep."""

import subprocess
import sys
from pathlib import Path

import pytest
from commandline import SMALL

from simdist import sweeps
from simdist.files import read_jsonl
from simdist.jobs.store import DESIGN, ROWS
from simdist.sweeps import InProcess, LocalPool, load

BAD = "{kind: misbehaving, period: 4, does: %s, gate: %s}"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def sweep_file(
    folder: Path, vary: str, *, schedules: str = "[{kind: sync}, {kind: local_sgd, period: 4}]", **keys
) -> Path:
    """Write a sweep over the small scenario, with these schedules."""
    begin = SMALL[: SMALL.index("schedules:")]
    (folder / "base.yaml").write_text(begin + f"schedules: {schedules}\n", encoding="utf-8")
    lines = [
        "scenario: base.yaml",
        f"vary: {vary}",
        *(f"{key}: {value}" for key, value in {"seeds": 2, **keys}.items()),
    ]
    path = folder / "s.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def compute(path: Path, folder: Path, *, n_workers: int = 0, **options):
    if n_workers == 0:
        return sweeps.sweep(load(path), folder, workers=InProcess(), **options)
    with LocalPool(n_workers) as pool:
        return sweeps.sweep(load(path), folder, workers=pool, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (DESIGN, ROWS)}


def rows(folder: Path) -> list[dict]:
    """Return the records that are complete; of each key one."""
    found = list(read_jsonl(folder / ROWS))
    assert len({each["key"] for each in found}) == len(found)
    return found


def failures(folder: Path) -> list[tuple[str, str]]:
    return [(each["failed"], each["error"]) for each in rows(folder) if "failed" in each]


def start(*args, **options) -> subprocess.Popen:
    """Start `simdist sweep` in a group of processes of its own, as a terminal does."""
    command = [sys.executable, "-m", "simdist", "sweep", *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def gated(folder: Path) -> tuple[Path, Path]:
    """Write a sweep of 36 different rows, 12 of which wait for a gate; return it and the gate."""
    gate = folder / "gate"
    vary = "{'schedules[1].does': [nothing, waits], seed: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}"
    return sweep_file(folder, vary, schedules=f"[{{kind: sync}}, {BAD % ('nothing', gate)}]"), gate


def endless(folder: Path) -> Path:
    """Write a sweep of two rows that never end. No row beside them: a machine under load may be late with it, too."""
    keys = {"baseline": "misbehaving", "time_limit": "0.5 s"}
    return sweep_file(folder, "{seed: [1, 2]}", schedules=f"[{BAD % ('loops', 'x')}]", **keys)
