"""Goodput of schedules under failures, against closed forms and against failures that come at known steps."""

import itertools
import json
import math

import numpy as np
import pytest
from commandline import call, write

import simdist
from simdist.errors import PlanError, ScenarioError, UnsupportedError
from simdist.runs.attempts import CATEGORIES
from simdist.runs.checkpoint_costs import checkpoint_costs
from simdist.scenario import loads
from simdist.studies.goodput import RateCurve, RatePoint, goodput

DAY_S = 86400.0


def job(
    failures="{causes: [{cause: gpu, of: job, rate: 1 per day, effect: process}]}",
    *,
    train_for="20 days",
    checkpoint="{every: 600, size: 30 GB}",
    disturbances="[]",
    schedules="[sync]",
    more="",
):
    """Return a job of two nodes and steps of 1 s, whose checkpoints of 30 GB take 30 s."""
    written = f"checkpoint: {checkpoint}\n" if checkpoint else ""
    return loads(f"""
name: job
cluster: {{nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal, storage: {{latency: 0 s, bandwidth: 1 GB/s}},
  device: {{host_bandwidth: 1000 GB/s}}}}
workload: {{tensors: [{{name: all, count: 9}}], batch_size: 1, forward: 400 ms, backward: 600 ms, optimize: 0 s}}
steps: 20
train_for: {train_for}
{written}failures: {failures}
disturbances: {disturbances}
schedules: {schedules}
{more}
""")


def only(study):
    (row,) = study
    return row


def test_a_policy_that_does_not_fit_a_schedule_costs_no_other_row():
    """FSDP has one replica, so that nobody goes on."""
    failures = "{causes: [{cause: gpu, of: gpu, rate: 1 per 5 days, effect: process}], on_failure: continue}"
    scenario = job(failures, schedules="[{kind: hsdp, shard: 1}, fsdp]")
    study = goodput(scenario, n_seeds=1)
    labels = [(row.schedule, row.on_failure) for row in study]
    assert labels == [("hsdp-1", "continue"), ("hsdp-1", "restart"), ("fsdp", "restart")]
    assert [each.place for each in study.remarks if "nobody is left" in each.text] == ["fsdp"]


def test_a_policy_that_does_not_fit_the_baseline_is_refused_before_anything_is_simulated(monkeypatch):
    failures = "{causes: [{cause: gpu, of: gpu, rate: 1 per 5 days, effect: process}], on_failure: continue}"
    scenario = job(failures, schedules="[{kind: hsdp, shard: 1}, fsdp]")
    monkeypatch.setattr("simdist.studies.goodput.steady", None)
    with pytest.raises(PlanError, match=r"^fsdp, on_failure: continue: .* all ranks hold one replica"):
        goodput(scenario, baseline="fsdp")


def test_compare_refuses_what_does_not_fit_before_anything_is_simulated(monkeypatch):
    failures = "{causes: [{cause: gpu, of: gpu, rate: 1 per 5 days, effect: process}], on_failure: continue}"
    monkeypatch.setattr("simdist.studies.comparison.build", None)
    with pytest.raises(PlanError, match=r"^fsdp: failures.on_failure: continue: all ranks hold one replica"):
        simdist.compare(job(failures, schedules="[{kind: hsdp, shard: 1}, fsdp]"))


def test_deaths_at_known_steps_repeat_the_steps_since_the_last_checkpoint():
    """300 steps, a file every 25, deaths after 60, 145 and 240 steps.

    Source:
        saforem2/ezpz, pull request 225: 4 attempts, resumed from 50, 125 and 225.
    """
    deaths = "{causes: [{cause: death, effect: process, at_steps: [60, 145, 240]}]}"
    row = only(goodput(job(deaths, train_for="300", checkpoint="{every: 25, size: 1 B}"), n_seeds=1))
    found = row.record()
    assert (found["attempts"], found["repeated_steps"], found["steps"]) == (4, 10 + 20 + 15, 300)
    assert found["goodput"] == pytest.approx(300 / 345, rel=1e-6)
    assert found["causes"]["death"]["failures"] == 3
    assert found["causes"]["death"]["lost_s"] == pytest.approx(45, rel=1e-6)


