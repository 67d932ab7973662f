"""Schedules that are proposed fit the cluster and the steps that they are proposed for."""

import pytest
from straggling_jobs import job

from simdist.schedules import LocalSGD, Sync
from simdist.schedules.job import Shape
from simdist.studies.proposals import few_schedules, level_chains, periods, traced_schedules


@pytest.mark.parametrize(
    ("nodes", "labels"),
    [
        (4, ["local-2", "local-4", "local-8", "hsgd-2-2,4-8", "hsgd-2-2,8-8", "hsgd-2-2,4-4,8-8"]),
        (2, ["local-2", "local-4", "local-8", "hsgd-2-2,4-4", "hsgd-2-2,8-4"]),
        (1, ["local-2", "local-4", "local-8"]),
    ],
)
def test_few_schedules_fit_the_world(nodes: int, labels: list[str]) -> None:
    assert [schedule.name for schedule in few_schedules(job(nodes=nodes))] == labels


def test_few_schedules_average_over_all_ranks_within_the_run_and_are_new() -> None:
    scenario = job(steps=4).changed(schedules=(Sync(), LocalSGD(period=2)))
    assert [schedule.name for schedule in few_schedules(scenario)] == ["local-4", "hsgd-2-2,4-8"]


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "n_steps", "labels"),
    [
        (1, 1, 20, ["sync"]),
        (1, 5, 20, ["sync", "local-2", "local-4", "local-8"]),
        (1, 4, 4, ["sync", "local-2", "local-4", "hsgd-2-2,4-4"]),
        (1, 4, 3, ["sync", "local-2"]),
        (4, 1, 8, ["sync", "local-2", "local-4", "local-8", "hsgd-2-2,4-4"]),
        (2, 4, 8, ["sync", "local-2", "local-4", "local-8", "hsgd-2-4,4-8", "hsgd-2-4,4-8-node-gradients"]),
    ],
)
def test_schedules_for_a_traced_job_fit_its_ranks_and_steps(nodes, gpus_per_node, n_steps, labels):
    found = traced_schedules(Sync(), n_steps, nodes=nodes, gpus_per_node=gpus_per_node, has_links=True)
    assert [schedule.name for schedule in found] == labels
    assert not any(schedule.problems(Shape(nodes * gpus_per_node, gpus_per_node)) for schedule in found)


def test_hierarchical_sgd_is_not_proposed_for_links_that_are_unknown():
    found = traced_schedules(Sync(), 8, nodes=2, gpus_per_node=4, has_links=False)
    assert [schedule.name for schedule in found] == ["sync", "local-2", "local-4", "local-8"]


def test_chains_of_eight_ranks_up_to_four_steps_are_all_there():
    chains = list(level_chains(8, 4))
    one = [((p, 8),) for p in (1, 2, 3, 4)]
    two = [((p, g), (q, 8)) for p, q in ((1, 2), (1, 3), (1, 4), (2, 4)) for g in (2, 4)]
    three = [((1, 2), (2, 4), (4, 8))]
    assert sorted(chains) == sorted(one + two + three)
    assert len(chains) == len(set(chains))


def test_periods_end_with_the_longest_that_is_allowed():
    assert periods(1) == (1,)
    assert periods(50)[-1] == 50
    assert list(periods(50)) == sorted(set(periods(50)))
