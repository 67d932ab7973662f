"""The seeds of the runs of a study: they follow from its own, and studies share none."""

from simdist.scenario.sampling import run_seeds


def test_studies_share_no_seed():
    seeds = [seed for study in range(100) for seed in run_seeds(study, 100)]
    assert len(set(seeds)) == 100 * 100


def test_the_first_run_has_the_seed_of_the_study():
    assert run_seeds(7, 1) == [7]
    assert run_seeds(2**63 - 1, 3)[0] == 2**63 - 1
    assert run_seeds(7, 0) == []


def test_a_seed_depends_on_its_number_only():
    whole = run_seeds(3, 12)
    for first in range(12):
        for n in range(12 - first):
            assert run_seeds(3, n, first=first) == whole[first : first + n]


def test_seeds_survive_json_and_stay_the_same():
    assert all(0 <= seed < 2**53 for seed in run_seeds(0, 1000))
    assert run_seeds(1, 3) == [1, 909278154628473, 3415235367757488]
    assert run_seeds(1, 1, first=2**40) == [4605315834827675]
