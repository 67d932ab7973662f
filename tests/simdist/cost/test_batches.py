"""The time of other batch sizes than the measured one: measured steps, and proportion."""

from pathlib import Path

import pytest

from simdist.cost.compute import ComputeCost, interpolated_step_s
from simdist.errors import ScenarioError
from simdist.scenario import Scenario, dump, load, loads, presets
from simdist.scenario.workload import MeasuredStep
from simdist.studies.comparison import compare
from simdist.studies.published_errors import batch_doubt, doubts_of, of_published_rows
from simdist.sweeps import load as load_sweep

TEXT = """
cluster: {preset: dgx-h200, nodes: 1}
workload: {preset: resnet18, optimize: 1 ms, WORKLOAD}
schedules: [sync]
steps: 2
"""
TWO = "step_times: [{batch_size: 64, time: 31 ms}, {batch_size: 256, time: 103 ms}]"


def job(workload: str) -> Scenario:
    return loads(TEXT.replace("WORKLOAD", workload))


def passes_ms(workload: str) -> float:
    """Return the milliseconds of both passes, to nine digits."""
    found = job(workload)
    cost = ComputeCost(found.workload, found.cluster)
    assert cost.backward_s == pytest.approx(2 * cost.forward_s)
    return round(1e3 * (cost.forward_s + cost.backward_s), 9)


@pytest.mark.parametrize(
    ("batch_size", "expected_ms"), [(32, 18.0), (64, 30.0), (128, 54.0), (256, 102.0), (512, 198.0)]
)
def test_two_measured_steps_are_a_cost_per_step_and_a_cost_per_sample(batch_size: int, expected_ms: float) -> None:
    assert passes_ms(f"batch_size: {batch_size}, {TWO}") == expected_ms


def test_one_measured_step_is_taken_in_proportion_and_a_line_never_reaches_zero() -> None:
    assert passes_ms("batch_size: 16, step_times: [{batch_size: 64, time: 30 ms}]") == 6.5
    steep = (MeasuredStep(batch_size=10, time_s=1.0), MeasuredStep(batch_size=20, time_s=3.0))
    assert [interpolated_step_s(steep, size) for size in (5, 10, 15, 20, 30)] == pytest.approx(
        [0.5, 1.0, 2.0, 3.0, 5.0]
    )
    three = (*steep, MeasuredStep(batch_size=40, time_s=4.0))
    assert [interpolated_step_s(three, size) for size in (15, 30, 80)] == pytest.approx([2.0, 3.5, 6.0])


def test_what_is_computed_again_is_part_of_a_measured_step() -> None:
    found = job(f"batch_size: 64, recompute: 100%, {TWO}")
    cost = ComputeCost(found.workload, found.cluster)
    assert cost.forward_s + cost.backward_s == pytest.approx(0.03)
    assert cost.backward_s > 2.5 * cost.forward_s


def test_seconds_are_in_proportion_to_the_batch_only_if_the_measured_one_is_stated() -> None:
    times = "forward: 10 ms, backward: 20 ms"
    assert passes_ms(f"batch_size: 16, {times}") == 30.0
    assert passes_ms(f"batch_size: 16, {times}, measured_batch_size: 64") == 7.5
    assert passes_ms(f"batch_size: 64, {times}, measured_batch_size: 64") == 30.0


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (f"batch_size: 1, forward: 1 ms, {TWO}", "workload.forward: 'forward' beside step_times"),
        (f"batch_size: 1, measured_batch_size: 4, {TWO}", "workload.measured_batch_size: 'measured_batch_size' beside"),
        (
            "batch_size: 1, step_times: [{batch_size: 8, time: 2 ms}, {batch_size: 4, time: 3 ms}]",
            r"workload.step_times\[1\].batch_size: 4 is not above 8: sort by batch_size",
        ),
        (
            "batch_size: 1, step_times: [{batch_size: 4, time: 3 ms}, {batch_size: 8, time: 2 ms}]",
            r"workload.step_times\[1\].time: 2 ms is less than the 3 ms of a smaller batch",
        ),
    ],
)
def test_wrong_times_are_refused_by_name(workload: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        job(workload)


def test_an_update_that_takes_longer_than_the_measured_step_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"takes 500 us, its update alone 1 ms: write workload\.optimize"):
        compare(job("batch_size: 1, step_times: [{batch_size: 2, time: 1 ms}]"))


