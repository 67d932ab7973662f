"""Launching takes time of the host: step times by batch size, all engines, delays, run-ahead, graphs and floors."""

import itertools

import numpy as np
import pytest
from engine_runs import EngineRun, des, fast

from simdist.cost.compute import ComputeCost
from simdist.cost.costs import Local
from simdist.errors import ScenarioError
from simdist.plan import Copy, KernelLaunch, occurrences, op_text
from simdist.runs import building
from simdist.scenario import Scenario, dump, loads
from simdist.scenario.cluster import Device, DeviceFloors
from simdist.studies.comparison import compare
from simdist.traces.breakdown import break_down

ONE_GPU = """
cluster: {preset: ideal, nodes: 1, gpus_per_node: 1}
workload: {preset: resnet18, optimize: 1 us, WORKLOAD}
host: HOST
schedules: [sync]
steps: 30
"""
# kernels of a forward pass, a backward pass and an update
N_KERNELS = (100, 210, 40)
HOST_S = 50e-6  # of a launch
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)


def one_gpu(workload: str, host: str = "{}") -> Scenario:
    return loads(ONE_GPU.replace("WORKLOAD", workload).replace("HOST", host))


def kernel_s(batch_size: int) -> float:
    return 2e-6 + 1.2e-6 * batch_size


def exact_step_s(batch_size: int, *, ahead: int | None, n_steps: int = 30) -> float:
    """Return the mean step of a queue of kernels, each launched and then run in order."""
    host_s = device_s = 0.0
    losses_s: list[float] = []
    for step in range(n_steps):
        for part, n_kernels in enumerate(N_KERNELS):
            if part == 1:
                losses_s.append(device_s)
                if ahead is not None and step >= ahead:
                    host_s = max(host_s, losses_s[step - ahead])
            for _ in range(n_kernels):
                host_s += HOST_S
                device_s = max(device_s, host_s) + (2e-6 if part == 2 else kernel_s(batch_size))
    return max(host_s, device_s) / n_steps


@pytest.mark.sentinel
@pytest.mark.parametrize("ahead", [0, 1, None])
def test_two_points_give_the_curve_of_an_exact_queue(ahead: int | None) -> None:
    """One measured step is that of the host, the other one that of the device."""
    small_s, large_s = (exact_step_s(size, ahead=None) for size in (SIZES[0], SIZES[-1]))
    shares = [n_kernels / sum(N_KERNELS) for n_kernels in N_KERNELS]
    launches = dict(zip(("forward", "backward", "optimize"), (f"{small_s * each} s" for each in shares), strict=True))
    forward_s = large_s * N_KERNELS[0] / sum(N_KERNELS[:2])
    times = f"forward: {forward_s} s, backward: {large_s - forward_s} s, measured_batch_size: {SIZES[-1]}"
    host = f"{{run_ahead_steps: {'null' if ahead is None else ahead}}}"
    errors = []
    for size in SIZES:
        scenario = one_gpu(f"batch_size: {size}, {times}, launches: {launches}".replace("'", ""), host)
        (row,) = compare(scenario)
        errors.append(row.step_s / exact_step_s(size, ahead=ahead) - 1)
    assert np.abs(errors).max() < 0.05, np.round(errors, 3)
    assert exact_step_s(16, ahead=ahead) == pytest.approx(exact_step_s(1, ahead=ahead), rel=0.02), "not flat"


# ---------------------------------------------------------------- engines

SEVERAL = """
cluster:
  preset: ideal
  nodes: 2
  gpus_per_node: 2
  fabric: {latency: 1 us, bandwidth: 50 GB/s}
  network: {latency: 5 us, bandwidth: 10 GB/s}
  host: {launches: {collective: 20 us, copy: 10 us, pack: 30 us, unpack: 30 us, select: 200 us, densify: 50 us}}
workload: {preset: resnet18, forward: 1 ms, backward: 2 ms, LAUNCHES}
host: HOST
disturbances: [{kind: transient, probability: 20%, delay: 8 ms}]
schedules: [SCHEDULE]
steps: 8
seed: 3
"""
LAUNCHES = "launches: {forward: 3 ms, backward: 5 ms, optimize: 2 ms}"
KINDS = EngineRun("alike")
FLOORED = Device(floors=DeviceFloors(copy_s=1e-6))


