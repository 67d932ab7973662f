"""What pip would install: which Pythons are asked, without whose settings, and what a conflict looks like."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from scripts import ROOT, load_script

pytestmark = pytest.mark.skipif(os.name != "posix", reason="stands shell scripts in for Pythons")


installs = load_script(ROOT / "tools" / "installs.py")

PACKAGES = [
    {"metadata": {"name": "simdist-training", "version": "1"}, "download_info": {"url": "file:///x", "dir_info": {}}},
    {"metadata": {"name": "torch", "version": "2.13.0"}, "download_info": {"url": "{wheel}", "archive_info": {}}},
    {"metadata": {"name": "triton", "version": "3.7.1"}, "download_info": {"url": "file:///no", "archive_info": {}}},
]
CONFLICT = "WARNING: this is experimental\nERROR: ResolutionImpossible: for help visit pip.pypa.io"
CAUSES = (
    "Collecting torch\nThe conflict is caused by:\n    torch 2.13.0 depends on triton==3.7.1\nTo fix this you could try"
)
REFUSED = (
    "WARNING: Retrying after connection broken\nERROR: Could not fetch URL https://index/torch/: Connection refused"
)


@pytest.fixture
def python(tmp_path: Path):
    """Return a function that makes a Python of which `-m venv` copies it and `-m pip` does what it is told."""

    def make(resolving: str) -> Path:
        wheel = tmp_path / "torch.whl"
        wheel.write_bytes(bytes(5_000_000))
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"install": PACKAGES}).replace("{wheel}", wheel.as_uri()), encoding="utf-8")
        path = tmp_path / "python3"
        path.write_text(
            f"""#!{shutil.which("bash")}
case "$*" in
    "-c import venv") exit 0 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"--upgrade pip") exit 0 ;;
    *) env | grep ^PIP_ > "{tmp_path}/environment"
       while [ "$1" != --report ]; do shift; done
       {resolving} ;;
esac
""",
            encoding="utf-8",
        )
        path.chmod(0o755)
        return path

    return make


def failing(text: str) -> str:
    return f"echo '{CAUSES}'; echo '{text}' >&2; exit 1"


def test_claimed_pythons_are_those_of_the_classifiers() -> None:
    assert installs.claimed_pythons()[:1] == ["3.11"]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in installs.claimed_pythons()


def test_an_interpreter_that_is_only_a_shim_is_not_at_hand(tmp_path, monkeypatch) -> None:
    for folder in ("shims", "versions/3.12.1/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shim, real = tmp_path / "shims" / "python3.12", tmp_path / "versions" / "3.12.1" / "bin" / "python3.12"
    for path, code in ((shim, 127), (real, 0)):
        path.write_text(f"#!{shutil.which('bash')}\nexit {code}\n", encoding="utf-8")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert installs.interpreter("3.12") == str(real)
    assert installs.interpreter("3.13") is None


def test_what_resolves_is_a_table_with_sizes(python, tmp_path, capsys) -> None:
    assert installs.main(["--python", str(python(f"cp '{tmp_path}/report.json' \"$2\"")), "--packages"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["Python", "target", "constraints", "packages", "MB", "torch", "triton", "numba", "numpy"]
    assert lines[1][-11:] == [".", "with", "2", "5", "+", "1", "unknown", "2.13.0", "3.7.1", "-", "-"]
    assert ["5.0", "MB", "torch", "2.13.0"] in lines
    assert ["?", "MB", "triton", "3.7.1"] in lines


def test_a_python_that_is_none_is_refused_by_name(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        installs.main(["--python", "/no/python"])
    assert ended.value.code == 2
    assert "--python /no/python: is no Python that works" in capsys.readouterr().err


def test_a_conflict_fails_in_the_words_of_pip(python, capsys) -> None:
    assert installs.main(["--python", str(python(failing(CONFLICT)))]) == 1
    out = capsys.readouterr().out
    assert out.count("CONFLICT") == 6
    assert (
        "with constraints.txt:\nERROR: ResolutionImpossible: for help visit pip.pypa.io\nThe conflict is caused" in out
    )
    assert "    torch 2.13.0 depends on triton==3.7.1\n" in out
    assert "WARNING" not in out


def test_no_answer_is_no_conflict(python, capsys) -> None:
    assert installs.main(["--python", str(python(failing(REFUSED)))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("no package index answers: ")
    assert error.endswith("ERROR: Could not fetch URL https://index/torch/: Connection refused\n")


def test_pip_gets_no_setting_of_this_machine_but_how_to_reach_an_index(python, tmp_path, monkeypatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "x")
    installs.main(["--python", str(python(failing(CONFLICT))), "--jobs", "1"])
    names = {line.partition("=")[0] for line in (tmp_path / "environment").read_text(encoding="utf-8").splitlines()}
    assert names & {"PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"} == {"PIP_INDEX_URL"}
    assert "PIP_CONFIG_FILE" in names
