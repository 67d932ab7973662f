"""The space of the tuner, its constraints, and the front."""

import math

import numpy as np
import pytest
from commandline import SMALL, edited

from simdist.errors import ScenarioError
from simdist.plan import Result
from simdist.runs.building import build, job
from simdist.scenario import loads
from simdist.schedules.job import Shape
from simdist.tuning import Constraints, Extras
from simdist.tuning.candidates import Candidate, input_choices, n_changes, schedule_of
from simdist.tuning.constraints import broken, exchanged, facts, longest_gap
from simdist.tuning.evaluating import front
from simdist.tuning.space import legal, space
from simdist.tuning.verdict import entry

NBYTES = 404_000  # of the small scenario's gradients
DATA = """\
input: {source: storage, prefetch: 3, readers: 2, data: {samples: 4096, file_size: 1 kB}}
"""
STORED = "  network: {latency: 25 us, bandwidth: 25 Gbit/s}\n  storage: {latency: 1 ms, bandwidth: 1 GB/s}\n"


def small(*edits, text=SMALL):
    return loads(edited(*edits, text=text))


def labels(found):
    return sorted(schedule_of(each).name for each in found.candidates)


def known(scenario, **settings):
    (schedule,) = scenario.changed(schedules=[settings]).schedules
    return facts(scenario, build(scenario, schedule))


def broken_limits(found, constraints):
    return tuple(each.limit for each in broken(found, constraints))


def test_space_of_two_nodes_of_four_ranks_is_what_one_counts_by_hand():
    """Its model fits into one bucket, so only the whole gradient is left of the sizes of buckets."""
    found = space(small(), Constraints(global_every=2), Extras())
    assert labels(found) == sorted(
        [
            "sync-one-bucket",
            "torus-one-bucket",
            "local-1",
            "local-2",
            "hsgd-1-8-intra",
            "hsgd-2-8-intra",
            "hsgd-1-2,2-8",
            "hsgd-1-2,2-8-intra",
            "hsgd-1-4,2-8",
            "hsgd-1-4,2-8-intra",
        ]
    )


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (1, 6), (2, 1), (2, 3), (3, 4), (4, 2), (5, 1)])
def test_every_candidate_is_legal_proved_and_meets_the_demands_on_exchanges(nodes, gpus):
    scenario = small(
        ("nodes: 2", f"nodes: {nodes}"),
        ("gpus_per_node: 4", f"gpus_per_node: {gpus}"),
        ("  - {kind: hierarchical_sgd, levels: {2: 4, 4: world}}\n", ""),
    )
    constraints = Constraints(global_every=4, group_every=((2, 2),))
    extras = Extras(min_density=0.01, allow=("fp16", "servers"))
    scenario = scenario.changed(steps=9)
    found = space(scenario, constraints, extras)
    names = set()
    for each in found.candidates:
        schedule = legal(each, scenario)
        assert schedule is not None
        assert schedule.problems(Shape(nodes * gpus, gpus)) == []
        plan = build(scenario, schedule)
        assert broken(facts(scenario, plan), constraints) == ()
        names.add(schedule.name)
    assert len(names) == len(found.candidates)  # labels tell them apart


def test_gtopk_is_left_out_where_it_says_that_the_world_is_no_power_of_two():
    only = Extras(only=("gtopk",), min_density=0.01)
    assert space(small(), Constraints(8), only).candidates
    odd = space(small(("nodes: 2", "nodes: 3"), ("{2: 4, 4: world}", "{2: 4, 4: 12}")), Constraints(8), only)
    assert odd.candidates == ()
    assert odd.n_illegal > 0


def test_powersgd_takes_ranks_that_send_as_much_as_is_demanded():
    """A matrix of 250 x 400, and 1,000 others that are sent as they are: rank r sends 650 r + 1000 of 101,000."""
    extras = Extras(only=("powersgd",), min_density=0.03)
    assert space(small(), Constraints(8), extras).candidates == ()  # no tensor states its rows
    known = small(("count: 100000", "count: 100000, rows: 250"))
    names = {schedule_of(each).name for each in space(known, Constraints(8), extras).candidates}
    assert names == {f"powersgd-{rank}-one-bucket" for rank in (4, 8, 16, 32)}


