"""Cost of stragglers: hand-drawn timelines, closed forms, and whether they are told apart."""

from dataclasses import replace

import numpy as np
import pytest
from engine_runs import simulate
from straggling_jobs import analysed, job, simulated
from traces import plan_of, trace_of, two_steps

from simdist.cost import price
from simdist.engines.replay import timing
from simdist.errors import TraceError
from simdist.plan import AllReduce, Delay, Forward
from simdist.plan.group import Group
from simdist.runs.building import build, delays
from simdist.scenario import Recorded, Scenario, loads
from simdist.stragglers import Slowdown, find_pattern, find_slowdown
from simdist.stragglers.recording import delays_of_steps, measured_delays, with_recording

FORWARD_S, BACKWARD_S, COMM_S = 0.02, 0.04, 0.006
COMPUTE_S = FORWARD_S + BACKWARD_S


def comm_s(scenario: Scenario) -> float:
    """Return the seconds of a step without computing."""
    return analysed(scenario.changed(disturbances=())).ideal_s - COMPUTE_S


def part(found: Slowdown, name: str, channel: str | None = None) -> float:
    (each,) = [each for each in found.kinds if each.name == name and channel in (None, each.channel)]
    return each.slowdown


def test_two_ranks_and_two_steps_by_hand() -> None:
    """The median backward pass takes 1 s and nothing else is late, so an ideal step takes 4 s; these took 6 and 5."""
    found = find_slowdown(two_steps(), ranks_per_node=1)
    assert found.slowdown == pytest.approx(11 / 8)
    assert found.lost_share == pytest.approx(3 / 11)
    assert (found.traced_s, found.replayed_s, found.explained_s, found.ideal_s) == (5.5, 5.5, 5, 4)
    assert found.step_s.tolist() == [6, 5]
    assert found.ideal_step_s.tolist() == [4, 4]
    assert found.step_slowdowns == pytest.approx([6 / 4, 5 / 4])
    assert part(found, "backward") == pytest.approx(10 / 8)
    assert part(found, "between operations") == pytest.approx(9 / 8)
    assert part(found, "all_reduce") == 1
    assert found.rank_slowdowns == pytest.approx([1, 11 / 8])
    assert found.node_slowdowns == pytest.approx([1, 11 / 8])
    assert found.rank_step_s.tolist() == [[4, 6], [4, 5]]
    assert (found.slowest_ranks, found.fixed_by_ranks) == ((1,), 1)
    assert (found.slowest_node, found.fixed_by_node) == (1, 1)


def test_only_the_steps_that_are_asked_for_are_made_ideal() -> None:
    """Step 1 alone: its backward passes take 1 s each, and one rank is 1 s late."""
    found = find_slowdown(two_steps(), ranks_per_node=1, steps=range(1, 2))
    assert (found.first_step, found.n_steps) == (1, 1)
    assert (found.replayed_s, found.ideal_s, found.slowdown) == (5, 4, 1.25)
    before = find_slowdown(two_steps(), ranks_per_node=1, steps=range(1))
    assert (before.replayed_s, before.ideal_s) == (6, 4)  # of 1 s and 3 s the lower is typical


def test_steps_before_those_that_are_asked_for_do_not_say_what_is_ideal() -> None:
    """The forward pass took 1 s before, and takes all ranks 3 s now: no rank is late."""
    step = (Forward(("param",), ("loss",)), AllReduce("loss", Group(3)))
    times = [(0, 0, 1), (1, 1, 2), (2, 2, 5), (5, 5, 6)]
    trace = trace_of(plan_of(step, step, world_size=3), times)
    found = find_slowdown(trace, ranks_per_node=3, steps=range(1, 2))
    assert (found.replayed_s, found.ideal_s, found.slowdown) == (4, 4, 1)


