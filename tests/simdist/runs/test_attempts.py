"""Jobs that suffer failures: exact cases by hand, closed forms where they hold, and a loop over single steps."""

import math
from itertools import pairwise

import pytest

from simdist.errors import PlanError, ScenarioError
from simdist.runs.attempts import CATEGORIES, Attempt, Goodput, LongJob, ReplicaAbsence, Strike, attempts
from simdist.runs.checkpointed_steps import Checkpoints
from simdist.scenario.failures import Failures

DAY_S = 86_400.0


def failing(*causes: dict, **others: object) -> Failures:
    named = [{"cause": f"cause {i}", **each} for i, each in enumerate(causes)]
    return Failures.model_validate({"causes": named, **others})


def job(**others: object) -> LongJob:
    return LongJob(**{"step_s": 1.0, "n_nodes": 4, "gpus_per_node": 2, "n_steps": 300, **others})


def suffered(failures: Failures, of: LongJob, seed: int = 0) -> Goodput:
    found = attempts(failures, of, seed=seed)
    assert set(found.seconds) == set(CATEGORIES)
    assert math.fsum(found.seconds.values()) == pytest.approx(found.total_s, rel=1e-9)
    assert min(found.seconds.values()) >= -1e-9 * found.total_s
    return found


def at(*moments: str, effect: str = "process", **others: object) -> dict:
    return {"effect": effect, "at": list(moments), **others}


# ---------------------------------------------------------------- by hand


@pytest.mark.sentinel
def test_deaths_of_ezpz_give_its_attempts() -> None:
    """300 steps, a file every 25, deaths at 60, 145 and 240 (ezpz, pull request 225)."""
    seen: list[Attempt] = []
    deaths = failing({"effect": "process", "at_steps": [60, 145, 240]})
    found = attempts(deaths, job(checkpoints=Checkpoints(25)), seed=0, observe=seen.append)
    assert [(each.first_step, each.last_step) for each in seen] == [(0, 60), (50, 145), (125, 240), (225, 300)]
    assert [before.last_step - after.first_step for before, after in pairwise(seen)] == [10, 20, 15]
    assert (found.n_attempts, found.n_repeated, found.n_steps, found.total_s) == (4, 45, 300, 345.0)
    assert found.seconds["wasted_progress"] == 45.0


def test_a_recovery_has_its_parts() -> None:
    """At 100 s, 8 ranks die in step 100; 90 steps are in the file. Half of a step is lost besides."""
    recovery = {
        "detect": "3 s",
        "diagnose": "4 s",
        "schedule": "50 s",
        "start": "5 s",
        "connect": "1 s",
        "connect_per_rank": "0.5 s",
        "load": "7 s",
        "warm_up": "2 s",
    }
    found = suffered(failing(at("112.5 s", effect="node"), recovery=recovery), job(checkpoints=Checkpoints(10)))
    first = {"program_startup": 5.0, "initialization": 5.0, "training_preparation": 2.0}
    again = {"program_startup": 5.0, "initialization": 5.0, "training_preparation": 2.0, "checkpoint_restore": 7.0}
    again |= {"infrastructure_recovery": 3.0 + 4.0 + 50.0, "wasted_progress": 0.5}
    assert found.by_cause["cause 0"].seconds == again
    for category in CATEGORIES:
        expected = first.get(category, 0.0) + again.get(category, 0.0) + (300.0 if category == "productive" else 0.0)
        assert found.seconds[category] == expected, category


def at_step_60(effect: str, **others: object) -> dict:
    return {"effect": effect, "at_steps": [60], **others}


@pytest.mark.parametrize(
    ("causes", "spares", "last_step", "recovery_s", "by"),
    [
        ([at_step_60("hang"), at_step_60("process", ranks=[3])], 0, 60, 3, 1),  # the death ends the hang
        ([at_step_60("process"), at_step_60("node", ranks=[3])], 0, 60, 3 + 50, 0),
        ([{"effect": "node", "at_steps": [60, 60], "ranks": [0, 7]}], 1, 60, 3 + 50, 0),  # one spare for two nodes
        ([{"effect": "node", "at_steps": [60, 60], "ranks": [0, 7]}], 2, 60, 3 + 5, 0),
        ([at_step_60("planned"), at_step_60("process")], 0, 60, 3, 1),  # no time to write a file
        ([at_step_60("planned"), at_step_60("planned", of="node", lasts="9 s")], 0, 60, 9, 0),
    ],
)
def test_failures_at_the_same_step_end_one_attempt(causes, spares, last_step, recovery_s, by) -> None:
    recovery = {"detect": "3 s", "timeouts": {"collective": "60 s"}, "schedule": "50 s", "swap": "5 s"}
    seen: list[Attempt] = []
    strikes: list[Strike] = []
    failures = failing(*causes, recovery=recovery, on_failure="spare", spares=spares)
    of = job(checkpoints=Checkpoints(25))
    found = attempts(failures, of, seed=0, observe=seen.append, observe_strikes=strikes.append)
    resume = 60 if causes[-1]["effect"] == "planned" else 50
    assert [(each.first_step, each.last_step) for each in seen] == [(0, last_step), (resume, 300)]
    assert seen[0].cause == f"cause {by}"
    assert found.total_s == 300 + (60 - resume) + recovery_s
    assert sum(each.n_failures for each in found.by_cause.values()) == 2
    assert [(each.attempt, each.step, each.resume) for each in strikes] == 2 * [(0, 60, resume)]


def test_a_node_may_be_slow_from_the_step_on_in_which_another_fails() -> None:
    slow = at_step_60("slow", factor=2, found_after="500 s", ranks=[5])
    found = suffered(failing(at_step_60("process"), slow), job(checkpoints=Checkpoints(25)))
    assert found.total_s == 60 + 2 * 250


def test_replicas_that_fail_at_the_same_step_leave_until_nobody_is_left() -> None:
    of = job(ranks_per_replica=2, checkpoints=Checkpoints(25))
    seen: list[Attempt] = []
    causes = {"effect": "process", "at_steps": [60] * 4, "ranks": [0, 2, 4, 6]}
    found = attempts(failing(causes, on_failure="continue"), of, seed=0, observe=seen.append)
    assert [(each.first_step, each.last_step) for each in seen] == [(0, 60), (50, 300)]
    assert found.by_cause["cause 0"].n_failures == 4