def test_updates_are_shared_if_that_is_allowed():
    extras = Extras(only=("sync", "torus"), allow=("shared-updates",))
    found = space(small(), Constraints(8), extras)
    assert labels(found) == [
        "sync-one-bucket",
        "sync-shared-2-one-bucket",
        "sync-shared-4-one-bucket",
        "sync-shared-one-bucket",
        "torus-one-bucket",
        "torus-shared-one-bucket",
    ]


def test_schedules_that_change_the_mathematics_need_to_be_allowed():
    kinds = {each.kind for each in space(small(), Constraints(8), Extras()).candidates}
    assert kinds == {"sync", "torus", "local_sgd", "hierarchical_sgd"}
    settings = [each.settings() for each in space(small(), Constraints(8), Extras()).candidates]
    assert not any("compression" in each or "density" in each for each in settings)
    with pytest.raises(ScenarioError, match=r"--only hitopk: .*--min-density 0\.001"):
        space(small(), Constraints(8), Extras(only=("hitopk",)))


def test_no_density_is_below_the_least_one():
    found = space(small(), Constraints(8), Extras(only=("hitopk",), min_density=0.02))
    assert {vars(schedule_of(each))["density"] for each in found.candidates} == {0.02, 0.03, 0.1}


def test_a_setting_that_has_no_effect_is_not_tried():
    """On one node a torus is synchronous SGD."""
    one_node = small(("nodes: 2", "nodes: 1"), ("{2: 4, 4: world}", "{2: 2, 4: world}"))
    assert "torus" not in {each.kind for each in space(one_node, Constraints(8), Extras()).candidates}


def test_input_is_varied_only_where_it_is_read_from_storage():
    assert input_choices(small()) == ()
    stored = small(
        ("  network: {latency: 25 us, bandwidth: 25 Gbit/s}\n", STORED), ("steps: 12\n", "steps: 12\n" + DATA)
    )
    found = space(stored, Constraints(1), Extras(only=("sync",)))
    tried = {tuple(sorted(dict(each.changed).items())) for each in found.candidates}
    assert {dict(each).get("input.prefetch", 3) for each in tried} == {1, 2, 3, 4, 8}
    assert {dict(each).get("input.readers", 2) for each in tried} == {2, 4, 8}
    assert {dict(each).get("input.policy", "naive") for each in tried} == {
        "naive"
    }  # the cluster has no disk and no memory


def test_first_candidates_wait_for_the_fewest():
    scenario = small()
    found = space(scenario, Constraints(8, ((4, 2),)), Extras())
    assert found.candidates[0] == Candidate("hierarchical_sgd", ((2, 4), (8, 8)))
    waited_for = []
    for each in found.candidates:
        results = [schedule_of(each).result(step, job(scenario)) for step in range(12)]
        waited_for.append(sum(result.gradients.size + result.parameters.size - 2 for result in results))
    assert len(set(waited_for)) > 4
    assert waited_for == sorted(waited_for)


def test_local_sgd_and_one_more_level_are_one_change_apart():
    local = Candidate("local_sgd", ((8, 64),))
    two = Candidate("hierarchical_sgd", ((2, 8), (8, 64)))
    assert n_changes(local, two) == n_changes(two, local) == 1
    assert n_changes(two, Candidate("hierarchical_sgd", ((2, 16), (8, 64)))) == 1
    assert n_changes(two, Candidate("hierarchical_sgd", ((4, 8), (8, 64)))) == 1
    assert n_changes(two, Candidate("hierarchical_sgd", ((2, 8), (8, 64)), (("intra_node_gradients", True),))) == 1
    assert n_changes(local, Candidate("sync")) == 2


