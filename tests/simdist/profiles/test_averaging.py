"""Traces of jobs that do not average all gradients over all ranks in every step, or that are not of one job at all."""

from dataclasses import replace

import numpy as np
import pytest
from profiled_jobs import Delay, changed, profiles_of, without_input

from simdist.errors import TraceError
from simdist.profiles import import_job
from simdist.profiles.job.job import assemble

JOB = without_input(n_ranks=4, n_steps=12)
PAIRS = ((0, 2), (1, 3))


def over(groups, profiles):
    """Return profiles of a job that averages gradients over these groups."""
    found = []
    for each in profiles:
        group = next(group for group in groups if each.rank in group)
        steps = (
            replace(step, calls=tuple(replace(c, ranks=group, n_ranks=len(group)) for c in step.calls))
            for step in each.steps
        )
        found.append(replace(each, steps=tuple(steps)))
    return found


def renumbered(profile, shift):
    return replace(profile, steps=tuple(replace(step, number=step.number + shift) for step in profile.steps))


def accumulating(profiles, is_last, *, updates=True):
    """Return profiles whose other steps exchange no gradients; nor do they update, if so wanted."""

    def alone(step):
        spent = {"forward_s": step.forward_s + step.wait_s + step.optimize_s, "wait_s": 0.0, "optimize_s": 0.0}
        return replace(step, calls=(), buckets_s=(), **({} if updates else spent))

    return [
        replace(each, steps=tuple(step if is_last(place) else alone(step) for place, step in enumerate(each.steps)))
        for each in profiles
    ]


def test_groups_smaller_than_the_world_are_refused_with_their_names() -> None:
    message = (
        r"rank0.json and others: gradients are averaged over ranks 0, 2, over ranks 1, 3, not over all 4 ranks: import "
        r"the traces of one data-parallel group only, such as ranks 0, 2"
    )
    with pytest.raises(TraceError, match=message):
        import_job(over(PAIRS, profiles_of(JOB)), name="job")


def test_groups_of_unknown_members_are_refused_by_their_size() -> None:
    profiles = [
        replace(
            each,
            steps=tuple(
                replace(s, calls=tuple(replace(c, ranks=None, n_ranks=2) for c in s.calls)) for s in each.steps
            ),
        )
        for each in profiles_of(JOB)
    ]
    with pytest.raises(TraceError, match="gradients are averaged over groups of 2 ranks, not over all 4 ranks"):
        import_job(profiles, name="job")
    assert import_job(profiles[::2], name="job").job.world_size == 2


def test_one_such_group_is_a_job_of_its_own() -> None:
    members = [each for each in over(PAIRS, profiles_of(JOB)) if each.rank in PAIRS[1]]
    imported = import_job(members, name="job")
    assert (imported.job.world_size, imported.job.ranks, imported.job.missing) == (2, (0, 1), ())
    assert [each.group for each in imported.times] == [(0, 1)] * len(JOB.buckets)
    assert any(note.startswith("gradients are averaged over ranks 1, 3 of 4") for note in imported.notes)
    assert abs(imported.proof.error) < 1e-3


@pytest.mark.parametrize("before", [True, False])
def test_what_a_group_exchanges_with_others_is_left_out_but_its_backward_pass_is_not(before: bool) -> None:
    """Ranks 0 and 2 average gradients; 0 and 1, 2 and 3 exchange activations before each bucket, or after it."""
    members = []
    for each in over(PAIRS, profiles_of(JOB))[::2]:
        pair = (each.rank, each.rank + 1)
        steps = []
        for step in each.steps:
            both = [(replace(call, ranks=pair), call) for call in step.calls]
            calls = [call for each_two in both for call in (each_two if before else each_two[::-1])]
            halves = [half for seconds in step.buckets_s for half in (0.25 * seconds, 0.75 * seconds)]
            steps.append(replace(step, calls=tuple(calls), buckets_s=tuple(halves)))
        members.append(replace(each, steps=tuple(steps)))
    imported = import_job(members, name="job")
    assert imported.job.world_size == 2
    first_s, second_s = (bucket.backward_s for bucket in JOB.buckets)
    later_s = 0.0 if before else 0.75 * first_s  # comes after the first bucket, and counts for the second
    assert imported.base.buckets_s == pytest.approx((first_s - later_s, second_s + later_s))


