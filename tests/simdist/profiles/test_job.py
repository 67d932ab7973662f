"""Profiles of ranks are put together into one job: who took part, and which steps they have in common."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kineto_truth import Device
from profiled_jobs import Bucket, Delay, Truth, changed, profiles_of, without_input

from simdist.errors import ScenarioError, TraceError
from simdist.profiles import ImportOptions, import_job
from simdist.profiles.job.job import assemble, grouped
from simdist.profiles.job.layout import find_layout
from simdist.profiles.steps.model import RankProfile
from simdist.settings.base import listed

JOB = without_input(n_ranks=4, n_steps=8, first_step=0)


def renumbered(profile, shift):
    return replace(profile, steps=tuple(replace(step, number=step.number + shift) for step in profile.steps))


def cut(profile, steps):
    return replace(profile, steps=tuple(step for step in profile.steps if step.number in steps))


def test_numbers_are_listed_as_ranges() -> None:
    assert listed([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert grouped([(0, "a"), (1, "a"), (1, "b")]) == ["ranks 0-1: a", "rank 1: b"]


@pytest.mark.parametrize(
    ("notes", "merged"),
    [
        (["takes 950 us of 57 ms", "takes 1.1 ms of 57 ms", "takes 1 ms of 57 ms"], "takes 950 us to 1.1 ms of 57 ms"),
        (["9,990 kernels", "10,400 kernels", "9,990 kernels"], "9,990 to 10,400 kernels"),
        (["3 of 40 steps reduce none", "2 of 40 steps reduce none"], "2 to 3 of 40 steps reduce none"),
        (["2 micro-batches of 8 samples"] * 2, "2 micro-batches of 8 samples"),
    ],
)
def test_notes_that_differ_in_amounts_are_one_with_a_range(notes: list[str], merged: str) -> None:
    assert grouped(enumerate(notes)) == [f"ranks 0-{len(notes) - 1}: {merged}"]


@pytest.mark.parametrize("note", ["left out: 3, {}", "step {} was left out", "{}/rank.json: is cut off", "steps {}"])
def test_notes_on_different_steps_stay_apart(note: str) -> None:
    notes = [note.format(number) for number in (4, 7)]
    assert grouped(enumerate(notes)) == [f"rank {rank}: {each}" for rank, each in enumerate(notes)]


def test_ranks_come_in_their_order_whatever_the_order_of_files() -> None:
    profiles = profiles_of(JOB)
    assert assemble(profiles[::-1]) == assemble(profiles)
    assert assemble(profiles).ranks == (0, 1, 2, 3)


def test_missing_ranks_are_named() -> None:
    job = assemble(profiles_of(replace(JOB, missing=(1, 2))))
    assert (job.world_size, job.ranks, job.missing) == (4, (0, 3), (1, 2))
    assert "no trace of ranks 1-2 of 4" in job.notes[0]


def test_the_world_is_as_large_as_the_groups_of_its_collectives_if_nothing_else_tells() -> None:
    profiles = [replace(each, world_size=None) for each in profiles_of(replace(JOB, missing=(3,)))]
    assert assemble(profiles).world_size == 4


def test_ranks_that_do_not_tell_who_they_are_get_numbers_by_their_files_and_a_note() -> None:
    profiles = profiles_of(JOB)
    job = assemble([replace(profiles[3], rank=None), *profiles[:3]])
    assert job.ranks == (0, 1, 2, 3)
    assert [note for note in job.notes if "taken for rank 3" in note and "rank3.json" in note]


def test_windows_of_one_rank_are_joined() -> None:
    profiles = profiles_of(JOB)
    early, late = (
        [replace(cut(each, steps), path=f"{name}-{each.path}") for each in profiles]
        for name, steps in (("a", range(4)), ("b", range(4, 8)))
    )
    assert assemble([*late, *early]).numbers == tuple(range(8))


def test_two_traces_of_the_same_rank_and_steps_are_refused_by_name() -> None:
    profiles = profiles_of(JOB)
    twice = [*profiles, replace(profiles[1], path="again.json")]
    with pytest.raises(TraceError, match=r"again.json and rank1.json: both are of rank 1 and have step 0"):
        assemble(twice)


def test_only_steps_that_all_ranks_have_are_used() -> None:
    profiles = profiles_of(replace(JOB, first_step=5))
    job = assemble([profiles[0], cut(profiles[1], range(6, 12)), *profiles[2:]])
    assert job.numbers == tuple(range(6, 12))
    assert any("left out: 5, 12" in note for note in job.notes)


def test_no_common_step_is_an_error_that_names_both_spans() -> None:
    profiles = profiles_of(replace(JOB, first_step=5))
    apart = [cut(profiles[0], range(5, 8)), *profiles[1:3], cut(profiles[3], range(9, 13))]
    with pytest.raises(TraceError, match=r"no step is in all 4 traces: rank0.json: steps 5-7; rank3.json: steps 9-12"):
        assemble(apart)


def test_a_trace_without_steps_is_named() -> None:
    with pytest.raises(TraceError, match=r"rank2.json: has no whole step"):
        assemble(changed(profiles_of(JOB), 2, steps=()))


def test_no_traces_at_all_are_an_error() -> None:
    with pytest.raises(TraceError, match="no traces"):
        assemble([])


def test_steps_can_be_chosen() -> None:
    assert assemble(profiles_of(JOB), steps=range(2, 5)).numbers == (2, 3, 4)
    with pytest.raises(TraceError, match=r"--steps: no traced step is among them; all ranks have steps 0-7"):
        assemble(profiles_of(JOB), steps=range(20, 30))


@pytest.mark.parametrize("skewed", [False, True])
def test_steps_without_marks_are_matched_by_their_collectives(skewed: bool) -> None:
    """Rank 2 began to trace two steps later, and counts from 0 like the others."""
    truth = replace(JOB, delays=(Delay("host", 0, 3, 0.02), Delay("host", 3, 5, 0.03)), jitter=0.05)
    if skewed:
        truth = replace(truth, skew_s=(0.0, 3.0, -2.0, 0.5))
    profiles = profiles_of(truth)
    whole = assemble(profiles)
    late = renumbered(cut(profiles[2], range(2, 8)), -2)
    job = assemble([*profiles[:2], late, profiles[3]])
    assert job.numbers == tuple(range(2, 8))
    assert [each.steps for each in job.profiles] == [each.steps[2:] for each in whole.profiles[:2]] + [
        profiles[2].steps[2:],
        profiles[3].steps[2:],
    ]


def test_a_rank_that_traced_as_many_steps_two_later_is_matched_by_one_long_step() -> None:
    profiles = profiles_of(replace(JOB, n_steps=22, delays=(Delay("host", 0, 10, 0.05),)))
    late = renumbered(cut(profiles[2], range(2, 22)), -2)
    job = assemble([*(cut(profiles[rank], range(20)) for rank in (0, 1)), late, cut(profiles[3], range(20))])
    assert job.numbers == tuple(range(2, 20))


MIXED = {
    "world size 4 against 8": {"world_size": 8},
    "device cpu against cuda": {"device": "cuda"},
    "backend gloo against nccl": {"backend": "nccl"},
    "type of gradients float32 against float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("difference", MIXED)
def test_traces_of_different_jobs_are_refused_with_what_differs(difference: str) -> None:
    with pytest.raises(TraceError, match=rf"rank0.json and rank2.json: are not of one job: {difference}"):
        assemble(changed(profiles_of(JOB), 2, **MIXED[difference]))


def test_traces_with_other_parameters_are_refused() -> None:
    other = profiles_of(replace(JOB, buckets=(Bucket((10, 20), 0.01, 0.01),)))[1]
    with pytest.raises(TraceError, match=r"rank0.json and rank1.json: .*parameter tensors 8 of 1479110 elements"):
        assemble(changed(profiles_of(JOB), 1, gradients=other.gradients))


def test_traces_with_other_collectives_are_refused() -> None:
    truth = replace(JOB, shapes=False, first_step=5)
    other = profiles_of(replace(truth, buckets=truth.buckets[:1]))[1]
    with pytest.raises(
        TraceError, match=r"rank0.json and rank1.json: .*gradient collectives of step 5: 2 .* against 1 \(1990840 B\)"
    ):
        assemble(changed(profiles_of(truth), 1, steps=other.steps))


def test_a_step_in_which_a_rank_issued_something_else_is_left_out() -> None:
    profiles = profiles_of(JOB)
    steps = list(profiles[1].steps)
    steps[3] = replace(steps[3], calls=steps[3].calls[:1])
    job = assemble(changed(profiles, 1, steps=tuple(steps)))
    assert job.numbers == (0, 1, 2, 4, 5, 6, 7)
    assert any("left out steps 3" in note for note in job.notes)


def test_what_many_ranks_note_is_said_once() -> None:
    job = assemble([replace(each, notes=("no shapes",)) for each in profiles_of(JOB)])
    assert job.notes == ("ranks 0-3: no shapes",)


def layout(truth: Truth, device="cuda", hosts=True, **options):
    return find_layout(assemble(profiles_of(truth, device, hosts=hosts)), **options)


def test_ranks_of_one_host_share_a_node() -> None:
    found = layout(without_input(n_ranks=8, n_steps=2, gpus_per_node=4))
    assert (found.nodes, found.gpus_per_node, found.source) == (2, 4, "names of hosts in the traces")


def test_numbers_of_gpus_tell_nodes_where_hosts_do_not() -> None:
    found = layout(without_input(n_ranks=8, n_steps=2, gpus_per_node=2), hosts=False)
    assert (found.nodes, found.gpus_per_node, found.source) == (4, 2, "numbers of GPUs in the traces")


def placed(device: Device, ranks: slice = slice(None), **facts: Sequence[object]) -> list[RankProfile]:
    """Return profiles of some ranks of a job with facts of their own, of as many ranks as there are facts."""
    rows = [dict(zip(facts, row, strict=True)) for row in zip(*facts.values(), strict=True)]
    profiles = profiles_of(without_input(n_ranks=len(rows), n_steps=2), device, hosts=False)
    return [replace(each, **row) for each, row in zip(profiles, rows, strict=True)][ranks]


ONE = slice(1)
#: What the traces tell -> machines, and the words of a note.
EVIDENCE = {
    "GPUs of one machine": (placed("cuda", file_host="abcdefgh"), 1, "hosts in the names of files do not agree"),
    "not the first GPUs": (placed("cuda", local_gpu=[2, 3]), 1, ""),
    "one GPU, used twice": (placed("cuda", local_gpu=[0, 0, 0, 0]), 4, ""),
    "GPUs beat names": (placed("cuda", local_gpu=[0, 1, 0, 1], file_host="aaaa"), 2, "hosts in the names of files do"),
    "hosts beat GPUs": (
        placed("cuda", local_gpu=[0, 0, 0, 0], hostname="aabb"),
        2,
        "do not agree with names of hosts in the traces",
    ),
    "one rank that is the last GPU": (placed("cuda", slice(7, 8), local_gpu=range(8)), 1, ""),
    "names of one host": (placed("cpu", file_host="aaaa"), 1, ""),
    "names of two hosts": (placed("cpu", file_host="aabb"), 2, ""),
    "one rank": (placed("cpu", file_host="a"), 1, ""),
}


@pytest.mark.parametrize(("profiles", "nodes", "note"), EVIDENCE.values(), ids=EVIDENCE)
def test_evidence_tells_machines(profiles: list[RankProfile], nodes: int, note: str) -> None:
    found = find_layout(assemble(profiles))
    assert found.nodes == nodes
    assert bool(found.notes) == bool(note)
    assert all(note in each for each in found.notes)


#: What the traces tell -> the words of the question.
QUESTIONS = {
    "a rank of two": (placed("cuda", ONE, local_gpu=[0, 1]), r"1 of 2 ranks were traced; .*GPUs 0 of 8\): .*\(1, 2\)"),
    "a rank of many": (
        placed("cuda", ONE, local_gpu=[*range(8), *range(8)]),
        r"ranks on GPUs 0 of 8\): give --nodes \(2, 4, 8, 16\) or --gpus-per",
    ),
    "one visible GPU": (placed("cuda", local_gpu=[0, 0], n_gpus=[1, 1]), r"every rank sees one GPU, number 0\)"),
    "other names": (placed("cpu", file_host="abcd"), r"4 names of hosts in names of files\)"),
    "nothing": (
        placed("cpu", hostname=[None] * 4),
        r"links depend on it \(4 of 4 ranks were traced\): give --nodes \(1, 2, 4\)",
    ),
    "unlike hosts": (placed("cpu", hostname="aaab"), r"2 names of hosts in the traces\): give --nodes or --gpus-per"),
}


@pytest.mark.parametrize(("profiles", "question"), QUESTIONS.values(), ids=QUESTIONS)
def test_too_little_evidence_is_a_question(profiles: list[RankProfile], question: str) -> None:
    with pytest.raises(ScenarioError, match=question):
        find_layout(assemble(profiles))
    assert find_layout(assemble(profiles), nodes=1).nodes == 1


def test_the_user_knows_nodes_better() -> None:
    assert layout(JOB, nodes=2).gpus_per_node == 2
    found = layout(JOB, gpus_per_node=1)
    assert found.nodes == 4
    assert found.notes[0] == "warning: names of hosts in the traces do not agree with --gpus-per-node, which counts"


@pytest.mark.parametrize(
    "options", [{"nodes": 3}, {"gpus_per_node": 5}, {"nodes": 0}, {"nodes": 2, "gpus_per_node": 4}]
)
def test_nodes_that_do_not_divide_the_ranks_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ScenarioError, match=r"the traces are of 4 ranks; write one of 1, 2, 4"):
        layout(JOB, **options)


def test_files_in_another_order_give_the_same_scenario() -> None:
    truth = replace(JOB, n_steps=12, jitter=0.1, skew_s=(0.0, 1.0, 2.0, -1.0))
    profiles = profiles_of(truth)
    first, second = (import_job(each, name="job") for each in (profiles, profiles[::-1]))
    assert first.scenario == second.scenario
    assert first.times == second.times
    assert all((first.delays[channel] == second.delays[channel]).all() for channel in first.delays)


def test_the_user_may_give_the_nodes_of_an_import() -> None:
    imported = import_job(profiles_of(JOB), name="job", options=ImportOptions(nodes=4))
    assert imported.scenario.cluster.nodes == 4


def test_a_file_cut_off_early_is_left_out_before_all_lose_their_steps() -> None:
    profiles = profiles_of(replace(JOB, n_steps=20))
    stump = replace(profiles[3], steps=profiles[3].steps[:4], is_cut=True)
    job = assemble([*profiles[:3], stump])
    assert (job.ranks, len(job.numbers)) == ((0, 1, 2), 20)
    assert any(note.startswith("warning: left out:") and "cut off after 4 of 20 steps" in note for note in job.notes)
    short = assemble([*profiles[:3], replace(stump, is_cut=False)])
    assert (short.ranks, len(short.numbers)) == ((0, 1, 2, 3), 4)


def test_a_cut_file_without_the_events_of_other_threads_is_left_out() -> None:
    profiles = profiles_of(replace(JOB, n_steps=12))
    silent = tuple(replace(step, calls=step.calls[:1]) for step in profiles[0].steps)
    job = assemble([replace(profiles[0], steps=silent, is_cut=True), *profiles[1:]])
    assert (job.ranks, len(job.numbers)) == ((1, 2, 3), 12)
    with pytest.raises(TraceError, match=r"gradient collectives of step"):
        assemble([replace(profiles[0], steps=silent), *profiles[1:]])
