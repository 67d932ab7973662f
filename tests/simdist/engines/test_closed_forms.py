"""Simulated step times against formulas that are implemented apart from the simulator, in closed_forms.py."""

import functools

import closed_forms
import numpy as np
import pytest
from engine_runs import des, fast
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist import scenario
from simdist.cost import price
from simdist.plan.delays import DrawnDelays
from simdist.runs.building import build, delay_sampler, job
from simdist.scenario.cluster import Cluster, Link
from simdist.scenario.sampling import run_seeds
from simdist.scenario.workload import Tensor, Workload
from simdist.schedules import Job, kinds
from simdist.studies.comparison import row
from simdist.studies.measuring import measure

STEP_S = 0.055
N_SEEDS, N_STEPS = 20, 1000

PRINTED = {  # GPUs, probability, schedule -> seconds per step
    (64, 0.02, "sync"): 0.780546,
    (64, 0.02, "local-2"): 0.529978,
    (64, 0.02, "local-4"): 0.338848,
    (64, 0.02, "local-8"): 0.244078,
    (64, 0.02, "hsgd-2-8,4-32,8-64"): 0.413448,
    (64, 0.02, "hsgd-4-32,8-64"): 0.334535,
    (256, 0.01, "sync"): 0.978685,
    (256, 0.01, "local-2"): 0.564726,
    (256, 0.01, "local-4"): 0.340414,
    (256, 0.01, "local-8"): 0.244013,
    (256, 0.01, "hsgd-1-4,2-16,4-64,8-256"): 0.468720,
    (256, 0.01, "hsgd-2-8,4-64,8-256"): 0.414024,
    (256, 0.01, "hsgd-4-16,8-256"): 0.320282,
}


def levels_of(schedule, world_size):
    """Return period -> group size: sync is one level of period 1, local SGD one of period H."""
    match schedule.split("-", 1):
        case ["sync"]:
            return {1: world_size}
        case ["local", period]:
            return {int(period): world_size}
        case ["hsgd", levels]:
            return {int(period): int(size) for period, size in (level.split("-") for level in levels.split(","))}


def exact_step_s(schedule, n, p, delay_s=1.0):
    match schedule.split("-", 1):
        case ["sync"]:
            return closed_forms.sync_step_s(STEP_S, delay_s, p, n)
        case ["local", period]:
            return closed_forms.local_sgd_step_s(STEP_S, delay_s, p, n, int(period))
        case _:
            return closed_forms.hierarchical_sgd_step_s(STEP_S, delay_s, p, levels_of(schedule, n))


def schedule_yaml(schedule, n):
    match schedule.split("-", 1):
        case ["sync"]:
            return "{kind: sync}"
        case ["local", period]:
            return f"{{kind: local_sgd, period: {period}}}"
        case _:
            levels = ", ".join(f"{period}: {size}" for period, size in levels_of(schedule, n).items())
            return f"{{kind: hierarchical_sgd, levels: {{{levels}}}, intra_node_gradients: false}}"


def straggling(n_gpus, schedules, disturbance, *, cluster="ideal", steps=N_STEPS, backward="35 ms"):
    """Return a scenario of ResNet-18 on nodes of 4 GPUs: 20 ms forward and 35 ms backward, the optimiser for free."""
    listed = "\n".join(f"  - {schedule_yaml(schedule, n_gpus)}" for schedule in schedules)
    return scenario.loads(
        f"cluster: {{preset: {cluster}, nodes: {n_gpus // 4}}}\n"
        f"workload: {{preset: resnet18, forward: 20 ms, backward: {backward}, optimize: 0 s}}\n"
        f"steps: {steps}\ndisturbances: [{disturbance}]\nschedules:\n{listed}\n"
    )


@functools.cache
def blog_scenario(n, p):
    schedules = [schedule for size, _, schedule in PRINTED if size == n]
    return straggling(n, schedules, f"{{kind: transient, probability: {p}, delay: 1 s}}")


@functools.cache
def simulated(n, p, schedule):
    chosen = blog_scenario(n, p)
    [each] = [each for each in chosen.schedules if each.name == schedule]
    return measure(chosen, build(chosen, each), n_seeds=N_SEEDS, engine="fast")


@functools.cache
def drawn(n, p):
    return delay_sampler(blog_scenario(n, p), run_seeds(0, N_SEEDS)).take(N_STEPS)["host"]


rows = pytest.mark.parametrize(("n", "p", "schedule"), PRINTED)


@rows
def test_formulas_give_the_printed_numbers(n, p, schedule):
    assert exact_step_s(schedule, n, p) == pytest.approx(PRINTED[n, p, schedule], abs=5e-7)


@rows
def test_hierarchical_formula_contains_sync_and_local_sgd(n, p, schedule):
    levels = levels_of(schedule, n)
    assert closed_forms.hierarchical_sgd_step_s(STEP_S, 1.0, p, levels) == pytest.approx(exact_step_s(schedule, n, p))