def test_a_failure_during_the_recovery_begins_it_anew() -> None:
    recovery = {"detect": "5 s", "schedule": "10 s", "start": "20 s"}
    found = suffered(failing(at("120 s", "150 s", effect="node"), recovery=recovery), job(checkpoints=Checkpoints(10)))
    assert found.n_attempts == 2
    assert found.seconds["program_startup"] == 20.0 + 15.0 + 20.0
    assert found.seconds["infrastructure_recovery"] == 2 * 15.0
    assert found.total_s == 300.0 + 85.0


def test_a_job_may_fail_before_its_first_save() -> None:
    found = suffered(failing(at("60 s", "100 s", "180 s")), job(checkpoints=Checkpoints(75)))
    assert (found.seconds["wasted_progress"], found.total_s) == (60.0 + 40.0 + 5.0, 405.0)
    assert suffered(failing(at("299 s")), job()).total_s == 599.0  # without files, all steps repeat


def test_a_file_that_is_being_written_cannot_be_resumed_from() -> None:
    files = Checkpoints(10, stall_s=1.0, write_s=5.0)
    assert suffered(failing(at("25 s")), job(checkpoints=files)).n_repeated == 13  # usable from 27 s on
    assert suffered(failing(at("27.5 s")), job(checkpoints=files)).n_repeated == 5


@pytest.mark.parametrize(
    ("timeouts", "effect", "found_by", "found_s"),
    [
        ({"heartbeat": "100 s"}, "hang", None, 100.0),
        ({"heartbeat": "100 s", "collective": "10 min", "watchdog": "15 min"}, "hang", None, 900.0),
        ({"heartbeat": "100 s", "collective": "10 min", "watchdog": "15 min"}, "hang", "collective", 600.0),
        ({"heartbeat": "100 s"}, "node", None, 1.0),
        ({"heartbeat": "100 s"}, "node", "heartbeat", 100.0),
    ],
)
def test_a_hang_ends_with_the_longest_time_out_that_applies(
    timeouts: dict, effect: str, found_by: str | None, found_s: float
) -> None:
    """A ladder of time-outs: heartbeat 100 s, NCCL 10 min, watchdog 15 min (marin). A lost node may close nothing."""
    cause = at("100 s", effect=effect, found_by=found_by)
    found = suffered(failing(cause, recovery={"timeouts": timeouts, "detect": "1 s"}), job(checkpoints=Checkpoints(10)))
    assert found.seconds["infrastructure_recovery"] == found_s


def test_a_slow_node_is_replaced_after_a_file_and_no_step_repeats() -> None:
    """25 steps take 2 s each; the file of step 125 takes 3 s more."""
    slow = at("100 s", effect="slow", factor=2, found_after="50 s")
    found = suffered(failing(slow, recovery={"schedule": "10 s"}), job(checkpoints=Checkpoints(1000, stall_s=3.0)))
    assert (found.n_repeated, found.total_s) == (0, 300.0 + 25.0 + 3.0 + 10.0)
    assert found.seconds["step_time_deviation"] == pytest.approx(25.0)
    assert found.by_cause["cause 0"].seconds["step_time_deviation"] == pytest.approx(25.0)


def test_a_node_that_becomes_slow_during_a_recovery_strikes_no_step() -> None:
    """Real ranks perform what strikes. At 120 s nobody trains; the node is slow in the attempt that follows."""
    strikes: list[Strike] = []
    slow = at("60 s", "120 s", effect="slow", factor=2, found_after="1 day")
    found = failing(at("100 s"), slow, recovery={"start": "50 s"})
    attempts(found, job(checkpoints=Checkpoints(10)), seed=0, observe_strikes=strikes.append)
    assert [(each.failure.cause, each.failure.at_s) for each in strikes] == [(1, 60.0), (0, 100.0)]


def test_flaps_stand_still_and_two_alerts_lead_to_an_eviction() -> None:
    """Two alerts within five minutes evict the node (ByteRobust, arXiv 2509.16293)."""
    flap = at("100 s", "200 s", "250.5 s", effect="flap", share=0, lasts="20 s")
    calm = suffered(failing(flap), job())
    assert (calm.seconds["step_time_deviation"], calm.total_s) == (pytest.approx(60.0), pytest.approx(360.0))
    recovery = {"alerts": {"count": 2, "within": "5 min"}, "schedule": "10 s"}
    evicted = suffered(failing(flap, recovery=recovery), job(checkpoints=Checkpoints(1000, stall_s=2.0)))
    assert (evicted.n_attempts, evicted.n_repeated) == (2, 0)
    assert evicted.total_s == pytest.approx(300.0 + 20.0 + 2.0 + 10.0 + 20.0)  # the third is the first of the new node


def test_a_flap_longer_than_the_time_out_ends_the_job() -> None:
    flap = at("100 s", effect="flap", share=0, lasts="20 s")
    found = suffered(failing(flap, recovery={"timeouts": {"collective": "15 s"}}), job(checkpoints=Checkpoints(30)))
    assert (found.n_attempts, found.seconds["infrastructure_recovery"], found.n_repeated) == (2, 15.0, 10)


def test_a_slow_link_slows_steps_as_the_job_says() -> None:
    flap = at("100 s", effect="flap", share=0.5, lasts="30 s")
    with pytest.raises(ScenarioError, match="'cause 0', whose flaps leave a share"):
        attempts(failing(flap), job(), seed=0)
    assert suffered(failing(flap), job(slowed={"cause 0": 1.5})).total_s == pytest.approx(300.0 + 10.0)


@pytest.mark.parametrize(
    ("keep", "resumed"),
    [(None, 90), (6, 90), (5, 0), (1, 0)],  # at 145 s, files of 100 to 140 steps are newer than that of 90
)
def test_corruption_goes_back_to_a_kept_file_from_before_it(keep: int | None, resumed: int) -> None:
    corruption = at("95 s", effect="corruption", found_after="50 s")
    seen: list[Attempt] = []
    attempts(failing(corruption), job(checkpoints=Checkpoints(10, keep=keep)), seed=0, observe=seen.append)
    assert [(each.first_step, each.last_step) for each in seen] == [(0, 145), (resumed, 300)]


