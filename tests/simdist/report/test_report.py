import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from traces import plan_of, trace_of

from simdist.errors import RunError, ScenarioError, TraceError
from simdist.plan import AllReduce, Backward, Delay, Forward, Wait
from simdist.plan.group import Group
from simdist.report import save, speedup_figure, timeline_figure
from simdist.studies.comparison import Row
from simdist.traces.trace import Trace

FORWARD = Forward(("param",), ("loss",))
BACKWARD = Backward(("param", "loss"), "grad")
SYNC = Row("sync", 0.4, (0.39, 0.41), 1.0, (1.0, 1.0), 0.05, 0.05, 0.2, 0.0, 0.1, "fast", 20)
HSGD = Row("hsgd-4-32,8-64", 0.16, (0.15, 0.17), 2.5, (2.3, 2.7), 0.05, 0.01, 0.04, 0.0, 0.06, "fast", 20)


def texts(figure: Figure, panel: int) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].texts]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_bars_are_as_long_as_speedups():
    figure = speedup_figure([SYNC, HSGD], title="64 GPUs")
    assert [bar.get_width() for bar in figure.axes[0].containers[0]] == [1.0, 2.5]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["sync", "hsgd-4-32,8-64"]
    assert figure.axes[0].yaxis_inverted()
    assert figure.get_suptitle() == "64 GPUs"


def test_whiskers_span_the_confidence_interval():
    figure = speedup_figure([SYNC, HSGD], title="")
    (whiskers,) = (each for each in figure.axes[0].collections if isinstance(each, LineCollection))
    assert [segment[:, 0].tolist() for segment in whiskers.get_segments()] == [pytest.approx([2.3, 2.7])]
    assert texts(figure, 0) == ["1.00", "2.50 ± 0.20"]
    assert figure.axes[0].get_xlabel() == "speed-up over sync, 95 % interval over seeds"
    whiskers = [each for each in figure.axes[1].collections if isinstance(each, LineCollection)]
    ends_ms = [segment[:, 0].tolist() for each in whiskers for segment in each.get_segments()]
    assert ends_ms == [pytest.approx([390, 410]), pytest.approx([150, 170])]


def test_one_seed_has_no_whiskers():
    rows = [dataclasses.replace(row, step_s_ci95=None, speedup_ci95=None, seeds=1) for row in (SYNC, HSGD)]
    figure = speedup_figure(rows, title="")
    assert not [*figure.axes[0].collections, *figure.axes[1].collections]
    assert texts(figure, 0) == ["1.00", "2.50"]
    assert figure.axes[0].get_xlabel() == "speed-up over sync"


def test_the_baseline_is_marked_at_1():
    (line,) = speedup_figure([SYNC, HSGD], title="").axes[0].get_lines()[-1:]
    assert line.get_xdata() == [1, 1]


def test_step_times_are_stacked_states_in_milliseconds():
    figure = speedup_figure([SYNC, HSGD], title="")
    groups = [group for group in figure.axes[1].containers if isinstance(group, BarContainer)]
    bars = {group.get_label(): list(group) for group in groups}
    assert list(bars) == ["compute", "exposed communication", "waiting for others", "held up by the host"]
    assert [bars[state][1].get_width() for state in bars] == pytest.approx([50, 10, 40, 60])
    assert [bars[state][1].get_x() for state in bars] == pytest.approx([0, 50, 60, 100])
    assert texts(figure, 1) == ["400 ms", "160 ms"]
    assert figure.axes[1].get_xlabel() == "ms per step, mean over ranks, 95 % interval over seeds"
    assert legend(figure) == list(bars)


def test_long_steps_are_in_seconds():
    figure = speedup_figure([dataclasses.replace(SYNC, step_s=12.34), HSGD], title="")
    assert texts(figure, 1) == ["12.3 s", "0.16 s"]


def test_no_rows_are_refused():
    with pytest.raises(ScenarioError, match="64 GPUs: no rows to draw"):
        speedup_figure([], title="64 GPUs")


