import numpy as np
import pytest
from drawn_plans import legal_plans
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from traces import plan_of, trace_of

from simdist.plan import AllReduce, Backward, Delay, Forward, Load, Wait, occurrences
from simdist.plan.group import Group
from simdist.traces import waiting
from simdist.traces.trace import Trace

FORWARD = Forward(("param",), ("loss",))
BACKWARD = Backward(("param", "loss"), "grad")
NAN = float("nan")
COLLECTIVE_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")


def one_collective(ready_s: list[float], *, group: Group, end_s: list[float]) -> Trace:
    """One step with nothing but an all-reduce; it starts in each group when its last member is ready."""
    plan = plan_of((AllReduce("grad", group),), world_size=len(ready_s))
    members = np.array(ready_s).reshape(group.shape(len(ready_s)))
    start_s = np.broadcast_to(members.max(axis=1, keepdims=True), members.shape).ravel()
    return trace_of(plan, [(ready_s, start_s.tolist(), end_s)])


def test_waiting_is_charged_to_the_member_that_was_ready_last():
    trace = one_collective([1.0, 4.0, 2.0], group=Group(3), end_s=[5.0] * 3)
    waits = waiting.attribute_waiting(trace)
    assert waits.suffered_s.tolist() == [[3.0, 0.0, 2.0]]
    assert waits.caused_s.tolist() == [[0.0, 5.0, 0.0]]
    assert waits.total_s == 5.0


def test_groups_are_charged_apart():
    trace = one_collective([0.0, 1.0, 7.0, 5.0], group=Group(2), end_s=[2.0, 2.0, 8.0, 8.0])
    assert waiting.attribute_waiting(trace).caused_s.tolist() == [[0.0, 1.0, 2.0, 0.0]]


def test_groups_with_a_stride_are_charged_apart():
    trace = one_collective([0.0, 7.0, 1.0, 5.0], group=Group(2, stride=2), end_s=[2.0, 8.0, 2.0, 8.0])
    assert waiting.attribute_waiting(trace).caused_s.tolist() == [[0.0, 2.0, 1.0, 0.0]]
    assert waiting.attribute_waiting(trace).suffered_s.tolist() == [[1.0, 0.0, 0.0, 2.0]]


def test_members_that_are_last_together_share_the_blame_equally():
    trace = one_collective([1.0, 3.0, 3.0], group=Group(3), end_s=[4.0] * 3)
    assert waiting.attribute_waiting(trace).caused_s.tolist() == [[0.0, 1.0, 1.0]]


def test_blame_is_added_up_by_step_and_by_rank():
    reduce = AllReduce("grad", Group(2))
    plan = plan_of((reduce,), (FORWARD,), (reduce, reduce), world_size=2)
    trace = trace_of(
        plan,
        [
            ([0.0, 1.0], 1.0, 2.0),
            (2.0, 2.0, 3.0),
            ([5.0, 3.0], 5.0, 6.0),
            ([6.0, 6.5], 6.5, 7.0),
        ],
    )
    waits = waiting.attribute_waiting(trace)
    assert waits.caused_s.tolist() == [[0.0, 1.0], [0.0, 0.0], [2.0, 0.5]]
    assert waits.suffered_s.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.5, 2.0]]
    assert waits.caused_by_rank_s.tolist() == [2.0, 1.5]
    assert waits.suffered_by_rank_s.tolist() == [1.5, 2.0]
    frame = waits.frame()
    assert frame.query("step == 2 and rank == 1").iloc[0].to_dict() == {
        "step": 2,
        "rank": 1,
        "caused_s": 0.5,
        "suffered_s": 2.0,
    }


