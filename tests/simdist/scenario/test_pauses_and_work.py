"""Pauses, work that differs by micro-batch, and slow-downs that set in: what is drawn, and what runs take then."""

import numpy as np
import pytest
from engine_runs import des, fast, simulate
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simdist.errors import ScenarioError
from simdist.runs.building import build, delays
from simdist.scenario import Pauses, Persistent, UnevenWork, dump, loads, sampler
from simdist.scenario.warnings import warnings_of
from simdist.testing import check_disturbance

STEP_S = 0.1
JOB = """
cluster: {{nodes: 4, gpus_per_node: 1, fabric: ideal, network: ideal}}
workload:
  tensors: [{{name: all, count: 1000}}]
  batch_size: 1
  forward: 40 ms
  backward: 60 ms
host: {host}
schedules: [{schedule}]
steps: {steps}
disturbances: [{disturbance}]
"""


def scenario(disturbance, *, steps=40, host="{}", schedule="{kind: sync}"):
    return loads(JOB.format(disturbance=disturbance, steps=steps, host=host, schedule=schedule))


def run_s(chosen):
    built = build(chosen, chosen.schedules[0])
    return simulate(built.plan, built.costs, delays(chosen)).makespan_s


def drawn(disturbance, n_steps=40, world_size=4, seeds=(1,), micro_batches=1, compute_s=1.0):
    source = sampler(
        [disturbance],
        seeds=seeds,
        world_size=world_size,
        ranks_per_node=1,
        compute_s=np.full(world_size, compute_s),
        micro_batches=micro_batches,
    )
    return source.take(n_steps)[disturbance.on][0]


# ---------------------------------------------------------------- pauses


def test_pauses_come_as_often_as_is_said():
    late = drawn(Pauses(every=(4, 4), first=(2, 2), delay_s=(1.5, 1.5), ranks=(1,)), n_steps=12)
    expected = np.zeros((12, 4))
    expected[[2, 6, 10], 1] = 1.5
    assert np.array_equal(late, expected)


def test_pauses_of_a_rank_are_apart_by_a_number_of_the_range_and_take_a_time_of_the_range():
    late = drawn(Pauses(every=(5, 8), first=(3, 4), delay_s=(1.0, 2.0)), n_steps=4000)
    found = set()
    for rank in range(4):
        (steps,) = np.nonzero(late[:, rank])
        assert steps[0] in (3, 4)
        found.update(np.diff(steps).tolist())
    assert found == {5, 6, 7, 8}
    lengths = late[late > 0]
    assert 1.0 <= lengths.min() < 1.01
    assert 1.99 < lengths.max() < 2.0
    assert lengths.mean() == pytest.approx(1.5, abs=0.02)


def test_run_begins_at_a_random_moment_between_two_pauses():
    """As often in each step: once in every mean interval."""
    pausing = drawn(Pauses(every=(1, 3), delay_s=(1.0, 1.0)), n_steps=50, world_size=20_000) > 0
    for step in (0, 1, 2, 49):
        assert pausing[step].mean() == pytest.approx(1 / 2, abs=0.015)
    first = pausing.argmax(axis=0)
    shares = np.bincount(first, minlength=3) / first.size
    assert shares == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=0.015)


def test_what_the_device_covers_of_a_pause_delays_nothing():
    whole = Pauses(every=(1, 1), first=(0, 0), delay_s=(1.0, 1.0))
    half = whole.model_copy(update={"covered_s": (0.4, 0.4)})
    drawn_cover = whole.model_copy(update={"covered_s": (0.0, 2.0)})
    assert drawn(half, n_steps=1).tolist() == [[0.6] * 4]
    late = drawn(drawn_cover, n_steps=20_000)
    assert np.mean(late == 0) == pytest.approx(1 / 2, abs=0.01)
    assert late.mean() == pytest.approx(1 / 4, abs=0.01)  # 1^2 / (2 x 2)


def test_steps_wait_for_the_rank_that_pauses():
    paused = scenario("{kind: pauses, ranks: [0], every: 10, first: 9, delay: 3 s}")
    assert run_s(paused) == pytest.approx(40 * STEP_S + 4 * 3.0, rel=1e-12)