def test_corruption_after_the_newest_file_goes_with_the_steps_that_repeat() -> None:
    corruption = at("95 s", effect="corruption", found_after="50 s")
    found = suffered(failing(corruption, at("98 s")), job(checkpoints=Checkpoints(10)))
    assert (found.n_attempts, found.n_repeated) == (2, 8)


@pytest.mark.parametrize(("keep", "resumed"), [(10, 90), (9, 0)])
def test_files_from_after_a_corruption_that_are_removed_take_no_place(keep: int, resumed: int) -> None:
    """At 135 s the job goes back to step 120. At 199 s, 9 files are newer than that of step 90, not 10."""
    early = at("95 s", effect="corruption", found_after="104 s")
    late = at("125 s", effect="corruption", found_after="10 s")
    seen: list[Attempt] = []
    attempts(failing(early, late), job(checkpoints=Checkpoints(10, keep=keep)), seed=0, observe=seen.append)
    assert [(each.first_step, each.last_step) for each in seen] == [(0, 135), (120, 184), (resumed, 300)]


@pytest.mark.parametrize(("notice", "repeated"), [(None, 0), ("5 s", 0), ("3 s", 3)])
def test_a_planned_interruption_repeats_steps_only_without_time_to_save(notice: str | None, repeated: int) -> None:
    """Saving waits for the file before until 103 s, and takes 3 s. Otherwise the job trains until 104 s."""
    planned = at("101 s", effect="planned", lasts="1 h", notice=notice)
    found = suffered(failing(planned), job(checkpoints=Checkpoints(100, stall_s=0.5, write_s=2.5)))
    assert found.seconds["infrastructure_recovery"] == 3600.0
    assert found.n_repeated == repeated


@pytest.mark.parametrize("cause", [{"effect": "planned"}, {"effect": "slow", "factor": 1.0, "found_after": "1 s"}])
def test_without_files_an_interruption_loses_all_steps_also_if_a_time_ends_the_job(cause: dict) -> None:
    """The process that is lost 20 s later is met, too."""
    causes = at("100 s", **cause), at("120 s", effect="process")
    found = suffered(failing(*causes), job(n_steps=None, horizon_s=300.0))
    assert (found.n_attempts, found.n_steps) == (3, 180)


def test_spares_take_the_places_of_nodes_until_there_are_none() -> None:
    """The third failure waits for the scheduler; the fourth takes the first node, repaired after 1,000 s."""
    causes = at("1000 s", "1100 s", "1200 s", "2500 s", effect="node")
    recovery = {"swap": "1 s", "schedule": "100 s", "repair": "1000 s"}
    found = suffered(failing(causes, recovery=recovery, on_failure="spare", spares=2), job(n_steps=5000))
    assert found.seconds["infrastructure_recovery"] == 1.0 + 1.0 + 100.0 + 1.0


def test_without_a_scheduler_a_job_waits_for_repairs() -> None:
    causes = at("1000 s", "1100 s", effect="node")
    recovery = {"swap": "1 s", "repair": "500 s"}
    found = suffered(failing(causes, recovery=recovery, on_failure="spare", spares=1), job(n_steps=5000))
    assert found.seconds["infrastructure_recovery"] == 1.0 + 400.0 + 1.0


def test_all_nodes_that_were_lost_are_replaced_when_a_recovery_is_interrupted() -> None:
    """The second node is lost while the first loss is not yet noticed; so no spare is left for the third."""
    recovery = {"detect": "10 s", "swap": "1 s", "schedule": "100 s"}
    lost = at("10 s", "15 s", "200 s", effect="node", of="node", ranks=[0, 2, 4])
    found = suffered(failing(lost, recovery=recovery, on_failure="spare", spares=2), job(checkpoints=Checkpoints(10)))
    assert found.seconds["infrastructure_recovery"] == 5.0 + 10.0 + 1.0 + 10.0 + 100.0


def test_evicting_a_group_takes_its_nodes_from_the_spares() -> None:
    recovery = {"swap": "1 s", "schedule": "100 s", "evicted_nodes": 4}
    found = suffered(failing(at("10 s", "20 s", effect="node"), recovery=recovery, on_failure="spare", spares=5), job())
    assert found.seconds["infrastructure_recovery"] == 1.0 + 100.0


def test_the_same_bad_node_fails_again_until_it_is_replaced() -> None:
    again = at("100 s", again={"probability": 0.99, "after": "10 s"}, of="node", ranks=[3])
    files = Checkpoints(5)
    often = suffered(failing(again, recovery={"schedule": "60 s"}), job(checkpoints=files))
    assert often.by_cause["cause 0"].n_failures > 3
    once = suffered(failing(again, recovery={"schedule": "60 s", "exclude_after": 2}), job(checkpoints=files))
    assert once.by_cause["cause 0"].n_failures == 2
    assert once.seconds["infrastructure_recovery"] == 60.0


def test_tries_fail_and_somebody_helps() -> None:
    tries = {"success": 0, "most": 3, "back_off": "60 s", "lost": "600 s", "by_hand": "2 h"}
    found = suffered(failing(at("100 s"), recovery={"start": "5 s", "tries": tries}), job(checkpoints=Checkpoints(100)))
    assert found.seconds["infrastructure_recovery"] == 3 * 660.0 + 7200.0
    assert found.seconds["program_startup"] == 10.0
    tries.pop("by_hand")
    lost = suffered(failing(at("100 s"), recovery={"tries": tries}), job(n_steps=None, horizon_s=DAY_S))
    assert (lost.gave_up, lost.total_s, lost.seconds["productive"]) == (True, DAY_S, 0.0)


def test_a_job_that_never_gets_on_is_given_up() -> None:
    """A restart takes 10 min, and something fails each minute."""
    failures = failing({"effect": "process", "of": "job", "rate": "1 per 1 min"}, recovery={"start": "10 min"})
    found = suffered(failures, job(checkpoints=Checkpoints(100)))
    assert (found.gave_up, found.n_steps) == (True, 0)
    assert found.by_cause["cause 0"].n_failures >= 1000