def test_shares_of_the_time_add_up_to_all_of_it():
    recovery = "{detect: 30 s, schedule: 5 min, start: 1 min, connect: 10 s, warm_up: 2 min}"
    failing = f"{{causes: [{{cause: gpu, of: gpu, rate: 1 per day, effect: node}}], recovery: {recovery}}}"
    row = only(goodput(job(failing), n_seeds=3))
    assert row.shares.keys() == set(CATEGORIES)
    assert sum(row.shares.values()) == pytest.approx(1)
    assert all(row.shares[each] > 0 for each in ("checkpoint_restore", "program_startup", "initialization"))
    lost_s = sum(each.lost_s for each in row.causes.values())
    own = row.shares["productive"] + row.shares["checkpoint_save"]
    first_s = 60 + 10 + 120  # start, connect and warm_up of the first attempt
    assert lost_s + own * 20 * DAY_S + first_s == pytest.approx(20 * DAY_S, rel=1e-6)


def test_a_straggler_lowers_goodput_and_not_ettr():
    """Every step of one rank is 250 ms late, so that steps of 1 s take 1.25 s. Nothing fails."""
    never = "{causes: [{cause: late, effect: process, at: [30 days]}]}"
    late = "[{kind: persistent, ranks: [0], factor: 1.25}]"
    row = only(goodput(job(never, checkpoint=None, disturbances=late), n_seeds=2))
    assert row.goodput == pytest.approx(0.8)
    assert row.shares["step_time_deviation"] == pytest.approx(0.2)
    assert row.record()["ettr"] == pytest.approx(1)


def test_stalls_for_data_are_no_goodput():
    """A batch of 1 GB takes 1 s and a step 1 s, of which nothing hides: prefetch of one batch in the first step."""
    never = "{causes: [{cause: late, effect: process, at: [30 days]}]}"
    described = job(never, checkpoint=None).changed(
        {"workload.sample_size": "1 GB", "input.source": "storage", "cluster.storage.bandwidth": "0.5 GB/s"}
    )
    row = only(goodput(described, n_seeds=1))
    stalled = row.shares["data_loading"]
    assert stalled > 0.4
    assert row.goodput == pytest.approx(1 - stalled)


def test_best_interval_is_youngs_where_young_assumes_what_holds():
    """Files take 30 s and failures come once a day: sqrt(2 x 86,400 x 30) = 2,277 s. Loading takes nothing much."""
    described = job(train_for="100 days", checkpoint="{every: 600, size: 15 GB, ranks: all}")
    costs = checkpoint_costs(described, described.schedules[0])
    row = only(goodput(described, n_seeds=10))
    assert row.young_s == pytest.approx(math.sqrt(2 * DAY_S * costs.stall_s))
    assert row.best_steps / row.young_s == pytest.approx(1, abs=0.2)
    lost_at_best = math.sqrt(2 * costs.stall_s / DAY_S) + costs.load_s / DAY_S
    assert row.record()["best_goodput"] == pytest.approx(1 - lost_at_best, abs=2e-3)


