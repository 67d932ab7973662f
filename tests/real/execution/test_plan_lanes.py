"""Lanes of a plan's own, performed."""

from pretended import Pretended, execute
from traces import plan_of

from real.collectives.worlds import groups_of
from simdist.plan import AllReduce, Forward, Group, Lane
from simdist.plan.lanes import push_to

EIGHTH = Lane("eighth", "comm", "eighth")


def test_executor_performs_it_in_a_thread_of_its_own():
    plan = plan_of((Forward(("param",), ("loss",)), AllReduce("param", Group(2), lane=EIGHTH)), world_size=2)
    program = Pretended()
    execute(plan, program)
    assert program.threads[plan.bodies[0][1]] == "eighth"


def test_lanes_of_one_communicator_take_turns_in_one_thread():
    pushes = [AllReduce(f"param.{n}", Group(2), lane=push_to(n)) for n in range(2)]
    plan = plan_of((Forward(("param.0",), ("loss",)), *pushes), world_size=2)
    program = Pretended()
    execute(plan, program)
    assert {program.threads[push] for push in pushes} == {"comm"}


def test_its_communicator_has_process_groups_of_its_own():
    step = (AllReduce("param", Group(2), lane=EIGHTH), AllReduce("param", Group(2)), AllReduce("param", Group(4)))
    plan = plan_of(step, step, world_size=4)
    assert groups_of(plan) == {"comm": [Group(2), Group(4)], "eighth": [Group(2)]}