def test_pauses_in_the_same_step_cost_once_and_in_others_each():
    together = scenario("{kind: pauses, every: 20, first: 5, delay: 3 s}")
    assert run_s(together) == pytest.approx(40 * STEP_S + 2 * 3.0, rel=1e-12)
    apart = together.changed(
        disturbances=[
            {"kind": "pauses", "every": 20, "first": 5 + rank, "delay": "3 s", "ranks": [rank]} for rank in range(4)
        ]
    )
    assert run_s(apart) == pytest.approx(40 * STEP_S + 8 * 3.0, rel=1e-12)


@pytest.mark.parametrize("engine", [des, fast])
def test_covered_pause_delays_by_the_rest_of_it(engine):
    """Rank 0: 40 ms forward, 60 ms backward; rank 1 pauses for 90 ms, 50 of which its device covers.

    rank 0  FFFFBBBBBB....
    rank 1  FFFF....BBBBBB
    """
    chosen = scenario("{kind: pauses, ranks: [1], every: 9, first: 0, delay: 90 ms, covered: 50 ms}", steps=1)
    built = build(chosen, chosen.schedules[0])
    assert engine.simulate(built.plan, built.costs, delays(chosen)).makespan_s == pytest.approx(0.14, rel=1e-12)


@pytest.mark.parametrize(("delay", "lost_s"), [("90 ms", 0.0), ("100 ms", 0.0), ("130 ms", 0.03), ("250 ms", 0.15)])
def test_host_one_step_ahead_hides_a_step_of_a_pause(delay, lost_s):
    """Without `covered`: the engines find out."""
    pauses = f"{{kind: pauses, ranks: [1], every: 30, first: 20, delay: {delay}}}"
    assert run_s(scenario(pauses, host="{run_ahead_steps: 1}")) == pytest.approx(40 * STEP_S + lost_s, rel=1e-9)


# ---------------------------------------------------------------- work


def test_recorded_lengths_are_played_micro_batch_by_micro_batch(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("# lengths\n1,2,1,1\n3,1,1,1\n1,1,4,1\n1,1,2,1\n")
    late = drawn(UnevenWork(file=file, order="recorded"), n_steps=2, micro_batches=2, compute_s=0.2)
    passes = 0.1  # of a step of two
    expected = passes * np.array([[[0, 1, 0, 0], [2, 0, 0, 0]], [[0, 0, 3, 0], [0, 0, 1, 0]]])
    assert late == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ScenarioError, match="ends before step 3: record 2 rows for each step, or write order: drawn"):
        drawn(UnevenWork(file=file, order="recorded"), n_steps=3, micro_batches=2)