def test_best_interval_trains_most_of_those_around_it():
    described = job(train_for="50 days")
    best = only(goodput(described, n_seeds=5))
    every = best.best_steps
    trained = {
        n: only(goodput(described.changed({"checkpoint.every": n}), n_seeds=5)).suffered.trained_per_s.mean()
        for n in (every // 3, every, 3 * every)
    }
    assert max(trained, key=trained.get) == every


def test_differences_are_of_the_same_failures():
    """The interval of a difference is less than half as wide as it would be if failures were independent."""
    spare = "{causes: [{cause: gpu, of: gpu, rate: 1 per day, effect: node}], recovery: {schedule: 10 min, swap: 1 min}"
    study = goodput(job(spare + ", on_failure: spare, spares: 50}"), n_seeds=20)
    own, again = study
    assert (own.on_failure, again.on_failure) == ("spare", "restart")
    low, high = again.record()["difference_ci95"]
    assert high < 0
    widths = [np.ptp(row.record()["goodput_ci95"]) for row in study]
    assert high - low < 0.5 * math.hypot(*widths)
    n_replaced = own.causes["gpu"].n_failures
    assert own.goodput - again.goodput == pytest.approx(n_replaced * 9 * 60 / (20 * DAY_S), rel=0.2)


def test_a_policy_that_costs_in_steady_state_pays_from_a_rate_on():
    """Continuing makes each step 5 % longer, and half of the ranks are away for 1 h; starting again takes 1 h.

    (1 - 1800 / T) / 1.05 = 1 - (3600 + 300) / T with 300 s of repeated steps, so T = 45,900 s.
    """
    keeps_on = (
        "{causes: [{cause: gpu, of: node, rate: 1 per 40 h, effect: node}], recovery: {schedule: 1 h}, "
        "on_failure: continue, step_factor: 1.05}"
    )
    study = goodput(job(keeps_on, train_for="100 days", checkpoint="{every: 600, size: 1 GB}"), n_seeds=10)
    own, again = study.curves
    assert own.break_even_s is None
    assert again.label == "sync, restart"
    speedups = [point.speedup for point in again.points]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 1 > speedups[-1]
    assert any(
        "trains more than sync, continue if the time between failures is longer" in str(r) for r in study.remarks
    )


def test_break_even_lies_between_points_in_proportion_to_their_logarithms():
    points = (RatePoint(0.5, 400.0, 0.9, 1.1), RatePoint(1.0, 100.0, 0.8, 1 / 1.1))
    assert RateCurve("sync", points).break_even_s == pytest.approx(200)
    assert RateCurve("sync", points[:1]).break_even_s is None


def test_where_the_baseline_trains_nothing_there_is_no_speed_up():
    never = "{causes: [{cause: gpu, of: job, rate: 1 per min, effect: process}], recovery: {start: 1 h}}"
    found = goodput(job(never, train_for="1 day", schedules="[sync, local-4]"), n_seeds=3)
    assert [row.record()["speedup"] for row in found] == [None, None]
    assert [row.record()["speedup_ci95"] for row in found] == [None, None]
    assert found.curves[0].break_even_s is None
    assert "sync" in found.text()


def test_rates_that_nobody_could_mean_are_refused_at_once():
    with pytest.raises(
        UnsupportedError, match=r"^sync, on_failure: restart: .* 1,728,000 failures are expected .* check rate and of"
    ):
        goodput(job("{causes: [{cause: gpu, of: job, rate: 1 per s, effect: process}]}"))


def test_goodput_falls_with_the_rate():
    (curve,) = goodput(job(train_for="100 days"), n_seeds=5).curves
    shares = [point.goodput for point in curve.points]
    assert shares == sorted(shares, reverse=True)
    between = [point.between_failures_s for point in curve.points]
    assert between[3] == pytest.approx(DAY_S)
    assert [a / b for a, b in itertools.pairwise(between)] == pytest.approx([2.0] * 6)


def test_money_is_that_of_all_nodes_and_of_what_causes_took():
    spare = "{causes: [{cause: gpu, of: gpu, rate: 1 per day, effect: node}], recovery: {schedule: 1 h}"
    own, again = goodput(job(spare + ", on_failure: spare, spares: 2}"), n_seeds=2, price_per_gpu_hour=3.0)
    assert own.record()["money"] == pytest.approx(3.0 * (2 + 2) * 20 * 24)
    assert again.record()["money"] == pytest.approx(3.0 * 2 * 20 * 24)
    cause = again.causes["gpu"]
    assert cause.money == pytest.approx(6.0 * cause.lost_s / 3600)


def test_equal_seeds_give_equal_studies():
    first, second = (goodput(job(), n_seeds=3).document() for _ in range(2))
    assert first == second


def test_recovery_that_is_not_stated_is_said_to_count_as_nothing():
    (remark,) = (each for each in goodput(job(), n_seeds=1).remarks if each.place == "failures.recovery")
    assert str(remark) == (
        "failures.recovery: detect, diagnose, schedule, start, connect, warm_up are not stated, and so 0 s"
    )


def remarks_at(place, study):
    return [str(each) for each in study.remarks if each.place == place]


def test_checkpoints_of_the_long_job_need_not_be_due_within_the_simulated_steps():
    study = goodput(job(checkpoint="{every: 1 h, size: 30 GB}"), n_seeds=1)
    assert remarks_at("checkpoint", study) == ["checkpoint: every 1 h is every 3,600 steps of sync"]


@pytest.mark.parametrize("train_for", ["10 days", "864000"])
def test_corruption_that_nobody_lives_to_find_is_named(train_for):
    """Steps take 1 s, and files 30 s more after each 600 steps: 864,000 steps are 10.5 days."""
    causes = "[{cause: gpu, of: job, rate: 1 per day, effect: corruption, found_after: FOUND}]"
    failing = f"{{causes: {causes}}}"
    late, soon = (
        goodput(job(failing.replace("FOUND", after), train_for=train_for), n_seeds=2) for after in ("11 days", "1 h")
    )
    place = "failures.causes[0].found_after"
    length = "10.5" if train_for == "864000" else "10"
    assert remarks_at(place, late) == [
        f"{place}: corruption is found after 11 days, and the job lasts {length} days, so that it is never found and "
        "costs nothing: write less, or a longer train_for"
    ]
    assert only(late).causes["gpu"].lost_s == 0
    assert remarks_at(place, soon) == []
    assert only(soon).causes["gpu"].lost_s > 0


def test_steps_that_are_lost_for_want_of_checkpoints_are_said_to_be():
    failing = "{causes: [{cause: gpu, effect: process, at: [AT]}]}"
    lost, kept, never = (
        goodput(job(failing.replace("AT", at), checkpoint=checkpoint), n_seeds=1)
        for at, checkpoint in (("5 days", None), ("5 days", "{every: 600, size: 1 GB}"), ("30 days", None))
    )
    assert remarks_at("checkpoint", lost) == [
        "checkpoint: none is written, so that a failure that ends an attempt loses all steps before it: write "
        "checkpoint, e.g. {every: 1 h, what: state}"
    ]
    assert remarks_at("checkpoint", kept) == remarks_at("checkpoint", never) == []


@pytest.mark.parametrize("when", ["of: job, rate: 0 per day", "at: [30 days]"])
def test_causes_that_never_strike_are_shown_to_take_nothing(when):
    causes = f"[{{cause: gpu, of: job, rate: 1 per day, effect: process}}, {{cause: never, effect: process, {when}}}]"
    study = goodput(job(f"{{causes: {causes}}}"), n_seeds=2, price_per_gpu_hour=2.0)
    (shown,) = ((columns, records) for title, columns, records in study.tables() if title == "what failures took")
    columns, (_, never) = shown
    assert [each.cell(never) for each in columns] == ["sync", "restart", "never", "0.0", "0 s", "0 %", "$ 0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"failures": None}, "failures: nothing fails"),
        ({"train_for": None}, "how long is the whole job"),
    ],
)
def test_scenario_without_what_it_takes_is_refused(change, message):
    with pytest.raises(ScenarioError, match=message):
        goodput(job().changed(**change))


