"""An answer has the same remarks, word for word, from the command, in Python, in sweeps, in notebooks and on pages."""

import html
import json
import re
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import call

import simdist
from simdist import sweeps
from simdist.errors import SimdistWarning
from simdist.report.page.pages import sweep_page
from simdist.report.page.sweep_model import read_sweep_report
from simdist.scenario.fields import find_field, parse_path
from simdist.studies.remarks import Remark, remarks_of
from simdist.studies.tolerable_rate import tolerances
from simdist.sweeps import InProcess

NETWORK = {"latency": "25 us", "bandwidth": "25 Gbit/s", "efficiency": 0.8}
JOB: dict[str, Any] = {
    "name": "job",
    "cluster": {"nodes": 2, "gpus_per_node": 2, "fabric": "ideal", "network": NETWORK},
    "workload": {"preset": "resnet50", "forward": "30 ms", "backward": "60 ms"},
    "steps": 8,
    "schedules": ["sync", "local-4"],
}
RARE = {"kind": "transient", "probability": "5%", "delay": "1 s"}
SHARDED = {
    "cluster.device": {"memory_size": "100 MB"},
    "schedules": ["sync", {"kind": "fsdp"}],
    "workload": {
        "tensors": [{"name": "first", "count": 1000, "flops": 1000}, {"name": "last", "count": 1000, "flops": 1000}],
        "batch_size": 1,
        "forward": "30 ms",
        "backward": "60 ms",
        "optimizer": "adamw",
    },
}
#: What is changed of a job, and how one of its remarks begins; nothing if there is none.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "sound": ({}, ""),
    "seed": ({"seed": 3}, "seed has no effect"),
    "never averages": ({"schedules": ["sync", "local-16"]}, "schedules[1] (local-16) never averages"),
    "hierarchy": ({"schedules": ["sync", "hsgd-2-2,16-world"]}, "schedules[1] (hsgd-2-2,16-world) never"),
    "unstated": ({"cluster.network.efficiency": None}, "cluster.network.efficiency is not stated"),
    "bits": ({"cluster.network.bandwidth": "200 GB/s"}, "cluster.network.bandwidth of 200 GB/s is 1600 Gbit/s"),
    "no card": ({"cluster.network.bandwidth": "7 GB/s"}, ""),
    "fabric": ({"cluster.fabric": {"latency": "5 us", "bandwidth": "1 Gbit/s"}}, "cluster.fabric.bandwidth is"),
    "unit of time": ({"workload.forward": "30 s"}, "workload.forward of 30 s does not fit its FLOPs"),
    "few seeds": ({"disturbances": [RARE]}, "2 seeds are too few to know the times of"),
    "rare": ({"disturbances": [RARE | {"probability": "0.001%"}]}, "no delay of disturbances[0] fell into these runs"),
    "heavy": (
        {"disturbances": [{"kind": "heavy_tail", "shape": 1.5, "scale": "10 ms"}]},
        "the delays of disturbances[0] have no variance",
    ),
    "no mean": (
        {"disturbances": [{"kind": "heavy_tail", "shape": 1.0, "scale": "10 ms"}]},
        "the delays of disturbances[0] have no mean",
    ),
    "bursts": (
        {"disturbances": [{"kind": "bursts", "enter": "0.01%", "leave": "20%", "delay": "200 ms"}]},
        "no delay of disturbances[0] fell into these runs",
    ),
    "few periods": (
        {"schedules": ["sync", {"kind": "local_sgd", "period": 4, "overlap_steps": 2}]},
        "local-4-overlap2: the run has 1.2 periods",
    ),
    "other ranks": (
        {"disturbances": [{"kind": "recorded", "file": "RECORDING"}], "cluster.nodes": 4},
        "disturbances[0]:",
    ),
    "never delays": ({"disturbances": [RARE | {"delay": "0 s"}]}, "disturbances[0] has no effect: it never delays"),
    "on io": ({"disturbances": [RARE | {"on": "io"}]}, "disturbances[0] has no effect: it is on io"),
    "backup": ({"schedules": ["sync", "backup-1"]}, "backup-1 uses the gradients of 75.0 % of the batches"),
    "powersgd": ({"schedules": ["sync", "powersgd-4"]}, "cluster.device.orthonormalize is not stated"),
    "host": ({"host": {"run_ahead_steps": 20}}, "host.run_ahead_steps has no effect: with 8 steps"),
    "input": ({"input": {"prefetch": 4}}, "input.prefetch has no effect"),
    "readers": ({"input": {"readers": 2, "decode_workers": 2}}, "input.readers has no effect"),
    "doubts": ({"doubts": ["rank 3 was traced twice"]}, "rank 3 was traced twice"),
    "checkpoints": (
        {
            "cluster.disk": {"read": "1 GB/s", "write": "1 GB/s"},
            "checkpoint": {"every": "500 ms", "size": "10 MB", "to": "disk"},
        },
        "checkpoint: every 500 ms is every",
    ),
    "memory": (SHARDED, "memory is counted without activations"),
    "recorded": ({"disturbances": [{"kind": "recorded", "file": "RECORDING"}]}, "disturbances[0]: recording.npz"),
    "two": ({"seed": 2, "schedules": ["local-16", "sync"], "cluster.network.efficiency": None}, "seed has no effect"),
}


