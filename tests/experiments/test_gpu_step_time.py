"""The experiment on a GPU goes through, on a machine without one too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).resolve().parents[2] / "experiments" / "gpu_step_time"


def run(*arguments: str) -> str:
    command = [sys.executable, str(HERE / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tiny_mode_measures_steps_and_compares(tmp_path: Path) -> None:
    run(
        *("--device", "cpu", "--model", "mlp", "--precision", "fp32", "--steps", "3", "--budget", "1 s"),
        *("--output", str(tmp_path)),
    )
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
def test_without_a_gpu_it_says_so() -> None:
    assert "no GPU here" in run()


def test_page_says_whether_results_of_a_gpu_are_recorded() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert ("No results of a GPU are recorded here yet" in page) == (not list(HERE.glob("results/*.json")))