def test_command_prints_tables_and_writes_rows_and_a_picture(tmp_path, capsys):
    from simdist.scenario.scenario import dump

    path = write(tmp_path / "job.yaml", dump(job(schedules="[sync, local-4]")))
    csv, picture = tmp_path / "rows.csv", tmp_path / "goodput.svg"
    answer = call(capsys, "goodput", path, "--seeds", "3", "--price", "2", "--csv", csv, "--plot", picture)
    assert answer.code == 0, answer.err
    for words in ("where the time goes", "what failures took", "goodput by the time between failures", "$"):
        assert words in answer.out
    head, *lines = csv.read_text(encoding="utf-8").splitlines()
    assert head.startswith("schedule,on_failure,goodput,goodput_ci95_low,goodput_ci95_high,")
    assert [line.split(",")[0] for line in lines] == ["sync", "local-4"]
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


def test_command_without_failures_says_what_to_write(capsys):
    answer = call(capsys, "goodput", "cloud-stragglers")
    assert answer.code == 2
    assert "write failures: {causes: [{cause: gpu, of: gpu, rate: 17 % per year, effect: node}]}" in answer.err


def test_compare_has_the_column_of_the_study(tmp_path, capsys):
    described = job()
    (row,) = simdist.compare(described, n_seeds=3)
    assert row.document()["goodput"] == only(goodput(described, n_seeds=3)).goodput
    assert "goodput" not in simdist.compare(described.changed(failures=None), n_seeds=3).text()