def test_scenarios_with_measured_steps_are_written_and_read_alike() -> None:
    for text in (f"batch_size: 8, {TWO}", "batch_size: 8, forward: 1 ms, measured_batch_size: 4, launches: 2 ms"):
        assert loads(dump(job(text))) == job(text)
    assert job("batch_size: 8").workload.utilization_batch_size.at("fp32") == 12


def test_a_time_written_over_a_preset_leaves_out_what_was_measured_with_the_other_time() -> None:
    own = job("batch_size: 8, utilization: 40%").workload
    assert own.utilization_batch_size.stated == ()
    base = {"forward": "1 ms", "backward": "2 ms", "measured_batch_size": 4}
    assert presets._merged(dict(base), {"forward": "3 ms"}) == {"forward": "3 ms", "backward": "2 ms"}
    assert presets._merged(dict(base), {"step_times": []}) == {"step_times": []}
    assert presets._merged({"launches": "2 ms"}, {"forward": "3 ms"}) == {"forward": "3 ms"}


@pytest.mark.parametrize("seconds", [{"forward": "1 ms"}, {"forward_s": 1e-3}])
def test_a_time_under_its_key_or_its_attribute_leaves_out_the_launches_of_a_preset(seconds: dict[str, object]) -> None:
    workload = {"preset": "resnet50", "batch_size": 32}
    base = {"cluster": "ideal", "schedules": ["sync"], "steps": 1}
    assert load(base | {"workload": workload}).workload.launches.passes_s > 0
    assert load(base | {"workload": workload | seconds}).workload.launches.passes_s == 0


# ---------------------------------------------------------------- doubts


def names(workload: str) -> list[str]:
    return [each.name for each in doubts_of(job(workload))]


def test_a_batch_that_was_not_measured_has_a_doubt() -> None:
    others = ["doubt.machine", "doubt.fabric"]
    times = "forward: 10 ms, measured_batch_size: 64"
    assert names(f"batch_size: 64, {times}") == others
    assert names(f"batch_size: 32, {times}") == ["doubt.batch", *others]
    assert names(f"batch_size: 128, {TWO}") == others, "a batch between two measured ones has a doubt"
    assert names(f"batch_size: 512, {TWO}") == ["doubt.batch", *others]
    assert names("batch_size: 12") == others
    assert names("batch_size: 6") == ["doubt.batch", *others]
    assert names("batch_size: 6, forward: 10 ms") == others


def width(workload: str) -> float:
    """Return the upper over the lower end of the doubt of a batch."""
    found = job(workload)
    doubt = batch_doubt(of_published_rows(), found.workload, found.cluster)
    return doubt.factor(0.95) / doubt.factor(0.05)


def test_the_doubt_grows_with_the_distance_and_shrinks_with_what_is_known() -> None:
    times = "forward: 10 ms, measured_batch_size: 256"
    nearest, near, far = (width(f"batch_size: {size}, {times}") for size in (250, 128, 8))
    assert 1.05 < near < far
    assert nearest < 1.1
    assert width(f"batch_size: 250, {times}, launches: 5 ms") < 1.1
    assert width(f"batch_size: 8, {times}, launches: 5 ms") < far / 3
    assert width("batch_size: 8, step_times: [{batch_size: 64, time: 3 ms}, {batch_size: 256, time: 9 ms}]") < far / 3


def test_the_doubt_of_a_smaller_batch_is_small_where_the_gpu_takes_longer_than_the_host() -> None:
    by_host, as_long, by_gpu = (width(f"batch_size: {size}, {TWO}, launches: 15 ms") for size in (4, 21, 48))
    assert 1.05 < by_gpu < 1.2 < min(by_host, as_long)
    assert width(f"batch_size: 21, {TWO}, launches: 3 ms") < as_long


