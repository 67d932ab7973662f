"""Times of epochs, stalls and levels, from hand-made traces and against closed forms; what knobs remove."""

import dataclasses
import math

import numpy as np
import pytest
from traces import plan_of, trace_of

from simdist.errors import ScenarioError, TraceError
from simdist.plan import AllReduce, Copy, Dataset, Forward, Group, Load, Optimize, StageIn
from simdist.runs import building
from simdist.scenario import Scenario, loads
from simdist.studies.data_knobs import knob_effects, knobs
from simdist.studies.epochs import Loading, epoch_errors, find_epochs
from simdist.studies.loading import loading_text
from simdist.traces.reads import expected
from simdist.traces.trace import Trace

# Hand-made traces: 2 ranks, 2 steps an epoch

DATASET = Dataset(8, 2, ranks_per_node=1, sample_nbytes=10, file_nbytes=(5,), shuffle="none")
LOAD = Load("batch", ("storage",))
STEP = (LOAD, Copy("batch", "input"), Forward(("input",), ("loss",)))


def at(*, load, copy, forward):
    """Return the times of a step that loads until `load`, copies at `copy` and computes until `forward`."""
    return [(0, 0, load), (copy, copy, copy), (copy, copy, forward)]


TIMES = [
    *at(load=(3, 4), copy=(3, 4), forward=(5, 6)),
    *at(load=(6, 6), copy=(6, 6), forward=(8, 8)),
    *at(load=(7, 7), copy=(8, 8), forward=(10, 10)),
    *at(load=(12, 11), copy=(12, 11), forward=(14, 13)),
]


def traced(*steps, times, dataset=DATASET) -> Trace:
    return trace_of(dataclasses.replace(plan_of(*steps, world_size=2), dataset=dataset), times)


@pytest.fixture
def by_hand():
    return traced(*[STEP] * 4, times=TIMES)


def test_stall_is_from_the_end_of_the_compute_before_to_the_end_of_the_load(by_hand):
    assert find_epochs(by_hand).step_stall_s.tolist() == [[3, 4], [1, 0], [0, 0], [2, 1]]


def test_epochs_follow_one_another(by_hand):
    first, second = find_epochs(by_hand).epochs
    assert (first.number, first.n_steps, first.seconds) == (0, 2, 8)
    assert (first.stall_s, first.mean_stall_s) == (4 + 1, 3.5 + 0.5)
    assert (second.number, second.n_steps, second.seconds) == (1, 2, 6)
    assert (second.stall_s, second.mean_stall_s, second.stall_share) == (2, 1.5, 2 / 6)
    assert find_epochs(by_hand).seconds == by_hand.makespan_s


def test_samples_and_bytes_are_those_of_all_ranks(by_hand):
    for epoch in find_epochs(by_hand).epochs:
        assert epoch.n_samples == (0, 0, 0, 8)
        assert epoch.nbytes == (0, 0, 0, 40)
        assert epoch.hits == {"memory": 0, "peer": 0, "disk": 0, "storage": 1}


def test_counts_of_a_run_take_the_place_of_what_the_plan_expects(by_hand):
    counted = expected(by_hand.plan)
    counted.n_samples[2, 0] = [1, 0, 1, 0]
    counted.nbytes[2, 0] = [10, 0, 5, 0]
    first, second = find_epochs(by_hand, counted).epochs
    assert (first.n_samples, second.n_samples) == ((0, 0, 0, 8), (1, 0, 1, 6))
    assert second.nbytes == (10, 0, 5, 30)
    assert second.hits == {"memory": 1 / 8, "peer": 0, "disk": 1 / 8, "storage": 6 / 8}


def test_slower_communication_is_no_stall():
    """The load is there at 4, the gradient is averaged at 9: the next step waits for nothing but that."""
    step = (*STEP, AllReduce("grad", Group(2)), Optimize(("param",), ("grad",)))
    times = [
        *[*at(load=1, copy=1, forward=2), (2, 2, 9), (9, 9, 9)],
        *[*at(load=4, copy=9, forward=10), (10, 10, 11), (11, 11, 11)],
    ]
    assert find_epochs(traced(step, step, times=times)).step_stall_s.tolist() == [[1, 1], [0, 0]]