def test_bytes_that_a_node_sends_are_those_of_the_ring():
    """Around a ring of 8 ranks, one of a node sends to the other node: 2 (8 - 1) / 8 of the gradient in every step."""
    assert known(small(), kind="sync").sent_nbytes == pytest.approx(2 * 7 / 8 * NBYTES)
    assert known(small(), kind="local_sgd", period=4).sent_nbytes == pytest.approx(2 * 7 / 8 * NBYTES / 4)
    within = known(small(), kind="hierarchical_sgd", levels={1: 4, 4: 8}, intra_node_gradients=False)
    assert within.sent_nbytes == pytest.approx(2 * 7 / 8 * NBYTES / 4)


def test_bytes_are_bytes_on_links_with_a_table_and_on_unlimited_ones():
    network = "{latency: 25 us, bandwidth: 25 Gbit/s}"
    table = "{table: [{size: 0 B, time: 25 us}, {size: 1 kB, time: 90 us}, {size: 1 MB, time: 1 ms}]}"
    for other in (table, "ideal"):
        assert known(small((network, other)), kind="sync").sent_nbytes == pytest.approx(2 * 7 / 8 * NBYTES)


def test_on_one_node_it_is_what_a_gpu_sends():
    one_node = small(("nodes: 2", "nodes: 1"), ("{2: 4, 4: world}", "{2: 2, 4: world}"))
    assert known(one_node, kind="sync").sent_nbytes == pytest.approx(2 * 3 / 4 * NBYTES)


def test_in_one_domain_of_two_nodes_it_is_what_a_gpu_sends():
    one_domain = small(("nodes: 2", "nodes: 2\n  topology: {nodes_per_domain: 2}"))
    assert known(one_domain, kind="sync").sent_nbytes == pytest.approx(2 * 7 / 8 * NBYTES)
    apart = known(one_domain, kind="parameter_server", servers=2, apart=True)
    assert apart.sent_nbytes == pytest.approx(4 * NBYTES)  # 4 ranks of a node push the whole, 2 servers answer 8 ranks


def test_memory_is_that_of_the_buffers():
    found = known(small(), kind="sync")
    assert found.device_nbytes == 3 * NBYTES  # parameters, momenta, gradients
    assert found.host_nbytes == 0


@pytest.mark.parametrize(
    ("degree", "by", "shares"),
    [
        (2, "all_gather", 2 * 3 / 4),  # two rings of 4 ranks, each of half the buffer
        (4, "all_gather", 2 * 1 / 2),
        ("node", "all_gather", 2 * 1 / 2),
        (True, "all_gather", 2 * 7 / 8),
        ("node", "broadcast", 2 * 7 / 8),
        (True, "broadcast", 2 * 7 / 8 + 7 / 8),
    ],
)
def test_a_node_sends_what_the_degree_of_shared_updates_says(degree, by, shares):
    found = known(small(), kind="sync", shared_update=degree, updates_sent_by=by)
    assert found.sent_nbytes == pytest.approx(shares * NBYTES)


def test_ranks_that_share_an_update_need_less_memory():
    """Parameters, gradients and slices of momenta; among nodes, also the slice of gradients that is under way."""
    degrees = {degree: known(small(), kind="sync", shared_update=degree) for degree in (2, 4, True)}
    assert {degree: found.device_nbytes / NBYTES for degree, found in degrees.items()} == {
        2: 2 + 1 / 2,
        4: 2 + 1 / 4,
        True: 2 + 2 / 8,
    }
    limit = Constraints(8, memory_nbytes=int(2.4 * NBYTES))
    assert {degree: broken_limits(found, limit) for degree, found in degrees.items()} == {
        2: ("--memory '970 kB'",),
        4: (),
        True: (),
    }