def test_a_size_that_launching_bounds_tells_little_of_larger_ones() -> None:
    def larger(launches: str) -> float:
        return width(f"batch_size: 512, {TWO}, launches: {launches}")

    assert larger("20 ms") < 0.9 * larger("21 ms")  # a quarter of 103 ms is 1.29 and 1.23 times as long
    assert larger("21 ms") == larger("0 ms")


def test_an_interval_contains_the_doubt_of_the_batch() -> None:
    def interval(workload: str) -> tuple[float, float]:
        (row,) = compare(job(workload))
        assert row.step_s_range
        return row.step_s_range[0] / row.step_s, row.step_s_range[1] / row.step_s

    times = "forward: 10 ms, backward: 20 ms, measured_batch_size: 64"
    assert interval(f"batch_size: 8, {times}")[1] > 2.5 * interval(f"batch_size: 64, {times}")[1]
    low, high = interval(f"batch_size: 8, {times}, launches: 30 ms")
    assert low < 0.95, "the host's time for launching has no doubt"
    assert high > 1.1


# ---------------------------------------------------------------- changes of the batch size


PLAIN = "batch_size: 32, forward: 10 ms"
REFUSED = (
    r"workload\.batch_size: 16: seconds of passes were stated with batch_size 32, but no size that they were measured "
    r"at: write measured_batch_size: 32 beside them, and other sizes are in proportion, or step_times; or change "
    r"forward, too$"
)


def swept(workload: str, **sweep: object) -> int:
    return load_sweep({"scenario": job(workload), **sweep}).n_points


def test_another_batch_size_with_the_same_seconds_is_refused_wherever_it_is_changed(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=f"^text: {REFUSED}"):
        job(PLAIN).changed("workload.batch_size", 16)
    with pytest.raises(ScenarioError, match=f"vary.{REFUSED}"):
        swept(PLAIN, vary={"workload.batch_size": [32, 16]})
    with pytest.raises(ScenarioError, match=r"vary.workload.batch_size: 99: seconds of passes were stated"):
        swept(PLAIN, vary={"workload.batch_size": {"integers": [1, 99]}}, sample={"kind": "random", "points": 3})
    own = {"name": "own", "workload.batch_size": 16, "workload.forward": "6 ms"}
    with pytest.raises(ScenarioError, match=rf"cases\[1\].{REFUSED}"):
        swept(PLAIN, cases=[own, {"name": "same", "workload.batch_size": 16}])
    for times in ("forward: 10 ms", "dtype: float32"):
        tensor = "{name: all, count: 1000, forward: 10 ms}" if "forward" not in times else "{name: all, count: 1000}"
        (tmp_path / "model.yaml").write_text(f"tensors: [{tensor}]\nbatch_size: 32\n{times}\n")
        (tmp_path / "job.yaml").write_text(
            "cluster: ideal\nworkload: {file: model.yaml, batch_size: 16}\nsteps: 1\nschedules: [sync]\n"
        )
        with pytest.raises(ScenarioError, match=REFUSED):
            load(tmp_path / "job.yaml")


def test_a_batch_size_may_change_with_its_seconds_or_if_the_measured_one_is_known(tmp_path: Path) -> None:
    plain = job(PLAIN)
    assert plain.changed("workload.batch_size", 32) == plain
    assert plain.changed({"workload.batch_size": 16, "workload.forward": "6 ms"}).workload.forward_s == 0.006
    measured = f"{PLAIN}, measured_batch_size: 32"
    assert job(measured).changed("workload.batch_size", 16).workload.batch_over_measured == 0.5
    sizes = {"workload.batch_size": [16, 32]}
    for workload in (measured, f"batch_size: 64, {TWO}", "batch_size: 8"):
        assert swept(workload, vary=sizes) == 2
    assert swept(PLAIN, vary=sizes | {"workload.forward": ["6 ms", "10 ms"]}) == 4
    assert swept(PLAIN, vary={"workload.batch_size": [32]}) == 1
    assert loads("{cluster: ideal, workload: {preset: mlp, batch_size: 16}, steps: 1, schedules: [sync]}")