def test_who_is_not_helped_waits_without_more_failures() -> None:
    tries = {"success": 0, "most": 1}
    lost = {"effect": "process", "of": "job", "rate": "1 per 1000 s"}
    found = suffered(failing(lost, recovery={"tries": tries}), job(n_steps=10_000))
    assert (found.gave_up, found.by_cause["cause 0"].n_failures) == (True, 1)


def test_an_interruption_at_the_end_of_the_time_cannot_be_prepared() -> None:
    planned = at("299 s", effect="planned", lasts="1 h")
    found = suffered(failing(planned), job(n_steps=None, horizon_s=300.0, checkpoints=Checkpoints(1000, stall_s=20.0)))
    assert found.seconds["productive"] == 300.0


def test_replicas_that_are_lost_again_and_again_lose_their_samples_once() -> None:
    """Each restart is from step 10, 10 steps after an average, and ends at once."""
    lost = {"effect": "node", "of": "node", "ranks": [0, 2, 4, 6] * 3, "at": [f"{15 + i / 64} s" for i in range(12)]}
    failures = failing(lost, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=2, average_every=100, checkpoints=Checkpoints(10)))
    assert 0 < found.n_samples_share <= 1


def test_a_file_survives_what_its_place_survives() -> None:
    """Memory of a neighbour is lost with both nodes; memory of the own node with one."""
    rack = {"effect": "node", "of": "domain", "domain_nodes": 2, "at": ["100 s"]}
    for survives, cause, resumed in (
        ("process", at("100 s"), 90),
        ("process", at("100 s", effect="node"), 0),
        ("node", at("100 s", effect="node"), 90),
        ("node", rack, 0),
        ("all", rack, 90),
    ):
        files = Checkpoints(30, survives=survives)
        assert suffered(failing(cause), job(checkpoints=files)).n_repeated == 100 - resumed, (survives, cause)


def test_files_in_memory_are_lost_with_a_node_that_goes_during_the_recovery() -> None:
    files = Checkpoints(30, survives="process")
    both = failing(at("100 s"), at("105 s", effect="node"), recovery={"start": "20 s"})
    found = suffered(both, job(checkpoints=files))
    assert (found.n_repeated, found.seconds["wasted_progress"], found.total_s) == (
        80,
        80.0,
        20.0 + 80.0 + 5.0 + 20.0 + 300.0,
    )


def test_a_slow_node_that_is_lost_is_slow_no_more() -> None:
    slow = {"effect": "slow", "of": "node", "ranks": [2], "at": ["100 s"], "factor": 2, "found_after": "1 h"}
    lost = {"effect": "node", "of": "node", "ranks": [2], "at": ["120 s"]}
    found = suffered(failing(slow, lost), job(checkpoints=Checkpoints(10)))
    assert found.total_s == 310.0  # 10 slow steps are in the file
    other = lost | {"ranks": [4]}
    assert suffered(failing(slow, other), job(checkpoints=Checkpoints(10))).total_s == 120.0 + 2 * 190.0


def test_alerts_that_are_far_apart_evict_nobody() -> None:
    flap = at("100 s", "500 s", effect="flap", share=0, lasts="20 s")
    recovery = {"alerts": {"count": 2, "within": "5 min"}, "schedule": "10 s"}
    assert suffered(failing(flap, recovery=recovery), job(n_steps=1000)).n_attempts == 1


def test_a_defect_is_gone_once_it_does_not_show_and_waits_with_its_attempt() -> None:
    """The failure of 100 s would come again at 150 s, but a restart at 120 s makes it 170 s."""
    again = at("100 s", again={"probability": 0.99, "after": "50 s"})
    found = suffered(failing(again, at("120 s")), job(n_steps=None, horizon_s=160.0))
    assert found.by_cause["cause 0"].n_failures == 1
    assert suffered(failing(again, at("120 s")), job(n_steps=None, horizon_s=171.0)).by_cause["cause 0"].n_failures == 2
    rarely = at("100 s", again={"probability": 0.2, "after": "5 s"})
    often = at(*(f"{moment} s" for moment in range(110, 2110, 10)))
    counts = [
        suffered(failing(rarely, often), job(n_steps=None, horizon_s=2200.0), seed=seed).by_cause["cause 0"].n_failures
        for seed in range(40)
    ]
    assert sum(counts) / len(counts) == pytest.approx(1 / (1 - 0.2), abs=3 * 0.56 / math.sqrt(40))


def test_a_bad_node_that_is_replaced_fails_like_the_others() -> None:
    """One node of 4 has half of one failure an hour. Once it is gone, each has a sixth: one failure in 1.5 h."""
    worst = {"effect": "node", "of": "node", "rate": "1 per 4 h", "worst": {"nodes": 1, "share": 0.5}}
    found = suffered(failing(worst), job(n_steps=None, horizon_s=600 * 3600.0))
    assert found.by_cause["cause 0"].n_failures == pytest.approx(600 / 1.5, abs=3 * math.sqrt(400))


# ---------------------------------------------------------------- timelines drawn by hand


def of_node(*moments: str, ranks: list[int], effect: str = "node", **others: object) -> dict:
    return at(*moments, effect=effect, of="node", ranks=ranks, **others)


def test_a_copy_at_a_neighbour_is_lost_with_both_one_after_the_other() -> None:
    """Files every 30 steps. Node 0 is lost at 100 s and node 1 before another file is there; nodes 0 and 2 keep one."""
    files = Checkpoints(30, survives="node")
    recovery = {"schedule": "10 s"}
    for moments, ranks, repeated in (
        (("100 s", "103 s"), [0, 2], 100),  # during the recovery
        (("100 s", "115 s"), [0, 2], 10 + 95),  # before step 120
        (("100 s", "145 s"), [0, 2], 10 + 5),  # after step 120
        (("100 s", "103 s"), [0, 4], 10),
        (("100 s", "103 s"), [6, 0], 100),  # the first node is next to the last
    ):
        found = suffered(failing(of_node(*moments, ranks=ranks), recovery=recovery), job(checkpoints=files))
        assert found.n_repeated == repeated, (moments, ranks)


def test_a_repaired_node_is_a_spare_again() -> None:
    """One spare: it serves at 50 s; at 90 s there is none; at 400 s the first node is repaired, since 150 s."""
    recovery = {"swap": "1 s", "schedule": "60 s", "repair": "100 s"}
    failures = failing(at("50 s", "90 s", "400 s", effect="node"), recovery=recovery, on_failure="spare", spares=1)
    found = suffered(failures, job(n_steps=500, checkpoints=Checkpoints(10)))
    assert found.seconds["infrastructure_recovery"] == 1.0 + 60.0 + 1.0


