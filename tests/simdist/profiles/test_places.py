"""Delays are told with the part of the step that they were in, and with what they have in common."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from commandline import call
from kineto_traces import write_job
from profiled_jobs import Delay, profiles_of, without_input
from sharded_traces import write_sharded

from simdist.profiles import import_job
from simdist.profiles.estimates.places import Place
from simdist.profiles.estimates.recurring import period, trend
from simdist.profiles.estimates.stragglers import Straggler, repeated
from simdist.profiles.steps.ranks import profile_rank

JOB = without_input(n_ranks=4, n_steps=24, first_step=10, jitter=0.02)
BUCKETS = len(JOB.buckets)


def imported(tmp_path, delays, **parameters):
    truth = replace(JOB, delays=tuple(delays), **parameters)
    return import_job([profile_rank(path) for path in write_job(tmp_path, truth, device="cuda")], name="job")


# ---------------------------------------------------------------- the part of a step


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_pause_in_backward_is_told_with_its_bucket(tmp_path, bucket: int, run_ahead: bool) -> None:
    found = imported(tmp_path, [Delay("host", 1, 7, 0.2, bucket=bucket)], run_ahead=run_ahead)
    (straggler,) = found.stragglers
    assert (straggler.ranks, straggler.steps, straggler.channel) == ((1,), (17,), "host")
    assert straggler.place == Place("backward", 1 + bucket, BUCKETS, "all_reduce")
    assert straggler.place.text == f"in backward before all_reduce {1 + bucket} of {BUCKETS}"


def test_a_pause_before_the_forward_pass_is_told_as_such(tmp_path) -> None:
    """It is in the loader, before the batch is there, but no loader was seen."""
    (straggler,) = imported(tmp_path, [Delay("io", 1, 7, 0.2)], input_s=0.001).stragglers
    assert straggler.place == Place("input")


def test_a_device_that_is_slow_in_a_step_is_slow_throughout(tmp_path) -> None:
    (straggler,) = imported(tmp_path, [Delay("compute", 2, 5, 0.1)]).stragglers
    assert (straggler.channel, straggler.place) == ("compute", Place(None))
    assert straggler.place.text == "throughout the step"


def test_on_cpus_a_pause_in_backward_is_longer_computing_of_its_bucket() -> None:
    truth = replace(JOB, delays=(Delay("host", 1, 7, 0.2, bucket=1),))
    (straggler,) = import_job(profiles_of(truth, "cpu"), name="job").stragglers
    assert (straggler.channel, straggler.place) == ("compute", Place("backward", 2, BUCKETS, "all_reduce"))


def test_steps_with_other_buckets_do_not_tell_the_place() -> None:
    profiles = profiles_of(replace(JOB, delays=(Delay("host", 1, 7, 0.2),)), "cuda")
    steps = list(profiles[1].steps)
    steps[7] = replace(steps[7], held_s=())
    (straggler,) = import_job(
        [profiles[0], replace(profiles[1], steps=tuple(steps)), *profiles[2:]], name="j"
    ).stragglers
    assert straggler.place is None


# ---------------------------------------------------------------- delays that come again


@pytest.mark.parametrize(
    ("steps", "every"),
    [
        ([10, 20, 30], 10.0),
        ([5, 17], None),
        ([4, 5, 6, 7], None),
        ([12, 34, 56, 77, 98], 21.5),
        ([6, 16, 18, 23], None),
        ([3, 9, 21, 24, 40], None),
    ],
)
def test_a_period_is_told_if_distances_are_alike(steps, every) -> None:
    assert period(steps) == every


def test_random_steps_have_hardly_ever_a_period() -> None:
    rng = np.random.default_rng(3)
    found = [period(sorted(rng.choice(40, rng.integers(4, 9), replace=False).tolist())) for _ in range(2_000)]
    assert sum(each is not None for each in found) <= 0.02 * len(found)


def test_delays_of_a_rank_in_one_place_are_one_line(tmp_path, capsys) -> None:
    """Of the pause of 150 ms, 10 ms are hidden: the device computes the forward pass, which is queued."""
    truth = replace(JOB, delays=tuple(Delay("host", 0, step, 0.15) for step in (2, 12, 22)))
    write_job(tmp_path, truth, device="cuda")
    done = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml")
    assert "\n  rank 0, steps 12, 22, 32 (every 10 steps): +140 ms (" in done.out
    assert "only rank 0, in a rhythm" in done.out
    said = json.loads(call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml", "--force", "--json").out)
    (found,) = said["repeated"]
    assert (found["steps"], found["every"], found["place"]["phase"]) == ([12, 22, 32], 10.0, "backward")
    assert [each["steps"] for each in said["stragglers"]] == [[12], [22], [32]]


def test_hosts_that_pause_in_their_own_rhythms_are_asked_for_garbage_collection(tmp_path, capsys) -> None:
    delays = [Delay("host", rank, step, 0.5) for rank, first in ((0, 2), (1, 5), (3, 7)) for step in (first, first + 8)]
    delays += [Delay("host", rank, step, 0.5) for rank, step in ((0, 18), (1, 21), (3, 23))]
    write_job(tmp_path, replace(JOB, delays=tuple(delays)), device="cuda")
    done = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml")
    assert "several hosts pause, each in its own rhythm: garbage collection?" in done.out


def test_delays_of_unlike_size_are_told_apart() -> None:
    each = Straggler("transient", (1,), None, "io", (3,), 1.0)
    small = replace(each, steps=(9,), seconds=0.3)
    assert [[straggler.steps for straggler in of.each] for of in repeated([each, small])] == [[(3,)], [(9,)]]


def test_what_all_ranks_wait_for_at_once_is_no_straggler(tmp_path, capsys) -> None:
    delays = [Delay("io", rank, step, 0.4 + 0.01 * rank) for rank in range(4) for step in (1, 9, 17)]
    write_job(tmp_path, replace(JOB, input_s=0.001, delays=tuple(delays)), device="cuda")
    said = json.loads(call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml", "--json").out)
    (common,) = said["common"]
    assert (common["steps"], common["every"], common["channel"]) == ([11, 19, 27], 8.0, "io")
    assert common["seconds"] == pytest.approx(0.415, rel=0.02)
    assert all(each["seconds"] < 0.05 for each in said["stragglers"])
    shown = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml", "--force").out
    assert "all ranks at once:\n  steps 11, 19, 27 (every 8 steps): +415 ms" in shown
    assert "`persistent_workers=True`" in shown


# ---------------------------------------------------------------- delays that grow


@pytest.mark.parametrize("sign", [1, -1])
def test_a_device_that_gets_slower_is_told_with_its_growth(sign: int) -> None:
    ramp_s = 0.001 * np.arange(24)[::sign]
    truth = replace(JOB, delays=tuple(Delay("compute", 2, step, float(ramp_s[step])) for step in range(24)))
    found = import_job(profiles_of(truth, "cuda"), name="job")
    (straggler,) = found.stragglers
    assert (straggler.kind, straggler.ranks, straggler.channel) == ("persistent", (2,), "compute")
    assert straggler.growth_s == pytest.approx(sign * 0.001, rel=0.05)
    planted_s = ramp_s[np.array(straggler.steps) - 10]
    assert straggler.step_seconds == pytest.approx(planted_s, abs=0.001)
    noticeable = np.flatnonzero(ramp_s > 0.035 * found.step_s) + 10
    assert set(noticeable.tolist()) <= set(straggler.steps)
    calm = import_job(profiles_of(JOB, "cuda"), name="job")
    assert found.without_named_s == pytest.approx(calm.step_s, rel=0.01)


@pytest.mark.parametrize(
    "delay_s",
    [
        np.zeros(40),
        np.repeat([0.0, 1.0], 20),
        np.repeat([0.0, 1.0], [36, 4]),
        np.full(40, 0.5),
        np.tile([0.0, 1.0], 20),
        0.1 * np.arange(10),
    ],
    ids=["none", "a sudden change", "a burst at the end", "always", "in turns", "too few steps"],
)
def test_other_delays_are_no_trend(delay_s) -> None:
    assert trend(delay_s, least_s=0.03, alarm=0.01) is None


def test_noise_has_hardly_ever_a_trend() -> None:
    rng = np.random.default_rng(2)
    draws = [rng.normal(size=50), rng.exponential(size=50), rng.lognormal(size=50)]
    walk = np.zeros(50)
    for step in range(1, 50):
        walk[step] = 0.7 * walk[step - 1] + rng.normal()
    assert [trend(each, least_s=1e-9, alarm=0.001) for each in (*draws, walk)] == [None] * 4


# ---------------------------------------------------------------- a job of which no scenario can be made


@pytest.mark.parametrize("is_scenario", [False, True], ids=["refused", "imported"])
def test_stragglers_of_a_sharded_job_are_told_whether_or_not_it_becomes_a_scenario(
    tmp_path, capsys, is_scenario
) -> None:
    """Rank 2 is late by 6 ms in each of its 4 units: 24 of 103.1 ms."""
    write_sharded(tmp_path, {(2, step): 6.0 for step in range(12)})
    for path in () if is_scenario else tmp_path.glob("*.gz"):
        text = gzip.decompress(path.read_bytes()).replace(b" msg nelems", b" size of nothing")
        path.write_bytes(gzip.compress(text))
    done = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml", "--nodes", "1", "--json")
    assert done.code == (0 if is_scenario else 2)
    said = json.loads(done.out)
    (straggler,) = said["stragglers"]
    assert (straggler["ranks"], straggler["kind"], straggler["channel"]) == ([2], "persistent", "compute")
    assert straggler["seconds"] == pytest.approx(0.024, rel=0.001)
    assert straggler["place"] == {"phase": "backward", "bucket": None, "n_buckets": 4}
    assert said["lost"]["stragglers"] == pytest.approx(24 / 103.14, rel=0.002)
    assert said["where"]["verdict"].startswith("straggler-bound: for 24 ms of a step (23.3 %)")


def test_a_late_unit_of_a_sharded_job_is_told_with_its_step(tmp_path, capsys) -> None:
    write_sharded(tmp_path, {(1, 5): 30.0, (3, 9): 20.0})
    done = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml")
    assert "  rank 1, step 5: +120 ms (+125% of a step), compute, in backward\n" in done.out
    assert "  rank 3, step 9: +80 ms (+84% of a step), compute, in backward\n" in done.out
    assert "without stragglers, a step would take 79.1 ms" in done.out


def test_a_quiet_sharded_job_has_no_straggler(tmp_path, capsys) -> None:
    write_sharded(tmp_path, {})
    done = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml")
    assert "stragglers: none" in done.out
    assert "communication-bound: for 16 ms of a step" in done.out