def test_first_epoch_begins_when_all_nodes_are_staged_in():
    times = [(0, 0, (4, 7)), *at(load=(5, 9), copy=(5, 9), forward=(5.5, 10)), *TIMES[3:]]
    found = find_epochs(traced((StageIn(Group(1)), *STEP), *[STEP] * 3, times=times))
    assert found.staging_s == 7
    assert found.step_stall_s[:2].tolist() == [[0, 2], [0, 0]]
    assert found.epochs[0].seconds == 10 - 7
    assert found.seconds == 14
    assert found.waiting_s == 7 + sum(epoch.stall_s for epoch in found.epochs)


def test_batch_that_is_read_ahead_belongs_to_the_step_that_reads_it():
    """Two buffers: the first step loads two batches, the last none."""
    even, odd = (
        (Load(name, ("storage",)), (Copy(name, "input"), Forward(("input",), ("loss",)))) for name in ("even", "odd")
    )
    steps = [(even[0], odd[0], *even[1]), (even[0], *odd[1]), (odd[0], *even[1]), odd[1]]
    times = [
        *[(0, 0, 1), (1, 1, 5), (1, 1, 1), (1, 1, 3)],
        *[(5, 5, 6), (5, 5, 5), (5, 5, 7)],
        *[(6, 6, 9), (7, 7, 7), (7, 7, 9)],
        *[(9, 9, 9), (9, 9, 11)],
    ]
    assert find_epochs(traced(*steps, times=times)).step_stall_s[:, 0].tolist() == [1, 5 - 3, 0, 0]


def test_step_that_reads_no_batch_belongs_to_the_epoch_before():
    steps = [STEP, STEP, (Forward(("input",), ("loss",)),), STEP]
    times = [*TIMES[:6], (8, 8, 9), *at(load=10, copy=10, forward=14)]
    first, second = find_epochs(traced(*steps, times=times)).epochs
    assert (first.n_steps, first.seconds, second.n_steps, second.seconds) == (3, 9, 1, 5)


def test_batch_that_is_read_twice_counts_once():
    twice = (LOAD, Copy("batch", "input"), Copy("batch", "other"), Forward(("input",), ("loss",)))
    (epoch,) = find_epochs(traced(twice, twice, times=[(0, 0, 1), *[(2, 2, 2)] * 3] * 2)).epochs
    assert epoch.n_samples == (0, 0, 0, 8)


def test_last_epoch_may_be_cut_short():
    first, second = find_epochs(traced(*[STEP] * 3, times=TIMES[:9])).epochs
    assert (first.n_steps, second.n_steps) == (2, 1)
    assert second.n_samples == (0, 0, 0, 4)


def test_of_a_run_that_ended_early_the_steps_count_that_all_ranks_finished(by_hand):
    end_s = by_hand.end_s.copy()
    end_s[8, 1] = np.nan  # the forward pass of step 2
    first, *others = find_epochs(dataclasses.replace(by_hand, end_s=end_s)).epochs
    assert (first.seconds, others) == (8, [])


def test_run_of_which_no_step_was_finished_has_no_epochs(by_hand):
    end_s = by_hand.end_s.copy()
    end_s[2, 1] = np.nan  # the forward pass of step 0
    found = find_epochs(dataclasses.replace(by_hand, end_s=end_s))
    assert (found.epochs, found.seconds, found.waiting_s, len(found.frame())) == ((), 0, 0, 0)
    assert found.step_stall_s.shape == (0, 2)
    assert find_epochs(by_hand, n_steps=0).epochs == ()
    assert loading_text(Loading(found)).endswith("no epoch: no step was finished by all ranks")
    assert "error of an epoch: none was finished" in loading_text(Loading(find_epochs(by_hand, n_steps=0), found))


def test_steps_that_read_no_batch_are_of_no_epoch():
    assert find_epochs(traced((LOAD, STEP[2]), times=[(0, 0, 1), (1, 1, 2)])).epochs == ()


def test_plan_without_a_data_set_has_no_epochs():
    with pytest.raises(TraceError, match="plan by hand has no data set, so it has no epochs"):
        find_epochs(traced(STEP, times=TIMES[:3], dataset=None))


def test_counts_of_another_plan_are_refused(by_hand):
    with pytest.raises(TraceError, match="reads of another plan"):
        find_epochs(by_hand, expected(traced(STEP, times=TIMES[:3]).plan))


