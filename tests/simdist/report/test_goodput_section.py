"""The section on failures of the page of runs: there if the scenario has failures, with the numbers of the study."""

from pathlib import Path

import numpy as np
import pytest
from commandline import call, write

from simdist.report.goodput import goodput_figure
from simdist.scenario import load, loads
from simdist.studies.goodput import goodput

JOB = """\
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal, storage: {latency: 0 s, bandwidth: 1 GB/s}}
workload: {tensors: [{name: all, count: 9}], batch_size: 1, forward: 1 s}
steps: 4
schedules: [sync, local-2]
"""
FAILING = """\
train_for: 10 days
checkpoint: {every: 600, size: 5 GB}
failures: {causes: [{cause: gpu, of: gpu, rate: 1 per day, effect: process}]}
"""


@pytest.fixture
def page(tmp_path, capsys):
    def of(text: str):
        path = write(tmp_path / "job.yaml", text)
        assert call(capsys, "simulate", path, "-o", tmp_path / "runs").code == 0
        answer = call(capsys, "report", tmp_path / "runs", "-o", tmp_path / "page.html")
        assert answer.code == 0, answer.err
        return (tmp_path / "page.html").read_text(encoding="utf-8"), path

    return of


def test_runs_whose_job_fails_are_shown_with_their_goodput(page) -> None:
    text, path = page(JOB + FAILING)
    assert 'id="goodput"' in text
    for row in goodput(load(Path(path))):
        assert f"{100 * row.goodput:.1f} ±" in text
    assert "what failures took" in text


def test_runs_whose_job_does_not_fail_have_no_such_section(page) -> None:
    text, _ = page(JOB)
    assert 'id="goodput"' not in text


UNCERTAIN = """\
uncertain:
  failures.causes[0].rate: {from: 0.5 per day, to: 3 per day, source: a log}
  failures.recovery.start: {from: 1 min, to: 30 min, source: a log}
"""


def test_the_picture_draws_what_is_uncertain() -> None:
    """Whiskers at the bars, the possible rates, and a band along each curve, as wide as the recovery allows."""
    job = JOB.replace("[sync, local-2]", "[sync]")
    failing = FAILING.replace("effect: process}]}", "effect: process}], recovery: {start: 10 min}}")
    study = goodput(loads(job + failing + UNCERTAIN), n_seeds=2)
    bars, curves = goodput_figure(study).axes
    (whisker,) = bars.lines
    assert whisker.get_xdata() == pytest.approx([100 - 100 * end for end in study[0].goodput_range90])
    rates = curves.patches[0].get_extents().transformed(curves.transData.inverted())
    assert sorted([rates.x0, rates.x1]) == pytest.approx(study.between_range_s)
    assert len(curves.collections) == len(study)
    for curve in study.curves:
        for point in curve.points:
            low, high = point.goodput_range90
            assert 0 <= low < point.goodput < high <= 1
    widths = [np.ptp(point.goodput_range90) for point in study.curves[0].points]
    assert widths[0] < widths[3] < widths[5]
    calm = goodput(loads(job + FAILING), n_seeds=2)
    bars, curves = goodput_figure(calm).axes
    assert not bars.lines
    assert not curves.patches
    assert "goodput_range90" not in calm.curves[0].points[0].record()


RATES = ("1 per day", "0.0001 % per year")  # many failures, and none


@pytest.mark.parametrize("rate", RATES)
def test_the_picture_of_goodput_has_its_legends_beside_its_axes_and_shares_below_100_percent(rate) -> None:
    study = goodput(loads(JOB + FAILING.replace("1 per day", rate)), n_seeds=2)
    figure = goodput_figure(study)
    figure.draw_without_rendering()
    legends = [legend.get_window_extent() for legend in figure.legends]
    assert len(legends) == 2
    for axes in figure.axes:
        assert not any(axes.get_tightbbox().overlaps(legend) for legend in legends)
    lost, curves = figure.axes
    assert lost.get_xlim()[1] >= 0.1
    assert curves.get_ylim()[1] <= 100.2
    assert any("as stated" in tick.get_text() for tick in curves.get_xticklabels())