FORMULA = r"$\frac{$"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_dollars_are_no_formulas(tmp_path: Path, suffix: str):
    rows = [dataclasses.replace(SYNC, schedule=FORMULA), dataclasses.replace(HSGD, schedule="$x$")]
    trace = straggler()
    trace = dataclasses.replace(trace, plan=dataclasses.replace(trace.plan, name=FORMULA))
    for name, figure in {"table": speedup_figure(rows, title=FORMULA), "line": timeline_figure(trace)}.items():
        save(figure, tmp_path / f"{name}{suffix}")
        drawn = [text for text in figure.findobj(Text) if "$" in text.get_text()]
        assert drawn
        assert not any(text.get_parse_math() for text in drawn)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_characters_that_the_font_lacks_are_drawn_without_warnings(tmp_path: Path, suffix: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(
            speedup_figure([dataclasses.replace(SYNC, schedule="同期 🚀 สวัสดี")], title="分散 \udcff"),
            tmp_path / f"a{suffix}",
        )


def test_long_names_are_shortened_in_their_middle(tmp_path: Path):
    label, short = "first" + 300 * "-" + "last", "first---------------…---------------last"
    long = [dataclasses.replace(row, schedule=name) for row, name in ((SYNC, label), (HSGD, label + HSGD.schedule))]
    figure = speedup_figure(long, title=label)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path / "a.png")
    shown = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert shown == [short, "first---------------…-lasthsgd-4-32,8-64"]
    assert figure.axes[0].get_xlabel() == "speed-up over first-----…-----last, 95 % interval over seeds"
    assert len(figure.get_suptitle()) == 110
    trace = straggler()
    figure = timeline_figure(dataclasses.replace(trace, plan=dataclasses.replace(trace.plan, name=label)))
    assert figure.axes[0].get_title("left") == f"{short}: step 0 of 1, all ranks"


def straggler(world_size: int = 2, n_steps: int = 1, late: int = 1) -> Trace:
    """Rank `late` sleeps 4 ms in every step of 10 ms; the others wait for it in the all-reduce."""
    step = (FORWARD, Wait("loss"), Delay("host"), BACKWARD, AllReduce("grad", Group(world_size)))
    delay = np.where(np.arange(world_size) == late, 4.0, 0.0)
    times = [
        (0 * delay, 0 * delay, 2 + 0 * delay),
        (2 + 0 * delay, 2 + 0 * delay, 2 + 0 * delay),
        (2 + 0 * delay, 2 + 0 * delay, 2 + delay),
        (2 + delay, 2 + delay, 5 + delay),
        (5 + delay, 9 + 0 * delay, 10 + 0 * delay),
    ]
    shifted = [
        tuple(((at + 10 * number) / 1e3).tolist() for at in triple) for number in range(n_steps) for triple in times
    ]
    return trace_of(plan_of(*[step] * n_steps, world_size=world_size), shifted)