def job(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the scenario of a case, as a file in a folder could have it."""
    found = deepcopy(JOB)
    for path, value in changes.items():
        *above, last = path.split(".")
        here = found
        for key in above:
            here = here[key]
        if value is None:
            del here[last]
        else:
            here[last] = value
    np.savez(folder / "recording.npz", np.eye(8, 6) / 10)
    text = json.dumps(found).replace("RECORDING", str(folder / "recording.npz"))
    return dict(json.loads(text))


def kinds_texts_places(remarks: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Return remarks, in an order that does not depend on the door."""
    documents = (each.document() if isinstance(each, Remark) else each for each in remarks)
    return sorted((each["kind"], each["text"], each["place"]) for each in documents)


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("case", CASES)
def test_remarks_are_the_same_in_every_door(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, begin = CASES[case]
    scenario = job(changes, tmp_path)
    path = tmp_path / "job.json.yaml"
    path.write_text(json.dumps(scenario))
    rows = simdist.compare(scenario, n_seeds=2)
    wanted = kinds_texts_places(rows.remarks)
    if begin:
        assert any(text.startswith(begin) for _, text, _ in wanted), wanted
    assert kinds_texts_places(rows.frame().attrs["remarks"]) == wanted
    as_json = json.loads(call(capsys, "compare", path, "--seeds", "2", "--json").out)
    assert kinds_texts_places(as_json["remarks"]) == wanted
    printed = call(capsys, "compare", path, "--seeds", "2")
    notebook = html.unescape(rows._repr_html_())
    for each in rows.remarks:
        assert (f"{path}: {each}\n" if each.is_of_inputs else flat(f"{each}.")) in (
            printed.err if each.is_of_inputs else flat(printed.out)
        )
        assert f"{each}." in notebook
        assert str(each) in repr(rows)
    for base in (simdist.load(scenario), scenario):
        sweep = {"scenario": base, "vary": {"steps": [scenario["steps"]]}, "seeds": 2}
        swept = sweeps.sweep(sweeps.load(sweep), tmp_path / "out", workers=InProcess())
        table = sweeps.read_results([tmp_path / "out"])
        assert kinds_texts_places(table.remarks) == wanted
        assert set(swept.remarks) <= set(table.remarks)
        assert kinds_texts_places(table.frame().attrs["remarks"]) == wanted
    pages = (
        html.unescape(sweep_page(read_sweep_report(tmp_path / "out", baseline=None))),
        html.unescape(table._repr_html_()),
    )
    assert all(f"{text}." in page for _, text, _ in wanted for page in pages)


@pytest.mark.parametrize("case", CASES)
def test_place_of_a_remark_on_a_setting_is_its_path(case: str, tmp_path: Path) -> None:
    scenario = simdist.load(job(CASES[case][0], tmp_path))
    for each in remarks_of(scenario):
        if each.place and each.place not in ("seed", "checkpoint"):
            find_field(scenario, parse_path(each.place))
        assert bool(each.place) != (each.text in scenario.doubts)


def test_remarks_of_points_of_a_sweep_name_their_points(tmp_path: Path) -> None:
    sweep = {"scenario": JOB | {"seed": 3}, "vary": {"schedules[1].period": [2, 16]}, "seeds": 1}
    sweeps.sweep(sweeps.load(sweep), tmp_path / "out", workers=InProcess())
    found = {each.place: each.points for each in sweeps.read_results([tmp_path / "out"]).remarks}
    assert found == {"seed": (), "schedules[1]": (1,)}


def test_remarks_of_a_sweep_are_there_when_it_is_resumed_with_other_schedules(tmp_path: Path) -> None:
    places = []
    for schedules in (["sync", "local-16"], ["sync", "local-16", "local-4"], ["local-16"]):
        sweep = {"scenario": JOB | {"schedules": schedules}, "vary": {"steps": [8]}, "seeds": 1}
        swept = sweeps.sweep(sweeps.load(sweep), tmp_path / "out", workers=InProcess())
        places.append((swept.n_new, [each.place for each in swept.remarks]))
    assert places == [(2, ["schedules[1]"]), (1, ["schedules[1]"]), (0, ["schedules[0]"])]


def test_run_directory_has_the_remarks_of_its_scenario_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(JOB | {"seed": 3, "schedules": ["local-16"]}))
    of_scenario = json.loads(call(capsys, "simulate", path, "-o", tmp_path / "run", "--json").out)["remarks"]
    of_run = json.loads(call(capsys, "simulate", tmp_path / "run", "--json").out)["remarks"]
    assert {each["place"] for each in of_scenario} == {"seed", "schedules[0]"}
    assert kinds_texts_places(of_run) == kinds_texts_places(of_scenario)
    assert kinds_texts_places(sweeps.read_results([tmp_path / "run"]).remarks) == kinds_texts_places(of_scenario)


NEVER_MET = JOB | {"disturbances": [RARE | {"probability": "0.001%"}]}
IN_ONE_RUN = "no delay of disturbances[0] fell into this run, 0.00032 expected: times are those without it"
IN_NO_RUN = "no delay of disturbances[0] fell into these runs, "


@pytest.mark.filterwarnings("ignore::simdist.errors.SimdistWarning")
def test_a_single_run_without_rare_delays_says_so_in_every_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(NEVER_MET))
    simulated = json.loads(call(capsys, "simulate", path, "-o", tmp_path / "runs", "--json").out)
    again = json.loads(call(capsys, "simulate", tmp_path / "runs", "--json").out)
    compared = json.loads(call(capsys, "compare", path, "--seeds", "1", "--json").out)
    runs = simdist.results(tmp_path / "runs")
    sweep = {"scenario": NEVER_MET, "vary": {"steps": [8]}, "seeds": 1}
    swept = sweeps.sweep(sweeps.load(sweep), tmp_path / "out", workers=InProcess())
    wanted = kinds_texts_places(compared["remarks"])
    assert IN_ONE_RUN in {text for _, text, _ in wanted}
    for remarks in (simulated["remarks"], again["remarks"], runs.remarks, sweeps.read_results([swept.folder]).remarks):
        assert kinds_texts_places(remarks) == wanted
    with pytest.warns(SimdistWarning, match=re.escape(IN_ONE_RUN)):
        simdist.simulate(NEVER_MET)


