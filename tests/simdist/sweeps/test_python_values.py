"""Values from Python mean the same in every door: `load`, `changed`, the scenario of a sweep, its values and cases."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

import simdist
from simdist.errors import ScenarioError
from simdist.scenario import Scenario
from simdist.schedules import LocalSGD, Sync
from simdist.settings.base import FromFile
from simdist.sweeps import InProcess, load, read_results, sweep

NETWORK = {"latency": "25 us", "bandwidth": "25 Gbit/s", "efficiency": 0.8}
RARE = {"kind": "transient", "probability": 0.01, "delay": "1 s"}
JOB: dict[str, Any] = {
    "name": "job",
    "cluster": {"nodes": 2, "gpus_per_node": 2, "fabric": "ideal", "network": NETWORK},
    "workload": {"preset": "resnet50", "forward": "30 ms", "backward": "60 ms"},
    "steps": 8,
    "disturbances": [RARE],
    "schedules": ["sync", "local-4"],
}


def tree_with(path: str, value: object) -> dict[str, Any]:
    """Return the job with another value at a path, as a user writes it in Python."""
    tree: Any = dict(JOB)
    *above, last = path.replace("[", ".").replace("]", "").split(".")
    here = tree
    for key in above:
        place = int(key) if key.isdigit() else key
        here[place] = list(here[place]) if isinstance(here[place], list) else dict(here[place])
        here = here[place]
    if isinstance(here, list):
        here[int(last)] = value
    else:
        here.pop({"bandwidth_Bps": "bandwidth", "delay_s": "delay"}.get(last), None)
        here[last] = value
    return dict(tree)


def of_point(sweep: Any) -> Scenario:
    (point,) = sweep.points()
    return Scenario.model_validate({"name": "job", **sweep.tree_of(point)}, context=FromFile(Path()))


DOORS: dict[str, Callable[[str, object], Scenario]] = {
    "load": lambda path, value: simdist.load(tree_with(path, value)),
    "changed": lambda path, value: simdist.load(JOB).changed(path, value),
    "sweep of a mapping": lambda path, value: of_point(
        load({"scenario": tree_with(path, value), "vary": {"steps": [8]}})
    ),
    "vary": lambda path, value: of_point(load({"scenario": JOB, "vary": {path: [value]}})),
    "vary of a scenario": lambda path, value: of_point(load({"scenario": simdist.load(JOB), "vary": {path: [value]}})),
    "cases": lambda path, value: of_point(load({"scenario": JOB, "cases": [{"name": "one", path: value}]})),
}
LOG = pd.DataFrame([(s, r, 0.1 * (r == 1)) for s in range(8) for r in range(4)], columns=["step", "rank", "seconds"])
TABLE = LOG.pivot(index="step", columns="rank", values="seconds").to_numpy()
#: A path, values that mean the same there, and the attribute that has them.
SAME: dict[str, tuple[list[tuple[str, object]], Callable[[Scenario], object]]] = {
    "bandwidth": (
        [
            ("cluster.network.bandwidth", "200 Gbit/s"),
            ("cluster.network.bandwidth_Bps", 25e9),
            ("cluster.network.bandwidth_Bps", np.float64(25e9)),
            ("cluster.network", {"latency_s": 25e-6, "bandwidth_Bps": 25e9}),
        ],
        lambda found: found.cluster.network.bandwidth_Bps,
    ),
    "delay": (
        [
            ("disturbances[0].delay", "100 ms"),
            ("disturbances[0].delay", timedelta(milliseconds=100)),
            ("disturbances[0].delay", np.timedelta64(100, "ms")),
            ("disturbances[0].delay_s", np.float64(0.1)),
            ("disturbances[0]", {"kind": "transient", "probability": 0.01, "delay_s": 0.1}),
            ("disturbances", [{"kind": "transient", "probability": np.float64(0.01), "delay_s": 0.1}]),
            ("disturbances", [simdist.load(JOB).disturbances[0].model_copy(update={"delay_s": 0.1})]),
        ],
        lambda found: found.disturbances,
    ),
    "values": (
        [
            ("disturbances", [{"kind": "drawn", "values": values}])
            for values in (["0 s", "0.1 s"], [0.0, 0.1], np.array([0.0, 0.1]), pd.Series([0.0, 0.1]))
        ],
        lambda found: found.disturbances,
    ),
    "recording": (
        [
            ("disturbances", [{"kind": "recorded", "file": table}])
            for table in (
                *(TABLE, TABLE.tolist(), LOG, LOG.sample(frac=1, random_state=1), LOG.to_records(index=False)),
                *(LOG.set_index(["step", "rank"]), LOG.set_index(["step", "rank"]).seconds, LOG.to_dict("list")),
                LOG.assign(ms=1e3 * LOG.seconds).drop(columns="seconds"),
            )
        ],
        lambda found: found.disturbances,
    ),
    "schedules": (
        [("schedules", ["sync", "local-8"]), ("schedules", [Sync(), LocalSGD(period=8)]), ("schedules[1]", "local-8")],
        lambda found: found.schedules,
    ),
}


#: Values that can be read once, or have more than one form: how they are made, and what is the same.
ONCE: dict[str, tuple[str, Callable[[], object], object]] = {
    "generator of schedules": ("schedules", lambda: (each for each in ("sync", "local-8")), ["sync", "local-8"]),
    "set of ranks": ("disturbances[0].ranks", lambda: {2, 0}, [0, 2]),
    "map of ranks": ("disturbances[0].ranks", lambda: map(int, "02"), [0, 2]),
    "decimal": ("disturbances[0].delay_s", lambda: Decimal("0.25"), "250 ms"),
    "fraction": ("disturbances[0].probability", lambda: Fraction(1, 4), 0.25),
    "whole decimal": ("steps", lambda: Decimal(8), 8),
    "generator of delays": (
        "disturbances",
        lambda: [{"kind": "drawn", "values": (each / 10 for each in range(3))}],
        [{"kind": "drawn", "values": [0.0, 0.1, 0.2]}],
    ),
    "durations": (
        "disturbances",
        lambda: [{"kind": "recorded", "file": pd.DataFrame(np.full((8, 4), pd.Timedelta("50 ms")))}],
        [{"kind": "recorded", "file": np.full((8, 4), 0.05)}],
    ),
    "array of durations": (
        "disturbances",
        lambda: [{"kind": "recorded", "file": np.full((8, 4), np.timedelta64(50, "ms"))}],
        [{"kind": "recorded", "file": np.full((8, 4), 0.05)}],
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", ONCE)
def test_values_of_other_types_mean_the_same_in_every_door(case: str, door: str) -> None:
    path, value, same = ONCE[case]
    of_values, of_same = (DOORS[door](path, each) for each in (value(), same))
    assert (of_values.schedules, of_values.disturbances) == (of_same.schedules, of_same.disturbances)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "table",
    [np.full((8, 4), True), np.full((8, 4), 1j), np.ma.masked_less(np.eye(8, 4), 0.5)],
    ids=["truth values", "complex numbers", "masked"],
)
def test_recording_of_other_than_seconds_is_refused(table: object, door: str) -> None:
    with pytest.raises((ScenarioError, ValidationError), match=r"is not a recording|nan at step 0, rank 1"):
        DOORS[door]("disturbances", [{"kind": "recorded", "file": table}])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", SAME)
def test_values_mean_the_same_in_every_door(case: str, door: str) -> None:
    same, meaning = SAME[case]
    found = [meaning(DOORS[door](path, value)) for path, value in same]
    assert found == [meaning(DOORS["load"](*same[0]))] * len(same)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("path", "value", "attribute"),
    [
        ("cluster.network.bandwidth", 25e9, "bandwidth_Bps"),
        ("cluster.network.bandwidth", np.float64(25e9), "bandwidth_Bps"),
        ("cluster.network", {"latency": "5 us", "bandwidth": 25e9}, "bandwidth_Bps"),
        ("disturbances[0].delay", 0.1, "delay_s"),
        ("disturbances", [RARE | {"delay": 0.1}], "delay_s"),
        ("workload.forward", 0.03, "forward_s"),
    ],
)
def test_number_without_a_unit_is_refused_by_the_name_that_takes_it(
    door: str, path: str, value: object, attribute: str
) -> None:
    with pytest.raises(ScenarioError, match=f"of which unit.* or {attribute} in SI units"):
        DOORS[door](path, value)


def test_bounds_and_limits_of_sweeps_need_units_like_values() -> None:
    bounds = {"cluster.network.latency": {"linear": [1e-6, 5e-6, 3]}}
    with pytest.raises(ScenarioError, match=r"latency\.linear\[0\]: 1e-06: of which unit.* or latency_s in SI units"):
        load({"scenario": JOB, "vary": bounds})
    with pytest.raises(ScenarioError, match=r"time_limit: 60: of which unit.* or time_limit_s in SI units"):
        load({"scenario": JOB, "vary": {"steps": [8]}, "time_limit": 60})
    assert load({"scenario": JOB, "vary": {"steps": [8]}, "time_limit_s": np.int64(60)}).time_limit_s == 60


@pytest.mark.parametrize(
    ("table", "what"),
    [
        (LOG.to_numpy(), r"shape \[32, 3\] whose first columns number steps and ranks is a log"),
        (np.zeros(8), r"shape \[8\] is not a recording"),
        (np.zeros((2, 2, 2, 2)), r"shape \[2, 2, 2, 2\] is not a recording"),
        (LOG.drop(columns="rank"), "which rank is which column"),
        (LOG[1:], "step 0 of rank 0 is missing"),
    ],
)
def test_recording_of_another_shape_is_refused(table: object, what: str) -> None:
    with pytest.raises(ScenarioError, match=what):
        simdist.load(JOB | {"disturbances": [{"kind": "recorded", "file": table}]})


def test_function_that_fails_is_refused_with_its_error() -> None:
    failing = simdist.load(JOB | {"disturbances": [{"kind": "drawn", "quantile": lambda u: u.no_such_attribute}]})
    with pytest.raises(ScenarioError, match="quantile fails: AttributeError"):
        simdist.compare(failing, n_seeds=1)


def test_arrays_of_a_sweep_are_kept_in_its_folder(tmp_path: Path) -> None:
    tables = [np.zeros((8, 4)), np.full((8, 4), 0.05)]
    base = JOB | {"disturbances": [{"kind": "recorded", "file": tables[0]}]}
    files = "disturbances[0].file"
    lists = [[{"kind": "recorded", "file": each}] for each in tables]
    for folder, vary in (("files", {files: tables}), ("lists", {"disturbances": lists})):
        sweep(load({"scenario": base, "vary": vary, "seeds": 1}), tmp_path / folder, workers=InProcess())
        kept = sorted((tmp_path / folder / "arrays").iterdir())
        assert sorted(np.load(each)["recording"].mean() for each in kept) == pytest.approx([0.0, 0.05])
        design = (tmp_path / folder / "design.jsonl").read_text()
        assert tempfile.gettempdir() + "/simdist-arrays" not in design
        assert all(f"arrays/{each.name}" in design for each in kept)
    found = read_results([tmp_path / "files"]).frame()
    assert set(found[files]) == {f"arrays/{each.name}" for each in kept}
    assert found.groupby(files, sort=False).step_s.first().diff().iloc[-1] == pytest.approx(0.05, rel=0.01)
    copied = [str(tmp_path / "files" / each) for each in dict.fromkeys(found[files])]
    resumed = load({"scenario": base, "vary": {files: copied}, "seeds": 1})
    assert sweep(resumed, tmp_path / "files", workers=InProcess()).n_new == 0