def test_frame_has_a_row_per_epoch(by_hand):
    frame = find_epochs(by_hand).frame()
    assert frame["seconds"].tolist() == [8, 6]
    assert frame["storage_nbytes"].tolist() == [40, 40]
    assert frame["stall_share"].tolist() == [5 / 8, 2 / 6]


def test_error_of_an_epoch_is_relative_to_the_measured(by_hand):
    slower = dataclasses.replace(by_hand, end_s=2 * by_hand.end_s)
    errors = epoch_errors(find_epochs(by_hand), find_epochs(slower))
    assert [(each.simulated_s, each.measured_s, each.error) for each in errors] == [(8, 16, -0.5), (6, 12, -0.5)]


def test_stall_of_one_rank_is_what_the_epoch_lasts_longer():
    """Ranks meet after every step, and in each another one is late by 2."""
    step = (*STEP, AllReduce("loss", Group(2)), Optimize(("param",), ("loss",)))
    times = [
        *[*at(load=(0, 2), copy=(0, 2), forward=(1, 3)), (3, 3, 3), (3, 3, 3)],
        *[*at(load=(5, 2), copy=(5, 3), forward=(6, 4)), (6, 6, 6), (6, 6, 6)],
    ]
    (epoch,) = find_epochs(traced(step, step, times=times)).epochs
    assert (epoch.seconds, epoch.stall_s, epoch.mean_stall_s) == (2 * 1 + 2 * 2, 2 * 2, 2 * 1)


# Closed forms. Two ranks on a node, 10 steps an epoch, 4 files of 1 MB a batch, a step computes for 60 ms.

COMPUTE_S, N_STEPS, BATCH_NBYTES = 0.06, 10, 4e6


def scenario_of(*, share_Bps: float, policy: str = "naive", prefetch: int = 2, more: str = "") -> Scenario:
    """Return a scenario in which each of two ranks has `share_Bps` of the server."""
    bandwidth = "unlimited" if share_Bps == math.inf else f"{2 * share_Bps!r} B/s"
    return loads(f"""
cluster:
  nodes: 1
  gpus_per_node: 2
  fabric: ideal
  network: ideal
  storage: {{latency: 0 s, bandwidth: {bandwidth}}}
  disk: {{read: 1 GB/s, write: unlimited}}
{more}
workload: {{tensors: [{{name: w, count: 10}}], batch_size: 4, forward: 20 ms, sample_size: 1 kB}}
input: {{source: storage, prefetch: {prefetch}, data: {{samples: 80, file_size: 1 MB, policy: {policy}}}}}
steps: 3 epochs
schedules: [{{kind: sync}}]
""")


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0, 1.5, 10.0])
def test_utilisation_is_the_share_of_the_server_over_the_demand(ratio):
    share_Bps = ratio * BATCH_NBYTES / COMPUTE_S
    found = find_epochs(building.simulate(scenario_of(share_Bps=share_Bps)))
    for epoch in found.epochs[1:]:
        assert 1 - epoch.stall_share == pytest.approx(min(1, ratio), rel=1e-9)
        assert epoch.seconds == pytest.approx(N_STEPS * COMPUTE_S / min(1, ratio), rel=1e-9)
        assert epoch.mean_stall_s == pytest.approx(epoch.stall_s)
        assert epoch.is_hidden == (ratio >= 1)


@pytest.mark.parametrize("load_s", [0.03, 0.15])
def test_first_epoch_also_waits_for_its_first_batch(load_s):
    first = find_epochs(building.simulate(scenario_of(share_Bps=BATCH_NBYTES / load_s))).epochs[0]
    step_s = max(load_s, COMPUTE_S)
    assert first.seconds == pytest.approx(load_s + (N_STEPS - 1) * step_s + COMPUTE_S)
    assert first.stall_s == pytest.approx(load_s + (N_STEPS - 1) * (step_s - COMPUTE_S))


def test_file_cache_takes_later_epochs_from_storage_to_compute():
    """4 MB at 33 MB/s take 120 ms; from disk, shared by two, 8 ms."""
    found = find_epochs(building.simulate(scenario_of(share_Bps=BATCH_NBYTES / 0.12, policy="files")))
    first, *later = found.epochs
    assert first.seconds == pytest.approx(N_STEPS * 0.12 + COMPUTE_S)
    assert first.hits["storage"] == 1
    assert not first.is_hidden
    for epoch in later:
        assert epoch.stall_s == 0
        assert epoch.seconds == pytest.approx(N_STEPS * COMPUTE_S)


