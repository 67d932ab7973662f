"""The experiment on a GPU goes through, on a machine without one too."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from processes import run_module
from scripts import ROOT, load_script

from simdist.cli import main

torch = pytest.importorskip("torch")

HERE = ROOT / "experiments" / "gpu_step_time"
run = load_script(HERE / "run.py")


def call(module: str, *arguments: object, ranks: int = 0) -> str:
    """Run a module as the script would, but faster: torch is loaded already in the processes that perform it."""
    if ranks:
        return run_module(module, ranks, *arguments)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([str(each) for each in arguments]) == 0
    return out.getvalue()


def test_tiny_mode_measures_steps_and_compares(tmp_path: Path, monkeypatch, capsys) -> None:
    tiny = ("--device", "cpu", "--model", "mlp", "--precision", "fp32", "--steps", "3", "--budget", "1 s")
    monkeypatch.setattr(run, "call", call)
    monkeypatch.setattr(sys, "argv", ["run.py", *tiny, "--output", str(tmp_path)])
    run.main()
    assert f"wrote {tmp_path / 'CPU.json'}" in capsys.readouterr().out
    results = json.loads((tmp_path / "CPU.json").read_text())
    assert set(results) == {"device", "torch", "cuda", "steps", "ranks sharing it"}
    (step,) = results["steps"]
    assert (step["model"], step["precision"], step["batch_size"]) == ("mlp", "fp32", 32)
    assert min(step["forward_ms"], step["backward_ms"], step["optimize_ms"]) > 0
    rows = results["ranks sharing it"]
    assert {row["schedule"] for row in rows} == {"sync", "local-4", "hsgd-2-2,4-4"}
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated_ms"] / row["measured_ms"] - 1, abs=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    run.main()
    assert "no GPU here" in capsys.readouterr().out


def test_page_says_whether_results_of_a_gpu_are_recorded() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert ("No results of a GPU are recorded here yet" in page) == (not list(HERE.glob("results/*.json")))