@rows
def test_simulated_mean_is_within_three_standard_errors(n, p, schedule):
    step_s = simulated(n, p, schedule).step_s
    assert len(step_s) == N_SEEDS
    error_s = step_s.std(ddof=1) / np.sqrt(N_SEEDS)
    assert error_s < 0.01 * step_s.mean()
    assert abs(step_s.mean() - exact_step_s(schedule, n, p)) < 3 * error_s


@rows
def test_every_seed_takes_as_long_as_nested_maxima_of_its_delays(n, p, schedule):
    waits_s = closed_forms.nested_waits_s(drawn(n, p), levels_of(schedule, n))
    np.testing.assert_allclose(simulated(n, p, schedule).step_s, STEP_S + waits_s / N_STEPS, rtol=1e-11)


@pytest.mark.parametrize(
    ("kind", "settings", "delays"),
    [
        ("sync", {}, 4.0),
        ("local_sgd", {"period": 2}, 2.25),
        ("hierarchical_sgd", {"levels": {2: 4, 4: 8}, "intra_node_gradients": False}, 2.1171875),
        ("local_sgd", {"period": 4}, 1.6484375),
    ],
)
def test_one_straggler_per_step_costs_exactly_this_over_all_4096_sequences(kind, settings, delays):
    """Eight ranks, four steps, a delay of 1 s: every number is a sum of powers of two, so the mean is exact."""
    every = closed_forms.one_straggler_per_step(4, 8)
    assert every.shape == (4096, 4, 8)
    plan = kinds()[kind](**settings).plan(Job(8, 4, 4, tensor_counts=(1,), delay_channels=frozenset({"host"})))
    ideal = Cluster(nodes=2, gpus_per_node=4, fabric=Link.ideal(), network=Link.ideal())
    workload = Workload(
        tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.25, backward_s=0.5, optimize_s=0.0
    )
    measured = fast.measure(plan, price(plan, ideal, workload), DrawnDelays({"host": every}), n_seeds=4096)
    assert (measured.makespan_s - 4 * 0.75).mean() == delays


@pytest.mark.parametrize(("n", "expected"), [(8, 2.71786), (64, 4.74389)])
def test_sync_waits_for_the_largest_of_n_exponential_delays(n, expected):
    assert closed_forms.harmonic(n) == pytest.approx(expected, abs=5e-6)
    chosen = straggling(n, ["sync"], "{kind: exponential, mean: 10 ms}")
    step_s = measure(chosen, build(chosen, chosen.schedules[0]), n_seeds=N_SEEDS).step_s
    error_s = step_s.std(ddof=1) / np.sqrt(N_SEEDS)
    assert abs(step_s.mean() - STEP_S - 0.010 * closed_forms.harmonic(n)) < 3 * error_s


def speedups(chosen, n_seeds):
    measured = [measure(chosen, build(chosen, schedule), n_seeds=n_seeds) for schedule in chosen.schedules]
    return {each.label: row(each, measured[0]).speedup for each in measured[1:]}


SIXTY_FOUR = ["sync", "local-2", "local-8", "hsgd-2-8,4-32,8-64", "hsgd-4-32,8-64"]


@pytest.mark.parametrize("slow", ["ranks: [5]", "nodes: [3]", "ranks: [0, 17, 63]"])
@pytest.mark.parametrize("how", ["delay: 1 s", "delay: 20 ms", "factor: 1.5", "factor: 1.5, on: compute"])
def test_persistent_straggler_leaves_no_speedup(slow, how):
    chosen = straggling(64, SIXTY_FOUR, f"{{kind: persistent, {how}, {slow}}}", steps=80)
    assert speedups(chosen, 1) == {schedule: pytest.approx(1.0, abs=0.01) for schedule in SIXTY_FOUR[1:]}


def test_persistently_slow_gpu_leaves_no_speedup():
    chosen = scenario.loads(
        "cluster: {preset: ideal, slow_devices: [{ranks: [9], speed: 0.5}]}\n"
        "workload: {preset: resnet18, forward: 20 ms, backward: 35 ms, optimize: 0 s}\nsteps: 80\nschedules:\n"
        + "".join(f"  - {schedule_yaml(schedule, 64)}\n" for schedule in SIXTY_FOUR)
    )
    assert speedups(chosen, 1) == {schedule: pytest.approx(1.0, abs=0.01) for schedule in SIXTY_FOUR[1:]}


@pytest.mark.parametrize("cluster", ["ideal", "gcp-t4x4-32gbit"])
def test_stragglers_among_30_percent_of_the_workers_leave_three_levels_almost_no_speedup(cluster):
    chosen = straggling(
        64,
        ["sync", "hsgd-2-8,4-32,8-64"],
        "{kind: transient, probability: 30%, delay: 1 s}",
        cluster=cluster,
        steps=400,
    )
    assert 1.0 < speedups(chosen, 10)["hsgd-2-8,4-32,8-64"] <= 1.1