def test_study_is_shown_in_notebooks_as_its_tables():
    shown = simdist.goodput(job(), n_seeds=2)._repr_html_()
    assert "where the time goes" in shown
    assert "what failures took" in shown


def test_document_is_json():
    json.dumps(goodput(job(), n_seeds=2).document(), allow_nan=False)


# ---------------------------------------------------------------- uncertain rates and recoveries

RATE = "failures.causes.0.rate: {from: 0.5 per day, to: 2 per day, source: 12 events}"
RECOVERY = "failures.recovery.schedule: {from: 30 min, to: 2 h}"
UNSURE = "{causes: [{cause: gpu, of: job, rate: 1 per day, effect: node}], recovery: {schedule: 1 h}}"


def unsure(*ranges, failures=UNSURE, **more):
    return job(failures, more="uncertain: {" + ", ".join(ranges) + "}", **more)


def test_ranges_of_rates_and_recoveries_widen_goodput():
    """Lost per failure: 1 h, 300 s of steps and loading; 5 % of steps and files besides. Ends of the range: 5 % off."""
    known = only(goodput(job(UNSURE), n_seeds=20)).record()
    assert "goodput_range90" not in known
    for given, per_day, lost_s in (
        ((RATE,), (0.5 + 0.05 * 1.5, 0.5 + 0.95 * 1.5), (3930, 3930)),
        ((RECOVERY,), (1, 1), (1800 + 0.05 * 5400 + 330, 1800 + 0.95 * 5400 + 330)),
    ):
        row = only(goodput(unsure(*given), n_seeds=20)).record()
        assert row["goodput"] == known["goodput"]
        low, high = row["goodput_range90"]
        width = (per_day[1] * lost_s[1] - per_day[0] * lost_s[0]) / DAY_S
        assert high - low == pytest.approx(width, rel=0.25)
        assert low < row["goodput"] < high
        assert max(row["doubts"], key=row["doubts"].get) == given[0].split(":")[0].replace(".0", "[0]")


def test_remarks_name_the_measurement_that_narrows_goodput():
    study = goodput(unsure(RATE), n_seeds=5)
    assert "is from failures.causes[0].rate (0.5 per day to 2 per day, 12 events): measure it" in str(study.remarks[-1])
    assert "in brackets: 90 % intervals" in study.text()


def test_draws_are_the_same_for_all_rows():
    """Failures cost both schedules the same, and so do their draws: the difference stays 0."""
    study = goodput(unsure(RATE, schedules="[sync, local-4]"), n_seeds=3)
    one, other = (row.record() for row in study)
    assert one["goodput_range90"] == pytest.approx(other["goodput_range90"], abs=1e-4)
    assert other["difference_range90"] == pytest.approx((0, 0), abs=1e-4)


def test_a_policy_without_the_managers_cost_is_drawn_without_it():
    """`step_factor` belongs to the scenario's own policy; its range leaves that of restart alone."""
    slower = UNSURE.replace("causes:", "step_factor: 1.05, on_failure: spare, spares: 2, causes:")
    study = goodput(unsure("failures.step_factor: {from: 1, to: 1.1}", failures=slower), n_seeds=3)
    own, again = study
    assert max(own.doubts, key=own.doubts.__getitem__) == "failures.step_factor"
    assert np.ptp(own.record()["goodput_range90"]) > 0.05
    assert again.doubts == {}


