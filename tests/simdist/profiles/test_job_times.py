"""The times of an imported job: clocks, collectives without waiting, links, undisturbed times, and the proof of it."""

from dataclasses import replace

import numpy as np
import pytest
from engine_runs import simulate
from profiled_jobs import Bucket, Delay, Truth, profiles_of, without_input

from simdist.errors import ScenarioError, TraceError
from simdist.plan.group import Group
from simdist.profiles import ImportedJob, ImportOptions, import_job
from simdist.profiles.estimates.base import base_times, parts
from simdist.profiles.estimates.collectives import (
    CollectiveTimes,
    collective_times,
    of_last_members,
    on_shared_cores,
)
from simdist.profiles.estimates.links import SHARDED, Fabric, derive_links, predicted_s
from simdist.profiles.job.job import assemble
from simdist.profiles.job.layout import find_layout
from simdist.profiles.job.matching import CollectiveKey, Matched, RankClocks, match, synchronize
from simdist.profiles.kineto.events import Hint
from simdist.profiles.steps.model import TracedCollective
from simdist.profiles.steps.step_parts import StepPart
from simdist.runs.building import build
from simdist.scenario import Cluster, Link, Tensor
from simdist.schedules import Sync
from simdist.tuning.candidates import input_choices

SKEWS = (0.0, 2.5, -3.0, 0.4)
JOB = without_input(n_ranks=4, n_steps=20, skew_s=SKEWS)
LATE = replace(JOB, delays=(Delay("host", 1, 7, 0.08), *(Delay("compute", 3, step, 0.012) for step in range(20))))


def matched(truth: Truth, device="cpu"):
    job = assemble(profiles_of(truth, device))
    calls = match(job)
    return job, calls, synchronize(calls)


def drifting(profile, drift):
    """Return a profile of a clock that is slow or fast."""

    def slower(call: TracedCollective) -> TracedCollective:
        times = {name: at * (1 + drift) for name, at in (("start_s", call.start_s), ("end_s", call.end_s))}
        return replace(call, issued_s=call.issued_s * (1 + drift), **times)

    return replace(profile, steps=tuple(replace(step, calls=tuple(map(slower, step.calls))) for step in profile.steps))


def _of_group(call: TracedCollective, ranks: tuple[int, ...] | None) -> TracedCollective:
    """Return a collective of some ranks only, that averages no gradients."""
    return replace(call, ranks=ranks, n_ranks=len(ranks) if ranks else 2, of_gradients=False)


def test_skews_of_clocks_are_found_by_the_ends_of_collectives() -> None:
    _, _, clocks = matched(replace(LATE, gpus_per_node=1))
    assert clocks.offset_s == pytest.approx(SKEWS, abs=1e-9)
    assert (clocks.skew_s, clocks.residual_s) == pytest.approx((5.5, 0.0), abs=1e-9)
    assert not clocks.drift.any()


def test_a_drifting_clock_is_brought_back() -> None:
    profiles = profiles_of(replace(LATE, n_steps=40))
    calls = match(assemble([*profiles[:2], drifting(profiles[2], 2e-3), profiles[3]]))
    clocks = synchronize(calls)
    corrected_s = clocks.corrected_s(calls.end_s)
    assert np.ptp(corrected_s, axis=1).max() < 20e-6
    assert clocks.drift[2] == pytest.approx(2e-3, rel=0.01)
    assert not clocks.drift[[0, 1, 3]].any()