def small_stragglers(delay):
    """Return the speed-ups of HSGD with communication, where a straggler's delay is under 10 % of the step."""
    schedules = ["sync", "hsgd-2-8,4-32,8-64", "hsgd-4-32,8-64"]
    disturbance = f"{{kind: transient, probability: 2%, delay: {delay}}}" if delay else ""
    return speedups(straggling(64, schedules, disturbance, cluster="gcp-t4x4-32gbit", steps=400), 5)


@pytest.mark.parametrize("delay", ["1 ms", "3 ms", "5 ms"])
def test_stragglers_that_cost_under_10_percent_leave_three_levels_no_speedup_once_averages_are_paid(delay):
    """Averages do not overlap with the backward pass; gradients do."""
    assert small_stragglers(delay)["hsgd-2-8,4-32,8-64"] <= 1.02


@pytest.mark.parametrize("delay", ["1 ms", "3 ms", "5 ms"])
def test_stragglers_that_cost_under_10_percent_add_little_to_what_saved_communication_gains(delay):
    """Two levels average half as often as three: they win 6 % without stragglers, and little more with small ones."""
    alone = small_stragglers(None)["hsgd-4-32,8-64"]
    assert 1.05 < alone < 1.08
    assert 1.0 < small_stragglers(delay)["hsgd-4-32,8-64"] / alone < 1.035


@examples(40)
@given(
    counts=st.lists(st.integers(1, 500_000), min_size=1, max_size=8),
    bucket_nbytes=st.sampled_from([4, 100_000, 1_000_000, 25_000_000]),
    bandwidth_Bps=st.sampled_from([1e7, 1e8, 1e9, 1e10]),
    latency_s=st.sampled_from([0.0, 1e-5, 1e-3]),
    n=st.sampled_from([1, 2, 3, 4]),
)
def test_sync_step_is_no_shorter_than_compute_and_no_shorter_than_communication(
    counts, bucket_nbytes, bandwidth_Bps, latency_s, n
):
    """step >= max(forward + backward, forward + first bucket ready + all communication)."""
    described = Job(n, 1, 5, tensor_counts=tuple(counts))
    sync = kinds()["sync"](first_bucket_nbytes=bucket_nbytes, bucket_nbytes=bucket_nbytes, algorithm="ring")
    plan = sync.plan(described)
    link = Link(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps)
    cluster = Cluster(nodes=n, gpus_per_node=1, fabric=Link.ideal(), network=link)
    tensors = tuple(Tensor(name=str(number), count=count) for number, count in enumerate(counts))
    workload = Workload(tensors=tensors, batch_size=1, forward_s=0.02, backward_s=0.04, optimize_s=0.0)
    buckets = [buffer for buffer in plan.buffers if buffer.name.startswith("grad")]
    reduce_s = [closed_forms.ring_all_reduce_s(n, bucket.nbytes, latency_s, bandwidth_Bps) for bucket in buckets]
    first_ready_s = 0.04 * buckets[0].count / sum(counts)
    costs = price(plan, cluster, workload)
    bound_s = max(0.06, 0.02 + first_ready_s + sum(reduce_s))
    for engine in (des, fast):
        makespan_s = engine.simulate(plan, costs, {}).makespan_s
        assert makespan_s >= 5 * bound_s * (1 - 1e-12)
        assert makespan_s <= 5 * (0.06 + sum(reduce_s)) * (1 + 1e-12)


def test_sync_step_of_k_passes_takes_k_times_their_computing_and_sends_once():
    chosen = scenario.loads(
        "cluster: {nodes: 4, gpus_per_node: 1, fabric: ideal, network: {latency: 1 ms, bandwidth: 100 MB/s}}\n"
        "workload:\n  tensors: [{name: first, count: 2500000}, {name: last, count: 2500000}]\n"
        "  batch_size: 8\n  micro_batches: 3\n  forward: 40 ms\n  backward: 80 ms\n  optimize: 10 ms\n"
        "steps: 5\nschedules: [{kind: sync, first_bucket_size: 1 B, bucket_size: 1 B}]\n"
    )
    bucket_s = closed_forms.ring_all_reduce_s(4, 10_000_000, 1e-3, 1e8)  # longer than the 40 ms of a bucket's backward
    built = build(chosen, chosen.schedules[0])
    for engine in (des, fast):
        makespan_s = engine.simulate(built.plan, built.costs, {}).makespan_s
        assert makespan_s == pytest.approx(5 * (3 * 0.12 - 0.04 + 2 * bucket_s + 0.01), rel=1e-12)


def test_job_of_the_scenarios_here_has_only_what_the_formulas_know():
    described = job(blog_scenario(64, 0.02))
    assert (described.run_ahead_steps, described.input_path.source, described.delay_channels) == (0, "device", {"host"})