def test_a_collective_that_did_not_run_is_nobodys_fault():
    trace = trace_of(plan_of((AllReduce("grad", Group(2)),), world_size=2), [(NAN, NAN, NAN)])
    waits = waiting.attribute_waiting(trace)
    assert waits.total_s == 0
    assert waits.caused_s.tolist() == [[0.0, 0.0]]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a trace with any times, the order of which only holds within an operation, and some operations not run."""
    plan = draw(legal_plans(max_times=2, max_runs=1))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (3, plan.n_instances, plan.world_size)
    times = np.cumsum(random.choice([0.0, 0.5, 1.0, 1e-3 * np.pi], size=shape), axis=0)
    times[:, random.random(shape[1:]) < draw(st.sampled_from([0.0, 0.2]))] = NAN
    return Trace(plan, *times, source="random")


@examples(50)
@given(traces())
def test_caused_and_suffered_both_add_up_to_all_waiting_of_collectives(trace):
    waits = waiting.attribute_waiting(trace)
    frame = trace.frame()
    in_collectives = frame[frame["op"].isin(COLLECTIVE_NAMES)]
    total_s = (in_collectives["start_s"] - in_collectives["ready_s"]).sum()
    assert waits.suffered_s.sum() == pytest.approx(total_s)
    assert waits.caused_s.sum() == pytest.approx(total_s)
    assert (waits.caused_s >= 0).all()


@examples(50)
@given(traces())
def test_occurrences_visit_every_instance_once_in_its_step(trace):
    frame = trace.frame().query("rank == 0").reset_index(drop=True)
    seen = {}
    for each in occurrences(trace.plan):
        seen |= dict(zip(each.rows.tolist(), each.steps.tolist(), strict=True))
    assert [seen[row] for row in range(trace.plan.n_instances)] == frame["step"].tolist()


def two_steps() -> Trace:
    """Two ranks; rank 1 is faster, and its load for later runs past everything."""
    plan = plan_of(*[(Load("batch"), FORWARD)] * 2, world_size=2)
    return trace_of(
        plan,
        [
            (0.0, 0.0, [1.0, 9.0]),
            (0.0, 0.0, [3.0, 2.0]),
            (0.0, 0.0, [1.0, 9.0]),
            ([3.0, 2.0], [3.0, 2.0], [7.0, 4.0]),
        ],
    )


def test_a_step_of_a_rank_ends_with_its_last_operation_that_is_no_load():
    assert waiting.step_end_s(two_steps()).tolist() == [[3.0, 2.0], [7.0, 4.0]]


def test_a_step_lasts_from_the_last_rank_to_the_last_rank():
    assert waiting.step_s(two_steps()).tolist() == [3.0, 4.0]


def test_a_step_does_not_end_before_the_one_before():
    """A collective of step 0 may still be under way when the forward pass of step 1 is done."""
    plan = plan_of((AllReduce("grad", Group(1)),), (FORWARD,), world_size=1)
    trace = trace_of(plan, [(0.0, 0.0, 5.0), (0.0, 0.0, 2.0)])
    assert waiting.step_end_s(trace).tolist() == [[5.0], [5.0]]
    assert waiting.step_s(trace).tolist() == [5.0, 0.0]


def straggler() -> Trace:
    """Rank 1 sleeps 4 s after its forward pass; rank 0 waits for it in the all-reduce."""
    step = (FORWARD, Wait("loss"), Delay("host"), BACKWARD, AllReduce("grad", Group(2)))
    return trace_of(
        plan_of(step, world_size=2),
        [
            (0.0, 0.0, 2.0),
            (2.0, 2.0, 2.0),
            (2.0, 2.0, [2.0, 6.0]),
            ([2.0, 6.0], [2.0, 6.0], [5.0, 9.0]),
            ([5.0, 9.0], 9.0, 10.0),
        ],
    )


def test_a_host_is_blocked_from_its_last_operation_to_the_end_of_the_wait():
    plan = plan_of(*[(FORWARD, Wait("loss"), Delay("host"), Wait("loss"))] * 2, world_size=2)
    ends_s = [2.0, [2.0, 3.0], [4.0, 5.0], 6.0, 8.0, [8.0, 9.0], 10.0, 10.0]
    blocked = waiting.host_waits(trace_of(plan, [(end, end, end) for end in ends_s]))
    assert blocked.rows.tolist() == [1, 3, 5, 7]
    assert blocked.begin_s.tolist() == [[0.0, 0.0], [4.0, 5.0], [6.0, 6.0], [10.0, 10.0]]
    assert blocked.end_s.tolist() == [[2.0, 3.0], [6.0, 6.0], [8.0, 9.0], [10.0, 10.0]]


def test_a_plan_without_host_operations_blocks_no_host():
    assert len(waiting.host_waits(two_steps()).rows) == 0


def test_rank_table_shows_where_time_went_and_who_is_to_blame():
    table = waiting.rank_table(straggler())
    assert table.index.tolist() == [0, 1]
    assert table.loc[0].to_dict() == {
        "compute_s": 5.0,
        "comm_s": 1.0,
        "wait_s": 4.0,
        "io_s": 0.0,
        "host_s": 0.0,
        "hidden_comm_s": 0.0,
        "caused_s": 0.0,
        "suffered_s": 4.0,
    }
    assert table.loc[1, ["compute_s", "comm_s", "wait_s", "host_s", "caused_s"]].tolist() == [5.0, 1.0, 0.0, 4.0, 4.0]


def test_communication_behind_computing_is_hidden():
    plan = plan_of((AllReduce("grad", Group(2)), BACKWARD), world_size=2)
    trace = trace_of(plan, [(0.0, 0.0, 3.0), (1.0, 1.0, 3.0)])
    table = waiting.rank_table(trace)
    assert table["comm_s"].tolist() == [1.0, 1.0]
    assert table["hidden_comm_s"].tolist() == [2.0, 2.0]