def test_a_slow_collective_is_charged_to_communication() -> None:
    step = (Forward(("param",), ("loss",)), AllReduce("loss", Group(3)))
    times = []
    for at, reduce_s in ((0, 1), (2, 4), (7, 1)):
        times += [(at, at, at + 1), (at + 1, at + 1, at + 1 + reduce_s)]
    found = find_slowdown(trace_of(plan_of(step, step, step, world_size=3), times), ranks_per_node=3)
    assert found.slowdown == pytest.approx(9 / 6)  # the median all-reduce takes 1 s
    assert part(found, "all_reduce", "communication") == found.slowdown
    assert [each.name for each in found.channels if each.slowdown > 1] == ["communication"]
    assert find_pattern(found).shape == "simultaneous"
    assert find_pattern(found).simultaneous == 1


@pytest.mark.parametrize("factor", [1.25, 2.0])
def test_one_slow_device_of_n_costs_what_it_has_too_much(factor: float) -> None:
    """The ideal is what the others take; a device of half the speed costs what a delay as long as its pass would."""
    slow = f"  slow_devices: [{{ranks: [5], speed: {1 / factor}}}]\n"
    scenario = job(cluster=slow)
    found = analysed(scenario)
    rest_s = found.replayed_s - COMPUTE_S * factor
    assert found.slowdown == pytest.approx((COMPUTE_S * factor + rest_s) / (COMPUTE_S + rest_s))
    assert found.slowest_ranks == (5,)
    assert found.fixed_by_ranks == pytest.approx(1)
    assert found.slowest_node == 2
    assert find_pattern(found).shape == "persistent"
    assert find_pattern(found).persistent == pytest.approx(1)
    assert found.channels[0].name == "compute"


def test_one_rank_that_is_late_in_every_step_costs_its_delay_and_vanishes_with_it() -> None:
    """A delay is no work: the ideal is its median, none."""
    scenario = job("{kind: persistent, delay: 33 ms, ranks: [2]}")
    found = analysed(scenario)
    undisturbed_s = COMPUTE_S + comm_s(scenario)
    assert found.ideal_s == pytest.approx(undisturbed_s)
    assert found.slowdown == pytest.approx((undisturbed_s + 0.033) / undisturbed_s)
    assert found.rank_slowdowns[2] == pytest.approx(found.slowdown)
    assert np.delete(found.rank_slowdowns, 2) == pytest.approx(np.ones(7))
    assert (found.slowest_ranks, found.fixed_by_ranks) == ((2,), pytest.approx(1))
    assert part(found, "delay", "host") == pytest.approx(found.slowdown)
    assert find_pattern(found).persistent == pytest.approx(1)


def test_work_grows_with_the_ranks_that_straggle_not_with_all_of_them() -> None:
    """The total of the progress is the number of replays, each of all ranks."""
    n_replays = []
    for n_nodes in (4, 8):
        calls: list[tuple[float, float]] = []
        late = job("{kind: persistent, delay: 33 ms, ranks: [2, 5]}", nodes=n_nodes)
        analysed(late, progress=lambda done, total, calls=calls: calls.append((done, total)))
        n_replays.append(calls[-1][1])
    assert n_replays[0] == n_replays[1]


@pytest.mark.parametrize("everyone", ["{kind: persistent, delay: 30 ms}", "{kind: jitter, median: 30 ms, sigma: 0}"])
def test_ranks_that_are_all_equally_late_are_no_stragglers(everyone: str) -> None:
    found = analysed(job(everyone))
    assert found.slowdown == pytest.approx(1)
    assert found.fixed_by_ranks is None
    assert find_pattern(found).shape == "even"


def test_random_pauses_are_transient_and_no_rank_is_to_blame() -> None:
    scenario = job("{kind: transient, probability: 4%, delay: 200 ms}", steps=200)
    found = analysed(scenario)
    late = delays(scenario)["host"][0].any(axis=1)
    undisturbed_s = COMPUTE_S + comm_s(scenario)
    assert found.replayed_s == pytest.approx(undisturbed_s + 0.2 * late.mean())
    assert found.step_s[late] == pytest.approx(undisturbed_s + 0.2)
    assert find_pattern(found).shape == "transient"
    assert find_pattern(found).transient == pytest.approx(1)
    assert found.fixed_by_ranks is not None
    assert found.fixed_by_ranks < 0.3