def test_groups_that_overlap_are_refused_without_an_example() -> None:
    profiles = profiles_of(JOB)
    steps = tuple(
        replace(step, calls=(replace(step.calls[0], ranks=(0, 1), n_ranks=2), *step.calls[1:]))
        for step in profiles[0].steps
    )
    with pytest.raises(
        TraceError, match=r"over ranks 0-1, over ranks 0-3, not .*, that is, of ranks with the same part"
    ):
        assemble(changed(profiles, 0, steps=steps))


@pytest.mark.parametrize("every", [2, 3, 5])
def test_steps_that_only_add_to_gradients_are_passes_of_the_next_one_that_exchanges_them(every: int) -> None:
    profiles = accumulating(profiles_of(JOB), lambda place: place % every == every - 1, updates=False)
    imported = import_job(profiles, name="job")
    step_s = float(np.mean([step.end_s - step.start_s for each in profiles for step in each.steps]))
    assert len(imported.job.numbers) == JOB.n_steps // every
    assert imported.scenario.workload.micro_batches == every
    assert imported.scenario.workload.batch_size == JOB.batch_size
    assert imported.proof.measured_s == pytest.approx(every * step_s, rel=0.01)
    assert abs(imported.proof.error) < 1e-3
    assert any(note.startswith(f"gradients are exchanged once in {every} steps") for note in imported.notes)


def test_a_step_of_another_number_of_passes_is_left_out() -> None:
    profiles = profiles_of(replace(JOB, micro_batches=2))
    steps = list(profiles[1].steps)
    steps[5] = replace(steps[5], micro_batches=1)
    job = assemble(changed(profiles, 1, steps=tuple(steps)))
    assert (job.micro_batches, steps[5].number in job.numbers, len(job.numbers)) == (2, False, 11)


@pytest.mark.parametrize("every", [2, 3, 4])
def test_gradients_that_add_up_over_steps_are_refused(every: int) -> None:
    profiles = accumulating(profiles_of(JOB), lambda place: place % every == every - 1)
    first = JOB.first_step + every - 1
    message = (
        rf"rank0.json: exchanges gradients only in every {every} steps \({first}, {first + every}, .*profiler.step"
    )
    with pytest.raises(TraceError, match=message):
        import_job(profiles, name="job")


def test_gradients_of_few_steps_are_refused() -> None:
    profiles = accumulating(profiles_of(JOB), lambda place: place in (0, 1, 7))
    with pytest.raises(TraceError, match=r"only in 3 of 12 steps \(3-4, 10\)"):
        import_job(profiles, name="job")


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("shift", [1, -2])
def test_a_rank_whose_steps_are_numbered_otherwise_is_renumbered_with_a_warning(wrong: int, shift: int) -> None:
    truth = replace(JOB, n_steps=16, first_step=5, jitter=0.2, skew_s=(0.0, 3.0, -2.0, 0.1))
    profiles = profiles_of(truth)
    job = assemble([renumbered(each, shift) if each.rank == wrong else each for each in profiles])
    assert [each.steps for each in job.profiles] == [each.steps for each in assemble(profiles).profiles]
    higher = f"{abs(shift)} {'higher' if shift > 0 else 'lower'} than"
    assert [
        each for each in job.notes if f"warning: rank{wrong}.json: steps of rank {wrong} are numbered {higher}" in each
    ]


def test_where_steps_are_alike_the_clock_of_their_host_tells_which_is_which() -> None:
    profiles = profiles_of(JOB)
    job = assemble([renumbered(each, 1) if each.rank == 2 else each for each in profiles])
    assert [each.steps for each in job.profiles] == [each.steps for each in profiles]
    assert any("steps of rank 2 are numbered 1 higher" in note for note in job.notes)


def test_ranks_of_one_host_that_are_seconds_apart_are_of_two_runs() -> None:
    ours, theirs = profiles_of(JOB), profiles_of(replace(JOB, skew_s=(30.0,)))
    with pytest.raises(TraceError, match=r"rank0\.json and rank1\.json: are of one host, node0, .* 30 s apart"):
        assemble([ours[0], *theirs[1:]])


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_numbers_that_are_right_are_believed(jitter: float) -> None:
    job = assemble(profiles_of(replace(JOB, jitter=jitter, delays=(Delay("host", 1, 3, 0.5),))))
    assert not any("numbered" in note for note in job.notes)


