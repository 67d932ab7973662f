"""The tiers of tests choose by cost, and fit their budgets."""

from types import SimpleNamespace

import pytest
import tiers


def item(nodeid: str, *marks: str, is_drawn: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=nodeid,
        obj=SimpleNamespace(hypothesis=None) if is_drawn else None,
        get_closest_marker=lambda name: name if name in marks else None,
    )


@pytest.mark.parametrize("tier", tiers.BUDGET_S)
def test_the_tests_of_a_tier_fit_its_budget(request: pytest.FixtureRequest, tier: str) -> None:
    assert tiers.Costs.read().total_s(request.session.items, tier) <= tiers.BUDGET_S[tier]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (item("new"), ("check", "test", "ci", "full")),
        (item("cheap"), ("check", "test", "ci", "full")),
        (item("middling"), ("test", "ci", "full")),
        (item("dear"), ("ci", "full")),
        (item("dear", "sentinel"), ("test", "ci", "full")),
        (item("dear", is_drawn=True), ("test", "ci", "full")),
        (item("cheap", "full"), ("full",)),
    ],
)
def test_a_tier_has_the_tests_up_to_its_limit_and_its_sentinels(test: SimpleNamespace, expected: tuple[str]) -> None:
    costs = tiers.Costs(listed={"cheap": 0.05, "middling": 0.4, "dear": 3.0})
    assert tuple(tier for tier in tiers.TIERS if costs.has(test, tier)) == expected


def test_the_cost_of_a_tier_is_that_of_its_tests() -> None:
    costs = tiers.Costs(cheap_s=5.0, listed={"middling": 0.4, "dear": 3.0, "drawn": 0.5})
    tests = [item("new"), item("middling"), item("dear"), item("drawn", is_drawn=True)]
    assert [costs.total_s(tests, tier) for tier in tiers.TIERS] == pytest.approx([5.05, 5.45, 8.9, 8.9])


def test_costs_are_written_and_read(tmp_path) -> None:
    costs = tiers.Costs.of({"tests/a.py::b[c::d]": 1.234, "tests/a.py::e": 0.03, "tests/f.py::g": 0.045})
    assert (costs.cheap_s, costs.listed) == (0.1, {"tests/a.py::b[c::d]": 1.23})
    costs.write(tmp_path / "costs.json")
    assert tiers.Costs.read(tmp_path / "costs.json") == costs


def test_costs_of_a_part_only_raise_those_of_all() -> None:
    costs = tiers.Costs(5.0, {"uses what another test makes": 0.2, "makes it": 3.0})
    found = costs.raised({"uses what another test makes": 2.9, "makes it": 0.5, "new": 0.4, "cheap": 0.01})
    assert found == tiers.Costs(5.0, {"uses what another test makes": 2.9, "makes it": 3.0, "new": 0.4})


def test_fewer_examples_are_drawn_where_people_wait(monkeypatch) -> None:
    monkeypatch.delenv("SIMDIST_FEW_EXAMPLES", raising=False)
    found = []
    for tier in tiers.TIERS:
        tiers.draw_for(tier)
        found.append([tiers.examples(number).max_examples for number in (3, 20, 200)])
    tiers.draw_for("ci")
    assert found == [[3, 5, 20], [3, 5, 20], [3, 20, 200], [3, 20, 200]]
