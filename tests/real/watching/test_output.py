"""Lateness reaches CSV files, TensorBoard, Weights & Biases and functions, in one process without a process group."""

import csv
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerAction, profile, schedule  # noqa: E402

import real  # noqa: E402
from real.watching.lateness import Lateness, LatenessWindow  # noqa: E402
from real.watching.output import LATENESS_COLUMNS, append_csv, check_csv  # noqa: E402
from real.watching.tracing import TraceMark  # noqa: E402
from real.watching.watch import StepWatch, Watching  # noqa: E402
from simdist.errors import RunError, ScenarioError  # noqa: E402

WINDOW = LatenessWindow(
    10,
    19,
    100.0,
    0.2,
    (
        Lateness(0, 0.5, 12, 1.25, 0.0, None, ()),
        Lateness(1, 20.0, 13, 150.0, 0.15, "transient", (13, 17)),
    ),
)
ROWS = "10,19,100,0,0.5,12,1.25,0,,\n10,19,100,1,20,13,150,0.15,transient,13 17\n"


def run_steps(watch: StepWatch, n_steps: int) -> None:
    for _ in range(n_steps):
        watch.step()


class Writer:
    """Has the method of TensorBoard's `SummaryWriter`."""

    def __init__(self) -> None:
        self.added: list[tuple[str, float, int]] = []

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None, new_style=False, double_precision=False):
        self.added.append((tag, scalar_value, global_step))


def wandb_like() -> tuple[types.ModuleType, list[Mapping[str, float]]]:
    """Return a module with the function of `wandb`, and what is logged."""
    logged: list[Mapping[str, float]] = []

    def log(data, step=None, commit=None, sync=None) -> None:
        assert (step, commit) == (None, False)  # the step is the script's
        logged.append(data)

    module = types.ModuleType("wandb")
    vars(module)["log"] = log
    return module, logged


def test_tensorboard_gets_each_scalar_at_the_last_step_of_the_window() -> None:
    writer = Writer()
    with real.watch(every=10, report=writer) as watch:
        run_steps(watch, 25)
    assert {step for _, _, step in writer.added} == {9, 19, 24}
    assert [tag for tag, _, step in writer.added if step == 9] == list(watch.scalars())


def test_the_writer_of_torch_takes_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer, real.watch(every=10, report=writer) as watch:
        run_steps(watch, 20)
    shown = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(shown.Tags()["scalars"]) == sorted(watch.scalars())
    for tag, value in watch.scalars().items():
        assert [each.step for each in shown.Scalars(tag)] == [9, 19]
        assert shown.Scalars(tag)[-1].value == pytest.approx(value)


def test_wandb_gets_the_scalars_with_the_row_that_the_script_logs_next() -> None:
    module, logged = wandb_like()
    with real.watch(every=10, report=module) as watch:
        run_steps(watch, 20)
    assert [each["simdist/last_step"] for each in logged] == [9.0, 19.0]
    assert "simdist/lateness_ms/rank0" in logged[0]


def test_a_function_gets_windows_in_the_thread_of_the_loop() -> None:
    seen: list[LatenessWindow] = []
    with real.watch(every=10, report=seen.append) as watch:
        run_steps(watch, 20)
    assert [(each.first_step, each.last_step) for each in seen] == [(2, 9), (10, 19)]
    assert watch.window == seen[-1]


def test_a_report_that_fails_is_told_once_and_the_loop_goes_on() -> None:
    def fails(_: LatenessWindow) -> None:
        raise KeyError("no such run")

    with pytest.warns(RuntimeWarning) as told, real.watch(every=10, report=fails) as watch:
        run_steps(watch, 40)
    assert watch.current_step == 40
    [warning] = told
    assert "has failed and is not called again: KeyError('no such run')" in str(warning.message)


def test_a_filter_that_turns_warnings_into_errors_does_not_end_the_job(capsys) -> None:
    def fails(_: LatenessWindow) -> None:
        raise KeyError("no such run")

    with warnings.catch_warnings(), real.watch(every=10, report=fails) as watch:
        warnings.simplefilter("error")
        run_steps(watch, 40)
        watch.close()
    assert "real.watch: report=" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "n_lines"), [({}, 3), ({"report": lambda _: None}, 0), ({"csv": "late.csv"}, 0)])
def test_rank_0_prints_windows_unless_they_go_elsewhere(options: dict, n_lines: int, tmp_path: Path, capsys) -> None:
    if "csv" in options:
        options = {"csv": tmp_path / "late.csv"}
    with real.watch(every=10, **options) as watch:
        run_steps(watch, 25)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "steps 2-9",
        "steps 10-19",
        "steps 20-24",
    ][:n_lines]


# --- CSV ---


def test_a_file_gets_a_header_and_a_row_for_each_rank(tmp_path: Path) -> None:
    file = tmp_path / "new" / "lateness.csv"
    check_csv(file)
    append_csv(file, WINDOW)
    assert file.read_text() == ",".join(LATENESS_COLUMNS) + "\n" + ROWS


def test_a_row_does_not_say_that_a_rank_is_not_late_where_that_is_not_visible(tmp_path: Path) -> None:
    file = tmp_path / "lateness.csv"
    check_csv(file)
    append_csv(file, replace(WINDOW, unseen="slow computing is not visible here"))
    assert [row["kind"] for row in csv.DictReader(file.read_text().splitlines())] == ["unseen", "transient"]


