"""Some of the injections, and that the page says what was recorded of all."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import ROOT, load_script

pytest.importorskip("torch")

import processes
from timeouts import SOON_S, TIMEOUT_S

from simdist.report import insert_tables

RUN = load_script(ROOT / "experiments" / "fault_injections" / "run.py")
vars(RUN)["fork_server"] = processes.fork_server


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory):
    """Give what jobs leave that nothing disturbs."""
    return RUN.prepare(tmp_path_factory.mktemp("undisturbed"))


def chosen(kind: str, text: str):
    (found,) = [each for each in RUN.INJECTIONS if (each.kind, each.text) == (kind, text)]
    return found


@pytest.mark.parametrize(
    ("kind", "text", "patience"),
    [
        ("script", "rank 3 sleeps, between", 1),
        ("script", "rank 0 torn, write trace., 2 times", 5),
        ("own group", "rank 0 SIGKILL, end", 5),
        ("spawn", "rank 3 SIGKILL, between", 5),
    ],
)
def test_a_job_ends_and_goes_on(
    known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, text: str, patience: int
) -> None:
    monkeypatch.setattr(RUN, "TIMEOUT_S", patience * SOON_S)
    monkeypatch.setattr(RUN, "LIMIT_S", TIMEOUT_S)
    result = RUN.inject(chosen(kind, text), known, tmp_path)
    assert result.passed, result


def test_a_job_that_does_not_do_as_expected_is_told(known, tmp_path: Path) -> None:
    """It begins from the checkpoint before step 6, and no rank says so."""
    expected = replace(chosen("script", "cut newest checkpoint"), begins=9, named="no such words")
    result = RUN.inject(expected, known, tmp_path)
    assert not result.passed
    assert "rank 0 ended with 0" in result.problem
    assert RUN.try_again(expected, RUN.Job("script", str(tmp_path), 20.0), known)[1] == (
        "it begins before step 8, 9 were done"
    )


def test_an_orphan_is_found_and_ended() -> None:
    """It says that it runs first: while a program is being started, its environment reads as empty."""
    sleeper = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(600)"]
    with subprocess.Popen(sleeper, env=os.environ | {RUN.MARK: "here"}, stdout=subprocess.PIPE) as orphan:
        assert orphan.stdout is not None
        assert orphan.stdout.readline() == b"runs\n"
        assert RUN.find_orphans([], "here", within_s=0.5) == 1
        assert orphan.wait(TIMEOUT_S) == -9


def test_page_shows_what_was_recorded() -> None:
    """All is as it should be there, by the limit that it states."""
    results = RUN.recorded()
    assert [(each.kind, each.text) for each in results] == [(each.kind, each.text) for each in RUN.INJECTIONS]
    assert [each for each in results if each.left or each.orphans or each.lost or each.problem] == []
    page = RUN.PAGE.read_text(encoding="utf-8")
    assert insert_tables(page, RUN.tables(results)) == page
