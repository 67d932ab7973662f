"""The script that tries the wheel: which releases it takes, what it shows, how it ends."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from scripts import ROOT

sys.path.append(str(ROOT / "tools"))  # where a script finds its neighbours
wheels = import_module("wheels")
NoAnswerError = wheels.NoAnswerError  # of the `installs` that it has imported

LISTED = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.10.0, 2.9.1, 2.4.1, 2.4.0, 2.3.1\n  INSTALLED: 2.3.1\n"


def test_oldest_claimed_torch_is_that_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"torch>={'.'.join(map(str, wheels.claimed_torch()))}" in extras["real"]


@pytest.mark.parametrize(("wanted", "found"), [("oldest", "2.4.0"), ("newest", "2.15.0")])
def test_releases_are_compared_as_numbers_and_none_is_older_than_claimed(wanted: str, found: str) -> None:
    assert wheels.release(LISTED, wanted, (2, 4)) == found


def test_an_index_without_a_claimed_release_is_no_answer() -> None:
    with pytest.raises(NoAnswerError, match="the index lists no torch from 3 on"):
        wheels.release(LISTED, "oldest", (3,))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for every command; what holds `broken` fails, and a build leaves a wheel."""
    ran: list[list[str]] = []

    def run(command: list[str], _folder: Path) -> str:
        ran.append(command)
        if "versions" in command:
            return LISTED
        if "build" in command and "--outdir" in command:
            out = Path(command[command.index("--outdir") + 1])
            out.mkdir(exist_ok=True)
            (out / "simdist_training-1-py3-none-any.whl").touch()
        for words, message in BROKEN.items():
            if words in " ".join(command):
                raise wheels.FailedError(message)
        return ""

    monkeypatch.setattr(wheels, "run", run)
    monkeypatch.setattr(wheels, "interpreter", lambda version: f"/python{version}" if version != "3.9" else None)
    monkeypatch.setattr(wheels, "claimed_pythons", lambda: ["3.9", "3.11"])
    BROKEN.clear()
    return ran


BROKEN: dict[str, str] = {}


def test_every_python_is_tried_without_torch_with_the_oldest_and_the_newest(commands, capsys) -> None:
    assert wheels.main([]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Python 3.9 is not on this machine: not tried"
    assert [line.split() for line in out[-4:]] == [
        ["Python", "torch", "install", "compare", "import", "ranks"],
        ["3.11", "-", "ok", "ok", "ok", "-"],
        ["3.11", "2.4.0", "ok", "ok", "ok", "ok"],
        ["3.11", "2.15.0", "ok", "ok", "ok", "ok"],
    ]
    assert sum("torchrun" in command[0] for command in commands) == 2


def test_what_fails_is_told_and_ends_in_1(commands, capsys) -> None:
    BROKEN["torchrun"] = "rank 1 was lost"
    assert wheels.main(["--torch", "2.4.0"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "rank 1 was lost"
    assert "Python 3.11, torch 2.4.0, ranks:" in out


def test_releases_that_do_not_fit_together_fail(commands, capsys) -> None:
    BROKEN["torch==2.4.0"] = "ERROR: ResolutionImpossible: for help visit pip.pypa.io"
    assert wheels.main(["--torch", "2.4.0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("ERROR: ResolutionImpossible")


def test_what_cannot_be_downloaded_is_no_failure_of_the_wheel(commands, capsys) -> None:
    BROKEN["torch==2.4.0"] = "ERROR: Could not fetch URL"
    assert wheels.main(["--torch", "none", "--torch", "oldest"]) == 2
    out = capsys.readouterr().out
    assert "Python 3.11, torch oldest: cannot be installed: ERROR: Could not fetch URL" in out
    assert out.splitlines()[-1].split() == ["3.11", "-", "ok", "ok", "ok", "-"]


def test_a_build_that_fails_ends_in_1(commands, capsys) -> None:
    BROKEN["--outdir"] = "ERROR Backend subprocess exited"
    assert wheels.main([]) == 1
    assert capsys.readouterr().err == "the build failed: ERROR Backend subprocess exited\n"