@pytest.mark.filterwarnings("ignore::simdist.errors.SimdistWarning")
@pytest.mark.parametrize("probability", ["0.001%", "0.005%"])
def test_whatif_knows_no_interval_of_gains_if_delays_fell_into_too_few_of_its_runs(probability: str) -> None:
    found = simdist.whatif(JOB | {"disturbances": [RARE | {"probability": probability}]}, n_runs=50)
    assert found.gains is not None
    assert found.gains.frame()[["speedup_ci95_low", "speedup_ci95_high"]].isna().all(axis=None)
    assert found.gains.best is None
    texts = [each.text for each in found.remarks]
    fell = [each for each in texts if each.startswith(IN_NO_RUN) or " fell into 50 seeds, " in each]
    assert len(fell) == 1
    assert any(each.startswith("no interval: too few of 50 runs differ, although") for each in texts)


@pytest.mark.filterwarnings("ignore::simdist.errors.SimdistWarning")
def test_whatif_says_that_rare_delays_are_not_corrected() -> None:
    found = simdist.whatif(JOB | {"disturbances": [RARE | {"probability": "0.02%"}]}, n_runs=50)
    texts = [each.text for each in found.remarks]
    assert any(
        re.match(r"\d+ late steps? of disturbances\[0\] fell into 50 seeds, .*are not corrected", each)
        for each in texts
    )


@pytest.mark.filterwarnings("ignore::simdist.errors.SimdistWarning")
def test_tune_says_what_compare_says_of_rare_delays() -> None:
    tuned = simdist.tune(NEVER_MET, n_seeds=2)
    compared = simdist.compare(tuned.runs.scenario.changed(schedules=NEVER_MET["schedules"]), n_seeds=2)
    of_delays = [[each for each in found.remarks if IN_NO_RUN in each.text] for found in (tuned, compared)]
    assert of_delays[0] == of_delays[1] != []
    shown = re.sub("</?code>", "`", html.unescape(tuned._repr_html_()))
    assert all(f"{each}." in shown for each in tuned.remarks)


def test_tolerable_rates_have_the_remarks_of_all_but_the_stragglers_that_they_replace() -> None:
    bursts = {"kind": "bursts", "enter": "0.001%", "leave": "50%", "delay": "1 s"}
    scenario = JOB | {"schedules": ["local-16"], "disturbances": [RARE | {"probability": "0.001%"}, bursts]}
    found = tolerances(scenario, delay_s=0.1, n_seeds=2)
    assert [each.place for each in found.remarks] == ["schedules[0]", "disturbances[1]"]
    assert found.frame().attrs["remarks"] == found.document()["remarks"]
    assert all(f"{each}." in html.unescape(found._repr_html_()) for each in found.remarks)