@pytest.mark.parametrize(
    ("constraints", "name"),
    [
        (Constraints(3), "--global-every 3"),
        (Constraints(4, ((4, 3),)), "--group-every 4:3"),
        (Constraints(4, max_nbytes=170_000), "--max-bytes '170 kB'"),
        (Constraints(4, memory_nbytes=1_200_000), "--memory '1.2 MB'"),
    ],
)
def test_what_a_schedule_breaks_is_named_as_it_is_written(constraints, name):
    found = known(small(), kind="local_sgd", period=4)
    assert broken_limits(found, constraints) == (name,)
    assert broken_limits(found, Constraints(4, ((4, 4),), 180_000, 2_000_000, 1)) == ()


def test_gaps_are_those_of_the_plan_with_its_warm_up_and_its_last_steps():
    found = known(small(), kind="local_sgd", period=5, warmup_steps=3)  # 3 steps, then averages in steps 7; 12 steps
    assert found.group_sizes.tolist() == [8, 8, 8, 1, 1, 1, 1, 8, 1, 1, 1, 1]
    assert found.global_gap == 5


@pytest.mark.parametrize(
    "schedule", [{"kind": "local_sgd", "overlap_steps": 1}, {"kind": "diloco", "fragments": 2, "overlap_steps": 1}]
)
def test_gaps_are_those_of_a_parameter_and_not_of_what_is_under_way(schedule):
    assert known(small(), period=4, **schedule).global_gap == 4


def test_exchanges_of_a_schedule_and_of_its_plan_are_the_same():
    scenario = small()
    for each in space(scenario, Constraints(4), Extras()).candidates:
        schedule = schedule_of(each)
        results: list[Result] = [schedule.result(step, job(scenario)) for step in range(scenario.steps)]
        assert facts(scenario, build(scenario, schedule)).group_sizes.tolist() == exchanged(results).tolist()


def test_never_is_an_infinite_gap():
    assert longest_gap(np.zeros(5, dtype=bool)) == math.inf
    assert longest_gap(np.ones(5, dtype=bool)) == 1


def test_front_has_what_no_other_point_beats():
    rng = np.random.default_rng(0)
    for _ in range(200):
        points = [(int(gap), float(time_s)) for gap, time_s in rng.integers(1, 6, (rng.integers(1, 12), 2))]

        def beats(one, other):
            return one != other and one[0] <= other[0] and one[1] <= other[1]

        expected = {point for point in points if not any(beats(other, point) for other in points)}
        found = [points[index] for index in front(points)]
        assert set(found) == expected
        assert len(found) == len(expected)
        assert found == sorted(found)


def test_entry_of_a_schedule_can_be_pasted_into_a_scenario():
    scenario = small()
    extras = Extras(min_density=0.01, allow=("fp16", "servers"))
    candidates = space(scenario, Constraints(4), extras).candidates
    for each, _ in zip(candidates, range(60), strict=False):
        schedule = schedule_of(each)
        text = SMALL[: SMALL.index("schedules:")] + f"schedules:\n  {entry(schedule)}\n"
        (read,) = loads(text).schedules
        assert read.name == schedule.name
        assert read.plan(job(scenario)).digest() == schedule.plan(job(scenario)).digest()


def test_late_averages_and_outer_optimizers_are_tried_where_they_are_allowed():
    plain = labels(space(small(), Constraints(4), Extras()))
    found = labels(space(small(), Constraints(4), Extras(allow=("overlap", "diloco"))))
    assert set(plain) < set(found)
    assert not any("overlap" in name or "diloco" in name for name in plain)
    assert {"local-2-overlap1", "local-2-overlap2", "diloco-4", "diloco-2-fragments2-overlap1"} <= set(found)
    assert not {"local-2-overlap4", "diloco-2-fragments4"} & set(found)


def test_labels_of_candidates_differ():
    extras = Extras(min_density=0.01, allow=("fp16", "servers", "overlap", "diloco"))
    big = small(("count: 100000", "count: 60000000"))
    names = labels(space(big, Constraints(4), extras))
    assert len(names) == len(set(names))
    assert {"sync", "sync-1MiB", "sync-fp16-one-bucket"} <= set(names)
