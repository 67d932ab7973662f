"""Every result has a frame, a picture and a table for notebooks."""

import re
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

import simdist
from simdist import sweeps
from simdist.errors import RunError, ScenarioError, UnsupportedError
from simdist.learning.answer import LearnedSchedules
from simdist.learning.curves import Curve, parse_target
from simdist.learning.summary import Learned
from simdist.learning.timing import TimedSchedule
from simdist.runs.building import delays
from simdist.scenario import load
from simdist.stragglers import find_gains, find_slowdown
from simdist.studies.data_knobs import knob_effects
from simdist.studies.epochs import find_epochs
from simdist.studies.measuring import ScheduleTimes
from simdist.studies.tolerable_rate import Tolerances, tolerances
from simdist.sweeps import InProcess, read_results
from simdist.sweeps import load as load_sweep
from simdist.traces.breakdown import STATES, break_down
from simdist.traces.waiting import attribute_waiting
from simdist.tuning import Constraints, TuneOptions
from simdist.tuning.tuning import tune

ROOT = Path(__file__).parents[3]
JOB = load(ROOT / "docs" / "examples" / "first.yaml").changed(steps=8, schedules=["sync", "local-4"])
STALLS = load(ROOT / "docs" / "examples" / "stalls.yaml").changed({"input.data.samples": 512, "steps": "2 epochs"})


class StoppedError(BaseException):
    """Stands for Ctrl-C."""


@pytest.fixture(scope="module")
def rows():
    return simdist.compare(JOB, n_seeds=3)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    sweep = load_sweep(
        {
            "scenario": JOB,
            "vary": {"disturbances[0].probability": [0.01, 0.1], "cluster.nodes": range(2, 5, 2)},
            "seeds": 2,
        }
    )
    folder = tmp_path_factory.mktemp("swept")
    sweeps.sweep(sweep, folder, workers=InProcess())
    return read_results([folder])


def test_comparison_is_a_list_of_rows_with_a_frame_without_tuples(rows) -> None:
    table = rows.frame()
    assert rows == simdist.compare(JOB, n_seeds=3)
    assert not table.map(lambda cell: isinstance(cell, tuple | list | dict)).any(axis=None)
    assert table.speedup_ci95_low[1] == rows[1].speedup_ci95[0]
    assert table.step_s_ci95_high[0] == rows[0].step_s_ci95[1]


def test_frame_of_one_seed_has_no_intervals() -> None:
    table = simdist.compare(JOB, n_seeds=1).frame()
    assert table[["step_s_ci95_low", "step_s_ci95_high", "speedup_ci95_low", "speedup_ci95_high"]].isna().all(axis=None)


def test_columns_of_a_comparison_are_those_of_a_sweep(rows, results) -> None:
    table = results.frame()
    assert [name for name in table.columns if name in rows.frame().columns] == list(rows.frame().columns)


def test_every_result_draws_itself(rows, results) -> None:
    trace = simdist.simulate(JOB)
    tuned = tune(
        JOB.changed(steps=4), TuneOptions(Constraints(global_every=2), n_seeds=2, n_search_seeds=1, evaluations=2)
    )
    epochs = find_epochs(simdist.simulate(STALLS))
    for each in (rows, results, trace, break_down(trace), attribute_waiting(trace), epochs, tuned):
        assert isinstance(each.plot(), matplotlib.figure.Figure)
        assert isinstance(simdist.plot(each), matplotlib.figure.Figure)
        assert len(each.frame())
    assert list(tuned.frame().columns) == list(rows.frame().columns)


@pytest.fixture(scope="module")
def answers():
    """Return an answer of each kind: tolerances, a slowdown, gains, knobs, and schedules that learned."""
    trace = simdist.simulate(JOB)
    sync, local = JOB.schedules
    stalls = STALLS.changed(schedules=["sync"])
    return {
        "tolerances": tolerances(JOB.changed(steps=100), delay_s=0.02, n_seeds=2),
        "slowdown": find_slowdown(trace, ranks_per_node=4),
        "gains": find_gains(JOB, [local], baseline=sync, n_runs=40),
        "knobs": knob_effects(stalls, stalls.schedules[0], delays(stalls)),
        "learned": learned(),
    }


def learned() -> LearnedSchedules:
    """Return two schedules with two seeds, of which the second learns in half of the time."""
    curve = Curve(
        [0, 4, 8],
        [float("nan"), 2.0, 1.0],
        {},
        {"accuracy": [0.1, 0.5, 0.9]},
        [0.0] * 3,
        [None] * 3,
        [None] * 3,
        {},
        None,
    )
    rows = []
    for schedule, step_s in zip(JOB.schedules, (0.2, 0.1), strict=True):
        built = simdist.build(JOB, schedule)
        ends_s = np.cumsum(np.full((2, 8), step_s), axis=1)
        times = ScheduleTimes(schedule.name, "", ends_s[:, -1] / 8, {})
        rows.append(Learned(TimedSchedule(JOB, schedule, times, ends_s, built.plan, (None, None)), (curve, curve)))
    return LearnedSchedules(rows, target=parse_target("accuracy >= 0.5"))