def test_staging_takes_as_long_as_the_server_needs_for_all_files():
    found = find_epochs(building.simulate(scenario_of(share_Bps=50e6, policy="staged")))
    assert found.staging_s == pytest.approx(80 * 1e6 / 100e6)
    assert all(epoch.hits["disk"] == 1 for epoch in found.epochs)


# Knobs


def effects_of(scenario: Scenario):
    found = knob_effects(scenario, scenario.schedules[0], building.delays(scenario))
    return found, {effect.knob: effect for effect in found.effects}


def test_twice_the_bandwidth_removes_all_stalls_where_loads_take_twice_as_long_as_compute():
    found, by_name = effects_of(scenario_of(share_Bps=BATCH_NBYTES / (2 * COMPUTE_S)))
    faster = by_name["storage bandwidth x 2"]
    assert faster.removed_by_epoch[1:] == pytest.approx((1, 1))
    assert faster.removed == pytest.approx(1 - COMPUTE_S / (2 * COMPUTE_S + 29 * COMPUTE_S))
    assert faster.seconds == pytest.approx(COMPUTE_S + 30 * COMPUTE_S)
    assert found.baseline.seconds == pytest.approx(30 * 2 * COMPUTE_S + COMPUTE_S)


def test_knob_that_is_not_the_bottleneck_removes_nothing():
    _, by_name = effects_of(scenario_of(share_Bps=BATCH_NBYTES / 0.12))
    for name in ("decode_workers 1 -> 2", "readers 8 -> 16", "prefetch 2 -> 4"):
        assert by_name[name].removed == pytest.approx(0, abs=1e-9)


def test_what_helps_most_stands_first():
    found, _ = effects_of(scenario_of(share_Bps=BATCH_NBYTES / 0.12))
    seconds = [round(effect.seconds, 9) for effect in found.effects]
    assert seconds == sorted(seconds)
    assert found.effects[0].removed > 0.5


def test_staging_counts_as_waiting():
    found, by_name = effects_of(scenario_of(share_Bps=BATCH_NBYTES / 0.12))
    staged = by_name["policy: staged"]
    waiting_s = staged.staging_s + sum(staged.stall_s)
    assert staged.staging_s > 1
    assert staged.removed == pytest.approx(1 - waiting_s / found.baseline.waiting_s)


def test_knob_that_lacks_something_says_what():
    scenario = scenario_of(share_Bps=1e9)
    bare = scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update={"disk": None})})
    missing = {knob.name: knob.missing for knob in knobs(bare, bare.schedules[0]) if knob.missing}
    assert missing == {
        "policy: files": "cluster.disk",
        "policy: memory": "cluster.memory",
        "policy: datacache": "cluster.disk and cluster.memory",
        "policy: staged": "cluster.disk",
    }
    found, by_name = effects_of(bare)
    assert found.missing == missing
    assert not by_name.keys() & missing.keys()


def test_knobs_start_from_what_the_schedule_says():
    scenario = scenario_of(share_Bps=1e9, more="  host: {cores_per_node: 3}")
    schedule = scenario.schedules[0].model_copy(update={"input": {"prefetch": 3, "readers": 5, "policy": "files"}})
    names = [knob.name for knob in knobs(scenario, schedule)]
    assert {"prefetch 3 -> 6", "readers 5 -> 10", "decode_workers 1 -> 2", "cores per node 3 -> 6"} < set(names)
    assert "policy: files" not in names
    assert "policy: naive" in names


def test_resource_that_is_unlimited_or_free_is_no_knob():
    names = [knob.name for knob in knobs(scenario_of(share_Bps=1e9), scenario_of(share_Bps=1e9).schedules[0])]
    assert [name for name in names if name.startswith("storage")] == ["storage bandwidth x 2"]


def test_knobs_need_a_data_set():
    scenario = scenario_of(share_Bps=1e9)
    bare = scenario.changed({"input.data": None, "steps": 10})
    with pytest.raises(ScenarioError, match=r"reads no data set: write input\.data:"):
        knobs(bare, bare.schedules[0])


def test_nothing_can_be_removed_where_nobody_waits():
    """Free loads; then a share of no waiting is no number."""
    scenario = scenario_of(share_Bps=math.inf)
    found, by_name = effects_of(scenario)
    assert found.baseline.waiting_s == 0
    assert math.isnan(by_name["prefetch 2 -> 4"].removed)