def test_ranks_that_share_no_collective_keep_their_clock_and_are_named() -> None:
    """Ranks 0 and 1 talk to each other, and so do 2 and 3."""
    profiles = []
    for each in profiles_of(replace(JOB, gpus_per_node=1)):
        pair = (0, 1) if each.rank < 2 else (2, 3)
        steps = (replace(s, calls=tuple(_of_group(c, pair) for c in s.calls)) for s in each.steps)
        profiles.append(replace(each, steps=tuple(steps)))
    clocks = synchronize(match(assemble(profiles)))
    assert clocks.offset_s == pytest.approx([0.0, 2.5, 0.0, 0.0])
    assert clocks.unknown == (2, 3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_collectives_are_timed_without_the_waiting_for_late_ranks(device) -> None:
    job, calls, clocks = matched(LATE, device)
    rows = collective_times(calls, clocks, find_layout(job))
    assert [(row.nbytes, row.calls) for row in rows] == [(bucket.nbytes, 20) for bucket in LATE.buckets]
    assert [row.seconds for row in rows] == pytest.approx([bucket.transfer_s for bucket in LATE.buckets], abs=1e-6)
    assert all(row.is_complete for row in rows)
    assert rows[0].wait_share > 0.3


def test_collectives_that_run_at_once_take_no_more_than_both_did() -> None:
    buckets = tuple(Bucket((count,), 0.001, transfer_s) for count, transfer_s in ((100_000, 0.004), (400_000, 0.009)))
    job, calls, clocks = matched(replace(JOB, buckets=buckets))
    rows = collective_times(calls, clocks, find_layout(job))
    assert sum(row.seconds for row in rows) == pytest.approx(0.013, abs=1e-6)
    assert all(row.seconds > 0 for row in rows)


EXACT = RankClocks(np.zeros(4), np.zeros(4), np.zeros(4), 0.0, np.zeros(4), ())


def of_pairs(*times_s: tuple[tuple[int, int], tuple[float, float], tuple[float, float]]) -> tuple[Matched, list]:
    """Return all_gathers in pairs of 4 ranks: members, arrivals and ends; and their times in one row."""
    arrival_s, end_s = (np.full((len(times_s), 4), np.nan) for _ in range(2))
    for row, (pair, came_s, ended_s) in enumerate(times_s):
        arrival_s[row, pair] = came_s
        end_s[row, pair] = ended_s
    keys = tuple(CollectiveKey("all_gather", 1000, pair, 0) for pair, _, _ in times_s)
    calls = Matched(keys, np.zeros(len(keys), dtype=np.int64), arrival_s, end_s, arrival_s, ())
    seconds = float(np.median(np.nanmedian(end_s, axis=1) - np.nanmax(arrival_s, axis=1)))
    return calls, [CollectiveTimes("all_gather", 1000, (0, 1), True, len(keys), seconds, 0.0, True)]


def test_groups_without_a_common_member_take_their_own_time_at_once() -> None:
    calls, times = of_pairs(((0, 1), (0.0, 0.0), (0.004, 0.004)), ((2, 3), (0.001, 0.001), (0.005, 0.005)))
    (found,) = on_shared_cores(tuple(times), calls, EXACT)
    assert found.seconds == pytest.approx(0.004)


def test_groups_with_a_common_member_share_the_time_in_which_one_was_running() -> None:
    calls, times = of_pairs(((0, 1), (0.0, 0.0), (0.004, 0.004)), ((0, 1), (0.002, 0.002), (0.006, 0.006)))
    (found,) = on_shared_cores(tuple(times), calls, EXACT)
    assert found.seconds == pytest.approx(0.003)


def test_a_collective_that_blocks_takes_what_its_last_member_takes_in_the_mean() -> None:
    """Rank 1 comes last and ends last, and in the second call rank 0 does."""
    calls, times = of_pairs(((0, 1), (0.0, 0.002), (0.004, 0.008)), ((0, 1), (0.013, 0.010), (0.021, 0.019)))
    assert times[0].seconds == pytest.approx((0.004 + 0.007) / 2)
    (found,) = of_last_members(tuple(times), calls, EXACT)
    assert found.seconds == pytest.approx((0.006 + 0.008) / 2)
    (kept,) = of_last_members((replace(times[0], is_complete=False),), calls, EXACT)
    assert kept == replace(times[0], is_complete=False)


@pytest.mark.parametrize("library", ["gloo", "nccl_simple"])
def test_links_of_a_sharded_job_give_gathers_and_reduce_scatters_back(library) -> None:
    """gloo carries out a reduce-scatter as an all_reduce, which takes twice as long as a gather."""
    link = Link.model_validate({"table": [(10_000, 1e-4), (250_000, 2e-3), (256_000_000, 2.0)]})
    cluster = Cluster(nodes=4, gpus_per_node=1, fabric=Link.ideal(), network=link, collectives={"library": library})
    group = Group(4)
    times = [
        CollectiveTimes(kind, nbytes, (0, 1, 2, 3), True, 8, predicted_s(cluster, group, nbytes, kind), 0.0, True)
        for kind in ("all_gather", "reduce_scatter")
        for nbytes in (40_000, 1_000_000)
    ]
    found = derive_links(times, cluster, kinds=SHARDED)
    assert found.notes == ()
    again = cluster.model_copy(update={"network": found.network})
    for each in times:
        assert each.nbytes
        assert predicted_s(again, group, each.nbytes, each.kind) == pytest.approx(each.seconds, rel=1e-3)


@pytest.mark.parametrize(
    "measured_s",
    [
        {("all_gather", 66_000): 5.5e-3, ("all_gather", 66_400): 8.5e-3, ("reduce_scatter", 132_800): 7.5e-3},
        {("all_gather", 10_000): 9e-3, ("all_gather", 1_000_000): 4e-3, ("reduce_scatter", 1_000_000): 20e-3},
        {("all_reduce", 100_000): 3e-3, ("all_reduce", 200_000): 2e-3, ("all_reduce", 400_000): 1e-3},
    ],
)
def test_a_link_that_cannot_give_each_time_back_gives_all_of_them_together_back(measured_s) -> None:
    """On busy cores smaller collectives take longer than larger ones, as on no link."""
    cluster = Cluster(
        nodes=4, gpus_per_node=1, fabric=Link.ideal(), network=Link.ideal(), collectives={"library": "gloo"}
    )
    calls = dict(zip(measured_s, (16, 2, 5), strict=True))
    times = [
        CollectiveTimes(kind, nbytes, (0, 1, 2, 3), True, calls[kind, nbytes], seconds, 0.0, True)
        for (kind, nbytes), seconds in measured_s.items()
    ]
    found = cluster.model_copy(update={"network": derive_links(times, cluster, kinds=SHARDED).network})
    again_s = sum(calls[kind, n] * predicted_s(found, Group(4), n, kind) for kind, n in measured_s)
    assert again_s == pytest.approx(sum(calls[key] * seconds for key, seconds in measured_s.items()), rel=0.01)


def test_without_the_last_rank_times_of_collectives_are_low_quantiles() -> None:
    """The rank that is late in half of the steps left no trace: the others seem to take longer in these."""
    late = tuple(Delay("host", 2, step, 0.05) for step in range(0, 20, 2))
    job, calls, clocks = matched(replace(JOB, delays=late, missing=(2,)))
    rows = collective_times(calls, clocks, find_layout(job))
    assert [row.seconds for row in rows] == pytest.approx([bucket.transfer_s for bucket in JOB.buckets], abs=1e-6)
    assert not any(row.is_complete for row in rows)


def test_collectives_of_unknown_groups_are_left_out_with_a_note() -> None:
    profiles = profiles_of(JOB)
    profiles = [
        replace(
            each,
            steps=tuple(replace(s, calls=tuple(_of_group(c, None) for c in s.calls)) for s in each.steps),
        )
        for each in profiles
    ]
    calls = match(assemble(profiles))
    assert calls.collectives == ()
    assert "160 collectives" in calls.notes[0]


def test_undisturbed_times_are_those_of_a_quiet_step() -> None:
    job = assemble(profiles_of(replace(LATE, host_s=0.003)))
    base = base_times(job, parts(job))
    assert (base.forward_s, base.host_s, base.optimize_s) == pytest.approx((0.010, 0.003, 0.002))
    assert base.buckets_s == pytest.approx((0.008, 0.012))
    assert base.input_s == 0.0
    assert not base.is_loaded


def test_forward_and_backward_times_are_those_of_one_of_several_passes() -> None:
    imported = import_job(profiles_of(replace(LATE, micro_batches=3, host_s=0.003)), name="job")
    workload = imported.scenario.workload
    assert workload.forward_s == pytest.approx(0.010 + 0.003 / 3)
    assert sum(tensor.backward_s or 0.0 for tensor in workload.tensors) == pytest.approx(0.020)
    assert imported.base.buckets_s == pytest.approx((0.008, 0.012))
    assert (workload.batch_size, workload.micro_batches) == (8, 3)


def test_the_links_give_the_measured_times_back() -> None:
    imported = import_job(profiles_of(LATE), name="job")
    for bucket in LATE.buckets:
        assert predicted_s(imported.scenario.cluster, Group(4), bucket.nbytes) == pytest.approx(
            bucket.transfer_s, rel=1e-4
        )


@pytest.mark.parametrize("gpus_per_node", [1, 2, 4])
def test_the_links_give_times_back_where_nccl_might_take_a_tree(gpus_per_node: int) -> None:
    truth = without_input(n_ranks=8, n_steps=4, gpus_per_node=gpus_per_node)
    imported = import_job(profiles_of(truth, "cuda"), name="job")
    assert imported.scenario.cluster.collectives.library == "nccl"
    for bucket in truth.buckets:
        cluster = imported.scenario.cluster
        assert predicted_s(cluster, Group(8), bucket.nbytes) == pytest.approx(bucket.transfer_s, rel=2e-3)


def test_collectives_inside_nodes_and_between_them_tell_both_links() -> None:
    """A ring over both has hops of both kinds; the links still give all times back."""
    buckets = (
        Bucket((100_000,), 0.010, 0.001),
        Bucket((110_000,), 0.010, 0.006),
        Bucket((200_000,), 0.020, 0.010),
        Bucket((200_001,), 0.020, 0.0015),
    )
    profiles = []
    for each in profiles_of(without_input(n_ranks=8, n_steps=4, gpus_per_node=4, buckets=buckets), "cuda"):
        node = tuple(range(4)) if (each.rank or 0) < 4 else tuple(range(4, 8))
        inside = {buckets[0].nbytes, buckets[3].nbytes}
        steps = []
        for step in each.steps:
            calls = (_of_group(c, node) if c.nbytes in inside else c for c in step.calls)
            steps.append(replace(step, calls=tuple(calls)))
        profiles.append(replace(each, steps=tuple(steps)))
    imported = import_job(profiles, name="job")
    assert imported.links is not None
    assert imported.links.measured == ("fabric", "network")
    for bucket, size in zip(buckets, (4, 8, 8, 4), strict=True):
        assert predicted_s(imported.scenario.cluster, Group(size), bucket.nbytes) == pytest.approx(
            bucket.transfer_s, rel=1e-2
        )


def test_times_that_no_link_gives_back_are_told() -> None:
    sizes = {2_000: 0.002, 4_000: 0.0021, 20_000: 0.02, 200_000: 0.021}
    buckets = tuple(Bucket((count,), 0.005, transfer_s) for count, transfer_s in sizes.items())
    truth = without_input(n_ranks=32, n_steps=4, gpus_per_node=1, buckets=buckets)
    notes = import_job(profiles_of(truth, "cuda"), name="job").notes
    assert any("no link gives all times of all_reduces back" in note for note in notes)


def test_one_size_makes_a_line_without_latency_and_a_note() -> None:
    imported = import_job(profiles_of(replace(JOB, buckets=JOB.buckets[:1])), name="job")
    bucket = JOB.buckets[0]
    assert imported.scenario.cluster.fabric == Link(
        latency_s=0.0, bandwidth_Bps=round(bucket.nbytes / 4 / (bucket.transfer_s / 6))
    )
    assert any("one size only" in note for note in imported.notes)


def test_a_number_that_takes_minutes_makes_the_slowest_link() -> None:
    imported = import_job(
        profiles_of(replace(JOB, buckets=(replace(JOB.buckets[0], counts=(1,), transfer_s=200.0),))), name="job"
    )
    assert imported.scenario.cluster.fabric.bandwidth_Bps == 1


def test_times_that_shrink_with_size_are_pooled() -> None:
    buckets = (Bucket((100_000,), 0.01, 0.006), Bucket((200_000,), 0.01, 0.004))
    imported = import_job(profiles_of(replace(JOB, buckets=buckets)), name="job")
    table = imported.scenario.cluster.fabric.table
    assert table is not None
    assert [point.time_s * 6 for point in table[:2]] == pytest.approx([0.005, 0.005])
    assert table[2].time_s > 100 * table[1].time_s


def test_links_between_nodes_stand_for_those_inside_with_a_warning() -> None:
    imported = import_job(profiles_of(without_input(n_ranks=8, n_steps=4, gpus_per_node=4), "cuda"), name="job")
    assert imported.scenario.cluster.fabric == imported.scenario.cluster.network
    assert any(note.startswith("warning: no collective ran only inside nodes") for note in imported.notes)


def test_links_that_are_given_are_taken() -> None:
    given = Cluster(nodes=9, gpus_per_node=9, fabric=Link.ideal(), network=Link(latency_s=1e-3, bandwidth_Bps=1e9))
    imported = import_job(profiles_of(JOB), name="job", options=ImportOptions(cluster=given))
    cluster = imported.scenario.cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.network) == (1, 4, given.network)
    assert imported.proof.predicted_s < imported.proof.measured_s


