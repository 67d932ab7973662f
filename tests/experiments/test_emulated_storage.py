"""Reading a data set from the file server of the emulated cluster: as planned, through outages, and as recorded."""

import sys
from functools import cache
from pathlib import Path
from statistics import median

import emulated_ranks
import numpy as np
import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "emulated_cluster"
sys.path.insert(0, str(FOLDER))

import network  # noqa: E402
import nfs  # noqa: E402
import run  # noqa: E402
import storage  # noqa: E402
import storage_run  # noqa: E402
from data_set import SampleSet, generate  # noqa: E402
from engine_runs import simulate  # noqa: E402

from simdist.caching import epoch_order  # noqa: E402
from simdist.cost import price  # noqa: E402
from simdist.plan import LEVELS  # noqa: E402
from simdist.report import insert_tables  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.studies.epochs import find_epochs  # noqa: E402
from simdist.traces.reads import differences, expected  # noqa: E402

REASON = nfs.missing()
needs_nfs = pytest.mark.skipif(REASON is not None, reason=f"no NFS server here: {REASON}")
each_shape = pytest.mark.parametrize("shape", storage.SHAPES, ids=lambda shape: shape.name)
SAMPLE_NBYTES = 3 * 37 * 37
WATCHED = f"""\
cluster:
  nodes: 2
  gpus_per_node: 1
  fabric: ideal
  network: ideal
  storage: {{latency: 0 s, bandwidth: 1 Mbit/s}}
  disk: {{read: 1 GB/s, write: 1 GB/s}}
  memory: {{bandwidth: 8 GB/s}}
workload: {{tensors: [{{name: weight, count: 4}}], batch_size: 4, forward: 1 ms, sample_size: {SAMPLE_NBYTES} B}}
steps: 2 epochs
input:
  source: storage
  prefetch: 2
  readers: 2
  data: {{samples: 32, file_size: {SAMPLE_NBYTES} B, policy: datacache}}
schedules: [{{kind: sync}}]
"""


@needs_nfs
def test_levels_give_as_many_samples_as_predicted(tmp_path):
    (result,) = storage_run.run_tiny(tmp_path)
    assert result.differences == ()
    cold, warm = result.epochs
    assert cold.measured_hits == cold.predicted_hits == (0, 0, 0, 32)
    assert warm.measured_hits == warm.predicted_hits
    assert sum(warm.measured_hits[:2]) == 32
    assert not list(tmp_path.rglob("cache"))


@needs_nfs
def test_every_sample_is_seen_once_though_the_server_is_away_for_a_while(tmp_path, capsys, monkeypatch):
    """A model reads the number that each picture shows."""
    monkeypatch.setattr(network, "launch", emulated_ranks.launch)
    files, path = tmp_path / "files", tmp_path / "runs" / "watched"
    generate(files, SampleSet(n_samples=32, nbytes=SAMPLE_NBYTES, sigma=0.0, format="raw", n_classes=32))
    scenario = loads(WATCHED)
    plan = build(scenario, scenario.schedules[0]).plan
    run_directory.write(path, scenario, plan, delays(scenario))
    storage_run.read_through_outage(
        *(path, storage.Shape(2, 1, "100 Mbit/s", "1 Mbit/s"), files),
        away_s=1.0,
        n_loads_before=1,
        options=["--program", "data_runs:job", "--backend", "gloo", "--device", "cpu"],
    )
    words = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("saw")]
    assert [each[1:5] for each in words] == [each[6:] for each in words]  # the numbers are those of the labels
    seen = np.array([each[1:5] for each in words], dtype=int).reshape(2, 8, 4).swapaxes(0, 1)
    assert np.array_equal(seen, np.concatenate([epoch_order(plan.dataset, epoch, 2) for epoch in range(2)]))
    found = run_directory.read_reads(path / run_directory.REAL_READS, plan=plan)
    assert differences(found, expected(plan)) == ()


@cache
def recorded(shape):
    return storage.recorded(shape)


@each_shape
def test_simulator_still_predicts_what_was_recorded(shape):
    calibrated = storage.recorded_calibration()
    for case, result in zip(storage.CASES[shape], recorded(shape), strict=True):
        scenario = storage.scenario_of(case, shape, calibrated)
        plan = build(scenario, scenario.schedules[0]).plan
        predicted = find_epochs(simulate(plan, price(plan, scenario.cluster, scenario.workload), delays(scenario)))
        assert result.case == case.name
        assert [each.predicted_s for each in result.epochs] == pytest.approx(
            [each.seconds for each in predicted.epochs]
        )
        if not case.sleeps:
            assert [each.predicted_hits for each in result.epochs] == [each.n_samples for each in predicted.epochs]


@each_shape
def test_epochs_are_predicted_within_ten_per_cent_in_the_median_of_each_policy(shape):
    for result in recorded(shape):
        assert len(result.epochs) == storage.N_EPOCHS
        assert median(abs(epoch.error) for epoch in result.epochs) <= 0.10, result.case


@each_shape
def test_counts_of_samples_from_each_level_were_identical(shape):
    assert {result.case: result.differences for result in recorded(shape) if result.differences} == {}
    assert {result.case for result in recorded(shape)} == {case.name for case in storage.CASES[shape]}


@each_shape
def test_every_level_was_read(shape):
    hits = np.sum([epoch.measured_hits for result in recorded(shape) for epoch in result.epochs], axis=0)
    assert len(hits) == len(LEVELS)
    assert hits.min() > 0


def test_an_outage_delayed_the_first_epoch_only_and_changed_no_count():
    outage = storage.recorded_outage()
    later_s = [epoch.measured_s - usual_s for epoch, usual_s in zip(outage.result.epochs, outage.usual_s, strict=True)]
    assert outage.result.differences == ()
    assert outage.away_s == 10
    assert later_s[0] > 0.5 * outage.away_s
    assert max(later_s[1:]) < 0.1 * outage.away_s


def test_page_shows_what_was_recorded():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    tables = storage_run.recorded_tables()
    assert insert_tables(page, tables) == page


def test_where_there_is_no_nfs_server_it_says_why(capsys, monkeypatch):
    monkeypatch.setattr(nfs, "missing", lambda: "no ganesha.nfsd")
    monkeypatch.setattr(sys, "argv", ["run.py", "--study", "storage"])
    assert run.main() == 0
    assert capsys.readouterr().out == "skipped: no ganesha.nfsd\n"


def test_names_of_cases_tell_them_apart():
    for cases in storage.CASES.values():
        assert len({case.name for case in cases}) == len({case.folder for case in cases}) == len(cases)
    assert storage.Case("files", "warm", "disk", "lru", prefetch=1, readers=1).name == (
        "files, warm, small disk lru, prefetch 1, 1 reader"
    )
