"""The bugs that tools/mutants.py plants fit the code as it is, and it tells killed from survived."""

from dataclasses import replace
from pathlib import Path

import pytest
from scripts import ROOT, load_script


@pytest.fixture(scope="module")
def mutants():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield load_script(ROOT / "tools" / "mutants.py")


@pytest.mark.sentinel
def test_every_mutant_can_be_planted(mutants) -> None:
    assert mutants.stale(ROOT, mutants.MUTANTS) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "adding.py").write_text("def add(a, b):\n    return a + b  # a and b\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_adding.py").write_text(
        "from sums.adding import add\n\n\ndef test_sum():\n    assert add(2, 2) == 4\n"
    )
    return tmp_path


CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--tier", default="ci")


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if config.option.tier == "ci" or item.name != "test_ci"]
"""


@pytest.fixture
def mutant(mutants):
    return mutants.Mutant("minus", "sums/adding.py", "a + b", "a - b", ("tests/test_adding.py",))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"old": "a * b"}, "sums/adding.py has 0 times: 'a * b'"),
        ({"old": "a"}, "sums/adding.py has 5 times: 'a'"),
        ({"new": "a +"}, "invalid syntax"),
        ({"old": "# a and b", "new": "# b and a"}, "sums/adding.py: nothing changes: '# b and a'"),
        ({"file": "sums/none.py"}, "No such file or directory"),
        ({"tests": ("tests/test_none.py",)}, "no such tests: tests/test_none.py"),
        ({"tests": ("-k", "sum")}, "no such tests: none are named"),
    ],
)
def test_a_mutant_that_does_not_fit_is_named(mutants, mutant, tree: Path, changes, problem: str) -> None:
    (found,) = mutants.stale(tree, [replace(mutant, **changes)])
    assert found.startswith("sums: minus: ")
    assert problem in found


def test_two_mutants_of_one_name_are_told(mutants, mutant, tree: Path) -> None:
    assert mutants.stale(tree, [mutant, mutant]) == ["sums: minus: planted 2 times; names are unique"]


def test_a_bug_is_killed_by_the_lowest_tier_that_notices_it_or_survives(mutants, mutant, tree: Path) -> None:
    """`test_check` is in all tiers and adds zeros; `test_ci` is in `ci` only."""
    (tree / "tests" / "conftest.py").write_text(CONFTEST)
    (tree / "tests" / "test_adding.py").write_text(
        "from sums.adding import add\n\n\ndef test_check():\n    assert add(0, 0) == 0\n\n\n"
        "def test_ci():\n    assert add(2, 2) == 4\n"
    )
    before = (tree / mutant.file).read_text()
    usual = {mutant.tests: mutants.run_tests(tree, mutant.tests, 60.0)}
    assert usual[mutant.tests].passed
    for new, expected in (("a + b + 1", "check"), ("a - b", "ci"), ("a * b", None)):
        _, _, tier = mutants.attacked(usual, tree, replace(mutant, new=new))
        assert tier == expected
    assert (tree / mutant.file).read_text() == before


def test_tests_that_do_not_end_in_time_have_failed(mutants, mutant, tree: Path) -> None:
    (tree / "tests" / "test_adding.py").write_text("while True:\n    pass\n")
    outcome = mutants.run_tests(tree, mutant.tests, 1.0)
    assert (outcome.passed, outcome.last) == (False, "no end within 1 s")