def test_what_a_rank_always_loses_is_told_from_what_it_loses_sometimes() -> None:
    """Rank 2 is 20 ms late in every step, and all are 200 ms late in 2 % of the cases."""
    both = analysed(
        job(
            "{kind: persistent, delay: 20 ms, ranks: [2]}",
            "{kind: transient, probability: 2%, delay: 200 ms}",
            steps=300,
        )
    )
    spread = find_pattern(both)
    lost_s = both.replayed_s - both.ideal_s
    assert spread.persistent == pytest.approx(0.02 / lost_s, rel=1e-6)
    assert spread.transient == pytest.approx(1 - 0.02 / lost_s, rel=1e-6)


def test_pauses_of_all_ranks_in_the_same_steps_are_simultaneous(tmp_path) -> None:
    late_s = np.zeros((40, 8))
    late_s[[3, 17, 30]] = 0.5
    np.savez(tmp_path / "late.npz", late_s)
    found = analysed(job().changed(disturbances=(Recorded(file=tmp_path / "late.npz"),)))
    assert find_pattern(found).shape == "simultaneous"
    assert found.rank_slowdowns == pytest.approx(np.full(8, found.slowdown))
    assert found.fixed_by_ranks == pytest.approx(0)


def test_a_node_that_is_late_as_a_whole_is_found_though_none_of_its_ranks_is_to_blame(tmp_path) -> None:
    scenario = job("{kind: persistent, delay: 30 ms, nodes: [3]}")
    found = analysed(scenario)
    assert (found.slowest_node, found.fixed_by_node) == (3, pytest.approx(1))
    assert found.fixed_by_ranks == pytest.approx(0)
    assert found.node_slowdowns[:3] == pytest.approx(np.ones(3))


@pytest.mark.parametrize(("steps", "world"), [(1, 8), (40, 1)])
def test_one_step_or_one_rank_cannot_tell_persistent_from_transient(steps: int, world: int) -> None:
    scenario = job("{kind: transient, probability: 30%, delay: 1 s}", steps=steps)
    if world == 1:
        scenario = scenario.changed(cluster=scenario.cluster.model_copy(update={"nodes": 1, "gpus_per_node": 1}))
    assert find_pattern(analysed(scenario)).shape == "unknown"


def test_three_percent_of_the_ranks_are_the_slowest() -> None:
    late = ("{kind: persistent, delay: 30 ms, ranks: [7, 20]}", "{kind: persistent, delay: 1 ms, ranks: [60]}")
    found = analysed(job(*late, nodes=32))
    assert found.slowest_ranks == (7, 20)  # 3 % of 64, rounded up
    assert found.fixed_by_ranks == pytest.approx(29 / 30)


def test_steps_that_the_trace_does_not_have_are_refused() -> None:
    with pytest.raises(TraceError, match=r"steps 2:9: plan by hand has the steps 0 to 1; write e\.g\. 0:1"):
        find_slowdown(two_steps(), ranks_per_node=1, steps=range(2, 9))


def test_a_job_that_takes_no_time_is_refused() -> None:
    trace = trace_of(plan_of((Delay("host"),), world_size=2), [(0, 0, 0)])
    with pytest.raises(TraceError, match="these steps take no time"):
        find_slowdown(trace, ranks_per_node=1)


def test_progress_ends_with_all_work_done() -> None:
    calls: list[tuple[float, float]] = []
    analysed(job(steps=4), progress=lambda done, total: calls.append((done, total)))
    assert all(done <= total for done, total in calls)
    assert calls[-1][0] == calls[-1][1]


