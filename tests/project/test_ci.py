"""Tests of pages are not left out unnoticed: they skip on a developer's machine only."""

import os
import shutil
import subprocess
from pathlib import Path

import browser
import pytest

CI = Path(__file__).resolve().parents[2] / ".ci" / "run"
BASH = shutil.which("bash")


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """Leave a few programs only, none of them a browser, and let `make` say what it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(shutil.which(name))
    program(folder / "id", "echo 1000")
    program(folder / "python3", "exit 0")
    program(folder / "make", f'echo "$@ ${{{browser.NEEDED}:-may skip}} $PYTEST_ADDOPTS"')
    monkeypatch.setenv("PATH", str(folder))
    for name in (browser.NEEDED, "PYTEST_ADDOPTS", "PYTHON"):  # `make test PYTHON=...` exports the last one
        monkeypatch.delenv(name, raising=False)
    return folder


def program(path: Path, line: str) -> None:
    path.write_text(f"#!{BASH}\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


def ci() -> subprocess.CompletedProcess:
    return subprocess.run([CI], capture_output=True, text=True, timeout=60, check=True)


def test_tests_of_pages_skip_without_a_browser(tools):
    with pytest.raises(pytest.skip.Exception, match="needs a browser: one of chromium, "):
        browser.require()


def test_tests_of_pages_fail_without_a_browser_where_one_is_needed(tools, monkeypatch):
    monkeypatch.setenv(browser.NEEDED, "1")
    with pytest.raises(pytest.fail.Exception, match="needs a browser: one of chromium, "):
        browser.require()


def test_tests_of_pages_fail_without_playwright_where_a_browser_is_needed(tools, monkeypatch):
    program(tools / "chromium", "exit")
    monkeypatch.setenv(browser.NEEDED, "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="needs playwright"):
        browser.require()


@pytest.mark.skipif(os.name != "posix", reason="runs a shell script")
def test_ci_needs_a_browser_where_there_is_one(tools):
    program(tools / "google-chrome", "exit")
    done = ci()
    assert done.stdout == "ci 1  -rfEs\n"
    assert "Chromium" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="runs a shell script")
def test_ci_without_a_browser_goes_on_and_says_so(tools):
    done = ci()
    assert (done.stdout, done.stderr) == (
        "ci may skip  -rfEs\n",
        "WARNING: no Chromium: no test of a page in a browser runs\n"
        "WARNING: no nfs-ganesha with libnfs 13: no test reads from a real file server\n",
    )


@pytest.mark.skipif(os.name != "posix", reason="runs a shell script")
@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [(1, 1, ""), (2, 0, "WARNING: no package index answers: what users install was not resolved\n")],
)
def test_ci_fails_on_a_conflict_of_packages_and_not_without_an_index(tools, code, expected, message):
    program(tools / "python3", f'echo "$@"; exit {code}')
    done = subprocess.run([CI], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == expected
    assert done.stdout.startswith("tools/installs.py\nci may skip")  # the tests run in either case
    assert done.stderr.startswith(message)


@pytest.mark.skipif(os.name != "posix", reason="runs a shell script")
def test_ci_fails_if_the_tests_do_and_still_says_what_was_missing(tools):
    program(tools / "make", "exit 3")
    done = subprocess.run([CI], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "no Chromium" in done.stderr