def several(schedule: str, host: str = "{}", launches: str = LAUNCHES) -> Scenario:
    text = SEVERAL.replace("SCHEDULE", schedule).replace("HOST", host).replace("LAUNCHES", launches)
    return loads(text)


SCHEDULES = ("sync", "local-2", '"hsgd-2-2,4-world"', "fsdp", "{kind: hitopk, density: 1%}", "{kind: torus}")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ahead", [0, 2, None])
def test_all_engines_give_the_same_times(schedule: str, ahead: int | None) -> None:
    scenario = several(schedule, f"{{run_ahead_steps: {'null' if ahead is None else ahead}}}")
    built = building.build(scenario, scenario.schedules[0])
    assert any(isinstance(op, KernelLaunch) for op in built.plan.distinct_ops)
    drawn = building.delays(scenario)
    by_events = des.simulate(built.plan, built.costs, drawn)
    by_vectors = fast.simulate(built.plan, built.costs, drawn)
    seen: list[object] = []
    live = des.simulate(built.plan, built.costs, drawn, observers=[seen.append])
    alike = KINDS.simulate(built.plan, built.costs, drawn)
    for name in ("ready_s", "start_s", "end_s"):
        expected = getattr(by_events, name)
        exact = not built.costs.contested
        for other in (by_vectors, live):
            assert np.allclose(getattr(other, name), expected, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
        assert np.allclose(getattr(alike, name), expected, rtol=1e-12, atol=1e-12)
    assert seen


def test_links_that_groups_share_are_among_the_plans_of_these_tests() -> None:
    found = (several(each) for each in SCHEDULES)
    assert any(building.build(each, each.schedules[0]).costs.contested for each in found)


@pytest.mark.parametrize(
    "schedule", ["{kind: backup_workers, backup: 1}", "{kind: local_sgd, period: 4, inner_steps: {3: 1}}"]
)
def test_ranks_that_sit_out_a_step_launch_no_passes(schedule: str) -> None:
    scenario = several(schedule).changed({"disturbances[0].delay": "40 ms", "steps": 16})
    built = building.build(scenario, scenario.schedules[0])
    drawn = building.delays(scenario)
    by_events, by_vectors = (each.simulate(built.plan, built.costs, drawn) for each in (des, fast))
    assert np.array_equal(by_events.end_s, by_vectors.end_s)
    idle = {kind: np.zeros((16, 4), dtype=bool) for kind in ("forward", "backward")}
    for each in occurrences(built.plan):
        if isinstance(each.op, KernelLaunch) and each.op.kind in idle:
            idle[each.op.kind][each.steps] |= by_events.end_s[each.rows] == by_events.start_s[each.rows]
    assert 0 < idle["forward"].sum() < 32
    assert np.array_equal(idle["forward"][:-1], idle["backward"][:-1])  # the last step is cut at its result


# ---------------------------------------------------------------- what is stated


def texts(scenario: Scenario) -> list[str]:
    plan = building.build(scenario, scenario.schedules[0]).plan
    return [op_text(op) for op in plan.bodies[-1]]


def test_a_launch_stands_behind_its_operation() -> None:
    launches = "launches: {forward: 3 ms, backward: 5 ms}"
    found = [each for each in texts(several("sync", launches=launches)) if not each.startswith("wait")]
    tensors = [int(each.split()[-2]) for each in found if each.startswith("kernel_launch(backward")]
    assert sum(tensors) == len(several("sync").workload.tensors)
    assert found[:2] == ["forward(param -> activations, loss.0)", f"kernel_launch(forward of {sum(tensors)} tensors)"]
    for one, other in itertools.pairwise(found):
        assert one.startswith("all_reduce") == other.startswith("kernel_launch(collective")
        assert one.startswith("backward") == other.startswith("kernel_launch(backward")
    assert not any("optimize" in each for each in found if each.startswith("kernel_launch"))


def test_passes_that_take_their_device_longer_hide_their_launches() -> None:
    plain = several("sync", launches="name: plain")
    hidden = several("sync", launches="launches: {forward: 1 ms, backward: 1.5 ms, optimize: 0.5 ms}")
    shown = several("sync", launches="launches: {forward: 1 ms, backward: 1.6 ms, optimize: 0.5 ms}")
    plans = [building.build(each, each.schedules[0]).plan for each in (plain, hidden, shown)]
    assert plans[0].digest() == plans[1].digest() != plans[2].digest()


def test_a_step_waits_for_the_host_that_launches_it() -> None:
    """A late host is late by what it launches, too; a host that runs ahead hides both."""
    scenario = one_gpu("batch_size: 1, forward: 1 ms, backward: 2 ms, launches: {forward: 4 ms, backward: 8 ms}")
    trace = building.simulate(scenario)
    assert trace.makespan_s / scenario.steps == pytest.approx(12e-3, rel=1e-3)
    states = break_down(trace).rank_states_s()
    assert states["compute"][0, 0] == pytest.approx(3e-3, rel=1e-2)
    assert states["host"][0, 0] == pytest.approx(9e-3, rel=1e-2)


def test_one_time_is_of_both_passes() -> None:
    found = one_gpu("batch_size: 1, launches: 12 ms").workload.launches
    assert (found.forward_s, found.backward_s) == pytest.approx((4e-3, 8e-3))
    assert loads(dump(one_gpu("batch_size: 1, launches: 12 ms"))).workload.launches == found


def test_a_graph_is_one_launch() -> None:
    scenario = several("sync").changed({"host.graphs": True, "cluster.host.launches.graph": "100 us"})
    found = [each for each in texts(scenario) if each.startswith("kernel_launch") and "collective" not in each]
    assert found == ["kernel_launch(graph)"] * 3
    alone = one_gpu("batch_size: 1, forward: 1 ms, backward: 2 ms, launches: 12 ms", "{graphs: true}")
    alone = alone.changed("cluster.host.launches.graph", "100 us")
    step_s = building.simulate(alone).makespan_s / alone.steps
    assert step_s == pytest.approx(3.1e-3, rel=2e-3), "the rest of a backward pass comes after its launch"


def seconds_of(scenario: Scenario) -> dict[str, float]:
    """Return the seconds of each kind of operation that needs no other rank."""
    costs = building.build(scenario, scenario.schedules[0]).costs.of
    return {type(op).__name__: cost.seconds for op, cost in costs.items() if isinstance(cost, Local)}


def test_no_operation_takes_less_than_the_floor_of_its_kind() -> None:
    scenario = several("{kind: hitopk, density: 1%}").changed({"cluster.device.floors.select": "3 ms"})
    assert seconds_of(scenario)["Select"] == 3e-3
    assert seconds_of(scenario)["Densify"] < 1e-3
    quick = scenario.changed("cluster.device.memory_bandwidth", "1 TB/s")
    least = quick.changed("cluster.device.floors.select", "1 ns")
    copies = ComputeCost(scenario.workload, scenario.cluster.model_copy(update={"device": FLOORED}))
    assert copies.at_least(Copy("a", "b"), np.array([1e-9, 0.0, 1.0])).tolist() == [1e-6, 0.0, 1.0]
    assert 1e-9 < seconds_of(least)["Select"] < seconds_of(quick)["Select"] == 3e-3


def test_the_earlier_key_is_an_error_that_names_the_new_one() -> None:
    with pytest.raises(ScenarioError, match="unknown key 'launch': did you mean 'launches'"):
        one_gpu("batch_size: 1, launch: 12 ms")
