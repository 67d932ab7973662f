"""The second reader of traces, and what follows from the two: on a trace of which everything is known."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kineto_drawing import GPU, SIDE_STREAM, Drawing, draw_step
from scripts import ROOT, load_script

FOLDER = ROOT / "experiments" / "public_traces"
sys.path.insert(0, str(FOLDER))

RUN = load_script(FOLDER / "run.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trace of three steps, whose device begins 4, 30 and 30 ms behind its host."""
    draw = Drawing(GPU)
    draw.gpu("multi_tensor_apply_kernel", None, 1.0, 4.0)  # launched before the trace began
    for number in range(3):
        at = 100 * number
        draw_step(draw, number, reads_loss=False)
        draw.note("nccl:all_to_all", at + 31, at + 31.1)
        draw.gpu("ncclDevKernel_SendRecv", at + 31.05, at + 60, at + 66, stream=SIDE_STREAM)  # hidden behind computing
        draw.gpu("sgemm", at + 52.6, at + 90, at + 130)
    path = tmp_path_factory.mktemp("traces")
    draw.write(path, "unknown.pt.json")
    return path


@pytest.fixture(scope="module")
def told(folder: Path):
    """Return what simdist says of it."""
    return RUN.imported(folder / "unknown.pt.json")


TIMES_MS = {
    "step": 326 / 3,  # from 4 to 130, 230 and 330 ms
    "computing": (18 + 3 * (17.8 + 44.98)) / 3,  # 12 to 30; 50.2 to 68 and 85.02 to 130 in each step
    "exposed": 17.0,  # 68 to 85
    "copies": 1.8 / 3,  # 10.2 to 12; later ones lie behind the kernel of the step before
    "idle": (6.2 + 3 * (20.2 + 0.02)) / 3,
}


def in_ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in seconds.items()}


def test_the_oracle_gives_the_times_that_were_drawn(folder: Path) -> None:
    found = RUN.shown(folder / "unknown.pt.json")
    assert in_ms(RUN._columns(found)) == pytest.approx(TIMES_MS)
    assert (found.mark_s, found.behind_s) == (pytest.approx(0.1), pytest.approx(0.03))
    assert (found.n_steps, found.n_before, found.collectives) == (3, 1, {"all_to_all": 1.0})


def test_simdist_gives_them_too_and_asks_for_machines(told) -> None:
    assert in_ms(told.seconds) == pytest.approx(TIMES_MS, abs=0.001)
    assert (told.ahead_s, told.all_to_alls) == (pytest.approx(0.03), 1.0)
    assert told.machines == "asked for"


@pytest.mark.parametrize(("off", "code"), [(0.0, 0), (0.019, 0), (0.021, 1)])
def test_check_fails_where_a_time_is_more_than_2_per_cent_of_a_step_off(
    folder: Path, told, off: float, code: int, monkeypatch, capsys
) -> None:
    seconds = told.seconds | {"copies": told.seconds["copies"] + off * told.seconds["step"]}
    monkeypatch.setattr(RUN, "imported", lambda path: replace(told, seconds=seconds))
    monkeypatch.setattr(sys, "argv", ["run.py", str(folder), "--check"])
    assert RUN.main() == code
    said = capsys.readouterr()
    assert "| unknown | 100.0 | 108.7 / 108.7 |" in said.out
    lines = ["unknown: copies 2.9 ms, the JSON shows 0.6 ms"] * code
    assert said.err.splitlines() == [*lines, f"not in {folder}: {', '.join(RUN.PUBLIC)}"]


def test_the_traces_that_the_page_shows_are_those_that_are_looked_for() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    times = page.partition("<!-- table times -->\n")[2].partition("<!-- end -->")[0]
    assert tuple(line.split(" | ")[0].strip("| ") for line in times.splitlines()[2:]) == RUN.PUBLIC