def test_what_was_injected_is_found_again_in_a_measured_trace(tmp_path) -> None:
    """The trace of one scenario, priced by it without its disturbances, shows them step by step and rank by rank."""
    late = (
        "{kind: transient, probability: 20%, delay: 50 ms}",
        "{kind: jitter, median: 3 ms, sigma: 0.5, on: compute}",
    )
    scenario = job(*late, steps=12)
    trace = simulated(scenario)
    costs = price(trace.plan, scenario.cluster, scenario.workload)
    found = measured_delays(trace, timing(trace), costs)
    expected = delays(scenario)
    assert found.keys() == expected.keys()
    for channel, seconds in expected.items():
        np.testing.assert_allclose(found[channel], seconds, atol=1e-12)
    replayed = with_recording(scenario, delays_of_steps(found, range(2, 10)), tmp_path)
    assert (replayed.steps, len(replayed.disturbances)) == (8, 2)
    np.testing.assert_allclose(delays(replayed)["host"], expected["host"][:, 2:10], atol=1e-12)


@pytest.mark.parametrize("schedule", ["sync", "fsdp"])
def test_what_was_injected_into_micro_batches_is_found_again_there(schedule, tmp_path) -> None:
    late = "{kind: transient, on: compute, probability: 20%, delay: 50 ms}"
    scenario = job(late, steps=6)
    workload = scenario.workload.model_copy(update={"micro_batches": 4})
    scenario = scenario.changed(workload=workload, schedules=[schedule])
    trace = simulated(scenario)
    costs = price(trace.plan, scenario.cluster, scenario.workload)
    found = measured_delays(trace, timing(trace), costs)
    expected = delays(scenario)["compute"]
    np.testing.assert_allclose(found["compute"], expected, atol=1e-12)
    replayed = with_recording(scenario, delays_of_steps(found, range(1, 5)), tmp_path)
    np.testing.assert_allclose(delays(replayed)["compute"], expected[:, 1:5], atol=1e-12)
    assert simulated(replayed).makespan_s < trace.makespan_s


def test_gaps_between_operations_are_delays_too() -> None:
    trace = two_steps()
    scenario = job()
    costs = price(build(scenario, scenario.schedules[0]).plan, scenario.cluster, scenario.workload)
    found = measured_delays(trace, timing(trace), costs)  # nothing in this plan has a price
    assert found["compute"].tolist() == [[[3, 5], [3, 4]]]


def test_a_job_without_delays_is_recorded_as_undisturbed(tmp_path) -> None:
    assert with_recording(job("{kind: jitter, median: 1 ms, sigma: 1}"), {}, tmp_path).disturbances == ()


def test_shares_of_the_loss_never_add_up_to_more_than_all_of_it() -> None:
    """The replays of what is persistent and of what is simultaneous may overlap."""
    found = analysed(job("{kind: transient, probability: 20%, delay: 100 ms}"))
    nearly_all_s = found.ideal_s + 0.9 * (found.replayed_s - found.ideal_s)
    shares = find_pattern(replace(found, persistent_s=nearly_all_s, simultaneous_s=nearly_all_s))
    assert (shares.persistent, shares.simultaneous, shares.transient) == pytest.approx((0.5, 0.5, 0))


def test_who_alone_writes_checkpoints_is_no_straggler() -> None:
    """Its own files belong to the job: nobody else does the same in a shorter time."""
    scenario = loads("""
cluster: {nodes: 4, gpus_per_node: 1, fabric: ideal, network: ideal, storage: {latency: 0 s, bandwidth: 100 MB/s}}
workload: {tensors: [{name: all, count: 2500000}], batch_size: 1, forward: 40 ms, backward: 80 ms}
checkpoint: {every: 2, what: parameters}
schedules: [{kind: sync}]
steps: 8
""")
    built = build(scenario, scenario.schedules[0])
    found = find_slowdown(simulate(built.plan, built.costs, {}), ranks_per_node=1)
    assert found.slowdown == pytest.approx(1, abs=1e-12)
    assert found.rank_slowdowns == pytest.approx([1, 1, 1, 1])