def test_lengths_of_a_file_are_drawn_with_equal_probability(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("2\n4\n4\n8\n")
    late = drawn(UnevenWork(file=file), n_steps=10_000, compute_s=1.0)
    values, counts = np.unique(late, return_counts=True)
    assert values.tolist() == [0.0, 1.0, 3.0]
    assert counts / late.size == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


def test_lengths_of_a_range_are_equally_likely_and_part_of_the_time_grows_with_their_square():
    late = drawn(UnevenWork(lengths=(1, 3), quadratic=0.5), n_steps=10_000, compute_s=1.0)
    values, counts = np.unique(late, return_counts=True)
    assert values == pytest.approx([0.0, 0.5 * 2 + 0.5 * 4 - 1, 0.5 * 3 + 0.5 * 9 - 1])
    assert counts / late.size == pytest.approx([1 / 3] * 3, abs=0.01)


def test_more_micro_batches_differ_less():
    one = drawn(UnevenWork(lengths=(1, 9)), n_steps=10_000)
    many = drawn(UnevenWork(lengths=(1, 9)), n_steps=10_000, micro_batches=16).sum(axis=1)
    assert many.mean() == pytest.approx(one.mean(), rel=0.02)
    assert many.std() == pytest.approx(one.std() / 4, rel=0.03)


def test_recording_that_is_too_short_for_the_micro_batches_is_refused(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("1,1,1,1\n" * 79)
    text = f"{{kind: uneven_work, file: {file}, order: recorded}}"
    with pytest.raises(ScenarioError, match="holds 79 micro-batches, the run has 80: record as many"):
        loads(
            JOB.replace("  batch_size: 1", "  batch_size: 1\n  micro_batches: 2").format(
                disturbance=text, steps=40, host="{}", schedule="{kind: sync}"
            )
        )


def test_lengths_of_fewer_ranks_are_played_by_all_from_another_step(tmp_path):
    """Rows tell step and micro-batch, columns the rank. Ranks 2 and 3 play both rows of another recorded step."""
    file = tmp_path / "lengths.npz"
    np.savez(file, 1.0 + 10 * np.arange(20)[:, None] + np.arange(2))
    late = drawn(UnevenWork(file=file, order="recorded"), n_steps=10, micro_batches=2, compute_s=2.0)
    lengths = late.sum(axis=1) + 2  # of both micro-batches: the shortest takes a second
    assert lengths[:, 0] == pytest.approx(2 + 10 * (4 * np.arange(10) + 1))
    assert lengths[:, 1] - lengths[:, 0] == pytest.approx(2)
    assert lengths[:, 3] - lengths[:, 2] == pytest.approx(2)
    shift = round((lengths[0, 2] - lengths[0, 0]) / 40)
    assert lengths[:, 2] == pytest.approx(np.roll(lengths[:, 0], -shift))
    remark = UnevenWork(file=file, order="recorded").ranks_remark(4)
    assert remark is not None
    assert remark.startswith("lengths.npz holds 2 ranks, the cluster has 4: ranks from 2 on play recorded ranks again")
    assert UnevenWork(file=file).ranks_remark(4) is None


# ---------------------------------------------------------------- slow-downs that set in


def test_slow_down_grows_linearly_and_stays():
    late = drawn(Persistent(factor=1.5, on="compute", ranks=(2,), sets_in=(2, 6)), n_steps=9, compute_s=0.2)
    assert late[:, 2] == pytest.approx([0, 0, 0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert not late[:, [0, 1, 3]].any()


def test_slow_down_that_sets_in_at_a_step_is_all_there_at_once():
    assert drawn(Persistent(delay_s=0.5, sets_in=(2, 2)), n_steps=4)[:, 0].tolist() == [0.0, 0.0, 0.5, 0.5]


def test_drift_costs_the_sum_of_its_arithmetic_series():
    drift = scenario("{kind: persistent, on: compute, ranks: [3], factor: 1.4, sets_in: [0, 40]}")
    lost_s = sum(0.4 * STEP_S * step / 40 for step in range(40))
    assert run_s(drift) == pytest.approx(40 * STEP_S + lost_s, rel=1e-12)


# ---------------------------------------------------------------- all of them


def ends(low, high):
    return st.lists(st.integers(low, high), min_size=2, max_size=2).map(lambda pair: tuple(sorted(pair)))


def times(most):
    return st.lists(st.floats(0, most), min_size=2, max_size=2).map(lambda pair: tuple(sorted(pair)))


def pauses(every, first, delay_s, covered_s):
    return Pauses(every=every, first=first, delay_s=delay_s, covered_s=covered_s)


PAUSES = st.builds(pauses, ends(1, 9), st.none() | ends(0, 9), times(0.3), times(0.2))
WORK = st.builds(
    UnevenWork,
    lengths=ends(1, 9),
    quadratic=st.floats(0, 1),
    on=st.sampled_from(["compute", "backward", "overlap", "host"]),
)
DRIFTS = st.builds(
    Persistent, factor=st.floats(1, 3), sets_in=ends(0, 20), on=st.sampled_from(["host", "compute", "backward"])
)
SCHEDULES = ["{kind: sync}", "{kind: local_sgd, period: 3}", "{kind: hierarchical_sgd, levels: {1: 2, 4: 4}}"]
HOSTS = ["{}", "{run_ahead_steps: 1}", "{run_ahead_steps: null}", "{waits_for: update}"]


@given(st.lists(PAUSES | WORK | DRIFTS, min_size=1, max_size=3), st.sampled_from(SCHEDULES), st.sampled_from(HOSTS))
def test_engines_agree_to_the_last_bit_and_files_bring_the_same_delays_back(disturbances, schedule, host):
    chosen = scenario("", steps=13, schedule=schedule, host=host).changed(disturbances=tuple(disturbances))
    assert loads(dump(chosen)).disturbances == chosen.disturbances
    built = build(chosen, chosen.schedules[0])
    found = delays(chosen)
    traces = [engine.simulate(built.plan, built.costs, found) for engine in (des, fast)]
    assert (traces[0].difference_s(traces[1]) == 0).all()


@pytest.mark.parametrize(
    "disturbance",
    [
        Pauses(every=(3, 5), delay_s=(0.1, 0.3), covered_s=(0.0, 0.2)),
        Pauses(every=(4, 4), first=(2, 2), delay_s=(0.1, 0.1), ranks=(0,)),
        UnevenWork(lengths=(512, 4096), quadratic=0.3),
        Persistent(factor=1.5, on="compute", sets_in=(3, 9)),
    ],
    ids=lambda disturbance: disturbance.kind,
)
def test_disturbances_keep_the_rules(disturbance):
    check_disturbance(disturbance)


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("{kind: pauses, every: 0, delay: 1 s}", "every: 0: write steps from 1 to 1000000, e.g. 250"),
        ("{kind: pauses, every: [5, 3], delay: 1 s}", "every: [5, 3]: the least comes first: write e.g. [250, 270]"),
        (
            "{kind: pauses, every: [5, 6, 7], delay: 1 s}",
            "every: [5, 6, 7]: write one value, or the least and the most, e.g. [250, 270]",
        ),
        ("{kind: pauses, every: 5, delay: 1}", "delay: 1: a time needs a unit: write e.g. 55 ms"),
        ("{kind: pauses, every: 5}", "delay: required key 'delay' is missing: write e.g. delay: 1.2 s"),
        (
            "{kind: pauses, every: 5, first: -1, delay: 1 s}",
            "first: -1: write a whole number from 0 to 1000000000",
        ),
        (
            "{kind: pauses, every: 5, delay: 1 s, covered: 1 s, on: compute}",
            "covered: pauses of compute are not covered by work of the device: leave covered out, or write on: host",
        ),
        ("{kind: uneven_work}", "lengths: write either lengths, e.g. [512, 4096], or file, e.g. lengths.csv"),
        ("{kind: uneven_work, lengths: [0, 3]}", "lengths: 0: write lengths of 1 or more, e.g. [512, 4096]"),
        (
            "{kind: uneven_work, lengths: [1, 3], order: recorded}",
            "order: recorded: lengths of a range are drawn: write file, or leave order out",
        ),
    ],
)
def test_wrong_settings_are_refused_with_place_value_and_remedy(written, fault):
    with pytest.raises(ScenarioError) as caught:
        scenario(written)
    assert str(caught.value).endswith(f"disturbances[0].{fault}")


def test_lengths_of_0_are_refused(tmp_path):
    (tmp_path / "x.csv").write_text("1\n0\n")
    with pytest.raises(ValidationError, match=r"x\.csv: 0 at row 1, column 0: lengths are finite and above 0"):
        UnevenWork(file=tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("written", "warning"),
    [
        ("{kind: pauses, every: 5, delay: 1 s, covered: 2 s}", "it never delays"),
        ("{kind: uneven_work, lengths: 7}", "it never delays"),
        ("{kind: pauses, every: 5, first: 40, delay: 1 s}", "it begins in step 40 of 40, counted from 0"),
        ("{kind: persistent, delay: 1 s, sets_in: [99, 200]}", "it begins in step 99 of 40, counted from 0"),
    ],
)
def test_settings_without_an_effect_are_told(written, warning):
    assert warnings_of(scenario(written)) == (f"disturbances[0] has no effect: {warning}",)


@pytest.mark.parametrize("host", ["{run_ahead_steps: 1}", "{run_ahead_steps: null}", "{waits_for: update}"])
def test_pauses_that_would_be_hidden_twice_are_told(host):
    (warning,) = warnings_of(scenario("{kind: pauses, every: 5, delay: 2 s, covered: 1 s}", host=host))
    assert warning.startswith("disturbances[0].covered hides a part of pauses, and so does a host that is ahead")
    assert warnings_of(scenario("{kind: pauses, every: 5, delay: 2 s}", host=host)) == ()


@pytest.mark.parametrize(
    ("disturbance", "is_random"),
    [
        (Pauses(every=(5, 5), first=(2, 2), delay_s=(1.0, 1.0)), False),
        (Pauses(every=(5, 5), delay_s=(1.0, 1.0)), True),
        (Pauses(every=(5, 5), first=(2, 2), delay_s=(1.0, 2.0)), True),
        (UnevenWork(lengths=(1, 2)), True),
        (Persistent(delay_s=1.0, sets_in=(1, 2)), False),
    ],
)
def test_seeds_matter_only_where_something_is_drawn(disturbance, is_random):
    assert disturbance.is_random is is_random
    one, other = (drawn(disturbance, n_steps=30, seeds=(seed,)) for seed in (1, 2))
    assert np.array_equal(one, other) is not is_random