def test_every_answer_has_a_frame_of_single_cells_a_picture_and_a_table(answers) -> None:
    for name, each in answers.items():
        table = each.frame()
        assert len(table), name
        assert not table.map(lambda cell: isinstance(cell, tuple | list | dict)).any(axis=None), name
        assert isinstance(each.plot(), matplotlib.figure.Figure), name
        assert each._repr_html_() == simdist.html_of(each), name
        assert "<td>" in each._repr_html_(), name


def test_frames_of_answers_have_the_columns_of_comparisons(rows, answers) -> None:
    known = set(rows.frame().columns)
    usual = {"schedule", "step_s", "speedup", "speedup_ci95_low", "speedup_ci95_high"}
    assert usual <= known
    assert usual <= set(answers["gains"].frame().columns)
    assert usual <= set(answers["learned"].frame().columns)
    assert {"schedule", "step_s"} <= set(answers["tolerances"].frame().columns)


def test_answers_say_what_they_say(answers) -> None:
    gains = answers["gains"].frame()
    assert gains.schedule.tolist() == ["sync", "local-4"]
    assert gains.speedup[1] == answers["gains"].rows[0].speedup
    assert gains.speedup_ci95_low.isna().tolist() == [True, False]
    slowed = answers["slowdown"].frame()
    assert slowed["node"].tolist() == [rank // 4 for rank in range(16)]
    assert slowed.slowdown.tolist() == answers["slowdown"].rank_slowdowns.tolist()
    turned = answers["knobs"].frame()
    assert turned.knob[0] == "as it is"
    assert turned.seconds[0] == pytest.approx(answers["knobs"].baseline.seconds)
    tolerated = answers["tolerances"].frame()
    assert tolerated.probability[1] > tolerated.probability[0] > 0
    learnt = answers["learned"].frame()
    assert learnt.target_s.tolist() == pytest.approx([0.8, 0.4])
    assert learnt.speedup.tolist() == pytest.approx([1.0, 2.0])


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ScenarioError, match="no schedules"):
        Tolerances([], title="none", scenario="job", delay_s=0.2, most_loss=0.05).plot()
    sync, _ = JOB.schedules
    with pytest.raises(ScenarioError, match="no schedule is compared with sync"):
        find_gains(JOB, [], baseline=sync, n_runs=1).plot()
    with pytest.raises(ScenarioError, match="write a delay above 0 s"):
        tolerances(JOB, delay_s=-1.0)


def test_definition_of_a_sweep_lists_its_fields() -> None:
    sweep = load_sweep(
        {"scenario": JOB, "vary": {"cluster.nodes": [2, 4], "cluster.network.bandwidth": ["10 Gbit/s", "25 Gbit/s"]}}
    )
    html = sweep._repr_html_()
    assert "4 points, 20 seeds each; a sweep of first" in html
    assert "<td>10 Gbit/s, 25 Gbit/s</td>" in html


def test_waiting_and_epochs_are_tables_in_notebooks() -> None:
    waiting = attribute_waiting(simdist.simulate(JOB))
    assert "<th>others waited</th>" in waiting._repr_html_()
    epochs = find_epochs(simdist.simulate(STALLS))
    assert "<th>stalled</th>" in epochs._repr_html_()


def test_picture_of_a_sweep_has_a_panel_for_each_size_and_a_line_for_each_schedule(results) -> None:
    figure = results.plot()
    assert [axes.get_title() for axes in figure.axes] == ["cluster.nodes = 2", "cluster.nodes = 4"]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines()] == ["sync", "local-4"]
        assert axes.get_lines()[0].get_xdata().tolist() == [0.01, 0.1]
        assert axes.get_lines()[0].get_ydata().tolist() == [1, 1]
        assert len(axes.collections) == 2  # bands


def test_results_that_vary_no_number_cannot_be_drawn(tmp_path: Path) -> None:
    sweep = load_sweep({"scenario": JOB, "vary": {"host.waits_for": ["loss", "update"]}, "seeds": 1})
    sweeps.sweep(sweep, tmp_path, workers=InProcess())
    with pytest.raises(ScenarioError, match="vary no number over which speed-ups could be drawn"):
        read_results([tmp_path]).plot()


def test_states_of_a_breakdown_add_up_to_its_step_time() -> None:
    trace = simdist.simulate(JOB)
    table = break_down(trace).frame()
    assert table["rank"].tolist() == list(range(16))
    assert table[[f"{state}_s" for state in STATES]].sum(axis=1).tolist() == pytest.approx(table.step_s.tolist())
    assert table.step_s[0] == pytest.approx(trace.makespan_s / 8)


