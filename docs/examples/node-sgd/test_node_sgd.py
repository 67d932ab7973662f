"""Node SGD, its disturbance and its algorithm keep the rules of simdist."""

from node_sgd import Maintenance, NodeSGD

from simdist.plan import AllReduce
from simdist.schedules.job import Job
from simdist.testing import check_algorithm, check_disturbance, check_schedule


def test_schedule_keeps_the_rules() -> None:
    check_schedule(NodeSGD)


def test_parameters_are_averaged_at_the_end_of_each_period() -> None:
    job = Job(world_size=8, ranks_per_node=4, n_steps=8, tensor_counts=(10,))
    plan = NodeSGD(period=4).plan(job)
    bodies = [plan.bodies[number] for number in plan.body_of_steps()]
    over_all = [any(isinstance(op, AllReduce) and op.group.size == 8 for op in body) for body in bodies]
    assert over_all == [False, False, False, True] * 2


def test_disturbance_keeps_the_rules() -> None:
    check_disturbance(Maintenance(interval=10, delay_s=0.5, skipped=0.25))


def test_algorithm_keeps_the_rules() -> None:
    check_algorithm("node_sgd:STAR")
