"""Stragglers of an imported job are those that were there: who, when, on what, by how much; a quiet job has none."""

from dataclasses import replace

import numpy as np
import pytest
from covers import cover
from profiled_jobs import Delay, profiles_of, without_input

from simdist.profiles import import_job
from simdist.profiles.estimates.stragglers import DelayTable, Straggler, find_common, find_stragglers, noise_of, without
from simdist.profiles.job.layout import RankLayout

QUIET_S = 0.005
JOB = without_input(n_ranks=8, n_steps=20, first_step=10, gpus_per_node=4, jitter=0.02)
STEPS = tuple(range(10, 30))


def found(truth, device="cpu"):
    return import_job(profiles_of(truth, device), name="job").stragglers


def always(channel, rank, seconds):
    return tuple(Delay(channel, rank, step, seconds) for step in range(20))


def told(stragglers):
    return [(each.kind, each.who, each.channel, each.steps) for each in stragglers]


@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.2])
def test_a_quiet_job_has_none(jitter: float) -> None:
    assert found(replace(JOB, jitter=jitter)) == ()


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("channel", ["host", "compute", "io"])
def test_a_rank_that_is_late_once_is_found(channel, n_ranks: int) -> None:
    stragglers = found(replace(JOB, n_ranks=n_ranks, delays=(Delay(channel, 1, 7, 0.08),)))
    assert told(stragglers) == [("transient", "rank 1", channel, (17,))]
    assert stragglers[0].seconds == pytest.approx(0.08, rel=0.02)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("channel", ["host", "compute", "io"])
def test_a_rank_that_is_always_late_is_found(channel, n_ranks: int) -> None:
    stragglers = found(replace(JOB, n_ranks=n_ranks, delays=always(channel, 0, 0.012)))
    assert told(stragglers) == [("persistent", "rank 0", channel, STEPS)]
    assert stragglers[0].seconds == pytest.approx(0.012, rel=0.1)


def test_steps_that_follow_one_another_are_one_burst() -> None:
    delays = (*(Delay("host", 5, step, 0.05) for step in range(3, 7)), Delay("host", 5, 12, 0.05))
    assert told(found(replace(JOB, delays=delays))) == [
        ("transient", "rank 5", "host", (13, 14, 15, 16)),
        ("transient", "rank 5", "host", (22,)),
    ]


def test_a_step_that_is_late_by_far_more_than_those_beside_it_stands_alone() -> None:
    delays = (Delay("host", 5, 3, 0.3), Delay("host", 5, 2, 0.02))
    assert told(found(replace(JOB, delays=delays))) == [
        ("transient", "rank 5", "host", (13,)),
        ("transient", "rank 5", "host", (12,)),
    ]


def test_a_node_whose_ranks_are_all_late_is_the_straggler() -> None:
    delays = tuple(delay for rank in range(4, 8) for delay in always("compute", rank, 0.01))
    stragglers = found(replace(JOB, delays=delays))
    assert told(stragglers) == [("persistent", "node 1 (ranks 4-7)", "compute", STEPS)]
    assert stragglers[0].ranks == (4, 5, 6, 7)


def test_a_node_that_is_late_once_is_one_straggler() -> None:
    delays = tuple(Delay("host", rank, 4, 0.05) for rank in range(4))
    assert told(found(replace(JOB, delays=delays))) == [("transient", "node 0 (ranks 0-3)", "host", (14,))]


def test_ranks_that_all_differ_always_are_not_late_at_times() -> None:
    delays = tuple(delay for rank in range(4) for delay in always("compute", rank, 0.004 * rank))
    assert all(each.kind == "persistent" for each in found(replace(JOB, n_ranks=4, delays=delays)))


def test_two_late_ranks_of_a_node_are_two_stragglers() -> None:
    delays = (*always("compute", 4, 0.01), *always("compute", 5, 0.01))
    assert sorted(each.who for each in found(replace(JOB, delays=delays))) == ["rank 4", "rank 5"]


def test_two_of_three_ranks_that_are_late_in_one_step_are_told_in_full() -> None:
    delays = (Delay("host", 0, 7, 0.08), Delay("host", 1, 7, 0.06))
    stragglers = found(replace(JOB, n_ranks=3, delays=delays))
    assert told(stragglers) == [("transient", f"rank {rank}", "host", (17,)) for rank in (0, 1)]
    assert [each.seconds for each in stragglers] == pytest.approx([0.08, 0.06], rel=0.02)


