"""Facets: one from elsewhere is seen wherever those of the package are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commandline import call, write

from simdist import scenario
from simdist.scenario import Scenario
from simdist.settings.units import format_nbytes
from simdist.studies import facets
from simdist.studies.columns import Column
from simdist.studies.comparison import compare, frame
from simdist.studies.facets import FACETS, Facet, FacetTable, Line, Simulated, StepTimes
from simdist.studies.remarks import Remark

SCENARIO = """
name: small
cluster: {nodes: 2, gpus_per_node: 2, fabric: ideal, network: {latency: 25 us, bandwidth: 25 Gbit/s, efficiency: 1}}
workload: {tensors: [{name: w, count: 1000}], batch_size: 4, forward: 20 ms}
steps: 4
disturbances: [{kind: transient, probability: 10%, delay: 0.3 s}]
schedules: [{kind: sync}, {kind: local_sgd, period: 2}]
"""


@dataclass(frozen=True)
class Sizes:
    """Value of the facet: bytes of the model on all ranks, and the step time without disturbances."""

    nbytes: int = 0
    calm_step_s: float = 0.0


class ModelSize(Facet[Sizes]):
    """How many bytes the model has on all ranks, and how fast a step is without disturbances."""

    nothing = Sizes()
    names = ("model_nbytes",)
    brief = (Column("models", "model_nbytes", form=format_nbytes),)

    def measure(self, simulated: Simulated) -> Sizes:
        return Sizes(4000 * simulated.plan.world_size)

    def measure_again(self, scenario: Scenario, step_s: StepTimes, again: facets.Again) -> Sizes:
        calm_s = again(scenario.changed(disturbances=()))
        assert len(calm_s) == len(step_s)
        return Sizes(4 * 4000, float(calm_s.mean()))

    def document(self, value: Sizes) -> dict[str, object]:
        return {"model_nbytes": value.nbytes, "calm": {"step_s": value.calm_step_s}} if value.nbytes else {}

    def kept(self, value: Sizes) -> dict[str, object]:
        return {"model_nbytes": value.nbytes}

    def restored(self, record: Mapping[str, Any]) -> Sizes:
        return Sizes(record["model_nbytes"])

    def columns(self, values: Sequence[Sizes]) -> Sequence[Column]:
        return self.brief

    def table(self, lines: Sequence[Line[Sizes]], base: Sizes) -> FacetTable | None:
        if not base.calm_step_s:
            return None
        records = [{"schedule": each.schedule, "ratio": each.value.calm_step_s / base.calm_step_s} for each in lines]
        return FacetTable("calm steps", (Column("schedule"), Column("ratio", form="{:.3f}".format)), records)

    def remarks(self, scenario: Scenario | None, lines: Sequence[Line[Sizes]]) -> list[Remark]:
        sizes = [Remark("result", f"{each.schedule} has {each.value.nbytes} bytes", each.schedule) for each in lines]
        return [*sizes, *([Remark("accuracy", f"{scenario.name} is made up")] if scenario else [])]


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> ModelSize:
    """Add a facet to those of the command line."""
    added = ModelSize()
    monkeypatch.setattr(facets, "FACETS", (*FACETS, added))
    return added


def test_facet_from_elsewhere_is_in_rows_and_in_their_frame() -> None:
    added = ModelSize()
    found = scenario.loads(SCENARIO)
    sync, local = rows = compare(found, n_seeds=2, facets=(*FACETS, added))
    calm = compare(found.changed(disturbances=()), n_seeds=2)
    assert [each.of(added).calm_step_s for each in rows] == [each.step_s for each in calm]
    assert sync.document()["calm"] == {"step_s": calm[0].step_s}
    assert frame(rows)["model_nbytes"].tolist() == [16000, 16000]
    assert "calm" not in frame(rows).columns
    assert local.step_s == compare(found, n_seeds=2)[1].step_s


def test_facet_from_elsewhere_is_in_the_json_of_compare(
    size: ModelSize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "small.yaml", SCENARIO)
    found = json.loads(call(capsys, "compare", path, "--seeds", "2", "--json").out)
    assert [each["model_nbytes"] for each in found["rows"]] == [16000, 16000]
    assert list(found["rows"][0])[-2:] == ["model_nbytes", "calm"]
    assert found["remarks"][:3] == [
        {"kind": "result", "text": "sync has 16000 bytes", "place": "sync"},
        {"kind": "result", "text": "local-2 has 16000 bytes", "place": "local-2"},
        {"kind": "accuracy", "text": "small is made up", "place": ""},
    ]


def test_facet_from_elsewhere_is_on_the_screen_of_compare(
    size: ModelSize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "small.yaml", SCENARIO)
    answer = call(capsys, "compare", path, "--seeds", "2")
    _, first, repeated, second, ratios, *texts = answer.out.rstrip("\n").split("\n\n")
    assert "models" not in first
    assert " ".join(repeated.split()).endswith("models 16 kB; engine fast.")
    assert second.strip() == "calm steps"
    assert ratios.splitlines()[2].split() == ["sync", "1.000"]
    assert texts[:3] == ["sync has 16000 bytes.", "local-2 has 16000 bytes.", "small is made up."]


def test_facet_from_elsewhere_is_in_results_of_sweeps_and_runs(
    size: ModelSize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario_file = write(tmp_path / "small.yaml", SCENARIO)
    sweep_file = write(tmp_path / "sweep.yaml", "{scenario: small.yaml, vary: {steps: [4]}, seeds: 1}")
    sweep = tmp_path / "sweep"
    runs = tmp_path / "runs"
    assert call(capsys, "sweep", sweep_file, "-o", sweep, "--workers", "0").code == 0
    simulated = json.loads(call(capsys, "simulate", scenario_file, "-o", runs, "--json").out)
    assert [each["model_nbytes"] for each in simulated["rows"]] == [16000, 16000]
    for folder in (sweep, runs):
        found = json.loads(call(capsys, "results", folder, "--json").out)
        assert [each["model_nbytes"] for each in found["rows"]] == [16000, 16000]
        assert " ".join(call(capsys, "results", folder).out.split()).endswith("; models 16 kB.")
    call(capsys, "report", runs, "-o", tmp_path / "page.html")
    assert "Simulated, local-2 has 16000 bytes." in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_facet_that_says_nothing_adds_nothing() -> None:
    class Silent(ModelSize):
        def measure_again(self, scenario: Scenario, step_s: StepTimes, again: facets.Again) -> Sizes:
            return Sizes()

    found = scenario.loads(SCENARIO)
    plain = compare(found, n_seeds=1)
    rows = compare(found, n_seeds=1, facets=(*FACETS, Silent()))
    assert [each.document() for each in rows] == [each.document() for each in plain]
    assert list(frame(rows).columns) == list(frame(plain).columns)
    assert facets.tables(rows, rows[0]) == []
