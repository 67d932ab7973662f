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


@pytest.fixture
def mutant(mutants):
    return mutants.Mutant("sums", "minus", "sums/adding.py", "a + b", "a - b", ("tests/test_adding.py",))


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


def test_a_bug_that_tests_notice_is_killed_and_one_that_they_do_not_survives(mutants, mutant, tree: Path) -> None:
    before = (tree / mutant.file).read_text()
    assert mutants.run_tests(tree, mutant.tests, 60.0).passed
    for new, survives in (("a - b", False), ("a * b", True)):
        with mutants.planted(tree, replace(mutant, new=new)):
            assert mutants.run_tests(tree, mutant.tests, 60.0).passed == survives
    assert (tree / mutant.file).read_text() == before


def test_tests_that_do_not_end_in_time_have_failed(mutants, mutant, tree: Path) -> None:
    (tree / "tests" / "test_adding.py").write_text("while True:\n    pass\n")
    outcome = mutants.run_tests(tree, mutant.tests, 1.0)
    assert (outcome.passed, outcome.last) == (False, "no end within 1 s")