def test_without_collectives_links_are_asked_for() -> None:
    silent = [
        replace(each, steps=tuple(replace(step, calls=(), buckets_s=()) for step in each.steps))
        for each in profiles_of(JOB)
    ]
    with pytest.raises(TraceError, match=r"no all_reduce .*give --cluster"):
        import_job(silent, name="job")
    given = Cluster(nodes=1, gpus_per_node=1, fabric=Link.ideal(), network=Link.ideal())
    imported = import_job(silent, name="job", options=ImportOptions(cluster=given))
    assert imported.model.tensors[-1].count == JOB.buckets[0].counts[0]
    assert imported.scenario.workload.tensors[0].backward_s is not None


PROVED = {
    "quiet": JOB,
    "stragglers": LATE,
    "input": replace(LATE, input_s=0.004, delays=(Delay("io", 2, 5, 0.06), Delay("host", 1, 7, 0.08))),
    "a host that always pauses": replace(LATE, host_s=0.003),
    "three passes a step": replace(LATE, micro_batches=3),
    "jitter": replace(LATE, jitter=0.2),
    "a missing rank": replace(JOB, jitter=0.05, missing=(2,)),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("case", PROVED)
def test_the_scenario_predicts_the_step_that_was_measured(case: str, device) -> None:
    imported = import_job(profiles_of(PROVED[case], device), name="job")
    assert abs(imported.proof.error) < (0.02 if "jitter" in case or "missing" in case else 1e-3)
    assert imported.proof.misses is None
    assert imported.scenario.workload.micro_batches == PROVED[case].micro_batches


@pytest.mark.parametrize("transfer_s", [0.0005, 0.03])  # bound by what is computed, and by links
def test_what_takes_longer_beside_exchanges_does_so_only_beside_exchanges(transfer_s: float) -> None:
    buckets = tuple(Bucket((1000,), seconds, transfer_s) for seconds in (0.002, 0.008, 0.010))
    beside = (0.0, 0.5, 1.0, 0.75) * 5
    imported = import_job(profiles_of(replace(JOB, buckets=buckets, beside=beside)), name="job")
    assert abs(imported.proof.error) < 1e-3
    assert imported.base.buckets_s == pytest.approx([0.002, 0.008, 0.010])
    overlap_s = np.repeat(0.018 * np.array(beside)[:, None], 4, axis=1)
    assert imported.delays["overlap"] == pytest.approx(overlap_s, abs=1e-8)
    assert all(seconds.max() < 1e-8 for channel, seconds in imported.delays.items() if channel != "overlap")
    local = imported.scenario.changed(schedules=[{"kind": "local_sgd", "period": 20}])
    built = build(local, local.schedules[0])
    delays = {channel: seconds[None] for channel, seconds in imported.delays.items()}
    computing_s = JOB.forward_s + 0.020 + JOB.optimize_s
    averaging_s = 3 * transfer_s  # 12 kB at the rate of what 4 kB take
    assert simulate(built.plan, built.costs, delays).makespan_s == pytest.approx(
        20 * computing_s + averaging_s, rel=1e-3
    )


def test_a_host_that_runs_ahead_is_predicted_by_what_its_device_saw() -> None:
    truth = replace(LATE, run_ahead=True, input_s=0.001)
    imported = import_job(profiles_of(truth, "cuda"), name="job")
    assert imported.scenario.host.run_ahead_steps is None
    assert list(imported.delays) == ["compute"]
    assert abs(imported.proof.error) < 1e-3


def with_loader_processes(truth: Truth) -> ImportedJob:
    hints: frozenset[Hint] = frozenset({"loader processes"})
    return import_job([replace(each, hints=hints) for each in profiles_of(truth)], name="job")


def test_processes_that_load_ahead_of_an_undisturbed_step_are_no_storage() -> None:
    late = Delay("io", 1, 5, 0.06), Delay("io", 2, 8, 0.06)  # single batches come late, 1.5 % of all time
    imported = with_loader_processes(replace(JOB, input_s=0.0001, delays=late))
    assert imported.base.is_loaded
    assert imported.scenario.cluster.storage is None
    assert input_choices(imported.scenario) == ()  # `tune` has nothing to advise about loading
    assert abs(imported.proof.error) < 0.01


def test_processes_that_every_step_waits_for_load_for_as_long_as_a_step() -> None:
    imported = with_loader_processes(replace(JOB, input_s=0.03))
    assert imported.scenario.input.prefetch == 2
    assert imported.scenario.cluster.storage.latency_s == pytest.approx(imported.proof.measured_s)
    proof = imported.proof
    assert proof.error == pytest.approx(proof.ahead_s / proof.measured_s, abs=0.01)  # it begins with loading a batch
    predicted_s, measured_s = proof.parts["waiting for input"]
    assert predicted_s - proof.ahead_s == pytest.approx(measured_s, rel=0.01)
    assert any("had been loading before the traced steps" in note for note in imported.notes)


def test_windows_that_opened_apart_name_no_straggler() -> None:
    """Ranks whose profiler was first wait in their first step until the others come."""
    profiles = profiles_of(replace(JOB, delays=()))
    early = []
    for each in profiles[:-1]:
        first = each.steps[0]
        parts_s = list(first.parts_s)
        parts_s[StepPart.ALL_REDUCE] += 5.0
        longer = replace(first, start_s=first.start_s - 5.0, wait_s=first.wait_s + 5.0, parts_s=tuple(parts_s))
        early.append(replace(each, steps=(longer, *each.steps[1:])))
    imported = import_job([*early, profiles[-1]], name="job")
    assert imported.stragglers == ()
    assert imported.job.numbers == tuple(step.number for step in profiles[0].steps[1:])
    assert any("profilers of ranks opened up to 5 s apart" in note for note in imported.notes)
    assert abs(imported.proof.error) < 0.01


def test_a_straggler_of_the_first_step_is_no_window_that_opened_late() -> None:
    imported = import_job(profiles_of(replace(JOB, delays=(Delay("host", 1, 0, 0.5),))), name="job")
    assert [(each.ranks, each.steps) for each in imported.stragglers] == [((1,), (JOB.first_step,))]


def test_the_slowest_of_several_loaders_that_run_ahead_is_no_straggler() -> None:
    slower = tuple(Delay("io", 1, step, 0.02) for step in range(JOB.n_steps))
    imported = with_loader_processes(replace(JOB, input_s=0.01, delays=slower))
    assert imported.stragglers == ()
    assert any("rank 1 waits 20 ms longer for its batches" in note for note in imported.notes)
    assert imported.budget.verdict.startswith("input-bound")  # though the others wait in their all_reduces


def test_a_prediction_far_off_names_the_part_that_misses() -> None:
    slow = Cluster(nodes=1, gpus_per_node=1, fabric=Link(latency_s=1.0, bandwidth_Bps=1e9), network=Link.ideal())
    imported = import_job(profiles_of(JOB), name="job", options=ImportOptions(cluster=slow))
    assert imported.proof.misses is not None
    assert imported.proof.misses.startswith("mostly waiting for communication and other ranks: reproduced")


def test_real_tensors_take_the_backward_seconds_of_their_bucket() -> None:
    imported = import_job(profiles_of(JOB), name="job")
    tensors = imported.scenario.workload.tensors
    counts = [count for bucket in JOB.buckets for count in bucket.counts]
    assert [tensor.count for tensor in tensors] == counts[::-1]
    assert sum(tensor.backward_s or 0 for tensor in tensors[4:]) == pytest.approx(JOB.buckets[0].backward_s)
    assert imported.model.is_real
    assert imported.model.schedule == Sync()


def test_buckets_that_defaults_do_not_give_get_sizes_of_their_own() -> None:
    buckets = tuple(Bucket((50_000, 50_000), 0.005, 0.003) for _ in range(4))
    imported = import_job(profiles_of(replace(JOB, buckets=buckets)), name="job")
    sync = imported.scenario.schedules[0]
    assert sync == Sync(first_bucket_nbytes=400_000, bucket_nbytes=400_000)
    assert abs(imported.proof.error) < 1e-3


def test_without_shapes_a_tensor_stands_for_each_bucket() -> None:
    imported = import_job(profiles_of(replace(JOB, shapes=False)), name="job")
    assert [tensor.name for tensor in imported.scenario.workload.tensors] == ["bucket.1", "bucket.0"]
    assert imported.scenario.schedules[0] == Sync()
    assert abs(imported.proof.error) < 1e-3


def test_tensors_that_are_given_must_have_the_elements_of_the_gradients() -> None:
    with pytest.raises(ScenarioError, match=r"--tensors: has 5 elements in 1 tensors; the gradients .* have 1479110"):
        import_job(profiles_of(JOB), name="job", options=ImportOptions(tensors=(Tensor(name="w", count=5),)))


def test_tensors_that_are_given_share_the_backward_pass_by_flops() -> None:
    ready = [
        Tensor(name=f"t{number}", count=count, flops=flops)
        for number, (count, flops) in enumerate([(497_710, 1.0), (490_700, 3.0), (490_700, 1.0)])
    ]
    options = ImportOptions(tensors=tuple(ready[::-1]))
    imported = import_job(profiles_of(replace(JOB, shapes=False)), name="job", options=options)
    seconds = {tensor.name: tensor.backward_s for tensor in imported.scenario.workload.tensors}
    assert seconds == pytest.approx({"t0": 0.008, "t1": 0.009, "t2": 0.003})


def test_steps_that_exchange_nothing_are_told() -> None:
    profiles = [
        replace(
            each,
            steps=tuple(step if step.number % 4 else replace(step, calls=(), buckets_s=()) for step in each.steps),
        )
        for each in profiles_of(JOB)
    ]
    imported = import_job(profiles, name="job")
    assert any("20 of 80 steps of ranks exchange no gradients" in note for note in imported.notes)
    assert len(imported.base.buckets_s) == 2


def test_one_rank_is_a_job_too() -> None:
    imported = import_job(profiles_of(without_input(n_ranks=1, n_steps=5)), name="job")
    assert imported.scenario.cluster.world_size == 1
    assert [schedule.name for schedule in imported.scenario.schedules] == ["sync"]


def test_schedules_fit_the_machines() -> None:
    profiles = profiles_of(without_input(n_ranks=16, n_steps=16, gpus_per_node=4), "cuda")
    fabric = Fabric(Link(latency_s=3e-6, bandwidth_Bps=240e9), "known")
    imported = import_job(profiles, name="job", options=ImportOptions(fabric=fabric))
    names = [schedule.name for schedule in imported.scenario.schedules]
    assert names == ["sync", "local-2", "local-4", "local-8", "hsgd-2-4,4-8,8-16", "hsgd-2-4,4-8,8-16-node-gradients"]


def test_gradients_in_half_precision_have_half_the_bytes() -> None:
    profiles = []
    for each in profiles_of(JOB):
        steps = (replace(s, calls=tuple(replace(c, nbytes=(c.nbytes or 0) // 2) for c in s.calls)) for s in each.steps)
        profiles.append(replace(each, dtype="bfloat16", steps=tuple(steps)))
    imported = import_job(profiles, name="job")
    assert imported.scenario.workload.dtype == "bfloat16"
    assert imported.model.is_real
    assert abs(imported.proof.error) < 1e-3


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_few_steps_are_imported_with_a_note(n_steps: int) -> None:
    imported = import_job(profiles_of(replace(JOB, n_steps=n_steps, first_step=0)), name="job")
    assert imported.scenario.steps == n_steps
    assert any("steps are few" in note for note in imported.notes)
