"""Simulation against measurement: exact by hand on small traces, and the command on run directories."""

# ruff: noqa: E501  (the tables are read row by row)

import dataclasses
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from commandline import LABELS, call, edited, write
from traces import plan_of, trace_of

from simdist.engines.peers import trace_of_rank
from simdist.errors import TraceError
from simdist.plan import AllReduce, Backward, Delay, Forward, KernelLaunch, Wait, occurrences
from simdist.plan.group import Group
from simdist.report import timeline_figure
from simdist.runs import run_directory
from simdist.runs.building import delays, simulate
from simdist.scenario import dump_cluster, load_cluster, loads
from simdist.settings.units import format_seconds
from simdist.studies.comparison import compare
from simdist.studies.ranking import StepTime, order, summarize
from simdist.studies.validation import Blame, Injection, Validation, finished_steps, validate
from simdist.traces.trace import Trace
from simdist.traces.waiting import operation_kind

FORWARD = Forward(("param",), ("loss",))
BACKWARD = Backward(("param", "loss"), "grad")
STEP = (Delay("host"), FORWARD, Wait("loss"), BACKWARD, AllReduce("grad", Group(2)))
NO_DELAYS = {"host": np.zeros((1, 2, 2))}


def by_hand(begin_s: float, scale: float, late_s: tuple[float, float] = (0.0, 0.0)) -> list:
    """One step of STEP that begins at `begin_s`; ranks come late by an injected delay, operations take `scale` s."""
    late = np.array(late_s) + begin_s
    met = late.max() + 3 * scale
    return [
        (begin_s, begin_s, late),
        (late, late, late + scale),
        (late, late, late + scale),
        (late + scale, late + scale, late + 3 * scale),
        (late + 3 * scale, met, met + scale),
    ]