def test_best_interval_is_that_of_frequent_and_rare_failures():
    """Young: half as many failures ask for an interval longer by sqrt 2."""
    row = only(goodput(unsure(RATE, checkpoint="{every: 600, size: 15 GB, ranks: all}"), n_seeds=2)).record()
    low_s, high_s = row["best_s_range90"]
    assert low_s < row["best_s"] < high_s
    assert high_s / low_s == pytest.approx(math.sqrt(1.925 / 0.575), rel=0.2)


def test_break_even_has_the_doubt_of_the_recovery_and_is_weighed_with_that_of_the_rates():
    """As in the test above of where a policy pays; the recovery takes 30 min to 2 h."""
    keeps_on = (
        "{causes: [{cause: gpu, of: node, rate: 1 per 40 h, effect: node}], recovery: {schedule: 1 h}, "
        "on_failure: continue, step_factor: 1.05}"
    )
    rate = "failures.causes.0.rate: {from: 1 per 80 h, to: 1 per 10 h}"
    described = unsure(RECOVERY, rate, failures=keeps_on, checkpoint="{every: 600, size: 1 GB}", train_for="100 days")
    study = goodput(described, n_seeds=2)
    _, again = study.curves
    low_s, high_s = again.break_even_range_s
    assert low_s < again.break_even_s < high_s
    assert high_s > 2 * low_s
    (text,) = remarks_at("sync, restart", study)
    assert "(" in text
    assert "; uncertain rates allow " in text


def test_compare_and_sweep_show_the_interval_of_goodput(tmp_path, capsys):
    from simdist.scenario.scenario import dump

    described = unsure(RATE)
    expected = only(goodput(described, n_seeds=3)).record()["goodput_range90"]
    (row,) = compared = simdist.compare(described, n_seeds=3)
    assert row.document()["goodput_range90"] == expected
    assert f"({100 * expected[0]:.1f} %-" in compared.text()
    write(tmp_path / "job.yaml", dump(described))
    sweep = "scenario: job.yaml\nvary: {workload.forward: [400 ms]}\nseeds: 3\n"
    assert call(capsys, "sweep", write(tmp_path / "sweep.yaml", sweep), "-o", tmp_path / "out").code == 0
    (found,) = simdist.results(tmp_path / "out").frame().to_dict("records")
    assert (found["goodput_range90_low"], found["goodput_range90_high"]) == pytest.approx(expected)


# ---------------------------------------------------------------- policies


def test_policies_to_compare_may_be_chosen(tmp_path, capsys):
    from simdist.scenario.scenario import dump

    failing = UNSURE.replace("causes:", "on_failure: continue, spares: 2, causes:")
    path = write(tmp_path / "job.yaml", dump(job(failing)))
    answer = call(capsys, "goodput", path, "--seeds", "2", "--policies", "restart,spare,continue", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert [each["on_failure"] for each in document["rows"]] == ["restart", "spare", "continue"]
    assert document["baseline"] == "sync, restart"
    wrong = call(capsys, "goodput", path, "--policies", "restart,stop")
    assert (wrong.code, "--policies 'stop': write restart, spare or continue" in wrong.err) == (2, True)


def test_a_policy_of_spares_needs_some():
    with pytest.raises(ScenarioError, match=r"failures.spares is 0: write on_failure: spare and spares"):
        goodput(job(), on_failure=["restart", "spare"])


# ---------------------------------------------------------------- corruption and the length of the job


def test_corruption_that_is_found_too_late_ends_no_attempt():
    """Of corruption that is found after 5 of 20 days, three quarters are found: one in 4 / 3 days."""
    causes = "{causes: [{cause: gpu, of: job, rate: 1 per day, effect: corruption, found_after: FOUND}]}"
    half, never = (only(goodput(job(causes.replace("FOUND", each)), n_seeds=2)) for each in ("5 days", "20 days"))
    assert half.young_s == pytest.approx(math.sqrt(2 * DAY_S / 0.75 * 30), rel=1e-3)
    assert never.young_s is None