def test_a_domain_that_is_larger_than_the_spares_waits_for_the_scheduler() -> None:
    rack = {"effect": "node", "of": "domain", "domain_nodes": 2, "at": ["100 s"], "ranks": [4]}
    failures = failing(rack, recovery={"swap": "1 s", "schedule": "60 s"}, on_failure="spare", spares=1)
    assert suffered(failures, job(checkpoints=Checkpoints(10))).seconds["infrastructure_recovery"] == 60.0


@pytest.mark.parametrize(("notice", "repeated"), [("20 s", 50), ("40 s", 0)])
def test_a_notice_is_used_to_save_if_it_suffices(notice: str, repeated: int) -> None:
    """At 100 s, 85 steps are done. A file takes 15 + 10 s. In 20 s, 15 steps are done and 5 s of their file."""
    files = Checkpoints(50, stall_s=15.0, write_s=10.0)
    found = suffered(failing(at("100 s", effect="planned", notice=notice, lasts="7 s")), job(checkpoints=files))
    assert (found.n_attempts, found.n_repeated) == (2, repeated)
    assert found.seconds["infrastructure_recovery"] == 7.0


def test_the_slowest_of_slow_nodes_tells_the_pace_and_each_is_replaced() -> None:
    """100 to 120 s twice as slow: 10 steps; then three times: 20 steps to 180 s. The first is replaced at 150 s."""
    slow = [
        of_node(moment, ranks=[rank], effect="slow", factor=factor, found_after=found_after)
        for moment, rank, factor, found_after in (("100 s", 0, 2, "50 s"), ("120 s", 2, 3, "60 s"))
    ]
    found = suffered(failing(*slow), job(checkpoints=Checkpoints(1000)))
    assert (found.n_attempts, found.n_repeated, found.total_s) == (3, 0, pytest.approx(180.0 + 170.0))


def test_a_slow_node_is_found_so_long_after_it_became_slow_in_a_recovery() -> None:
    """It is slow from 170 s on, in the start from 150 to 200 s, and found at 230 s, after 15 slow steps."""
    slow = at("170 s", effect="slow", factor=2, found_after="60 s")
    found = suffered(failing(at("150 s"), slow, recovery={"start": "50 s"}), job(checkpoints=Checkpoints(10)))
    assert (found.n_repeated, found.total_s) == (0, pytest.approx(230.0 + 50.0 + 185.0))


def test_corruption_is_found_although_the_job_started_again_meanwhile() -> None:
    """The file of step 120 is corrupt, too: at 145 s, 140 steps are done, and step 90 is the newest clean one."""
    corruption = at("95 s", effect="corruption", found_after="50 s")
    found = suffered(failing(corruption, at("125 s")), job(checkpoints=Checkpoints(10)))
    assert (found.n_repeated, found.total_s) == (5 + 50, 300.0 + 55.0)


def test_corruption_while_nothing_trains_corrupts_nothing() -> None:
    corruption = at("110 s", effect="corruption", found_after="50 s")
    found = suffered(failing(at("100 s"), corruption, recovery={"start": "20 s"}), job(checkpoints=Checkpoints(10)))
    assert (found.n_attempts, found.by_cause["cause 1"].seconds) == (2, {})


def test_a_link_that_flaps_during_a_recovery_blocks_the_first_steps() -> None:
    """Ranks start from 120 to 140 s; the link is blocked from 130 to 160 s."""
    flap = at("130 s", effect="flap", share=0, lasts="30 s")
    strikes: list[Strike] = []
    failures = failing(at("120 s"), flap, recovery={"start": "20 s"})
    found = attempts(failures, job(checkpoints=Checkpoints(10)), seed=0, observe_strikes=strikes.append)
    assert (found.total_s, found.seconds["step_time_deviation"]) == (20.0 + 300.0 + 20.0 + 20.0, pytest.approx(20.0))
    assert [each.failure.cause for each in strikes] == [0]
    alerts = {"start": "20 s", "schedule": "5 s", "alerts": {"count": 2, "within": "5 min"}}
    twice = at("130 s", "132 s", effect="flap", share=0, lasts="3 s")
    evicted = suffered(failing(at("120 s"), twice, recovery=alerts), job(checkpoints=Checkpoints(10)))
    assert (evicted.n_attempts, evicted.total_s) == (2, 20.0 + 300.0 + 12.0 + 5.0 + 20.0)


def test_a_blocked_link_is_gone_with_its_node() -> None:
    flap = of_node("100 s", ranks=[0], effect="flap", share=0, lasts="100 s")
    found = suffered(
        failing(flap, of_node("110 s", ranks=[0]), recovery={"schedule": "5 s"}), job(checkpoints=Checkpoints(10))
    )
    assert (found.n_attempts, found.total_s) == (2, 300.0 + 10.0 + 5.0)


def test_a_node_is_excluded_after_hangs_that_come_again() -> None:
    """Each hang ends with the longest of two time-outs; after the second one the node is replaced."""
    hang = of_node("100 s", "200 s", ranks=[2, 2], effect="hang")
    recovery = {"timeouts": {"a": "5 s", "b": "20 s"}, "exclude_after": 2, "schedule": "50 s"}
    found = suffered(failing(hang, recovery=recovery), job(checkpoints=Checkpoints(10)))
    assert found.seconds["infrastructure_recovery"] == 20.0 + 20.0 + 50.0


def test_a_failure_during_a_try_begins_the_recovery_anew() -> None:
    """Tries of 10 s, 5 s apart, fail from 100 s on; a node is lost at 112 s. Two tries later, somebody helps."""
    tries = {"success": 0, "most": 2, "back_off": "5 s", "by_hand": "100 s"}
    recovery = {"start": "10 s", "schedule": "3 s", "tries": tries}
    failures = failing(at("100 s"), at("112 s", effect="node"), recovery=recovery)
    found = suffered(failures, job(checkpoints=Checkpoints(10)))
    assert found.total_s == 112.0 + 3.0 + 2 * 15.0 + 100.0 + 10.0 + 210.0


