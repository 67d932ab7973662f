"""Units of a sharded job from single calls of a rank: which there are, which are kept, and how far gathers run ahead.

A step is written as words, each a second after the one before: `G` gathers a unit, `C` copies it out, `R` reduces its
gradients, `B` begins the backward pass, `E` ends it. `G:3` is a gather of unit 3.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from simdist.profiles.estimates.base import BaseTimes
from simdist.profiles.estimates.sharded_model import ShardedModel, sharded_model
from simdist.profiles.job.job import TracedJob
from simdist.profiles.job.sharded_ranks import with_groups
from simdist.profiles.job.sharding import Sharding, find_sharding
from simdist.profiles.kineto.columns import EventColumns, RankEvents, Shapes
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.steps import sharded_steps
from simdist.profiles.steps.host import HostRun
from simdist.profiles.steps.model import HostMark, RankProfile, RankStep, TracedCollective

COUNTS = (100, 1000, 1000, 1000)
KINDS = {"G": "all_gather", "R": "reduce_scatter"}
BASE = BaseTimes(0.0, 1.0, 0.0, (2.0,), (None,), 0.5, 0.0, is_loaded=False, micro_batches=1, notes=())


def call_at(kind: str, count: int, at_s: float, unit: str | None = None) -> TracedCollective:
    """Return a collective of two of the ranks, which lasts a second."""
    mark = HostMark(at_s, 0.0, 0.0)
    is_reduced = kind != "all_gather"
    return TracedCollective(
        kind, 4 * count, (0, 1), 2, at_s, at_s, at_s + 1, is_reduced, 0.0, "float32", "shards", unit, mark=mark
    )


def step_of(words: str, counts: tuple[int, ...] = COUNTS, names: Mapping[int, str] | None = None) -> RankStep:
    calls, copy_outs, borders = [], [], []
    for at_s, word in enumerate(words.split(), 1):
        what, _, number = word.partition(":")
        mark = HostMark(float(at_s), 0.0, 0.0)
        if what in KINDS:
            calls.append(call_at(KINDS[what], counts[int(number)], float(at_s), names and names[int(number)]))
        elif what == "C":
            copy_outs.append(mark)
        else:
            borders.append(mark)
    passes = tuple(zip(borders[::2], borders[1::2], strict=True))
    return RankStep(
        number=0,
        start_s=0.0,
        end_s=100.0,
        marked_s=0.0,
        input_s=0.0,
        forward_s=1.0,
        host_s=0.0,
        backward_s=2.0,
        wait_s=0.0,
        optimize_s=0.5,
        sharding_s=0.0,
        parts_s=(),
        buckets_s=(),
        calls=tuple(calls),
        held_s=(),
        copy_outs=tuple(copy_outs),
        passes=passes,
    )


def profile_of(*steps: RankStep, rank: int = 0) -> RankProfile:
    return RankProfile(
        path=f"rank{rank}.json",
        rank=rank,
        world_size=2,
        hostname=None,
        file_host=None,
        local_gpu=rank,
        n_gpus=2,
        device="cuda",
        device_name="",
        backend="nccl",
        steps=steps,
        gradients=(),
        dtype="float32",
        batch_size=None,
        host_waits=False,
        notes=(),
    )


def sharding_of(*steps: RankStep) -> Sharding:
    found = find_sharding(TracedJob(2, (profile_of(*steps),), (), shards=True))
    assert found is not None
    return found


def model_of(*steps: RankStep) -> ShardedModel:
    return sharded_model(sharding_of(*steps), BASE, before_s=0.0, is_blocking=False)


def test_a_last_unit_that_is_kept_hides_no_root() -> None:
    """Neither the root, unit 0, nor the last unit is gathered again."""
    words = "G:0 C G:1 C G:2 C G:3 C B R:3 G:2 C R:2 G:1 C R:1 R:0 E"
    found = model_of(step_of(words))
    assert found.sharding.root == 0
    assert (found.schedule.wrap, found.schedule.keep_last_unit) == ("blocks", True)


@pytest.mark.parametrize(
    ("words", "depth"),
    [
        ("B G:2 C G:1 R:2 C R:1 R:0 E", 1),
        ("B G:2 G:1 C R:2 C R:1 R:0 E", 2),  # both before any unit is copied out
    ],
)
def test_gathers_run_ahead_of_the_unit_that_was_copied_out_last(words: str, depth: int) -> None:
    step = step_of(f"G:0 C G:1 C G:2 C {words}", COUNTS[:3])
    assert model_of(step).schedule.backward_prefetch == depth


def test_a_kept_unit_that_is_not_the_last_is_in_doubt() -> None:
    names = dict(enumerate(["layers.0", "layers.1", "layers.2"]))
    found = model_of(step_of("G:0 C G:1 C G:2 C B G:2 C R:2 R:1 G:0 C R:0 E", COUNTS[1:], names))
    assert not found.schedule.keep_last_unit
    doubt = "kept after the forward pass: layers.1; the scenario gathers them again for the backward pass"
    assert doubt in found.notes


@pytest.mark.parametrize(
    ("reductions", "names"),
    [
        ("R:2 R:1 R:0", ["root.parameters", "unit.1.layers.0", "unit.2.layers.1"]),
        ("R:2 R:0 R:1", ["unit.0.layers.0", "unit.1.layers.1", "root.parameters"]),  # raw input: reduced after the root
    ],
)
def test_a_root_stands_where_its_reduction_says(reductions: str, names: list[str]) -> None:
    units = dict(enumerate(["", "layers.0", "layers.1"]))
    found = model_of(step_of(f"G:0 C G:1 C G:2 C B G:2 C G:1 C {reductions} E", COUNTS[:3], units))
    assert [tensor.name for tensor in found.tensors] == names


def with_shapes(step: RankStep, *shapes: tuple[int, ...]) -> RankStep:
    """Return a step whose reduce-scatters show the parameters of their unit."""
    calls = [replace(each, shapes=shapes) if each.kind == "reduce_scatter" else each for each in step.calls]
    return replace(step, calls=tuple(calls))


def test_parameters_are_padded_by_rows() -> None:
    """Three rows of 2 and three scalars take four rows of 2 and four scalars on two ranks."""
    step = step_of("G:0 C G:1 C B R:1 G:0 C R:0 E", (12, 12))
    assert [unit.shapes for unit in sharding_of(with_shapes(step, (3, 2), (3,))).units] == [((3, 2), (3,))] * 2
    assert [unit.shapes for unit in sharding_of(with_shapes(step, (4, 2), (5,))).units] == [()] * 2


@pytest.mark.parametrize(("early_s", "communicators"), [(0.05, 1), (0.5, 2)])
def test_a_gather_and_a_reduction_at_once_are_two_communicators_beyond_an_error_of_clocks(
    early_s: float, communicators: int
) -> None:
    step = step_of("G:0 C G:1 C B R:1 G:0 C R:0 E", (12, 12))
    calls = []
    for each in step.calls:
        begins_s = each.start_s - early_s if each.kind == "all_gather" else each.start_s
        calls.append(replace(each, communicator="", start_s=begins_s))
    assert sharding_of(replace(step, calls=tuple(calls))).communicators == communicators


@pytest.mark.parametrize(("rank", "shares", "same_slice"), [(2, (2, 3), (0, 2)), (3, (2, 3), (1, 3))])
def test_groups_that_traces_do_not_name_are_of_consecutive_ranks_and_of_the_same_slice(
    rank: int, shares: tuple[int, ...], same_slice: tuple[int, ...]
) -> None:
    """Of four ranks, two share a copy."""
    step = step_of("G:0 C B R:0 E", (100,))
    calls = (*step.calls, call_at("all_reduce", 50, 6.0))
    unnamed = replace(step, calls=tuple(replace(each, ranks=None, n_ranks=None) for each in calls))
    (found,) = with_groups([profile_of(unnamed, rank=rank)], 4, 2)
    assert [each.ranks for each in found.steps[0].calls] == [shares, shares, same_slice]


def columns(kind: EventKind, *events: tuple[float, float, int]) -> EventColumns:
    """Return events of one kind: start, end and link."""
    start_s, end_s, link = (np.array(each) for each in zip(*events, strict=True))
    n = len(events)
    return EventColumns(start_s, end_s, np.zeros(n, np.int32), np.full(n, kind, np.int8), link.astype(np.int64))


def host_of(events: EventColumns, units: tuple[str, ...] = (), shapes: tuple[Shapes, ...] = ()) -> RankEvents:
    nothing = events.of()
    return RankEvents(events, nothing, ((0, 0),), (), {}, Counter(), frozenset(), frozenset(), units, shapes)


def test_an_instant_has_the_name_of_the_annotation_around_it() -> None:
    trace = host_of(columns(EventKind.UNIT, (1.0, 2.0, 1), (3.0, 4.0, 0)), units=("layers.0", "layers.1"))
    units = sharded_steps._Units.of(trace)
    assert [units.name_at(at_s) for at_s in (0.5, 1.5, 2.5, 3.5, 4.5)] == [None, "layers.1", None, "layers.0", None]


def test_a_reduction_has_the_gradients_that_were_copied_together_since_the_one_before() -> None:
    trace = host_of(columns(EventKind.PACK, (1.0, 2.0, 0), (5.0, 6.0, 1)), shapes=(((3, 2),), ((4,),)))
    units = sharded_steps._Units.of(trace)
    assert units.shapes_before(3.0, -np.inf) == ((3, 2),)
    assert units.shapes_before(4.0, 3.0) == ()
    assert units.shapes_before(7.0, 4.0) == ((4,),)


@pytest.mark.parametrize(("sync_s", "reads_loss"), [(1.5, False), (2.5, True), (3.5, False)])
def test_a_host_reads_the_loss_between_the_last_gather_and_the_backward_pass(sync_s: float, reads_loss: bool) -> None:
    """Units are gathered at 1 and 2 s, and the backward pass begins at 3 s."""
    events = columns(EventKind.SYNC, (sync_s, sync_s + 0.2, 0))
    host = HostRun(host_of(events), events, ())
    step = step_of("G:0 G:1 B E")
    assert sharded_steps._reads_loss(host, step, np.array([3.0])) == reads_loss
