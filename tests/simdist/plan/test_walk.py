"""Dependencies: equal to a naive derivation, none redundant, and the same whether a stretch is walked or replayed."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from drawn_plans import ALGORITHMS, legal_plans, schedule_plans, spelled_out
from hypothesis import given
from tiers import examples

from simdist.plan import (
    AllReduce,
    Backward,
    Body,
    Buffer,
    Copy,
    Delay,
    Forward,
    Instance,
    Load,
    Optimize,
    Pack,
    Plan,
    Run,
    Tick,
    Unpack,
    Wait,
    reads,
    writes,
)
from simdist.plan.group import Group
from simdist.plan.lanes import HOST, Lane
from simdist.plan.ops import lane_of
from simdist.plan.plan import StepIndex
from simdist.plan.walk import Stretch, Template, _Walker, stretches, walk
from simdist.schedules import InputPath, Job, Schedule, kinds

# ---------------------------------------------------------------- by hand


def after_of(steps: Iterable[Body], *, host: tuple[str, ...] = ()) -> list[tuple[int, ...]]:
    steps = list(steps)
    names = sorted({name for step in steps for op in step for name in (*reads(op), *writes(op))})
    buffers = [
        Buffer(name, 4, tensors=(0, 1), place="host" if name in host else "device", initialized=True) for name in names
    ]
    return [instance.after for instance in walk(Plan.from_steps("hand", world_size=2, buffers=buffers, steps=steps))]


def mean(buffer: str) -> AllReduce:
    return AllReduce(buffer, Group(2))


def test_reader_comes_after_the_writer() -> None:
    assert after_of([(Backward(("p",), "g"), mean("g"))]) == [(), (0,)]


def test_writer_comes_after_the_readers_since_the_last_write() -> None:
    load, copy = Load("batch"), Copy("batch", "input")
    assert after_of([(load, copy, load, copy, load)], host=("batch",)) == [(), (0,), (1,), (2,), (3,)]


def test_writer_comes_after_the_writer_before_it() -> None:
    assert after_of([(mean("g"), Backward(("p",), "g"), mean("g"))]) == [(), (0,), (1,)]


def test_readers_on_different_streams_do_not_wait_for_each_other() -> None:
    first_reader = Copy("g", "flat")
    assert after_of([(mean("g"), first_reader, Wait("g"))]) == [(), (0,), (0,)]


def test_operations_on_disjoint_buffers_are_independent() -> None:
    assert after_of([(Backward(("p",), "g"), mean("h"), Load("batch"))], host=("batch",)) == [(), (), ()]


def test_dependencies_cross_steps() -> None:
    step = (Backward(("p",), "g"), mean("g"), Optimize(("p",), ("g",)))
    assert after_of([step, step])[3:] == [(), (3,), (4,)]


def test_backward_waits_for_a_stale_all_reduce_of_its_bucket() -> None:
    step = (Backward(("p",), "g"), mean("g"))
    assert after_of([step, step])[2] == (1,)


def test_what_the_host_enqueues_after_it_was_held_up_waits_for_the_host() -> None:
    assert after_of([(Copy("p", "a"), Delay("host"), Copy("p", "b"), mean("c"))]) == [(), (), (1,), (1,)]


def test_host_wait_holds_up_later_operations_of_every_stream() -> None:
    step = (Copy("p", "a"), Wait("a"), mean("c"), Load("batch"))
    assert after_of([step], host=("batch",)) == [(), (0,), (1,), (1,)]


def test_stream_delay_holds_up_its_own_stream_only() -> None:
    assert after_of([(Delay("compute"), Copy("p", "a"), mean("c"))]) == [(), (), ()]


def test_dependency_that_another_one_implies_is_left_out() -> None:
    # the optimiser needs the gradient (0, through 1) and the all-reduce (1)
    assert after_of([(Backward(("p",), "g"), mean("g"), Optimize(("p",), ("g",)))])[2] == (1,)


def test_fused_buckets_wait_for_a_tick_that_waits_for_the_last_of_them() -> None:
    backward = (Backward(("p",), "g"), Backward(("p",), "h"))
    fused = (Tick(("g", "h"), 1.0), Pack(("g", "h"), "f"), mean("f"), Unpack("f", ("g", "h")))
    step = (*backward, *fused, Optimize(("p",), ("g", "h")))
    assert after_of([step, step]) == [(), (), (1,), (), (), (), (5,), (), (), (8,), (), (), (), (12,)]


def test_prefetch_depth_is_the_number_of_batch_buffers() -> None:
    def loads_ahead(n_buffers: int) -> int:
        loads = [(Load(f"batch.{number % n_buffers}"), Copy(f"batch.{number % n_buffers}", "x")) for number in range(8)]
        after = after_of(loads, host=tuple(f"batch.{number}" for number in range(n_buffers)))
        waits_for = {number: [index // 2 for index in after[2 * number]] for number in range(n_buffers, 8)}
        assert all(len(steps) == 1 for steps in waits_for.values())
        return next(number - steps[0] for number, steps in waits_for.items())

    assert [loads_ahead(n) for n in (1, 2, 3)] == [1, 2, 3]


def test_instances_are_numbered_in_program_order() -> None:
    step, last = (Delay("host"), Delay("io")), (Delay("compute"),)
    plan = Plan.from_steps("count", world_size=1, buffers=(), steps=[step, step, last])
    assert [(each.index, each.step, each.position, each.op, each.lane.stream) for each in walk(plan)] == [
        (0, 0, 0, Delay("host"), "host"),
        (1, 0, 1, Delay("io"), "io"),
        (2, 1, 0, Delay("host"), "host"),
        (3, 1, 1, Delay("io"), "io"),
        (4, 2, 0, Delay("compute"), "compute"),
    ]


# ---------------------------------------------------------------- against a naive derivation


def naive_needs(plan: Plan) -> list[int]:
    """Return, for each instance, all earlier ones that it conflicts with, that are on its stream, or on the host.

    Sets are bits of an integer. No pruning, no state but who touched what.
    """
    readers: defaultdict[str, int] = defaultdict(int)
    writers: defaultdict[str, int] = defaultdict(int)
    on_lane: defaultdict[Lane, int] = defaultdict(int)
    needs = []
    index = 0
    for body in plan.body_of_steps():
        for op in plan.bodies[body]:
            need = on_lane[HOST] | on_lane[lane_of(op)]
            for name in reads(op):
                need |= writers[name]
            for name in writes(op):
                need |= writers[name] | readers[name]
            needs.append(need)
            bit = 1 << index
            on_lane[lane_of(op)] |= bit
            for name in reads(op):
                readers[name] |= bit
            for name in writes(op):
                writers[name] |= bit
            index += 1
    return needs


def members(bits: int) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]


def closure(needs: list[int]) -> list[int]:
    done: list[int] = []
    for need in needs:
        everything = need
        for index in members(need):
            everything |= done[index]
        done.append(everything)
    return done


def pruned_needs(instances: list[Instance]) -> list[int]:
    tails: dict[Lane, int] = {}
    needs = []
    for instance in instances:
        edges = (*instance.after, tails[instance.lane]) if instance.lane in tails else instance.after
        needs.append(sum(1 << index for index in set(edges)))
        tails[instance.lane] = instance.index
    return needs


def assert_equals_the_naive_derivation(plan: Plan) -> None:
    instances = list(walk(plan))
    needs = pruned_needs(instances)
    done = closure(needs)
    assert done == closure(naive_needs(plan))
    for instance, need in zip(instances, needs, strict=True):
        for kept in instance.after:
            others = [done[index] | 1 << index for index in members(need) if index != kept]
            assert not any(other >> kept & 1 for other in others), f"{instance}: {kept} is implied by another"
            assert instances[kept].lane != instance.lane


@examples(150)
@given(legal_plans(algorithms=ALGORITHMS, max_bodies=4, max_times=3))
def test_dependencies_of_random_plans_are_those_of_a_naive_derivation_and_none_is_redundant(plan: Plan) -> None:
    assert_equals_the_naive_derivation(plan)


@examples(40)
@given(schedule_plans(max_steps=10))
def test_dependencies_of_schedules_are_those_of_a_naive_derivation_and_none_is_redundant(plan: Plan) -> None:
    assert_equals_the_naive_derivation(plan)


# ---------------------------------------------------------------- replay


def assert_replay_changes_nothing(plan: Plan) -> None:
    instances, middle = list(walk(spelled_out(plan))), plan.n_steps // 2
    assert list(walk(plan)) == instances
    assert list(walk(plan, middle)) == [each for each in instances if each.step >= middle]
    index = StepIndex(plan, [len(body) for body in plan.bodies])
    assert [index.before(each.step) + each.position for each in instances] == [each.index for each in instances]
    assert [index.step(each.index) for each in instances] == [each.step for each in instances]
    assert [index.body(step) for step in range(plan.n_steps)] == list(plan.body_of_steps())


@examples(200)
@given(legal_plans(algorithms=ALGORITHMS, max_bodies=3, max_runs=5, max_times=25))
def test_replayed_stretches_of_random_plans_equal_a_walk_step_by_step(plan: Plan) -> None:
    assert_replay_changes_nothing(plan)


@examples(50)
@given(schedule_plans(max_steps=80))
def test_replayed_stretches_of_schedules_equal_a_walk_step_by_step(plan: Plan) -> None:
    assert_replay_changes_nothing(plan)


def assert_repetitions_need_only_the_one_before(plan: Plan) -> None:
    """Engines keep the rows of one repetition for the next one."""
    for stretch in stretches(plan):
        if stretch.times > 1:
            needed = [back for each in stretch.templates for back in (each.previous, *each.after) if back is not None]
            assert max(needed, default=0) <= len(stretch.templates)


@examples(200)
@given(legal_plans(algorithms=ALGORITHMS, max_bodies=3, max_runs=5, max_times=25))
def test_repetitions_of_random_plans_need_nothing_from_before_the_last_one(plan: Plan) -> None:
    assert_repetitions_need_only_the_one_before(plan)


@examples(50)
@given(schedule_plans(max_steps=80))
def test_repetitions_of_schedules_need_nothing_from_before_the_last_one(plan: Plan) -> None:
    assert_repetitions_need_only_the_one_before(plan)


def test_plans_of_one_structure_share_a_walk_but_not_operations() -> None:
    def plan(size: int, nbytes: int) -> Plan:
        step = (Backward(("p",), "g"), AllReduce("g", Group(size)), Optimize(("p",), ("g",)))
        buffers = [Buffer(name, nbytes, tensors=(0, 1), initialized=True) for name in ("p", "g")]
        longer = (*step, AllReduce("p", Group(size)))
        return Plan.from_steps("like", world_size=4, buffers=buffers, steps=([step] * 5 + [longer]) * 4 + [longer])

    first = plan(2, 8)
    other = plan(4, 12)
    found = list(stretches(first))
    like = list(stretches(other))
    for of_plan, its in ((first, found), (other, like)):
        bodies = [of_plan.bodies[number] for number in of_plan.body_of_steps()]
        for stretch in its:
            assert all(each.op is bodies[stretch.first_step + each.step][each.position] for each in stretch.templates)
    assert len({id(stretch.templates[0].after) for stretch in (found[0], like[0])}) == 1
    assert_equals_the_naive_derivation(other)


def test_state_left_by_one_run_is_seen_by_the_next_after_a_replay() -> None:
    train = (Backward(("p",), "g"), mean("g"), Optimize(("p",), ("g",)))
    read_far_back = (Copy("old", "p"), Wait("g"), Delay("io"))
    buffers = [Buffer(name, 4, tensors=(0, 1), initialized=True) for name in ("p", "g", "old")]
    first = (mean("old"),)
    plan = Plan("far", 2, tuple(buffers), (first, train, read_far_back), (Run((0,)), Run((1,), 50), Run((2, 1), 50)))
    assert max(stretch.times for stretch in stretches(plan)) > 40
    assert_replay_changes_nothing(plan)
    assert_equals_the_naive_derivation(plan)


def test_equal_steps_within_a_repetition_are_walked_until_they_recur(monkeypatch: pytest.MonkeyPatch) -> None:
    train = (Backward(("p",), "g"), mean("g"), Optimize(("p",), ("g",)))
    buffers = [Buffer(name, 4, tensors=(0, 1), initialized=True) for name in ("p", "g")]
    plan = Plan.from_steps("seldom", world_size=2, buffers=buffers, steps=([train] * 49 + [(*train, mean("p"))]) * 9)
    assert plan.order == (Run((*[0] * 49, 1), 9),)
    assert_replay_changes_nothing(plan)
    visited = []
    visit = _Walker._visit

    def counting(walker: _Walker, step: int, *decoded: Any) -> Template:
        visited.append(step)
        return visit(walker, step, *decoded)

    monkeypatch.setattr(_Walker, "_visit", counting)
    assert len(list(walk(plan))) == plan.n_instances
    assert len(visited) < 100  # of 151 in a repetition, of which several are walked


def test_streams_that_never_meet_are_walked_right() -> None:
    apart = (Delay("compute"), Delay("io"), mean("g"))
    meet = (Copy("g", "h"), Wait("h"))
    buffers = (Buffer("g", 1, initialized=True), Buffer("h", 1))
    plan = Plan("apart", 2, buffers, (apart, meet), (Run((0,), 30), Run((1,)), Run((0,), 30), Run((1, 0), 20)))
    assert_replay_changes_nothing(plan)
    assert_equals_the_naive_derivation(plan)


# ---------------------------------------------------------------- stretches


def assert_live_is_complete(plan: Plan) -> None:
    """Every reference across the end of a stretch is to an instance that `live` names."""
    references: dict[int, list[int]] = {}
    ends: list[tuple[int, Stretch]] = []
    expected_index = expected_step = 0
    for stretch in stretches(plan):
        assert (stretch.first_index, stretch.first_step) == (expected_index, expected_step)
        for _ in range(stretch.times):
            for template in stretch.templates:
                back = [*template.after, *([] if template.previous is None else [template.previous])]
                references[expected_index] = [expected_index - each for each in back]
                expected_index += 1
        ends.append((expected_index, stretch))
        expected_step += stretch.n_steps * stretch.times
    assert (expected_index, expected_step) == (plan.n_instances, plan.n_steps)
    for end, stretch in ends:
        kept = {end - back for back in stretch.live}
        wanted = {index for later in range(end, plan.n_instances) for index in references[later] if index < end}
        assert wanted <= kept, f"after {end}: {sorted(wanted - kept)} are referred to, but not live"


@examples(100)
@given(legal_plans(algorithms=ALGORITHMS, max_bodies=3, max_times=6))
def test_live_never_drops_what_a_later_operation_of_a_random_plan_refers_to(plan: Plan) -> None:
    assert_live_is_complete(plan)


@examples(20)
@given(schedule_plans(max_steps=24))
def test_live_never_drops_what_a_later_operation_of_a_schedule_refers_to(plan: Plan) -> None:
    assert_live_is_complete(plan)


@examples(60)
@given(legal_plans(algorithms=ALGORITHMS, max_bodies=3, max_times=6))
def test_previous_is_the_predecessor_on_the_same_stream(plan: Plan) -> None:
    tails: dict[Lane, int] = {}
    for stretch in stretches(plan):
        index = stretch.first_index
        for _ in range(stretch.times):
            for template in stretch.templates:
                found = None if template.previous is None else index - template.previous
                assert found == tails.get(template.lane)
                tails[template.lane] = index
                index += 1


INPUT_PATHS = [InputPath("device"), InputPath("memory", "pageable"), InputPath("storage", "pinned", prefetch=3)]
SCHEDULES = [(cls, example) for cls in kinds().values() for example in cls.examples]


@pytest.mark.parametrize("path", INPUT_PATHS, ids=lambda path: path.source)
@pytest.mark.parametrize(("cls", "example"), SCHEDULES)
def test_stretches_do_not_grow_with_the_number_of_steps(
    cls: type[Schedule], example: dict[str, object], path: InputPath
) -> None:
    def measure(n_steps: int) -> tuple[int, int]:
        job = Job(
            8,
            4,
            n_steps,
            tensor_counts=(1000, 500_000, 8),
            input_path=path,
            run_ahead_steps=1,
            delay_channels=frozenset({"host"}),
        )
        found = list(stretches(cls(**example).plan(job)))
        return sum(len(stretch.templates) for stretch in found), max(len(stretch.live) for stretch in found)

    found = measure(2401)
    assert found == measure(241)
    assert found[0] < 241 * 10
    assert found[1] < 40


def test_a_plan_of_a_million_million_steps_is_a_few_stretches() -> None:
    step = (Forward(("p",), ("loss",)), Wait("loss"), Backward(("p",), "g"), mean("g"), Optimize(("p",), ("g",)))
    buffers = tuple(Buffer(name, 4, tensors=(0, 1), initialized=True) for name in ("p", "g", "loss"))
    plan = Plan("long", 2, buffers, (step,), (Run((0,), 10**12),))
    found = list(stretches(plan))
    assert len(found) < 5
    assert sum(stretch.times for stretch in found) == 10**12
    assert found[-1].first_index + found[-1].times * len(step) == plan.n_instances
    assert found[-1].live == (4, 2, 1), "the tails: wait, all_reduce, optimize; all know the rest to be done"


def test_a_stream_that_stands_still_does_not_prevent_replay() -> None:
    step = (Backward(("p",), "g"), mean("g"), Optimize(("p",), ("g",)))
    buffers = (
        *(Buffer(name, 4, tensors=(0, 1), initialized=True) for name in ("p", "g")),
        Buffer("x", 4, place="host"),
    )
    for first in (Load("x"), Delay("host"), Wait("p")):
        plan = Plan("still", 2, buffers, ((first,), step), (Run((0,)), Run((1,), 1000), Run((0,)), Run((1,), 3)))
        assert len(list(stretches(plan))) < 12, first
        assert_replay_changes_nothing(plan)


def test_what_a_stream_waits_for_once_after_as_many_operations_as_a_step_has_it_does_not_wait_for_again() -> None:
    """The compute stream knew the host's operation three before the one that it learns of; a step has three, too."""
    first = tuple(Delay(channel) for channel in ("host", "io", "compute", "host", "io"))
    step = tuple(Delay(channel) for channel in ("compute", "io", "io"))
    plan = Plan("once", 1, (), (first, step), (Run((0,)), Run((1,), 3)))
    assert [(each.index, each.after) for each in walk(plan) if each.after] == [
        (1, (0,)),
        (2, (0,)),
        (4, (3,)),
        (5, (3,)),
    ]
    assert_replay_changes_nothing(plan)


def test_walking_a_long_plan_starts_at_once() -> None:
    plan = dataclasses.replace(
        Plan.from_steps("long", world_size=1, buffers=(), steps=[(Delay("host"),)]), order=(Run((0,), 10**12),)
    )
    instances = walk(plan)
    assert [next(instances).after for _ in range(4)] == [(), (), (), ()]
