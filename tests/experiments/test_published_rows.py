"""Published rows: the page, the doubts and the rows that were written are those of the code."""

import json
import math
import sys

import numpy as np
import pytest
from scripts import ROOT, load_script

from simdist.report import insert_tables

HERE = ROOT / "experiments" / "published_rows"
sys.path.insert(0, str(HERE))
run = load_script(HERE / "run.py")
AGAIN = "predictions have changed: python experiments/published_rows/run.py --write"


def test_page_shows_the_tables_of_the_code():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, run.tables()) == page


def test_doubts_are_those_of_the_rows():
    written = json.loads(run.DOUBTS.read_text(encoding="utf-8"))
    again = json.loads(run.dumped(run.doubts_document(run.saved())))
    assert again.keys() == written.keys()
    for kind, classes in written["training"].items():
        for name, entry in classes.items():
            assert np.allclose(entry["logs"], again["training"][kind][name]["logs"], atol=2e-4)
    for name, entry in written["batch"]["classes"].items():
        assert np.allclose(entry["logs"], again["batch"]["classes"][name]["logs"], atol=2e-4), name


@pytest.mark.parametrize("every", [41])
def test_rows_are_predicted_as_they_were_written(every):
    written = {(line.family, line.name, line.measured_s): line for line in run.saved()}
    training = [run.of_training(each) for each in list(run.published.training_rows())[::every]]
    collectives = [run.of_collective(each) for each in list(run.published.collective_rows())[::every]]
    reading = [run.of_storage(each) for each in list(run.storages.rows())[::11]]
    for line in (*training, *collectives, *reading):
        found = [each for each in run.saved() if (each.family, each.name) == (line.family, line.name)]
        assert found, AGAIN
        assert any(math.isclose(each.simulated_s, line.simulated_s, rel_tol=1e-4) for each in found), AGAIN
    assert written


def test_intervals_of_families_that_are_left_out_hold_nine_rows_in_ten_of_training():
    training = [line for line in run.saved() if run.is_training(line)]
    assert 0.85 <= sum(line.is_inside for line in training) / len(training) <= 0.95


def test_intervals_of_batch_sizes_hold_nine_steps_in_ten_of_models_that_are_left_out():
    batches = run.batches
    for way in (batches.ONE, batches.TWO, batches.ONE + batches.SMALLER, batches.TWO + batches.SMALLER):
        inside = [
            low <= each.log <= high
            for each in batches.all_errors()
            if each.classes == (way,)
            for low, high in [batches.ends(each.family, way, batches.PLACES[way][each.nbytes])]
        ]
        assert 0.85 <= sum(inside) / len(inside) <= 0.97, way


def test_intervals_of_storages_that_are_left_out_hold_most_steps_that_read_from_them():
    reading = [line for line in run.saved() if line.kinds in run.estimate.STORAGE]
    assert 0.85 <= sum(line.is_inside for line in reading) / len(reading) <= 0.95
    cached = [line for line in reading if line.family == run.storages.CACHED]
    assert len(cached) == 2
    assert not any(line.is_inside or list(line.residuals) for line in cached)


def test_a_step_that_reads_is_limited_by_storage_only_if_it_takes_longer_than_computing():
    rows = {each.name: each for each in run.storages.rows() if each.family.startswith("MLPerf, 6500")}
    found = {
        name: run.of_storage(rows[name]).kinds
        for name in ("unet3d-h100, 1 accelerators", "resnet50-h100, 37 accelerators")
    }
    assert list(found.values()) == ["input", "storage"]


def test_clear_verdicts_are_right():
    for with_host, least in ((False, 0.94), (True, 0.96)):
        found = [each for each in run.saved_decisions() if each.with_host == with_host]
        clear = [each for each in found if each.is_clear]
        assert len(clear) / len(found) >= 0.6
        assert sum(each.is_right for each in clear) / len(clear) > least


def test_a_class_with_one_family_resembles_the_kind():
    residual = run.Residual
    rows = [residual("a", "machine", ("new",), 0.0), residual("b", "machine", ("old",), 1.0)] * 5
    assert run.estimate.distribution(rows, "new").mean() == pytest.approx(0.5)
    rows += [residual("c", "machine", ("new",), 0.0)]
    assert run.estimate.distribution(rows, "new").mean() < 0.45


def test_the_hosts_time_per_call_is_what_a_program_that_waits_adds():
    """These are the errors that docs/how-to/describe-your-cluster.md states."""
    waits = [line for line in run.saved() if line.name.endswith("PyTorch waits") and line.n_gpus <= 8]
    errors = {
        name: max(abs(line.error(line.simulated_s)) for line in waits if line.family.startswith(name))
        for name in ("8 H200", "4 H100", "8 B200")
    }
    assert errors["8 H200"] <= 0.165
    assert errors["4 H100"] <= 0.165
    assert errors["8 B200"] <= 0.285
    queued = {line.nbytes: line for line in run.saved() if line.name.endswith("queued by PyTorch")}
    for line in waits:
        if line.family.startswith("8 H200") and line.nbytes <= 2**24:
            assert 17e-6 < line.measured_s - queued[line.nbytes].measured_s < 30e-6


def test_intervals_of_collectives_that_are_left_out_hold_nine_rows_in_ten_in_each_size():
    for title, widest in (("collectives below 64 KiB", 0.35), ("64 KiB to 64 MiB", 0.35), ("64 MiB and more", 0.2)):
        found = [line for line in run.saved() if line.nbytes and run.group(line) == title]
        assert sum(line.is_inside for line in found) / len(found) >= 0.85
        assert np.median([line.width for line in found]) <= widest


def test_no_doubt_multiplies_the_hosts_time_that_has_a_range():
    """All-reduces that waited have narrower intervals than they would, if the host's time were a part of the links."""
    waits = [each for each in run.published.collective_rows() if each.how == "PyTorch waits" and each.n_gpus == 8]
    row = min(waits, key=lambda each: each.nbytes)
    cluster = run.predict.cluster_of(row)
    at_ends = [run.predict.ranged_overhead_s(cluster, {"cluster.collectives.overhead": at}) for at in (0.0, 1.0)]
    assert at_ends == [pytest.approx(22.5e-6), pytest.approx(32.5e-6)]
    line = run.of_collective(row)
    doubts = json.loads(run.DOUBTS.read_text(encoding="utf-8"))
    low_s, high_s = run._of_collective(row, line, doubts)
    assert at_ends[0] < low_s
    assert high_s < at_ends[1] + 1.25 * (line.simulated_s - 27.5e-6)