def other_run(seed: int):
    """Return profiles of a run of the job whose steps took other times."""
    delays = tuple(Delay("host", 1, step, 0.1 * ((step * seed) % 7)) for step in range(12))
    return profiles_of(replace(JOB, delays=delays))


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_rank_of_another_run_is_refused_by_the_name_of_its_file(wrong: int) -> None:
    ours, theirs = other_run(3), other_run(5)
    mixed = [replace(theirs[rank], path="theirs.json") if rank == wrong else ours[rank] for rank in range(4)]
    with pytest.raises(TraceError, match=rf"theirs.json: collectives of rank {wrong} end .* apart from the same ones"):
        import_job(mixed, name="job")
    import_job(ours, name="job")


def seen_late(profiles, rank: int, late_s):
    """Return the profiles; one rank sees the ends of each step late."""
    steps = (
        replace(step, calls=tuple(replace(c, end_s=c.end_s + by_s) for c in step.calls))
        for step, by_s in zip(profiles[rank].steps, late_s, strict=True)
    )
    return changed(profiles, rank, steps=tuple(steps))


LONG = replace(JOB, n_steps=60, jitter=0.3)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("mean_ms", [20, 60])
def test_a_rank_of_the_run_that_sees_ends_late_by_chance_is_not_refused(jitter: float, mean_ms: float) -> None:
    for seed in range(5):
        late_s = np.random.default_rng(seed).exponential(1e-3 * mean_ms, 60)
        imported = import_job(seen_late(profiles_of(replace(LONG, jitter=jitter)), 2, late_s), name="job")
        assert imported.clocks.apart_s[2] > 0.008


def test_a_rank_of_the_run_that_is_late_for_several_steps_is_not_refused() -> None:
    """Lengths of steps differ by more, and agree with those of the others."""
    delays = tuple(Delay("host", step % 4, step, 0.1 * (step % 5 == 0)) for step in range(60))
    late_s = np.repeat(np.random.default_rng(1).exponential(0.02, 12), 5)
    import_job(seen_late(profiles_of(replace(LONG, delays=delays)), 2, late_s), name="job")


@pytest.mark.parametrize("n_steps", [20, 60])
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_runs_whose_steps_vary_by_chance_are_told_apart(n_steps: int, n_ranks: int) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        runs = [
            profiles_of(
                replace(
                    JOB,
                    n_ranks=n_ranks,
                    n_steps=n_steps,
                    delays=tuple(Delay("host", 0, step, rng.exponential(0.03)) for step in range(n_steps)),
                )
            )
            for _ in range(2)
        ]
        with pytest.raises(TraceError, match=r"rank1.json: collectives of rank 1 end .* apart|rank0.json: .* 0 end"):
            import_job([runs[1][rank] if rank == 1 else each for rank, each in enumerate(runs[0])], name="job")


def test_numbers_are_believed_if_another_pairing_is_hardly_better() -> None:
    """Steps are all alike, and one rank sees ends late by a millisecond or two."""
    late_s = np.random.default_rng(0).uniform(0, 2e-3, 12)
    profiles = profiles_of(replace(JOB, first_step=3))
    steps = tuple(
        replace(step, calls=tuple(replace(c, end_s=c.end_s + late_s[place]) for c in step.calls))
        for place, step in enumerate(profiles[2].steps)
    )
    assert not any("numbered" in note for note in assemble(changed(profiles, 2, steps=steps)).notes)


def test_ends_that_a_busy_host_sees_late_are_of_one_run() -> None:
    late = [
        replace(
            step,
            calls=tuple(replace(c, end_s=c.end_s + 0.004 * (step.number % 2)) for c in step.calls),
        )
        for step in profiles_of(JOB)[2].steps
    ]
    imported = import_job(changed(profiles_of(JOB), 2, steps=tuple(late)), name="job")
    assert imported.clocks.apart_s[2] == pytest.approx(0.002)
    assert imported.job.numbers == tuple(step.number for step in late)