@pytest.mark.parametrize("torn", ["", "20,29,1", "first_st"])
def test_rows_are_appended_after_a_crash(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "lateness.csv"
    header = ",".join(LATENESS_COLUMNS) + "\n"
    file.write_text(torn if torn == "first_st" else header + ROWS + torn)
    check_csv(file)
    append_csv(file, WINDOW)
    assert file.read_text() == header + (ROWS if torn == "first_st" else ROWS + ROWS)


def test_another_table_is_not_written_to(tmp_path: Path) -> None:
    file = tmp_path / "lateness.csv"
    file.write_text("step,loss\n1,2\n")
    with pytest.raises(ScenarioError) as caught:
        real.watch(csv=file)
    assert str(caught.value) == (
        f"{file}: has the columns 'step,loss', not '{','.join(LATENESS_COLUMNS)}'; give csv= another file"
    )
    assert file.read_text() == "step,loss\n1,2\n"


def test_a_file_that_cannot_be_written_is_told_at_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        real.watch(csv=tmp_path / "file" / "lateness.csv")


def test_a_disk_that_fails_later_is_told_once_and_the_loop_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "lateness.csv"
    watch = real.watch(every=10, csv=file)
    file.unlink()
    file.mkdir()
    run_steps(watch, 10)
    watch._thread._thread.join(60)
    with pytest.warns(RuntimeWarning) as told:
        run_steps(watch, 20)
    watch.close()
    [warning] = told
    assert str(warning.message) == f"real.watch: watches no longer: {file}: cannot be written: Is a directory"
    assert watch.current_step == 30


def test_windows_of_a_resumed_job_begin_with_it() -> None:
    windows: list[LatenessWindow] = []
    with real.watch(first_step=7, every=10, report=windows.append) as watch:
        run_steps(watch, 20)
    assert [(each.first_step, each.last_step) for each in windows] == [(9, 16), (17, 26)]  # the first two warm up


# --- traces ---


def test_a_profiler_records_the_marked_step_and_its_neighbours() -> None:
    watch = real.watch(first_step=100, every=10)
    watch._thread.mark = TraceMark(112, 3, "periodic")
    names = {ProfilerAction.WARMUP: "W", ProfilerAction.RECORD: "R", ProfilerAction.RECORD_AND_SAVE: "S"}
    assert "".join(names.get(watch.schedule(step), ".") for step in range(16)) == "..........WRRS.."[:16]
    traced = []
    for _ in range(16):
        traced += [watch.current_step] if watch.should_trace else []
        watch.step()
    watch.close()
    assert traced == [111, 112, 113]


def test_actions_are_those_of_the_schedule_of_torch() -> None:
    watch = real.watch(every=10)
    watch._thread.mark = TraceMark(12, 3, "persistent")
    theirs = schedule(skip_first=0, wait=10, warmup=1, active=10, repeat=1)
    assert [watch.schedule(step) for step in range(40)] == [theirs(step) for step in range(40)]
    watch.close()


def test_a_profiler_of_torch_takes_the_schedule(tmp_path: Path) -> None:
    watch = real.watch(every=10)
    watch._thread.mark = TraceMark(5, 0, "periodic")
    saved = []
    with profile(schedule=watch.schedule, on_trace_ready=lambda profiler: saved.append(profiler.step_num)) as profiler:
        for _ in range(9):
            torch.ones(3).sum()
            watch.step()
            profiler.step()
    watch.close()
    assert saved == [7]


def test_without_a_late_rank_there_is_nothing_to_trace() -> None:
    with real.watch(every=10) as watch:
        run_steps(watch, 20)
        assert watch.trace_mark is None
        assert not watch.should_trace
        assert watch.schedule(3) == ProfilerAction.NONE
    assert watch.trace_mark is None


# --- arguments ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 9}, "every=9; write 10 steps or more: fewer tell little from noise"),
        ({"timeout_s": 0.0}, "timeout_s=0.0; write seconds, more than 0"),
        ({"first_step": -1}, "first_step=-1; steps count from 0"),
    ],
)
def test_wrong_values_are_told_at_the_beginning(options: dict, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        real.watch(**options)
    assert str(caught.value) == message


def test_what_cannot_take_windows_is_told_at_the_beginning() -> None:
    with pytest.raises(TypeError) as caught:
        Watching(report="tensorboard")
    assert str(caught.value) == (
        "report='tensorboard': write a function of a LatenessWindow, a SummaryWriter of TensorBoard, or wandb"
    )
    with pytest.raises(TypeError, match=r"^real.Experiment\(watching=True\): write watching=real.Watching\(...\)$"):
        real.Experiment(watching=True)


def test_ranks_without_a_process_group_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RunError) as caught:
        real.watch()
    assert str(caught.value) == (
        "real.watch: there are 4 ranks and no process group; call torch.distributed.init_process_group before it"
    )


# --- ends ---


def test_a_watch_closes_once_and_its_steps_count_on() -> None:
    seen: list[LatenessWindow] = []
    watch = real.watch(every=10, report=seen.append)
    run_steps(watch, 15)
    watch.close()
    watch.close()
    run_steps(watch, 15)
    with watch.waiting():
        pass
    assert [(each.first_step, each.last_step) for each in seen] == [(2, 9), (10, 14)]
    assert watch.current_step == 30


def test_a_module_has_no_hooks_afterwards() -> None:
    module = torch.nn.Linear(2, 2)
    with real.watch(module, every=10) as watch:
        run_steps(watch, 3)
    assert not module._forward_pre_hooks


def test_importing_real_imports_no_watch() -> None:
    code = "import real, sys; assert 'real.watching.watch' not in sys.modules; real.watch; real.Watching"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
