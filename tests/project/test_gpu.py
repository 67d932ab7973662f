"""The command for a machine with a GPU: nothing measured is lost, and a dry run is never taken for a GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from scripts import ROOT, load_script
from timeouts import TIMEOUT_S

gpu = load_script(ROOT / "tools" / "gpu.py")
page = load_script(ROOT / "experiments" / "gpu" / "page.py")
HERE = ROOT / "experiments" / "gpu"

posix = pytest.mark.skipif(os.name != "posix", reason="ends groups of processes")
PARTS = {
    "machine": 'part.emit({"device": "a GPU", "gpus": 1, "torch": "2"})',
    "broken": 'part.emit({"n": 1})\n    raise ValueError("it rained")',
    "stuck": 'import os, time\n    part.emit({"pid": os.getpid()})\n    time.sleep(600)',
    "quick": 'part.emit({"n": 1})\n    print("no row")\n    part.emit({"n": 2})',
    "keeps": 'part.kept.mkdir(exist_ok=True)\n    (part.kept / "a").write_text("b")',
    "skipped": 'part.emit({"skipped": "needs 2 GPUs or more"})',
}
DRIVER = """
import sys
sys.path.insert(0, {tools!r})
from pathlib import Path
import gpu
gpu.HERE = Path({folder!r})
gpu.PARTS = tuple(gpu.Part(name, "", limit_s) for name, limit_s in {parts!r})
sys.exit(gpu.main(["-o", {output!r}]))
"""


@pytest.fixture
def start(tmp_path: Path):
    """Return a function that starts the command with parts of this test: name, limit in seconds."""
    for name in ("part.py", "common.py"):
        (tmp_path / name).write_text((HERE / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name, body in PARTS.items():
        (tmp_path / f"{name}.py").write_text(f"def run(part):\n    {body}\n", encoding="utf-8")

    def begin(*parts: tuple[str, float]) -> subprocess.Popen[str]:
        where = {"tools": str(ROOT / "tools"), "folder": str(tmp_path), "output": str(tmp_path / "results")}
        code = DRIVER.format(parts=list(parts), **where)
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


def results(folder: Path) -> dict[str, dict]:
    (path,) = (folder / "results").glob("*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def archived(folder: Path) -> dict[str, bytes]:
    """Return the files in the archive beside the results."""
    (path,) = (folder / "results").glob("*.tar.xz")
    with tarfile.open(path) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}


@posix
def test_a_part_that_fails_or_is_stuck_is_recorded_and_the_rest_goes_on(start, tmp_path) -> None:
    process = start(("broken", 60.0), ("stuck", 5.0), ("quick", 60.0))
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    found = results(tmp_path)["parts"]
    assert {name: part["status"] for name, part in found.items()} == {
        "broken": "failed",
        "stuck": "out of time",
        "quick": "done",
    }
    assert [len(part["rows"]) for part in found.values()] == [1, 1, 2]
    assert found["broken"]["error"].endswith("ValueError: it rained")
    assert out.splitlines()[1:] == [
        "broken: failed, 1 rows ()",
        "stuck: out of time, 1 rows ()",
        "quick: done, 2 rows ()",
    ]


@posix
def test_a_part_that_cannot_run_here_says_why_and_is_no_failure(start, tmp_path) -> None:
    process = start(("skipped", 60.0), ("keeps", 60.0))
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    part = results(tmp_path)["parts"]["skipped"]
    assert (part["status"], part["error"], part["rows"]) == ("skipped", "needs 2 GPUs or more", [])
    assert "skipped: skipped, 0 rows ()" in out
    assert archived(tmp_path) == {"a": b"b"}
    assert [path.suffix for path in (tmp_path / "results").iterdir() if path.is_dir()] == []


def test_results_name_the_commit_and_whether_files_differ_from_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    assert gpu.commit() == {"commit": None, "dirty": None}
    as_somebody = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "file").write_text("1")
    for words in (("init", "-q"), ("add", "."), (*as_somebody, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, timeout=60)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "earlier.json").write_text("{}")
    found = gpu.commit()
    assert len(found["commit"]) == 12
    assert found["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert gpu.commit() == found | {"dirty": True}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@posix
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
def test_whatever_ends_the_command_keeps_what_was_measured_and_ends_the_part(start, tmp_path, sent) -> None:
    process = start(("keeps", 60.0), ("quick", 60.0), ("stuck", 600.0))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (found := kept(tmp_path)):
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(sent)
    process.communicate(timeout=TIMEOUT_S)
    (row,) = found
    while is_alive(row["pid"]):
        assert time.monotonic() < deadline_s, "the part goes on"
        time.sleep(0.1)
    parts = results(tmp_path)["parts"]
    assert [part["status"] for part in parts.values()] == ["done", "done", "interrupted"]
    assert [len(part["rows"]) for part in parts.values()] == [0, 2, 1]
    assert archived(tmp_path) == {"a": b"b"}


def kept(folder: Path) -> list[dict]:
    """Return the rows of the part that is stuck, as far as they are in the file."""
    if not list((folder / "results").glob("*.json")):
        return []
    return results(folder)["parts"].get("stuck", {"rows": []})["rows"]


def test_every_missing_package_is_named_and_nothing_runs(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu.main(["-o", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    for part in gpu.PARTS:
        for package in (*gpu.PACKAGES.values(), *part.needs.values()):
            assert f"missing: {package}, which " in error
    assert "missing: triton, which peers, selection need\n" in error
    assert not (tmp_path / "results").exists()


def test_parts_that_do_without_what_is_missing_run_if_asked(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else object())
    found = gpu.refuse_missing(gpu.PARTS, True)
    assert [part.name for part in found] == [part.name for part in gpu.PARTS if part.name not in ("peers", "selection")]
    assert gpu.refuse_missing(gpu.PARTS, False) is None


def test_results_of_a_dry_run_do_not_go_where_those_of_gpus_are(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--dry-run", "-o", str(gpu.RESULTS)])
    assert ended.value.code == 2
    assert "is for results of GPUs" in capsys.readouterr().err


def test_limits_of_the_parts_fit_into_eight_minutes() -> None:
    for n_gpus in (1, 2, 8):
        names = {part.name for part in gpu.PARTS if part.runs_on(n_gpus)}
        assert {"alone", "peers", "suite"} < names
        assert names.isdisjoint({"nccl"} if n_gpus == 1 else {"shared_gpu", "plans"})
        assert sum(part.limit_s for part in gpu.PARTS if part.runs_on(n_gpus)) <= gpu.LIMIT_S < 480
    assert {part.name for part in gpu.PARTS} == set(page.PARTS)


def test_every_test_that_needs_a_gpu_is_where_they_are_looked_for() -> None:
    places = ("tests/real/test_gpu.py", "tests/real/kernels/")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)
    ]
    assert [path for path in found if not path.startswith(places)] == []


@posix
def test_dry_run_does_every_part_and_is_not_shown_on_the_page(tmp_path: Path, monkeypatch) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu.py"), "--dry-run", "-o", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, timeout=1500, check=False)
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {name: part["error"] for name, part in found["parts"].items()} == dict.fromkeys(page.PARTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["dry_run"] is True
    assert re.search(r"^limits: \d+ of \d+ are held$", done.stdout, re.MULTILINE)
    for name in ("alone", "peers", "sharding", "single", "steps"):
        assert re.search(rf"^  {name}: (held|MISSED): ", done.stdout, re.MULTILINE), name
    assert found["device"] == "no GPU: a dry run on CPUs at toy sizes"
    assert page.recorded(tmp_path) == []
    for name, table in page.tables(tmp_path).items():
        assert table == page.NOTHING or name in ("published", "summary"), name
    assert set(page.trust(tmp_path).values()) == {page.NEVER}
    # Shown as if of a GPU, every table can be made of such rows.
    path.write_text(json.dumps(found | {"dry_run": False, "driver": "1", "nccl": "2"}), encoding="utf-8")
    tables = page.tables(tmp_path)
    assert page.NOTHING not in tables.values()
    assert "| hitopk-0.01-mstopk |" in tables["plans"]
    assert "Named and not planted: " in tables["profiled"]  # how many depends on what else the machine does
    assert "differ by at most 0 from those" in tables["single"]
    assert "BROKEN" not in tables["selection"]
    assert "| by two sizes |" in tables["steps"]  # how many can be predicted depends on what else the machine does
    assert "equal to the last bit: 6 of 6 schedules, 4 ranks." in tables["nccl"]
    assert "A killed rank was named by 3 of 3, in " in tables["nccl"]
    assert "equal to the last bit: 6 of 6 schedules, 2 ranks." in tables["shared_gpu"]
    assert "| 512 | device, late by 20 ms | 16 | hsgd-2-8,4-world |" in tables["peers"]
    trusted = page.trust(tmp_path)
    assert re.search(r"4 makespans, error median \d+\.\d%, worst [+-]", trusted["one rank alone"])
    assert "in a job of 8: 18 makespans, error median" in trusted["one real rank among simulated ones"]
    assert "12 makespans of 4 GPUs" in trusted["a rank on each of several GPUs, over NCCL"]
    # Everything that was compared is kept, is small, and can be predicted again.
    kept_nbytes = path.with_suffix(gpu.ARCHIVE).stat().st_size
    assert kept_nbytes + path.stat().st_size < 2e6
    monkeypatch.syspath_prepend(str(HERE))
    compared = [row for part in found["parts"].values() for row in part["rows"] if "kept" in row]
    assert len(compared) == 4 + 42 + 12
    n_rows, lacks = load_script(HERE / "kept.py").predict_again(path)
    assert n_rows >= len(compared)
    assert lacks == [f"{path.name}: 8 runs were not kept (cluster, workload and trace)"]
    again = json.loads(path.read_text(encoding="utf-8"))["parts"]
    assert [row for part in again.values() for row in part["rows"] if "kept" in row] == compared


def test_what_was_named_is_held_against_what_was_planted(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    profiled = load_script(HERE / "profiled.py")
    late_s = np.zeros((4, 2))
    late_s[1, 0] = late_s[3, 1] = 0.15
    stragglers = [
        {"ranks": [0], "steps": [1], "seconds": 0.149},
        {"ranks": [1], "steps": [2], "seconds": 0.05},
    ]
    found = {"stragglers": stragglers, "step": {"measured_s": 0.1, "predicted_s": 0.11}}
    stamps_s = np.array([[[0.0, 0.1], [0.1, 0.2]], [[0.0, 0.1], [0.1, 0.22]]])
    rows: list[dict] = []
    profiled._emit(profiled.common.Part(rows.append, True, HERE), late_s, found, stamps_s)
    assert [(row["rank"], row["step"], row["named_ms"]) for row in rows[:-1]] == [(0, 1, 149.0), (1, 3, None)]
    assert rows[-1]["named_and_not_planted"] == [[1, 2]]
    assert rows[-1]["step_ms"] == pytest.approx(110.0)
    assert "Named and not planted: 1." in "\n".join(page.profiled(rows))


def test_page_has_the_tables_of_the_recorded_results() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    for name, table in page.tables().items():
        assert f"<!-- table {name} -->\n{table}\n<!-- end -->" in text, "run experiments/gpu/page.py --write"