def pair(simulated: list, measured: list) -> tuple[Trace, Trace]:
    """Return the measured and the simulated trace of as many steps as there are times for."""
    plan = plan_of(*[STEP] * (len(measured) // len(STEP)), world_size=2)
    return dataclasses.replace(trace_of(plan, measured), source="real by hand"), trace_of(plan, simulated)


def kinds(validation: Validation) -> dict:
    return {kind.op: kind for kind in validation.kinds}


def one_real(simulated: Trace, late_s: float) -> Trace:
    """Return the trace of rank 1 among simulated peers if it is late for its only collective, in step 1."""
    row = next(each.rows[1] for each in occurrences(simulated.plan) if isinstance(each.op, AllReduce))
    times_s = np.stack([simulated.ready_s[:, 1], simulated.end_s[:, 1]])
    times_s[0, row:] += late_s
    times_s[1, row:] += late_s
    rows = [each.rows for each in occurrences(simulated.plan) if isinstance(each.op, AllReduce)]
    return trace_of_rank(simulated, 1, times_s, times_s[1, np.concatenate(rows)], "real rank 1")


def test_one_real_rank_is_compared_where_it_was_real(tmp_path):
    scenario = loads(edited(("probability: 10%", "probability: 0%"), ("steps: 12", "steps: 2")))
    simulated = simulate(scenario)
    late_s = 0.5
    for measured, lateness_s in ((one_real(simulated, 0.0), 0.0), (one_real(simulated, late_s), late_s)):
        measured.save(tmp_path / "trace.npz")
        found = validate(Trace.load(tmp_path / "trace.npz"), simulated, delays(scenario))
        assert found.n_steps == 2
        assert found.measured_s == pytest.approx(found.simulated_s + lateness_s)
        assert {kind.count for kind in found.kinds} == {2}
        expected = [Blame(rank, 0.0, 7 * lateness_s if rank == 1 else 0.0) for rank in range(8)]
        assert [(each.rank, each.measured_s) for each in found.blames] == [
            (each.rank, pytest.approx(each.measured_s)) for each in expected
        ]


def test_an_operation_lasts_until_its_last_kernel_is_launched_as_a_gpu_tells_it():
    """The device computes for 1 s, and the host launches for 3 s: events of the device are 3 s apart."""
    step = (FORWARD, KernelLaunch("forward", 1), BACKWARD)
    simulated = [(0, 0, 1), (0, 0, 3), (3, 3, 5)]
    measured = [(0, 0, 3), (0, 0, 2.9), (3, 3, 5)]
    plan = plan_of(step, world_size=2)
    real = dataclasses.replace(trace_of(plan, measured), source="real by hand")
    found = kinds(validate(real, trace_of(plan, simulated), {}))
    assert found["forward"].error == found["backward"].error == 0
    assert found["kernel_launch"].error == pytest.approx(0.1 / 2.9)


def test_equal_traces_have_no_errors():
    scenario = loads(edited())
    trace = simulate(scenario, label="hsgd-2-4,4-world")
    found = validate(dataclasses.replace(trace, source="real gloo"), trace, delays(scenario))
    assert (found.schedule, found.source, found.n_steps) == ("hsgd-2-4,4-world", "real gloo", 12)
    assert found.error == 0
    assert {kind.error for kind in found.kinds if kind.measured_s} == {0.0}
    assert all(each.simulated_s == each.measured_s for each in found.blames)
    assert (found.overlap, found.correlation) == (1.0, pytest.approx(1.0))
    assert abs(found.injections[0].difference_s) < 1e-12


def test_error_is_relative_to_the_measured_and_negative_where_reality_is_slower():
    found = validate(*pair(by_hand(0, 1.0), by_hand(0, 1.25)), NO_DELAYS)
    assert (found.simulated_s, found.measured_s, found.error) == (4.0, 5.0, pytest.approx(-0.2))
    assert [kind.error for kind in found.kinds] == pytest.approx([-0.2] * 4)
    assert [kind.signed_instance_error for kind in found.kinds] == pytest.approx([-0.2] * 4)
    assert [kind.instance_error for kind in found.kinds] == pytest.approx([0.2] * 4)


def test_sums_and_instances_are_told_apart():
    """Errors of instances that cancel in the sum are still seen, instance by instance."""
    measured = by_hand(0, 1.0)
    measured[1] = (0.0, 0.0, [0.5, 1.5])
    forward = kinds(validate(*pair(by_hand(0, 1.0), measured), NO_DELAYS))["forward"]
    assert (forward.count, forward.simulated_s, forward.measured_s, forward.error) == (2, 1.0, 1.0, 0.0)
    assert forward.instance_error == pytest.approx((1 + 1 / 3) / 2)
    assert forward.signed_instance_error == pytest.approx((1 - 1 / 3) / 2)
    assert (forward.simulated_total_s, forward.measured_total_s) == (2.0, 2.0)


def test_typical_error_of_a_kind_with_two_sizes_is_that_of_its_instances():
    """Medians lie between the sizes, and would be 12 % apart because of the one instance that is."""
    measured = by_hand(0, 1.01) + by_hand(4.04, 3.03)
    measured[1] = (0.0, 0.0, [1.01, 1.5])
    forward = kinds(validate(*pair(by_hand(0, 1.0) + by_hand(4, 3.0), measured), NO_DELAYS))["forward"]
    assert forward.simulated_s / forward.measured_s - 1 == pytest.approx(-0.12, abs=0.005)
    assert forward.signed_instance_error == pytest.approx(1 / 1.01 - 1)
    assert forward.instance_error == pytest.approx(1 - 1 / 1.01)


def test_hiccup_shows_in_the_error_of_the_sum_and_not_in_what_is_typical():
    measured = by_hand(0, 1.0) + by_hand(4, 1.0)
    measured[6] = (4.0, 4.0, [5.0, 9.0])
    forward = kinds(validate(*pair(by_hand(0, 1.0) + by_hand(4, 1.0), measured), NO_DELAYS))["forward"]
    assert (forward.simulated_mean_s, forward.measured_mean_s, forward.error) == (1.0, 2.0, -0.5)
    assert (forward.signed_instance_error, forward.instance_error) == (0.0, 0.0)


def test_wait_is_the_time_in_which_the_host_is_blocked():
    wait = kinds(validate(*pair(by_hand(0, 1.0, (0, 2)), by_hand(0, 1.5, (0, 2))), NO_DELAYS))["wait"]
    assert (wait.stream, wait.count, wait.simulated_s, wait.measured_s) == ("host", 2, 1.0, 1.5)


def test_kinds_are_those_of_the_table_of_operations_without_delays_and_the_longest_first():
    scenario = loads(edited())
    trace = simulate(scenario, label="hsgd-2-4,4-world")
    rows = defaultdict(list)
    for each in occurrences(trace.plan):
        if not isinstance(each.op, Delay | Wait):
            rows[operation_kind(each.op)].append(each.rows)
    expected_s = {kind: (trace.end_s - trace.start_s)[np.concatenate(parts)] for kind, parts in rows.items()}
    found = validate(dataclasses.replace(trace, source="real"), trace, delays(scenario)).frame()
    assert list(found.measured_total_s) == sorted(found.measured_total_s, reverse=True)
    seen = {(row.op, row.stream, row.group): row for row in found.itertuples() if row.op != "wait"}
    assert seen.keys() == expected_s.keys()
    for key, row in seen.items():
        assert (row.count, row.measured_s) == (expected_s[key].size, np.median(expected_s[key]))
        assert row.simulated_total_s == pytest.approx(expected_s[key].sum())


def test_operation_measured_as_nothing_has_no_relative_error():
    measured = by_hand(0, 1.0)
    measured[1] = (0.0, 0.0, 0.0)
    forward = kinds(validate(*pair(by_hand(0, 1.0), measured), NO_DELAYS))["forward"]
    assert np.isnan(forward.error)
    assert np.isnan(forward.signed_instance_error)
    assert np.isnan(forward.instance_error)


def test_injected_delays_are_compared_with_the_drawn_ones():
    drawn = {"host": np.array([[[0.0, 2.0], [1.0, 0.0]]])}
    simulated = by_hand(0, 1.0, (0, 2.0)) + by_hand(6, 1.0, (1.0, 0))
    measured = by_hand(0, 1.0, (0, 2.001)) + by_hand(6.001, 1.0, (0.98, 0))
    found = validate(*pair(simulated, measured), drawn)
    assert found.injections == (Injection("host", 2, 3.0, pytest.approx(2.981), pytest.approx(-0.02), step=1, rank=0),)


def test_blame_of_both_traces_is_compared_rank_by_rank():
    found = validate(*pair(by_hand(0, 1.0, (0, 2.0)), by_hand(0, 1.0, (0, 3.0))), NO_DELAYS)
    assert found.blames == (Blame(0, 0.0, 0.0), Blame(1, 2.0, 3.0))
    assert found.verdict == "rank 1 is blamed most in both (simulated 2 s, measured 3 s)"
    assert (found.correlation, found.overlap) == (pytest.approx(1.0), pytest.approx(2 / 3))


def test_blame_of_the_right_rank_in_the_wrong_step_does_not_overlap():
    simulated = by_hand(0, 1.0, (0, 2.0)) + by_hand(6, 1.0)
    measured = by_hand(0, 1.0) + by_hand(4, 1.0, (0, 2.0))
    found = validate(*pair(simulated, measured), NO_DELAYS)
    assert (found.correlation, found.overlap) == (pytest.approx(1.0), 0.0)


VERDICTS = {
    "other rank": ((0, 2), (1, 0), "simulated, rank 1 is blamed most (simulated 2 s, measured 0 s); measured, rank 0 (simulated 0 s, measured 1 s)"),
    "only measured": ((0, 0), (1, 0), "simulated, rank 0 is blamed most (simulated 0 s, measured 1 s); measured, rank 0 (simulated 0 s, measured 1 s)"),
    "only simulated": ((0, 1), (0, 0), "simulated, rank 1 is blamed most (simulated 1 s, measured 0 s); measured, rank 0 (simulated 0 s, measured 0 s)"),
    "no rank": ((0, 0), (0, 0), "no rank waits for another in either"),
}  # fmt: skip


@pytest.mark.parametrize(("simulated", "measured", "verdict"), VERDICTS.values(), ids=VERDICTS)
def test_verdict_says_who_is_blamed(simulated, measured, verdict):
    found = validate(*pair(by_hand(0, 1.0, simulated), by_hand(0, 1.0, measured)), NO_DELAYS)
    assert found.verdict == verdict


def test_rank_that_shares_the_simulated_blame_is_blamed_in_both():
    found = validate(
        *pair(by_hand(0, 1.0, (0, 1)) + by_hand(5, 1.0, (1, 0)), by_hand(0, 1.0) + by_hand(4, 1.0, (0, 3))), NO_DELAYS
    )
    assert found.verdict == "rank 1 is blamed most in both (simulated 1 s, measured 3 s)"


def test_measurement_that_ended_early_is_compared_over_its_finished_steps():
    whole = validate(*pair(by_hand(0, 1.0, (0, 1)), by_hand(0, 1.5)), {"host": np.array([[[0.0, 1.0]]])})
    simulated = by_hand(0, 1.0, (0, 1)) + by_hand(5, 1.0, (9, 0))
    real, simulated = pair(simulated, by_hand(0, 1.5) + by_hand(6, 1.5, (7, 0)))
    real.end_s[9, 1] = np.nan  # the all-reduce of step 1, on one rank
    assert finished_steps(real) == 1
    found = validate(real, simulated, {"host": np.array([[[0.0, 1.0], [9.0, 0.0]]])})
    nan = {"correlation", "overlap"}  # no rank is blamed; NaN equals nothing
    assert np.isnan([getattr(each, name) for each in (found, whole) for name in nan]).all()
    others = [field.name for field in dataclasses.fields(whole) if field.name not in nan]
    assert [getattr(found, name) for name in others] == [getattr(whole, name) for name in others]


def test_steps_behind_one_that_was_not_finished_do_not_count():
    real, simulated = pair(by_hand(0, 1.0) + by_hand(4, 1.0), by_hand(0, 1.0) + by_hand(4, 1.0))
    real.end_s[1, 0] = np.nan
    assert finished_steps(real) == 0
    with pytest.raises(TraceError, match=r"by hand \(real by hand\): no step was finished by all ranks: run it again"):
        validate(real, simulated, NO_DELAYS)


def test_traces_of_different_plans_are_refused():
    real, _ = pair(by_hand(0, 1.0), by_hand(0, 1.0))
    _, other = pair(by_hand(0, 1.0) * 2, by_hand(0, 1.0) * 2)
    with pytest.raises(TraceError, match="traces of different plans"):
        validate(real, other, NO_DELAYS)
    with pytest.raises(TraceError, match="traces of different plans"):
        timeline_figure(other, real)


# Several schedules


def validation(schedule: str, simulated_s: float, measured_s: float, n_steps: int = 10) -> Validation:
    return Validation(schedule, "real", n_steps, simulated_s, measured_s, (), (), (), np.nan, np.nan)


def test_speedups_are_those_of_step_times_over_the_baseline():
    found = summarize([validation("local", 4, 5), validation("sync", 8, 6, n_steps=5)], baseline="sync")
    assert [row.simulated_speedup for row in found.rows] == pytest.approx([4.0, 1.0])
    assert [row.measured_speedup for row in found.rows] == pytest.approx([2.4, 1.0])
    assert (found.baseline, [row.error for row in found.rows]) == ("sync", pytest.approx([-0.2, 1 / 3]))
    assert (found.median_error, found.worst_error) == (pytest.approx((0.2 + 1 / 3) / 2), pytest.approx(1 / 3))


def test_worst_error_keeps_its_sign():
    found = summarize([validation("a", 9, 10), validation("b", 7, 10), validation("c", 11, 10)], baseline="a")
    assert (found.median_error, found.worst_error) == (pytest.approx(0.1), pytest.approx(-0.3))


ORDERS = {  # (simulated, measured) of a and of b -> right, wrong, unmeasured
    "both, alike": ((10, 10), (11, 12), "right", ("a", "b")),
    "both, the other way": ((11, 10), (10, 12), "wrong", ("a", "b")),
    "measured, predicted by little": ((10, 10), (10.1, 12), "right", ("a", "b")),
    "measured, predicted as equal": ((10, 10), (10, 12), "wrong", ("a", "b")),
    "measured, predicted by little the other way": ((10.1, 10), (10, 12), "wrong", ("a", "b")),
    "predicted, measured by little": ((10, 10), (11, 10.4), "unmeasured", ("a", "b")),
    "predicted, measured by little the other way": ((11, 10), (10, 10.4), "unmeasured", ("b", "a")),
}  # fmt: skip


@pytest.mark.parametrize(("a", "b", "outcome", "pair"), ORDERS.values(), ids=ORDERS)
def test_pair_that_differs_as_predicted_or_as_measured_is_right_or_wrong_or_unmeasured(a, b, outcome, pair):
    for both in ([StepTime("a", *a), StepTime("b", *b)], [StepTime("b", *b), StepTime("a", *a)]):
        expected = {"right": (), "wrong": (), "unmeasured": ()} | {outcome: (pair,)}
        assert dataclasses.asdict(order(both)) == expected


def test_pair_that_differs_by_little_both_ways_does_not_count():
    found = order([StepTime("a", 10, 10.4), StepTime("b", 10.4, 10)])
    assert found.n_pairs == 0
    assert found.verdict == found.counts == "no two schedules differ by more than 5 %, predicted or measured"


def test_order_is_that_of_step_times_and_not_of_makespans():
    found = summarize([validation("a", 5, 5, n_steps=5), validation("b", 6, 6, n_steps=10)], baseline="a")
    assert found.order.right == (("b", "a"),)


def test_verdict_on_the_order_names_what_is_not_right():
    times = [StepTime("a", 10, 10), StepTime("b", 9, 10.2), StepTime("c", 8, 12), StepTime("d", 20, 20)]
    found = order(times)
    start = "of 6 pairs that differ by more than 5 %, predicted or measured, 3 are right; 2 are wrong"
    assert found.counts == f"{start}; 1 difference was predicted but not measured"
    names = (
        " (measured, a is faster than c, b is faster than c); 1 difference was predicted but not measured (b against a)"
    )
    assert found.verdict == start + names
    one = order([StepTime("a", 10, 10), StepTime("b", 20, 20)])
    assert one.verdict == "of 1 pair that differs by more than 5 %, predicted or measured, 1 is right"


# The picture


def test_both_timelines_begin_with_the_step_and_have_one_scale():
    simulated = by_hand(0, 1.0) + by_hand(4, 1.0)
    real, simulated = pair(simulated, by_hand(0, 1.5) + by_hand(6, 2.0))
    figure = timeline_figure(simulated, real, first_step=1)
    above, below = figure.axes
    assert (above.get_xlim(), below.get_xlim()) == ((4.0, 12.0), (6.0, 14.0))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "by hand: step 1 of 2, all ranks\nby hand",
        "real by hand",
    ]
    with pytest.raises(TraceError, match="step 2: the trace has the steps 0 to 1"):
        timeline_figure(simulated, real, first_step=2)


def test_both_timelines_show_the_ranks_that_were_waited_for_most_as_measured():
    plan = plan_of((FORWARD, BACKWARD, AllReduce("grad", Group(20))), world_size=20)

    def late(rank: int) -> Trace:
        ends_s = np.where(np.arange(20) == rank, 5.0, 2.0)
        return trace_of(plan, [(0, 0, 1), (1, 1, ends_s), (ends_s, 5.0, 6.0)])

    figure = timeline_figure(late(3), late(11))
    shown = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert shown[0] == shown[1]
    assert len(shown[0]) == 8
    assert "rank 11" in shown[0]  # and is not among those that are spread evenly
    swapped = [label.get_text() for label in timeline_figure(late(11), late(4)).axes[0].get_yticklabels()]
    assert "rank 4" in swapped
    assert "rank 11" not in swapped


# The command


def measure(run: Path, scale: float = 1.1, source: str = "real gloo on cpu") -> Path:
    """Pretend that a run was executed: its simulation, stretched."""
    found = run_directory.read(run)
    trace = simulate(found.scenario)
    real = Trace(trace.plan, trace.ready_s * scale, trace.start_s * scale, trace.end_s * scale, source)
    run_directory.save_trace(real, run / run_directory.REAL)
    return run


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Run directories of three schedules, planned only."""
    from simdist.cli import main

    folder = tmp_path_factory.mktemp("template")
    assert main(["plan", str(write(folder / "s.yaml")), "-o", str(folder / "runs")]) == 0
    return folder / "runs"


@pytest.fixture
def runs(template, tmp_path):
    """Run directories of three schedules, measured as 30 %, 20 % and 10 % slower than simulated."""
    shutil.copytree(template, tmp_path / "runs")
    for label, scale in zip(LABELS, (1.3, 1.2, 1.1), strict=True):
        measure(tmp_path / "runs" / label, scale)
    return tmp_path / "runs"


def document(capsys, *args):
    answer = call(capsys, *args, "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def contents(path):
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def assert_refused(answer, *parts):
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.count("error:") == 1
    for part in parts:
        assert part in answer.err, answer.err


def test_validate_prints_what_the_library_computes(runs, capsys):
    found = document(capsys, "validate", runs / "local-4")
    run = run_directory.read(runs / "local-4")
    real = Trace.load(runs / "local-4" / run_directory.REAL)
    expected = validate(real, simulate(run.scenario), run.delays)
    (row,) = found["rows"]
    assert (found["summary"], found["cluster"]) == (None, None)
    for key in ("schedule", "source", "simulated_s", "measured_s", "error", "correlation", "overlap", "verdict"):
        assert row[key] == getattr(expected, key)
    assert row["error"] == pytest.approx(1 / 1.2 - 1)
    assert [kind["op"] for kind in row["kinds"]] == [kind.op for kind in expected.kinds]
    assert row["blames"] == [dataclasses.asdict(blame) for blame in expected.blames]
    assert (row["steps"], row["world_size"], row["simulated_by"]) == (12, 8, "simulated by fast")


def test_validate_prints_tables_for_people(runs, capsys):
    out = call(capsys, "validate", runs / "sync").out
    assert out.startswith("sync: 8 ranks, 12 steps; measured: real gloo on cpu; simulated: the cluster of ")
    assert re.search(r"^makespan: simulated .* m?s, measured .* m?s, error -23\.1 %$", out, re.M)
    assert re.search(r"^ all_reduce +comm +group of 8 +.* -23\.1 % +-23\.1 % +23\.1 %$", out, re.M)
    assert re.search(r"^injected on host: \d+ delays, .* largest difference \+15 ms \(step \d+, rank \d\)$", out, re.M)
    assert re.search(r"^waiting: rank \d is blamed most in both \(simulated .*, measured .*\)$", out, re.M)
    assert "nan" not in out


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_validate_tells_whether_the_measured_one_is_in_the_interval(tmp_path, capsys, is_calibrated):
    """Of what is uncertain in the scenario, or in the cluster that is simulated instead."""
    ranges = "{network.bandwidth: {from: 10 Gbit/s, to: 30 Gbit/s}}"
    text = edited(("bandwidth: 25 Gbit/s}", f"bandwidth: 25 Gbit/s}}\n  uncertain: {ranges}"))
    uncertain = loads(text)
    folder, options = tmp_path / "runs", ()
    if is_calibrated:
        options = ("--cluster", write(tmp_path / "cluster.yaml", dump_cluster(uncertain.cluster)))
        text = edited()
    assert call(capsys, "plan", write(tmp_path / "unsure.yaml", text), "-o", folder).code == 0
    row = compare(uncertain, n_seeds=1)[0]
    low_s, high_s = (12 * end for end in row.step_s_range)
    for scale, where in [
        (high_s / (12 * row.step_s) * 1.01, "above"),
        (low_s / (12 * row.step_s), "in"),
        (0.2, "below"),
    ]:
        measure(folder / "sync", scale * 1.001 if where == "in" else scale)
        (found,) = document(capsys, "validate", folder / "sync", *options)["rows"]
        assert tuple(found["simulated_s_range90"]) == pytest.approx((low_s, high_s), rel=1e-9)
        interval = f"{format_seconds(low_s)} to {format_seconds(high_s)}"
        said = f"\nthe measured one is {where} the 90 % interval of what is uncertain, {interval}\n"
        assert said in call(capsys, "validate", folder / "sync", *options).out


def test_validate_compares_several_schedules(runs, capsys):
    found = document(capsys, "validate", runs)
    assert sorted(row["schedule"] for row in found["rows"]) == sorted(LABELS)
    assert found["summary"]["baseline"] == "sync"
    assert found["summary"]["worst_error"] == pytest.approx(1 / 1.3 - 1)
    assert found["summary"]["median_error"] == pytest.approx(1 - 1 / 1.2)
    assert found["summary"]["order_agrees"] is True
    out = call(capsys, "validate", runs).out
    assert "\nmakespans; speed-up over sync\n" in out
    said = r"^order: of (\d) pairs that differ by more than 5 %, predicted or measured, \1 are right$"
    assert re.search(said, out, re.M)
    assert found["summary"]["n_clear_pairs"] == found["summary"]["n_right_pairs"] > 0
    assert "error: median 16.7 %, worst -23.1 %" in out
    only = document(capsys, "validate", runs, "--schedule", "local-4")
    assert ([row["schedule"] for row in only["rows"]], only["summary"]) == (["local-4"], None)


def test_order_that_is_simulated_wrongly_is_named(runs, capsys):
    measure(runs / "local-4", scale=9.0)
    out = call(capsys, "validate", runs).out
    assert re.search(r"^order: of 3 pairs .* are wrong \(measured, .*sync is faster than local-4", out, re.M)
    summary = document(capsys, "validate", runs)["summary"]
    assert summary["order_agrees"] is False
    assert ["sync", "local-4"] in summary["wrong_pairs"]


def test_difference_that_was_only_predicted_is_named(runs, capsys):
    makespans_s = {label: simulate(run_directory.read(runs / label).scenario).makespan_s for label in LABELS}
    for label in LABELS:
        measure(runs / label, scale=1 / makespans_s[label])
    summary = document(capsys, "validate", runs)["summary"]
    n_clear = summary["n_clear_pairs"]
    assert summary["order_agrees"] is False
    assert (summary["n_right_pairs"], len(summary["unmeasured_pairs"])) == (0, n_clear)
    fastest = min(LABELS, key=makespans_s.__getitem__)
    assert f"predicted but not measured ({fastest} against" in call(capsys, "validate", runs).out


def test_first_run_is_the_baseline_where_none_is_synchronous(runs, capsys):
    shutil.rmtree(runs / "sync")
    assert document(capsys, "validate", runs)["summary"]["baseline"] == LABELS[2]


def test_simulation_is_kept_if_there_is_none_and_never_replaced(runs, capsys):
    run = runs / "sync"
    assert f"wrote {run / run_directory.SIMULATED}" in call(capsys, "validate", run).err
    assert (
        Trace.load(run / run_directory.SIMULATED).difference_s(simulate(run_directory.read(run).scenario)).any()
        == np.False_
    )
    before = contents(run)
    assert call(capsys, "validate", run).err == ""
    assert contents(run) == before


def test_simulation_of_another_cluster_than_that_of_the_scenario_is_not_taken(runs, capsys):
    run = runs / "sync"
    expected = document(capsys, "validate", run)
    trace = Trace.load(run / run_directory.SIMULATED)
    run_directory.save_trace(dataclasses.replace(trace, end_s=trace.end_s * 2), run / run_directory.SIMULATED)
    before = contents(run)
    answer = call(capsys, "validate", run, "--json")
    assert json.loads(answer.out) == expected
    assert contents(run) == before


CLUSTER = "nodes: 2\ngpus_per_node: 4\nfabric: ideal\nnetwork: {latency: 2 ms, bandwidth: 25 Gbit/s}\n"


def test_calibrated_cluster_is_simulated_afresh_and_nothing_is_written(runs, tmp_path, capsys):
    file = write(tmp_path / "calibrated.yaml", CLUSTER)
    plain = document(capsys, "validate", runs / "sync")["rows"][0]
    before = contents(runs)
    found = document(capsys, "validate", runs / "sync", "--cluster", file)
    assert found["cluster"] == str(file)
    assert found["rows"][0]["simulated_s"] > plain["simulated_s"]
    assert found["rows"][0]["measured_s"] == plain["measured_s"]
    document(capsys, "validate", runs, "--cluster", file)
    assert contents(runs) == before
    assert f"simulated: {file}\n" in call(capsys, "validate", runs / "sync", "--cluster", file).out


@pytest.mark.parametrize(("program", "slower"), [("emulated", 1.0), ("mlp fp32", 2.0)])
def test_emulated_computation_took_what_the_scenario_says_whatever_was_calibrated(
    runs, tmp_path, capsys, program, slower
):
    file = write(tmp_path / "calibrated.yaml", CLUSTER + "device: {speed: 0.5}\n")
    measure(runs / "sync", source=f"real gloo on cpu, {program}")
    plain = document(capsys, "validate", runs / "sync")["rows"][0]["kinds"]
    found = document(capsys, "validate", runs / "sync", "--cluster", file)["rows"][0]["kinds"]
    forward = [next(kind["simulated_s"] for kind in kinds if kind["op"] == "forward") for kinds in (plain, found)]
    assert forward[1] == pytest.approx(slower * forward[0])


def test_a_collective_lasts_until_its_last_member_is_done():
    plan = plan_of((AllReduce("grad", Group(2)),), world_size=2)
    real = dataclasses.replace(trace_of(plan, [(0.0, 1.0, [2.0, 4.0])]), source="real")
    found = validate(real, trace_of(plan, [(0.0, 1.0, 3.0)]), {})
    assert found.kinds[0].measured_s == 3.0
    assert found.kinds[0].simulated_s == 2.0


CLUSTERS = {
    "other size": (CLUSTER.replace("nodes: 2", "nodes: 1"), ["c.yaml: has 1 nodes x 4 GPUs", "scenario.yaml has 2 x 4"]),
    "same ranks, other nodes": (CLUSTER.replace("nodes: 2", "nodes: 8").replace("node: 4", "node: 1"), ["8 nodes x 1 GPUs", "2 x 4"]),
    "wrong value": (CLUSTER.replace("2 ms", "2"), ["c.yaml:4: network.latency: 2: a time needs a unit"]),
    "no cluster": ("", ["c.yaml:1: is empty"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), CLUSTERS.values(), ids=CLUSTERS)
def test_cluster_file_that_does_not_fit_is_refused(runs, tmp_path, capsys, text, parts):
    assert_refused(call(capsys, "validate", runs, "--cluster", write(tmp_path / "c.yaml", text)), *parts)


def test_cluster_file_that_cannot_price_the_plan_is_named(tmp_path, capsys):
    storage = "  storage: {latency: 1 ms, bandwidth: 1 GB/s}\nworkload:\n"
    text = edited(("workload:\n", storage), ("seed: 1", "seed: 1\ninput: {source: storage}"))
    path = write(tmp_path / "s.yaml", text)
    assert call(capsys, "plan", path, "--schedule", "sync", "-o", tmp_path / "run").code == 0
    measure(tmp_path / "run")
    file = write(tmp_path / "c.yaml", CLUSTER)
    answer = call(capsys, "validate", tmp_path / "run", "--cluster", file)
    assert_refused(answer, f"{tmp_path / 'run'} with {file}: ", "uses storage", "set cluster.storage")


def test_run_that_was_not_measured_says_how_to_do_it(runs, capsys):
    (runs / "sync" / run_directory.REAL).unlink()
    run = runs / "sync"
    command = f"torchrun --nproc-per-node 8 -m real {run}"
    assert_refused(call(capsys, "validate", run), f"{run}: has no trace.real.npz", f"`{command}`")
    shutil.copy(runs / "local-4" / run_directory.REAL, runs / "local-4" / "kept")
    shutil.copy(measure(run) / run_directory.REAL, run / run_directory.PARTIAL)
    (run / run_directory.REAL).unlink()
    assert_refused(call(capsys, "validate", run), f"{run}: has only trace.partial.npz", "ended early", f"`{command}`")
    answer = call(capsys, "validate", runs, "--json")
    assert answer.code == 0
    assert sorted(row["schedule"] for row in json.loads(answer.out)["rows"]) == sorted(set(LABELS) - {"sync"})
    assert f"warning: {run}: left out: has only trace.partial.npz" in answer.err
    for label in LABELS:
        (runs / label / run_directory.REAL).unlink(missing_ok=True)
    assert_refused(
        call(capsys, "validate", runs), f"-m real {runs / LABELS[2]}", f"nor can any other run in {runs} be used"
    )


def test_trace_that_nobody_measured_is_refused(runs, capsys):
    measure(runs / "sync", source="simulated by fast")
    answer = call(capsys, "validate", runs / "sync")
    assert_refused(answer, f"{runs / 'sync' / run_directory.REAL}: is 'simulated by fast', and no measurement")


def test_steps_that_were_not_finished_are_left_out_with_a_warning(runs, capsys, tmp_path):
    file = runs / "sync" / run_directory.REAL
    trace = Trace.load(file)
    trace.end_s[-1, 0] = np.nan
    run_directory.save_trace(trace, file)
    answer = call(capsys, "validate", runs / "sync", "--plot", tmp_path / "a.png")
    assert f"{file}: only 11 of 12 steps were finished." in answer.out.replace("\n", " ")
    assert answer.out.startswith("sync: 8 ranks, 11 of 12 steps;")
    trace.end_s[:] = np.nan
    run_directory.save_trace(trace, file)
    assert_refused(call(capsys, "validate", runs / "sync"), f"{file}: ", "no step was finished")


def test_runs_of_other_models_are_compared_with_a_warning(runs, tmp_path, capsys):
    path = write(tmp_path / "s.yaml", edited(("forward: 20 ms", "forward: 30 ms")))
    call(capsys, "plan", path, "--schedule", "sync", "-o", runs / "sync", "--force")
    measure(runs / "sync")
    assert f"warning: {runs / 'sync'}: other machines or another model than" in call(capsys, "validate", runs).err


def test_wrong_runs_and_pictures_are_refused(runs, tmp_path, capsys):
    assert_refused(call(capsys, "validate", tmp_path / "none"), "none: is no run directory")
    assert_refused(call(capsys, "validate", runs, "--schedule", "x"), "no run is labelled 'x'", *LABELS)
    assert_refused(call(capsys, "validate", runs, "--plot", "a.gif"), "a.gif", "'.gif'")


def test_validate_draws_a_picture_of_each_run(runs, tmp_path, capsys):
    assert call(capsys, "validate", runs / "sync", "--plot", tmp_path / "one.png").code == 0
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert call(capsys, "validate", runs, "--plot", tmp_path / "all.svg").code == 0
    assert sorted(path.name for path in tmp_path.glob("all*")) == sorted(f"all-{label}.svg" for label in LABELS)


def test_large_world_shows_the_ranks_that_are_blamed_most(tmp_path, capsys):
    path = write(tmp_path / "s.yaml", edited(("nodes: 2", "nodes: 8"), ("4: world}", "4: 32}")))
    call(capsys, "plan", path, "--schedule", "sync", "-o", tmp_path / "run")
    run = measure(tmp_path / "run")
    out = call(capsys, "validate", run).out
    _, _, table = out.partition("16 of 32 ranks: those blamed most\n")
    assert len(re.findall(r"^ +\d+ +\S+ (?:s|ms|us) ", table, re.M)) == 16
    assert len(document(capsys, "validate", run)["rows"][0]["blames"]) == 32


def test_overhead_is_corrected_by_a_run_and_told(tmp_path, capsys):
    """Measured on machines of which each collective takes 3 ms more: that is found again, and written beside the old."""
    text = """
cluster: {nodes: 2, gpus_per_node: 2, fabric: ideal, network: {latency: 10 us, bandwidth: 1 GB/s}}
workload: {tensors: [{name: w, count: 1000000}], batch_size: 1, forward: 5 ms}
schedules: [{kind: sync}, {kind: local_sgd, period: 2}]
steps: 6
"""
    file, found = tmp_path / "x.yaml", tmp_path / "found.yaml"
    file.write_text(text.replace("ideal,", "ideal, collectives: {overhead: 3 ms},"))
    assert call(capsys, "simulate", file, "-o", tmp_path / "slow").code == 0
    file.write_text(text)
    assert call(capsys, "simulate", file, "-o", tmp_path / "runs").code == 0
    for name in ("sync", "local-2"):
        slow = Trace.load(tmp_path / "slow" / name / "trace.simulated.npz")
        dataclasses.replace(slow, source="real gloo on cpu").save(tmp_path / "runs" / name / "trace.real.npz")
    calibrated = call(capsys, "validate", tmp_path / "runs", "--schedule", "sync", "--calibrate", found)
    assert calibrated.code == 0
    assert "corrected: collectives.overhead is 3 ms, not 0 s, so that sync of" in calibrated.out
    assert load_cluster(found).collectives.overhead_s == pytest.approx(3e-3, rel=1e-6)
    assert "collectives.overhead is 3 ms, not 0 s" in load_cluster(found).source
    (other,) = json.loads(call(capsys, "validate", tmp_path / "runs/local-2", "--cluster", found, "--json").out)["rows"]
    assert other["error"] == pytest.approx(0.0, abs=1e-6)
    both = call(capsys, "validate", tmp_path / "runs", "--calibrate", tmp_path / "new.yaml")
    assert_refused(both, "--calibrate takes one run", "--schedule")
    assert_refused(call(capsys, "validate", tmp_path / "runs/sync", "--calibrate", found), "found.yaml: exists")
    fast = call(capsys, "validate", tmp_path / "runs/sync", "--cluster", file_of_slow(tmp_path), "--calibrate", "new")
    assert_refused(fast, "slow.yaml: no collectives.overhead from 0 s to 1 s makes sync of")


def file_of_slow(folder):
    cluster = loads("""
cluster: {nodes: 2, gpus_per_node: 2, fabric: ideal, network: {latency: 10 ms, bandwidth: 1 GB/s}}
workload: {tensors: [{name: w, count: 1000000}], batch_size: 1, forward: 5 ms}
schedules: [{kind: sync}]
steps: 6
""").cluster
    (folder / "slow.yaml").write_text(dump_cluster(cluster))
    return folder / "slow.yaml"


def test_every_key_of_the_json_result_is_documented(runs, capsys):
    def keys_of(value):
        match value:
            case dict():
                return set(value).union(*(keys_of(item) for key, item in value.items() if key != "remarks"))
            case list():
                return set().union(*map(keys_of, value))
            case _:
                return set()

    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "data-dictionary.md"
    section = page.read_text(encoding="utf-8").partition("\n## `simdist validate`")[2].partition("\n## ")[0]
    found = keys_of(document(capsys, "validate", runs))
    assert found - set(re.findall(r"`(\w+)`", section)) == set()


# Two traces of one run, for viewers


def test_trace_of_a_run_with_two_is_chosen(runs, tmp_path, capsys):
    run, chrome = runs / "sync", tmp_path / "chrome.json"
    assert document(capsys, "trace", run, "--chrome", chrome)["source"] == "real gloo on cpu"
    missing = call(capsys, "trace", run, "--chrome", chrome, "--trace", "simulated")
    assert_refused(missing, f"{run}: has no trace.simulated.npz", f"`simdist simulate {run}` makes a simulated trace")
    call(capsys, "simulate", run)
    assert document(capsys, "trace", run, "--chrome", chrome)["source"] == "real gloo on cpu"
    for which, source in {"simulated": "simulated by fast", "real": "real gloo on cpu"}.items():
        found = document(capsys, "trace", run, "--chrome", chrome, "--trace", which)
        assert (found["source"], found["trace"]) == (source, str(run / f"trace.{which}.npz"))
    (run / run_directory.REAL).unlink()
    missing = call(capsys, "trace", run, "--chrome", chrome, "--trace", "real")
    assert_refused(
        missing, f"{run}: has no trace.real.npz", f"`torchrun --nproc-per-node 8 -m real {run}` a measured one"
    )
    file = call(capsys, "trace", run / run_directory.SIMULATED, "--chrome", chrome, "--trace", "real")
    assert_refused(file, "--trace real chooses a trace of a run directory; this is a file, so leave it out")
