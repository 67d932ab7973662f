"""The memory of a device on the page: shown where schedules shard, with the numbers of `compare`."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from commandline import call
from html_pages import page_of

from simdist.report.page.sections import memory as section
from simdist.settings.units import format_nbytes

SCENARIO = """
cluster: {{nodes: 1, gpus_per_node: 4, fabric: ideal, network: ideal, device: {{memory_size: {limit}}}}}
workload:
  tensors: [{{name: h.0.w, count: 1000000}}, {{name: h.1.w, count: 1000000}}, {{name: h.2.w, count: 1000000}}]
  optimizer: adamw
  activation_size: 0 B
  batch_size: 1
  forward: 30 ms
  backward: 60 ms
steps: 3
schedules: [{schedules}]
"""
SHARDED = "sync, {kind: fsdp}, {kind: fsdp, reshard_after_forward: false}"


def made(tmp_path: Path, capsys, *, limit: str, schedules: str) -> Path:
    """Return a page of simulated runs."""
    (tmp_path / "job.yaml").write_text(SCENARIO.format(limit=limit, schedules=schedules))
    assert call(capsys, "simulate", tmp_path / "job.yaml", "-o", tmp_path / "runs").code == 0
    assert call(capsys, "report", tmp_path / "runs", "-o", tmp_path / "page.html").code == 0
    return tmp_path / "page.html"


def test_peaks_are_those_of_compare_by_what_they_are_for(tmp_path: Path, capsys) -> None:
    path = made(tmp_path, capsys, limit="40 MB", schedules=SHARDED)
    rows = page_of(path).rows("Most memory in use, when that is, and what for")
    compared = json.loads(call(capsys, "compare", tmp_path / "job.yaml", "--json").out)["rows"]
    assert list(rows) == [row["schedule"] for row in compared] == ["sync", "fsdp", "fsdp-keep"]
    for row in compared:
        most, _, parameters, optimizer = rows[row["schedule"]][:4]
        assert most == format_nbytes(row["memory_nbytes"])
        assert parameters == format_nbytes(row["memory_of_nbytes"]["parameters"])
        assert optimizer == format_nbytes(row["memory_of_nbytes"]["optimizer"])
    text = path.read_text()
    assert "sync: at most 48 MB, which does not fit: a device has 40 MB." in text
    assert f"fsdp: at most {format_nbytes(compared[1]['memory_nbytes'])}, and a device has 40 MB." in text


def test_areas_are_stacked_up_to_the_peak(tmp_path: Path, capsys) -> None:
    text = made(tmp_path, capsys, limit="80 GB", schedules="{kind: fsdp}").read_text()
    heights = [
        [float(corner.split(",")[1]) for corner in part.split('points="')[1].split('"')[0].split()]
        for part in text.split("<polygon ")[1:]
    ]
    assert min(map(min, heights)) == 0  # the top of the picture
    assert max(map(max, heights)) == section._HEIGHT  # its bottom
    for below, above in pairwise(heights):
        n = len(below) // 2
        assert below[:n] == above[n:][::-1]  # an area stands on the one before


def test_a_short_peak_between_two_drawn_moments_is_drawn(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(section, "_MOMENTS", 3)
    text = made(tmp_path, capsys, limit="80 GB", schedules="{kind: fsdp}").read_text()
    corners = [part.split('points="')[1].split('"')[0].split() for part in text.split("<polygon ")[1:]]
    assert all(len(each) <= 4 * (3 + 1) for each in corners)
    assert min(float(corner.split(",")[1]) for each in corners for corner in each) == 0


def test_a_peak_without_activations_is_not_said_to_fit(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "SCENARIO", SCENARIO.replace("  activation_size: 0 B\n", ""))
    text = made(tmp_path, capsys, limit="40 MB", schedules=SHARDED).read_text()
    assert "sync: at least 48 MB, which does not fit: a device has 40 MB." in text
    assert "a device has 40 MB: whether it fits is not known, memory is counted without activations: write" in text


@pytest.mark.parametrize(("limit", "is_shown"), [("80 GB", False), ("40 MB", True)])
def test_memory_of_whole_models_is_shown_only_if_one_does_not_fit(
    tmp_path: Path, capsys, limit: str, is_shown: bool
) -> None:
    text = made(tmp_path, capsys, limit=limit, schedules="sync").read_text()
    assert ('id="memory"' in text) == is_shown
