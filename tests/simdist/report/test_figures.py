"""Pictures for notebooks: empty panels, and timelines of several schedules above each other."""

import numpy as np
import pytest
from engine_runs import simulate
from matplotlib.text import Text

from simdist.errors import ScenarioError, TraceError
from simdist.report import save
from simdist.report.figures import panels
from simdist.report.timeline import schedules_figure
from simdist.runs.building import build
from simdist.scenario import load
from simdist.traces.trace import Trace


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """Return two delays in two pairs, which synchronous SGD pays for twice and hierarchical SGD once."""
    hierarchical = {"kind": "hierarchical_sgd", "levels": {2: 2, 4: 4}, "intra_node_gradients": False}
    scenario = load("docs/examples/first.yaml").changed(
        cluster={"preset": "ideal", "nodes": 1},
        schedules=[{"kind": "sync"}, hierarchical],
        disturbances=[{"kind": "transient", "on": "host", "probability": 0.5, "delay": "200 ms"}],
        steps=4,
    )
    delays_s = np.zeros((1, 4, 4))
    delays_s[0, 0, 0] = delays_s[0, 1, 2] = 0.2
    built = [build(scenario, schedule) for schedule in scenario.schedules]
    return {each.schedule.name: simulate(each.plan, each.costs, {"host": delays_s}) for each in built}


def test_panels_are_as_wide_as_a_page_and_come_row_by_row() -> None:
    figure, axes = panels(3, n_rows=2, height_in=2.0)
    assert tuple(figure.get_size_inches()) == (9, 4)
    assert [(each.get_subplotspec().rowspan.start, each.get_subplotspec().colspan.start) for each in axes] == [
        (row, column) for row in range(2) for column in range(3)
    ]


def test_panels_share_an_axis_when_asked() -> None:
    _, (left, right) = panels(2, sharey=True)
    left.set(xlim=(0, 7), ylim=(0, 5))
    assert right.get_ylim() == (0, 5)
    assert right.get_xlim() == (0, 1)


@pytest.mark.parametrize("size", [{"n_columns": 0}, {"n_rows": 0}, {"height_in": 0.0}, {"height_in": float("nan")}])
def test_no_panels_are_refused(size: dict[str, float]) -> None:
    with pytest.raises(ScenarioError, match="each must be positive"):
        panels(**size)


def test_schedules_stand_above_each_other_on_one_scale_that_the_longest_fills(traces: dict[str, Trace]) -> None:
    figure = schedules_figure({"slow": traces["sync"], "fast": traces["hsgd-2-2,4-4"]}, ranks=range(4))
    assert [axes.get_title("left") for axes in figure.axes] == ["slow", "fast"]
    longest_ms = 1e3 * traces["sync"].makespan_s
    assert longest_ms > 1e3 * traces["hsgd-2-2,4-4"].makespan_s + 190
    for axes in figure.axes:
        assert axes.get_xlim() == pytest.approx((0, longest_ms))
        assert axes.get_xlabel() == "time since the start (ms)"


def test_only_the_chosen_ranks_and_steps_are_drawn(traces: dict[str, Trace]) -> None:
    (axes,) = schedules_figure({"sync": traces["sync"]}, ranks=[2, 0], first_step=1, n_steps=2).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 2", "rank 0"]
    assert [text.get_text() for text in axes.texts if "step" in text.get_text()] == ["step 1", "step 2"]


def test_letters_of_stacked_timelines_are_legible_and_the_legend_is_inside(traces: dict[str, Trace], tmp_path) -> None:
    figure = schedules_figure(traces, ranks=range(4))
    save(figure, tmp_path / "figure.png")
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert min(text.get_fontsize() for text in shown) >= 9
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {"injected delay", "forward", "end of step"}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"ranks": [4]}, "sync: rank 4 is not in the trace; choose among 0 to 3"),
        ({"ranks": [-1]}, "sync: rank -1 is not in the trace; choose among 0 to 3"),
        ({"ranks": []}, "sync: no rank is chosen; choose among 0 to 3"),
        ({"ranks": [0], "n_steps": 5}, "sync: steps 0 to 4; the trace has 0 to 3"),
        ({"ranks": [0], "n_steps": 0}, "sync: steps 0 to -1; the trace has 0 to 3"),
        ({"ranks": [0], "first_step": -1, "n_steps": 2}, "sync: steps -1 to 0; the trace has 0 to 3"),
    ],
)
def test_ranks_and_steps_outside_of_a_trace_are_refused(
    traces: dict[str, Trace], choice: dict[str, object], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        schedules_figure({"sync": traces["sync"]}, **choice)


def test_no_traces_are_refused() -> None:
    with pytest.raises(TraceError, match="no traces to draw; give at least one"):
        schedules_figure({}, ranks=[0])