def test_a_node_that_is_away_slows_nobody() -> None:
    """The replica of node 0 is away from 100 s to 150 s. What makes its node slow meanwhile is no failure."""
    slow = of_node("110 s", ranks=[0], effect="slow", factor=2, found_after="20 s")
    failures = failing(of_node("100 s", ranks=[0]), slow, recovery={"schedule": "50 s"}, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=2, checkpoints=Checkpoints(10)))
    assert (found.total_s, found.by_cause["cause 1"].n_failures) == (300.0, 0)


def test_a_failure_in_a_recovery_does_not_bring_lost_nodes_back_earlier() -> None:
    """A node is lost at 100 s and there at 200 s. A process fails at 110 s, which takes 20 s for itself."""
    lost, software = at("100 s", effect="node"), at("110 s")
    recovery = {"detect": "5 s", "schedule": "95 s", "start": "15 s"}
    found = suffered(failing(lost, software, recovery=recovery), job(checkpoints=Checkpoints(5)))
    assert (found.n_attempts, found.total_s) == (2, 300.0 + 15.0 + 100.0 + 15.0)


def test_a_job_whose_last_step_ends_before_an_interruption_is_done() -> None:
    """Saving takes 20 s. In 10 s of notice the last 5 steps are done. With 30 s, the last one is saved."""
    for notice, end_s in (("10 s", 300.0), ("30 s", 300.0 + 20.0)):
        planned = at(f"{295 if notice == '10 s' else 299.5} s", effect="planned", notice=notice, lasts="1 h")
        found = suffered(failing(planned), job(checkpoints=Checkpoints(1000, stall_s=20.0)))
        assert (found.n_attempts, found.n_steps, found.total_s) == (1, 300, end_s)


def test_replicas_lost_one_after_the_other_in_a_recovery_leave_no_live_one() -> None:
    """Each of 2 replicas is lost while the other one has not got its state back."""
    lost = of_node("95 s", "97 s", ranks=[0, 4])
    of = job(ranks_per_replica=4, checkpoints=Checkpoints(30))
    for policy in ({}, {"on_failure": "continue"}):
        failures = failing(lost, recovery={"state": "replica", "schedule": "10 s"}, **policy)
        found = suffered(failures, of)
        assert (found.n_attempts, found.n_repeated) == (2, 97 - 90 if policy else 95 - 90), policy
    assert suffered(failing(of_node("95 s", "197 s", ranks=[0, 4]), recovery={"state": "replica"}), of).n_repeated == 0


# ---------------------------------------------------------------- with a replica less


def test_an_absent_replica_slows_nobody_until_it_is_back() -> None:
    """Its node, twice as slow since 50 s, stays when its process fails after 75 steps; steps 76 to 99 are fast."""
    slow = of_node("50 s", ranks=[0], effect="slow", factor=2, found_after="1 day")
    still = of_node("50 s", ranks=[0], effect="flap", share=0, lasts="25 s")
    software = at("100 s", ranks=[0], of="gpu")
    of = job(ranks_per_replica=2, n_steps=None, horizon_s=150.0)
    recovery = {"diagnose": "24.5 s"}
    found = suffered(failing(slow, software, recovery=recovery, on_failure="continue"), of)
    assert (found.absences, found.n_steps) == ((ReplicaAbsence(0, 75, 100),), 75 + 25 + 12)
    gone = at("60 s", ranks=[0], of="gpu")
    blocked = suffered(failing(still, gone, recovery={"diagnose": "1 h"}, on_failure="continue"), of)
    assert (blocked.n_steps, blocked.seconds["step_time_deviation"]) == (140, 10.0)


def test_a_slow_node_is_slow_until_its_replica_leaves() -> None:
    """Found at 60 s, after 55 steps; its replica leaves after the average of step 64, 9 slow steps later."""
    slow = of_node("50 s", ranks=[0], effect="slow", factor=2, found_after="10 s")
    found = suffered(failing(slow, on_failure="continue"), job(ranks_per_replica=2, average_every=16))
    assert found.total_s == pytest.approx(300.0 + 64 - 50)


def test_an_announced_replica_leaves_at_the_end_of_its_notice() -> None:
    """Averages every 100 steps. With 20 s of notice at 130 s, it leaves at 150 s and loses its 50 steps."""
    for notice, n_less in (("20 s", 100), ("90 s", 0)):
        planned = of_node("130 s", ranks=[0], effect="planned", lasts="10 s", notice=notice)
        found = suffered(
            failing(planned, on_failure="continue"), job(ranks_per_replica=2, average_every=100, n_steps=200)
        )
        assert found.seconds["absent_replicas"] == pytest.approx(n_less / 4)


def test_who_is_announced_goes_with_the_restart_before() -> None:
    """At 105 s software ends all ranks. Node 0, announced at 102 s to leave at step 112, is replaced by then."""
    slow = of_node("52 s", ranks=[0], effect="slow", factor=1, found_after="50 s")
    software = {"effect": "process", "of": "job", "at": ["105 s"]}
    failures = failing(slow, software, recovery={"schedule": "30 s"}, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=2, average_every=16, checkpoints=Checkpoints(21)))
    assert (found.n_attempts, found.absences, found.total_s) == (2, (), 300.0 + 30.0)


def test_the_last_replica_cannot_leave_alone() -> None:
    """Of 2 replicas one is lost at 98 s, and the other one has been announced at 97 s to leave at 112 s: it saves."""
    planned = of_node("97 s", ranks=[0], effect="planned", lasts="40 s")
    lost = of_node("98 s", ranks=[4])
    failures = failing(planned, lost, recovery={"schedule": "100 s"}, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=4, average_every=16, checkpoints=Checkpoints(1000, stall_s=3.0)))
    assert (found.n_attempts, found.n_repeated) == (2, 0)
    assert found.total_s == 112.0 + 3.0 + (198.0 - 115.0) + 188.0


def test_the_same_bad_node_fails_again_in_a_replica_that_is_back() -> None:
    again = at("100 s", again={"probability": 0.99, "after": "10 s"}, of="gpu", ranks=[3])
    failures = failing(again, recovery={"exclude_after": 3, "schedule": "60 s"}, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=2))
    assert (found.n_attempts, found.by_cause["cause 0"].n_failures, len(found.absences)) == (1, 3, 3)