def test_scenarios_and_results_are_tables_in_notebooks(rows, results) -> None:
    trace = simdist.simulate(JOB)
    named = JOB.changed(name="<b>")
    for each, text in (
        (named, "<caption>&lt;b&gt;</caption>"),
        (rows, "<td>local-4</td>"),
        (results, "<caption>8 rows; speed-up over sync</caption>"),
        (trace, "16 ranks, 8 steps"),
        (break_down(trace), "<th>compute</th>"),
    ):
        assert text in each._repr_html_()
        assert each._repr_html_() == simdist.html_of(each)
    assert "epochs: time" in simdist.compare(STALLS, n_seeds=1)._repr_html_()


def test_comparison_goes_on_where_it_was_interrupted(rows) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if label == "local-4":
            raise StoppedError

    measured: list[ScheduleTimes] = []
    with pytest.raises(StoppedError):
        simdist.compare(JOB, n_seeds=3, measured=measured, progress=stop)
    assert [each.label for each in measured] == ["sync"]
    begun: list[str] = []
    again = simdist.compare(JOB, n_seeds=3, measured=measured, progress=lambda label, *_: begun.append(label))
    assert again == rows
    assert set(begun) == {"local-4"}


@pytest.mark.parametrize("other", [{"n_seeds": 2}, {"scenario": JOB.changed(steps=9)}])
def test_times_of_another_comparison_are_refused(other) -> None:
    measured: list[ScheduleTimes] = []
    simdist.compare(JOB, n_seeds=3, measured=measured)
    with pytest.raises(ScenarioError, match="measured has times of sync in another scenario or with other seeds"):
        simdist.compare(**{"scenario": JOB, "n_seeds": 3, "measured": measured} | other)


def test_actors_run_beside_every_schedule_and_seed() -> None:
    started = []

    def watch(env, cluster):
        started.append(cluster)
        yield env.timeout(0.001)

    rows = simdist.compare(JOB, n_seeds=2, actors=[watch])
    assert len(started) == 4
    assert {row.engine for row in rows} == {"des"}
    assert [row.step_s for row in rows] == pytest.approx([row.step_s for row in simdist.compare(JOB, n_seeds=2)])
    with pytest.raises(UnsupportedError, match="need every event"):
        simdist.compare(JOB, n_seeds=2, engine="fast", actors=[watch])


def test_actor_that_fails_ends_the_comparison() -> None:
    def failing(env, cluster):
        yield env.timeout(0.001)
        raise ValueError("oh")

    with pytest.raises(RunError, match="actor failing failed"):
        simdist.compare(JOB, n_seeds=1, actors=[failing])


def test_sweep_from_a_mapping_names_the_path_of_what_is_wrong() -> None:
    with pytest.raises(ScenarioError, match=r"^sweep: vary\.cluster\.nods: there is no key 'nods' in cluster"):
        load_sweep({"scenario": JOB, "vary": {"cluster.nods": [1, 2]}})


def test_a_varied_period_is_one_line_of_its_kind_with_a_tick_at_each_value(tmp_path: Path) -> None:
    job = JOB.changed(schedules=["sync", {"kind": "local_sgd", "period": 2}])
    sweep = load_sweep({"scenario": job, "vary": {"schedules[1].period": [2, 4, 8]}, "seeds": 1})
    sweeps.sweep(sweep, tmp_path, workers=InProcess())
    (axes,) = read_results([tmp_path]).plot().axes
    assert [line.get_label() for line in axes.get_lines()] == ["sync", "local_sgd"]
    assert axes.get_lines()[1].get_xdata().tolist() == [2, 4, 8]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8"]


def test_states_of_many_ranks_are_drawn_without_gaps() -> None:
    trace = simdist.simulate(JOB.changed({"cluster.nodes": 32, "steps": 4}), label="sync")
    (axes,) = break_down(trace).plot().axes
    assert axes.get_xlim() == pytest.approx((-0.6, 127.6))
    stairs = [each for each in axes.patches if hasattr(each, "get_data")]
    assert len(stairs) >= 2
    assert len(stairs[0].get_data().values) == 128
    assert len(find_slowdown(trace, ranks_per_node=4).plot().axes) == 1


def test_each_study_of_the_page_is_shorter_than_40_lines() -> None:
    text = (ROOT / "docs" / "how-to" / "work-in-notebooks.md").read_text(encoding="utf-8")
    studies = text.split("\n## ")[2:4]
    assert [each.splitlines()[0] for each in studies] == [
        "Speed-up over straggler rate",
        "The breakdown of a step",
    ]
    for each in studies:
        for block in re.findall(r"```python\n(.*?)```", each, re.DOTALL):
            assert len(block.splitlines()) < 40