def test_a_step_that_is_long_on_all_ranks_is_no_straggler() -> None:
    assert found(replace(JOB, delays=tuple(Delay("host", rank, 4, 0.05) for rank in range(8)))) == ()


def test_a_rank_that_is_always_late_may_be_later_in_a_step() -> None:
    stragglers = found(replace(JOB, delays=(*always("host", 3, 0.01), Delay("host", 3, 5, 0.06))))
    assert told(stragglers) == [("persistent", "rank 3", "host", STEPS), ("transient", "rank 3", "host", (15,))]
    assert stragglers[1].seconds == pytest.approx(0.06, rel=0.01)


def test_the_cost_of_stragglers_is_what_a_step_takes_less_without_them() -> None:
    imported = import_job(profiles_of(replace(JOB, jitter=0.0, delays=always("compute", 2, 0.012))), name="job")
    assert imported.lost.stragglers == pytest.approx(0.012 / imported.proof.measured_s, rel=0.05)
    assert imported.lost.total == pytest.approx(imported.lost.stragglers, abs=0.002)


def test_without_its_stragglers_a_job_is_quiet() -> None:
    delay_s = np.zeros((5, 3))
    delay_s[2, 1] = 1.0
    layout = RankLayout(1, 3, "")
    delays = DelayTable({"host": delay_s}, (0, 2, 5), range(5), step_s=1.0)
    stragglers = find_stragglers(delays, layout)
    assert stragglers == (Straggler("transient", (2,), None, "host", (2,), 1.0),)
    assert not without(delays, stragglers)["host"].any()


def test_delays_are_what_was_measured_beyond_the_undisturbed_times() -> None:
    truth = replace(JOB, jitter=0.0, delays=(Delay("host", 1, 7, 0.08), Delay("compute", 6, 3, 0.03)))
    delays = import_job(profiles_of(truth), name="job").delays
    expected = {channel: np.zeros((20, 8)) for channel in ("host", "compute")}
    expected["host"][7, 1], expected["compute"][3, 6] = 0.08, 0.03
    assert list(delays) == ["host", "compute"]
    for channel, seconds in expected.items():
        assert delays[channel] == pytest.approx(seconds, abs=2e-9)


def test_ranks_without_a_trace_have_the_delays_of_a_rank_that_is_not_late() -> None:
    truth = replace(JOB, missing=(0,))
    imported = import_job(profiles_of(truth), name="job")
    compute_s = imported.delays["compute"]
    assert compute_s.shape == (20, 8)
    assert compute_s[:, 0] == pytest.approx(np.sort(compute_s[:, 1:], axis=1)[:, 1], abs=1e-9)  # second of seven


def in_steps_of_1_s(delay_s, channel="compute"):
    n_steps, n_ranks = delay_s.shape
    ranks, layout = range(n_ranks), RankLayout(1, n_ranks, "")
    return find_stragglers(DelayTable({channel: delay_s}, ranks, range(n_steps), step_s=1.0), layout)


def noise(rng, kind, spread, n_steps, n_ranks):
    if kind == "exponential":
        return rng.exponential(spread, (n_steps, n_ranks))
    if kind == "lognormal":
        computing_s = 0.6 * rng.lognormal(0, spread, (n_steps, n_ranks))
        return np.maximum(0.0, computing_s - np.quantile(computing_s, 0.05))
    return np.maximum(0.0, rng.normal(1.645 * spread, spread, (n_steps, n_ranks)))


@pytest.mark.parametrize("n_late", range(1, 21))
def test_a_rank_is_late_by_its_full_size_however_many_steps_it_is_late_in(n_late: int) -> None:
    delay_s = noise(np.random.default_rng(n_late), "normal", QUIET_S, 20, 8)
    delay_s[:n_late, 3] += 0.3
    (straggler,) = in_steps_of_1_s(delay_s)
    assert (straggler.kind, straggler.ranks) == ("transient" if n_late <= 10 else "persistent", (3,))
    assert straggler.steps == tuple(range(n_late))
    assert straggler.seconds == pytest.approx(0.3, rel=0.1)


def test_a_persistent_one_in_consecutive_steps_is_told_with_these() -> None:
    delay_s = np.zeros((20, 4))
    delay_s[2:14, 1] = 0.2
    (straggler,) = in_steps_of_1_s(delay_s)
    assert (straggler.kind, straggler.when(20)) == ("persistent", "steps 2-13")