def test_two_that_are_lost_between_averages_are_noticed_before_groups_form_once() -> None:
    """Lost at 105 s and 111 s and noticed 10 s later; groups form at 121 s, and when both are back."""
    lost = of_node("105 s", "111 s", ranks=[0, 4])
    recovery = {"detect": "10 s", "connect": "1 s", "schedule": "1 day"}
    found = suffered(
        failing(lost, recovery=recovery, on_failure="continue"), job(ranks_per_replica=2, average_every=16)
    )
    assert (found.seconds["infrastructure_recovery"], found.seconds["initialization"]) == (121.0 - 113.0, 1.0 + 1.0)


def test_the_last_step_waits_for_the_loss_to_be_noticed() -> None:
    lost = at("299.5 s", effect="node")
    found = suffered(failing(lost, recovery={"detect": "10 s"}, on_failure="continue"), job(ranks_per_replica=2))
    assert (found.n_steps, found.total_s) == (300, 309.5)


def test_a_lone_replica_averages_with_nobody() -> None:
    """With 2 replicas, steps take 3 s, and 1 s from step 10 on, while one is away for 20 s; twice as long if slow."""
    lost, slow = of_node("31.5 s", ranks=[0]), of_node("0 s", ranks=[4], effect="slow", factor=2, found_after="1 day")
    policy = {"recovery": {"schedule": "20 s"}, "on_failure": "continue", "step_factor": 3}
    of = job(ranks_per_replica=4, n_steps=50)
    assert suffered(failing(lost, **policy), of).total_s == pytest.approx(31.5 + 20.5 + 3 * (50 - 10 - 21))
    slower = suffered(failing(lost, slow, **policy), of)
    assert slower.by_cause["cause 1"].seconds["step_time_deviation"] == pytest.approx(slower.total_s / 2)


def test_a_lost_replica_takes_the_files_on_its_disk_with_it() -> None:
    lost, software = of_node("100 s", ranks=[0]), {"effect": "process", "of": "job", "at": ["110 s"]}
    for survives, repeated in (("process", 110), ("node", 20), ("all", 20)):
        of = job(ranks_per_replica=2, checkpoints=Checkpoints(30, survives=survives))
        assert suffered(failing(lost, software, on_failure="continue"), of).n_repeated == repeated, survives


def test_corruption_does_not_go_back_to_a_file_that_a_replica_has_lost() -> None:
    """The clean file of step 90 is on the disk of node 0, which is lost at 100 s; that of step 120 is corrupt."""
    corruption = at("95 s", effect="corruption", found_after="50 s")
    of = job(ranks_per_replica=2, checkpoints=Checkpoints(30, survives="process"))
    found = suffered(failing(corruption, of_node("100 s", ranks=[0]), on_failure="continue"), of)
    assert (found.n_attempts, found.n_repeated) == (2, 145)


def test_a_replica_is_back_when_all_of_its_nodes_are() -> None:
    """A replica of 2 nodes loses one, which is replaced at 150 s. A process on the other one fails meanwhile."""
    failures = failing(
        of_node("100 s", ranks=[0]),
        at("110 s", ranks=[2], of="gpu"),
        recovery={"schedule": "50 s"},
        on_failure="continue",
    )
    assert suffered(failures, job(ranks_per_replica=4)).absences == (ReplicaAbsence(0, 100, 150),)


def test_others_go_on_and_take_the_replica_back() -> None:
    """4 replicas of 2 ranks. One is lost in step 80. The others end it when they know, 2.5 s later, in new groups.

    After 33 s it is ready again. Then the others form groups with it, and wait while it gets their state.
    """
    recovery = {"detect": "3 s", "schedule": "10 s", "start": "20 s", "connect": "1 s", "connect_per_rank": "0.5 s"}
    recovery |= {"load": "2 s"}
    failures = failing(at("105.5 s", effect="node"), recovery=recovery, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=2, checkpoints=Checkpoints(10)))
    start_s = 20.0 + 5.0  # at the begin of the job
    again_s = 2.5 + (1.0 + 0.5 * 6) + (1.0 + 0.5 * 8) + 2.0
    assert found.total_s == 300.0 + start_s + again_s
    assert (found.n_attempts, found.n_repeated, found.n_steps) == (1, 0, 300)
    back_s = 105.5 + 3.0 + 10.0 + 20.0
    n_less = 1 + math.ceil(back_s - (108.5 + 4.0))  # steps with a replica less: it joins at the end of one
    assert found.absences == (ReplicaAbsence(0, 80, 80 + n_less),)
    assert found.seconds["absent_replicas"] == pytest.approx(n_less / 4)
    assert found.n_samples_share == pytest.approx(1 - n_less / 4 / 300)


def test_between_averages_the_others_train_to_the_next_one() -> None:
    """Averages every 16 steps: at 100.5 s, the lost replica's 4.5 steps since step 96 are lost, and no others."""
    failures = failing(
        at("100.5 s", effect="node"), recovery={"detect": "3 s", "connect": "1 s"}, on_failure="continue"
    )
    found = suffered(failures, job(ranks_per_replica=2, average_every=16))
    assert found.seconds["wasted_progress"] == 0.0
    assert found.seconds["infrastructure_recovery"] == 0.0  # noticed at 103.5 s, before step 112
    back_s = 1.0 + 100.5 - 1.0 + 4.0
    assert found.total_s == 300.0 + 1.0 + 2 * 1.0
    assert back_s < 112
    lost = (99.5 % 16 + (112 - 99.5)) / 4
    assert found.seconds["absent_replicas"] == pytest.approx(lost)


def test_an_announced_replica_leaves_after_the_next_average_and_loses_nothing() -> None:
    planned = {"effect": "planned", "of": "node", "at": ["100.5 s"], "lasts": "30 s"}
    found = suffered(failing(planned, on_failure="continue"), job(ranks_per_replica=2, average_every=16))
    assert (found.n_repeated, found.total_s) == (0, 300.0)
    assert found.seconds["absent_replicas"] == pytest.approx(32 / 4)  # from 112 s; it is back at 142 s, joins at 144 s


