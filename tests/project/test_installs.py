"""What pip would install: which Pythons are asked, without whose settings, and what a conflict looks like."""

import json
import os
import shutil
import sys
import zipfile
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
       echo "$@" >> "{tmp_path}/commands"
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


def test_the_newest_python_that_is_here_resolves_for_one_that_is_not(python, tmp_path, monkeypatch, capsys) -> None:
    here = str(python(f"cp '{tmp_path}/report.json' \"$2\""))
    monkeypatch.setattr(installs, "claimed_pythons", lambda: ["3.12", "3.13", "3.14"])
    monkeypatch.setattr(installs, "interpreter", {"3.12": "/no/python", "3.13": here}.get)
    monkeypatch.setattr(installs, "new_environment", lambda path, _: here)
    assert installs.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Python 3.14 is not on this machine: the pip of Python 3.13 resolves for it\nPython ")
    assert out.count("\n3.14  ") == 6
    commands = (tmp_path / "commands").read_text(encoding="utf-8")
    assert commands.count(" 3.14 install --python-version 3.14 --only-binary :all: --dry-run") == 6
    assert commands.count("-m pip install --dry-run") == 12


def test_markers_are_those_of_the_other_python(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1-py3-none-any.whl"
    requires = "Requires-Dist: missing; python_version < '3.99'\nRequires-Dist: two; python_version >= '3.99'\n"
    write_wheel(wheel, "one", requires)
    write_wheel(tmp_path / "two-1-py3-none-any.whl", "two")
    command = [sys.executable, "-c", installs.PIP_OF_ANOTHER_PYTHON, "3.99", "install", "--python-version", "3.99"]
    command += ["--only-binary", ":all:", "--dry-run", "--ignore-installed", "--no-index", "--find-links"]
    done = installs.run([*command, str(tmp_path), str(wheel)])
    assert done.stdout.splitlines()[-1] == "Would install one-1 two-1", done.stderr


def write_wheel(path: Path, name: str, requires: str = "") -> None:
    folder = f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}")
        wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{folder}/RECORD", "")


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