def boxes(figure: Figure) -> dict[str, list[tuple[int, float, float]]]:
    """Return per label the band, left and right edge of what is drawn, rounded."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for collection in figure.axes[0].collections:
        if isinstance(collection, PolyCollection):
            corners = [path.vertices for path in collection.get_paths()]
            spans = [(round(box[:, 1].mean()), box[:, 0].min(), box[:, 0].max()) for box in corners]
            found[str(collection.get_label())] = [
                (band, round(left, 6), round(right, 6)) for band, left, right in spans
            ]
    return found


def test_a_timeline_shows_what_every_stream_did():
    drawn = boxes(timeline_figure(straggler()))
    assert drawn == {
        "forward": [(0, 0, 2), (1, 0, 2)],
        "host blocked": [(0, 0, 2), (1, 0, 2)],
        "injected delay": [(1, 2, 6)],
        "backward": [(0, 2, 5), (1, 6, 9)],
        "waiting for others": [(0, 5, 9)],
        "transfer": [(0, 9, 10), (1, 9, 10)],
    }


def test_lanes_of_a_band_do_not_overlap():
    collections = timeline_figure(straggler()).axes[0].collections
    edges = {
        collection.get_label(): (path.vertices[:, 1].min(), path.vertices[:, 1].max())
        for collection in collections
        if isinstance(collection, PolyCollection)
        for path in collection.get_paths()[:1]
    }
    host, compute, comm = edges["host blocked"], edges["forward"], edges["transfer"]
    assert -0.5 < host[0] < host[1] <= compute[0] < compute[1] <= comm[0] < comm[1] < 0.5


def test_a_timeline_marks_and_numbers_steps():
    figure = timeline_figure(straggler(n_steps=6), first_step=2, n_steps=3)
    (marks,) = (each for each in figure.axes[0].collections if isinstance(each, LineCollection))
    ends = sorted({round(float(segment[0, 0]), 6) for segment in marks.get_segments()})
    assert ends == [30, 40, 50]
    assert figure.axes[0].get_xlim() == pytest.approx((20, 50))
    assert [text for text in texts(figure, 0) if text.startswith("step")] == ["step 2", "step 3", "step 4"]
    assert figure.axes[0].get_title("left") == "by hand: steps 2 to 4 of 6, all ranks"
    assert figure.axes[0].get_xlabel() == "time since the start (ms)"


def test_fewer_steps_than_asked_for_are_drawn_if_there_are_no_more():
    title = timeline_figure(straggler(n_steps=2), first_step=1).axes[0].get_title("left")
    assert title == "by hand: step 1 of 2, all ranks"


def test_the_legend_explains_exactly_what_is_drawn():
    figure = timeline_figure(straggler())
    assert set(legend(figure)) == {*boxes(figure), "end of step"}


def test_of_many_ranks_the_late_ones_and_some_others_are_drawn():
    figure = timeline_figure(straggler(world_size=40, late=17))
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(shown) == 16
    assert {"rank 0", "rank 17", "rank 39"} <= set(shown)
    assert shown == sorted(shown, key=lambda name: int(name.split()[1]))
    expected = "by hand: step 0 of 1, 16 of 40 ranks (1 that others waited for most, 15 spread evenly)"
    assert figure.axes[0].get_title("left") == expected


def test_a_timeline_of_nothing_that_takes_time_can_be_drawn():
    figure = timeline_figure(trace_of(plan_of((FORWARD,), world_size=1), [(0.0, 0.0, 0.0)]))
    assert boxes(figure) == {}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"first_step": 2}, "4 steps from step 2: the trace has the steps 0 to 1"),
        ({"n_steps": 0}, "0 steps from step 0"),
    ],
)
def test_a_step_outside_of_the_trace_is_refused(choice, message):
    with pytest.raises(TraceError, match=message):
        timeline_figure(straggler(n_steps=2), **choice)


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_equal_figures_give_equal_files(tmp_path: Path, suffix: str, magic: bytes):
    for name in ("first", "second"):
        save(timeline_figure(straggler()), tmp_path / f"{name}{suffix}")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("first", "second"))
    assert first.startswith(magic)
    assert first == second


@pytest.mark.parametrize(
    ("name", "wrong"), [("a.gif", "'.gif' is no picture that can be written"), ("a", "needs a suffix")]
)
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str, wrong: str):
    with pytest.raises(ScenarioError, match=f"{wrong}; write e.g. a.png, .svg or .pdf"):
        save(speedup_figure([SYNC], title=""), tmp_path / name)


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(RunError, match=r"nowhere.a\.png: cannot be written \(No such file or directory\)"):
        save(speedup_figure([SYNC], title=""), tmp_path / "nowhere" / "a.png")


def test_figures_leave_no_trace_in_pyplot_and_matplotlib_is_imported_late():
    program = (
        "import sys, simdist.report as report\n"
        "assert 'matplotlib' not in sys.modules, 'imported early'\n"
        "from simdist.studies.comparison import Row\n"
        "report.speedup_figure([Row('sync', 1, None, 1, None, 1, 0, 0, 0, 0, 'fast', 1)], title='')\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