def test_a_replica_that_is_lost_again_before_it_is_back_joins_later() -> None:
    """It would have joined after step 64, and joins after step 80."""
    lost = at("46.5 s", "61 s", effect="node")
    recovery = {"schedule": "10 s", "connect": "1 s"}
    found = suffered(
        failing(lost, recovery=recovery, on_failure="continue"), job(ranks_per_replica=2, average_every=16)
    )
    assert found.seconds["initialization"] == 3.0
    assert found.seconds["absent_replicas"] == pytest.approx((80 - 32) / 4)


def test_a_restart_of_all_ranks_brings_all_replicas_back() -> None:
    """Software ends all ranks at 52 s, before the others have met without the lost one at step 64.

    They start when the node is replaced.
    """
    lost = at("50.5 s", effect="node")
    software = {"effect": "process", "of": "job", "at": ["52 s"]}
    recovery = {"schedule": "1 h", "detect": "30 s", "connect": "1 s"}
    failures = failing(lost, software, recovery=recovery, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=2, average_every=16, checkpoints=Checkpoints(48)))
    assert (found.n_attempts, found.n_repeated, found.total_s) == (
        2,
        3,
        51.0 + 3.0 + 300.0 - 51.0 + 2.0 + (50.5 + 3630.0 - 52.0),
    )
    assert found.n_samples_share == 1.0


def test_all_ranks_start_again_when_no_replica_is_left() -> None:
    recovery = {"schedule": "10 h"}
    every_node = {"effect": "node", "of": "node", "at": ["50 s", "60 s", "70 s", "80 s"], "ranks": [0, 2, 4, 6]}
    failures = failing(every_node, recovery=recovery, on_failure="continue")
    found = suffered(failures, job(ranks_per_replica=2, checkpoints=Checkpoints(10)))
    assert found.n_attempts == 2
    assert found.seconds["infrastructure_recovery"] == 36_000.0


def test_a_replica_is_copied_from_another_one() -> None:
    cause = at("105.5 s", effect="node")
    recovery = {"state": "replica", "load": "30 s"}
    found = suffered(failing(cause, recovery=recovery), job(ranks_per_replica=2, checkpoints=Checkpoints(100)))
    assert (found.n_repeated, found.total_s) == (0, 300.0 + 0.5 + 30.0)


@pytest.mark.parametrize("policy", [{"on_failure": "continue"}, {"recovery": {"state": "replica"}}])
def test_who_shards_over_all_ranks_has_no_replica_to_go_on_with(policy: dict) -> None:
    with pytest.raises(PlanError, match="all ranks hold one replica of the model together"):
        attempts(failing(at("1 s"), **policy), job(), seed=0)


# ---------------------------------------------------------------- random failures

AGAIN = {"probability": 0.3, "after": "60 s"}
EFFECTS = [
    {"cause": "gpu", "of": "gpu", "rate": "400 per year", "effect": "node"},
    {"cause": "software", "of": "job", "rate": "1 per 2 h", "effect": "process", "again": AGAIN},
    {"cause": "rack", "of": "domain", "domain_nodes": 2, "rate": "1 per 9 h", "effect": "node"},
    {"cause": "lemons", "of": "node", "rate": "1 per 9 h", "effect": "process", "worst": {"nodes": 1, "share": 0.7}},
    {"cause": "hang", "of": "job", "rate": "1 per 9 h", "effect": "hang"},
    {"cause": "slow", "of": "gpu", "rate": "1 per 40 h", "effect": "slow", "factor": 1.7, "found_after": "30 min"},
    {"cause": "still", "of": "node", "rate": "1 per 9 h", "effect": "flap", "share": 0, "lasts": "70 s"},
    {"cause": "flap", "of": "node", "rate": "1 per 9 h", "effect": "flap", "share": 0.5, "lasts": "10 min"},
    {"cause": "corruption", "of": "gpu", "rate": "1 per 200 h", "effect": "corruption", "found_after": "40 min"},
    {"cause": "spot", "of": "node", "rate": "1 per 20 h", "effect": "planned", "notice": "30 s", "lasts": "20 min"},
]  # fmt: skip
RECOVERY = {
    "detect": "10 s",
    "timeouts": {"collective": "10 min"},
    "diagnose": "20 s",
    "schedule": "5 min",
    "swap": "10 s",
    "repair": "2 h",
    "exclude_after": 2,
    "start": "30 s",
    "connect": "2 s",
    "load": "40 s",
    "warm_up": "15 s",
    "alerts": {"count": 2, "within": "1 h"},
    "tries": {"success": 0.8, "most": 3, "back_off": "30 s", "by_hand": "1 h"},
}
POLICIES = [
    {"on_failure": "restart"},
    {"on_failure": "spare", "spares": 2},
    {"on_failure": "continue"},
    {"on_failure": "continue", "spares": 2, "step_factor": 1.1},
    {"on_failure": "spare", "spares": 2, "recovery": {**RECOVERY, "state": "replica"}},
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, list(policy.values())[:2])))
@pytest.mark.parametrize("average_every", [1, 16])
def test_time_is_spent_once_whatever_comes_together(policy: dict, average_every: int) -> None:
    failures = failing(*EFFECTS, **({"recovery": RECOVERY} | policy))
    files = Checkpoints(120, stall_s=2.0, write_s=30.0, keep=30)
    for length in ({"n_steps": None, "horizon_s": 5 * DAY_S}, {"n_steps": 20_000}):
        of = job(ranks_per_replica=2, average_every=average_every, checkpoints=files, slowed={"flap": 1.4}, **length)
        found = suffered(failures, of, seed=3)
        assert attempts(failures, of, seed=3) == found
        if of.horizon_s:
            assert all(each.n_failures for each in found.by_cause.values())
            assert found.total_s == of.horizon_s
        else:
            assert found.n_steps == of.n_steps


def test_policies_and_jobs_suffer_the_same_failures() -> None:
    causes = EFFECTS[:1]
    counts = {
        suffered(failing(*causes, recovery=RECOVERY, **policy), of).by_cause["gpu"].n_failures
        for policy in POLICIES[:3]
        for step_s in (0.7, 2.0)
        for of in (job(step_s=step_s, ranks_per_replica=2, n_steps=None, horizon_s=20 * DAY_S),)
    }
    assert len(counts) == 1
    assert counts.pop() > 100