NOISES = [("normal", 0.05), ("normal", 0.1), ("exponential", 0.05)]


@cover(law=NOISES, n_ranks=[2, 4, 8, 64], n_steps=[10, 20], ids={"law": lambda each: f"{each[0]}-{each[1]}"})
def test_noise_makes_no_persistent_stragglers(law: tuple[str, float], n_ranks: int, n_steps: int) -> None:
    kind, spread = law
    rng, n_jobs = np.random.default_rng(7), 50 if n_ranks == 64 else 150
    alarms = sum(
        any(each.kind == "persistent" for each in in_steps_of_1_s(noise(rng, kind, spread, n_steps, n_ranks)))
        for _ in range(n_jobs)
    )
    assert alarms <= 0.02 * n_jobs


@pytest.mark.parametrize("n_steps", [10, 20])
@pytest.mark.parametrize("n_ranks", [2, 4, 8, 64])
def test_a_tenth_of_a_step_is_found_in_noise_of_a_fiftieth(n_ranks: int, n_steps: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        delay_s = noise(rng, "normal", 0.02, n_steps, n_ranks)
        delay_s[:, 1] += 0.1
        assert [(each.kind, each.ranks) for each in in_steps_of_1_s(delay_s)] == [("persistent", (1,))]


@pytest.mark.parametrize("n_ranks", [4, 8, 64])
def test_exponential_noise_makes_no_transient_stragglers(n_ranks: int) -> None:
    rng, n_jobs = np.random.default_rng(3), 100
    alarms = sum(bool(in_steps_of_1_s(noise(rng, "exponential", 0.05, 20, n_ranks))) for _ in range(n_jobs))
    assert alarms <= 0.05 * n_jobs


CLEAN = [("normal", 0.1), ("exponential", 0.1), ("lognormal", 0.3), ("lognormal", 0.5)]


@cover(law=CLEAN, n_ranks=[2, 3, 4, 8], n_steps=[12, 20, 50], ids={"law": lambda each: f"{each[0]}-{each[1]}"})
def test_in_200_clean_jobs_few_stragglers_are_told(law: tuple[str, float], n_ranks: int, n_steps: int) -> None:
    alarms = alarms_of(law, n_ranks, n_steps, n_jobs=200)
    assert alarms["persistent"] <= 0.02 * 200
    assert alarms["transient"] <= 0.05 * 200


def test_a_tail_goes_on_as_heavy_as_it_begins() -> None:
    assert alarms_of(("lognormal", 0.7), 8, 50, n_jobs=60)["transient"] <= 0.1 * 60  # 21 % with an exponential tail


def alarms_of(law: tuple[str, float], n_ranks: int, n_steps: int, *, n_jobs: int) -> dict[str, int]:
    rng = np.random.default_rng(23)
    ranks, layout = range(n_ranks), RankLayout(1, n_ranks, "")
    alarms = dict.fromkeys(("persistent", "transient"), 0)
    for _ in range(n_jobs):
        of = {channel: noise(rng, *law, n_steps, n_ranks) for channel in ("host", "compute", "io")}
        kinds = {each.kind for each in find_stragglers(DelayTable(of, ranks, range(n_steps), step_s=1.0), layout)}
        alarms.update({kind: alarms[kind] + 1 for kind in kinds})
    return alarms


@pytest.mark.parametrize("n_steps", [20, 40])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_a_rank_that_is_later_in_each_step_is_found_however_much_steps_vary_on_all_ranks(
    n_ranks: int, n_steps: int
) -> None:
    """As on shared cores: of two ranks, one is later by 8.5 % of a step, and every step takes 10 to 30 % more."""
    rng = np.random.default_rng(6)
    for _ in range(20):
        delay_s = rng.uniform(0.1, 0.3, (n_steps, 1)) + noise(rng, "normal", 0.02, n_steps, n_ranks)
        delay_s[:, 1] += 0.085
        assert [(each.kind, each.ranks) for each in in_steps_of_1_s(delay_s)] == [("persistent", (1,))]


@pytest.mark.parametrize("probability", [0.05, 0.15, 0.3])
def test_frequent_stragglers_do_not_hide_among_themselves(probability: float) -> None:
    rng = np.random.default_rng(1)
    delay_s = noise(rng, "normal", QUIET_S, 20, 64)
    is_late = rng.random(delay_s.shape) < probability
    delay_s[is_late] += 0.3
    cells = {(step, each.ranks[0]) for each in in_steps_of_1_s(delay_s, "host") for step in each.steps}
    assert len(cells & set(zip(*np.nonzero(is_late), strict=True))) >= 0.95 * is_late.sum()


def test_noticeable_delays_that_noise_explains_are_counted() -> None:
    delay_s = noise(np.random.default_rng(2), "exponential", 0.05, 20, 8)
    found_, ranks, numbers = in_steps_of_1_s(delay_s), range(8), range(20)
    rest = noise_of(DelayTable({"compute": delay_s}, ranks, numbers, step_s=1.0), found_)
    assert found_ == ()
    assert 20 < rest.count < 80
    assert rest.seconds > 0.05 * rest.count


def test_persistent_ones_come_first_and_both_kinds_by_size() -> None:
    delay_s = noise(np.random.default_rng(4), "normal", QUIET_S, 20, 16)
    delay_s[:, 2] += 0.1
    delay_s[:, 5] += 0.2
    delay_s[3, 7] += 0.5
    delay_s[8, 1] += 0.9
    assert [each.ranks[0] for each in in_steps_of_1_s(delay_s)] == [5, 2, 1, 7]


def test_a_rank_that_is_late_in_most_steps_is_persistent_in_these() -> None:
    late = (*range(9), *range(12, 20))
    delays = tuple(Delay("compute", 2, step, 0.02) for step in late)
    stragglers = found(replace(JOB, delays=delays))
    assert told(stragglers) == [("persistent", "rank 2", "compute", tuple(10 + step for step in late))]
    assert stragglers[0].when(20) == "17 of 20 steps"


@pytest.mark.parametrize("mean_s", [0.015, 0.025, 0.035])
def test_delays_far_beyond_exponential_noise_are_told(mean_s: float) -> None:
    """300 ms are 8 to 20 times the mean: the noise of 444 delays hardly ever passes them."""
    n_found = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        delay_s = rng.exponential(mean_s, (111, 4))
        late = rng.choice(444, 17, replace=False)
        delay_s.flat[late] += 0.3
        cells = {(step, each.ranks[0]) for each in in_steps_of_1_s(delay_s) for step in each.steps}
        n_found += len(cells & set(zip(*np.unravel_index(late, delay_s.shape), strict=True)))
    assert n_found >= {0.015: 170, 0.025: 168, 0.035: 165}[mean_s]


LATE_S = 0.3
SHAPES = {  # 300 ms are 8 times the mean or more, which such noise passes once in thousands of delays
    "exponential": lambda rng, shape: rng.exponential(0.035, shape),
    "gamma": lambda rng, shape: rng.gamma(2, 0.0175, shape),
    "lognormal": lambda rng, shape: 0.035 * rng.lognormal(-0.125, 0.5, shape),
}


def late_in(draw, seed, *, n_late=7):
    """Return delays of 40 steps of 4 ranks, some of them 300 ms later, and these: (step, rank)."""
    rng = np.random.default_rng(seed)
    delay_s = draw(rng, (40, 4))
    late = rng.choice(160, n_late, replace=False)
    delay_s.flat[late] += LATE_S
    return delay_s, set(zip(*np.unravel_index(late, delay_s.shape), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_few_delays_of_one_size_are_told_from_noise_of_an_eighth(shape: str) -> None:
    n_found = n_wrong = 0
    for seed in range(20):
        delay_s, late = late_in(SHAPES[shape], seed)
        cells = {(step, each.ranks[0]) for each in in_steps_of_1_s(delay_s) for step in each.steps}
        n_found += len(cells & late)
        n_wrong += len(cells - late)
    assert n_found >= 0.8 * 20 * 7
    assert n_wrong <= 3


def test_delays_of_one_size_are_not_told_from_noise_with_a_heavy_tail() -> None:
    """Pareto noise of shape 1.5 passes 300 ms once in 16 delays."""
    delay_s, late = late_in(lambda rng, shape: 0.055 * rng.pareto(1.5, shape), seed=1)
    stragglers = in_steps_of_1_s(delay_s)
    rest = noise_of(DelayTable({"compute": delay_s}, range(4), range(40), step_s=1.0), stragglers)
    assert not {(step, each.ranks[0]) for each in stragglers for step in each.steps} & late
    assert rest.told_from_s["compute"] > 5 * LATE_S


@pytest.mark.parametrize("mean_s", [0.005, 0.015, 0.025, 0.035])
def test_no_named_delay_is_smaller_than_what_is_told_from_noise(mean_s: float) -> None:
    for seed in range(5):
        delay_s, _ = late_in(lambda rng, shape: rng.exponential(mean_s, shape), seed)
        table = DelayTable({"host": delay_s, "compute": 10 * delay_s[::-1]}, range(4), range(40), step_s=0.1)
        stragglers = find_stragglers(table, RankLayout(1, 4, ""))
        told_from_s = noise_of(table, stragglers).told_from_s
        for each in stragglers:
            assert each.seconds >= told_from_s.get(each.channel, 0.0)


def test_a_clear_bulk_is_not_extrapolated_from_its_median() -> None:
    """Most delays are next to nothing, a quarter are 2 to 35 ms: what is late by 300 ms is told, and nothing else."""
    rng = np.random.default_rng(8)
    delay_s = rng.exponential(1e-4, (111, 4))
    busy = rng.random(delay_s.shape) < 0.25
    delay_s[busy] += np.minimum(rng.exponential(0.009, busy.sum()), 0.035)
    late = rng.choice(444, 17, replace=False)
    delay_s.flat[late] += 0.3
    layout = RankLayout(1, 4, "")
    found_ = find_stragglers(DelayTable({"host": delay_s}, range(4), range(111), step_s=0.185), layout)
    cells = {(step, each.ranks[0]) for each in found_ for step in each.steps}
    assert cells == set(zip(*np.unravel_index(late, delay_s.shape), strict=True))


def test_pauses_that_coincide_by_chance_are_not_those_of_all_ranks() -> None:
    """Hosts pause in three of ten steps, so in some steps all four do."""
    n_found = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        delay_s = np.maximum(0.0, rng.exponential(0.035, (40, 4)) - 0.042)
        n_found += bool(find_common(DelayTable({"host": delay_s}, range(4), range(40), step_s=0.1)))
    assert n_found <= 5


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_delays_that_all_ranks_have_at_once_are_found(n_ranks: int) -> None:
    delay_s = np.random.default_rng(1).exponential(0.01, (40, n_ranks))
    delay_s[[5, 17, 29]] += 0.4
    (common,) = find_common(DelayTable({"io": delay_s}, range(n_ranks), range(40), step_s=0.1))
    assert (common.steps, common.every) == ((5, 17, 29), 12)


def alarms_in(draw, n_jobs: int, kind: str) -> int:
    rng = np.random.default_rng(31)
    return sum(any(each.kind == kind for each in in_steps_of_1_s(draw(rng))) for _ in range(n_jobs))


def test_a_rank_with_wider_noise_is_not_late() -> None:
    widths = np.geomspace(0.05, 0.4, 8)
    assert alarms_in(lambda rng: rng.normal(1, widths, (40, 8)), 100, "transient") <= 8


def test_noise_that_lasts_makes_no_persistent_stragglers() -> None:
    def lasting(rng):
        noise_s = rng.normal(0, 0.1, (100, 4))
        for step in range(1, 100):
            noise_s[step] = 0.7 * noise_s[step - 1] + 0.71 * noise_s[step]
        return 1 + noise_s

    assert alarms_in(lasting, 100, "persistent") <= 5


def test_a_clock_that_ticks_makes_no_gaps() -> None:
    assert alarms_in(lambda rng: 0.05 * np.round(rng.exponential(2.0, (100, 4))), 100, "transient") <= 8


def test_noise_says_from_when_on_a_delay_is_told_from_it() -> None:
    light = noise(np.random.default_rng(2), "exponential", 0.05, 100, 4)
    heavy = 0.05 * np.random.default_rng(2).pareto(1.5, (100, 4))
    told_s = [
        noise_of(DelayTable({"host": each}, range(4), range(100), step_s=0.5), ()).told_from_s["host"]
        for each in (light, heavy)
    ]
    assert light.max() < told_s[0] < 1.0 < told_s[1]


def test_ranks_whose_hosts_hardly_pause_are_not_compared_by_that() -> None:
    """As in a job with late hosts: most pauses are next to nothing, on one rank a hundred times less than on others."""
    rng = np.random.default_rng(3)
    delay_s = rng.exponential([1e-6, 1e-4, 1e-4, 1e-4], (20, 4))
    late = rng.choice(80, 14, replace=False)
    delay_s.flat[late] += 0.4
    cells = {(step, each.ranks[0]) for each in in_steps_of_1_s(delay_s) for step in each.steps}
    assert cells == set(zip(*np.unravel_index(late, delay_s.shape), strict=True))
