"""The recorded shares of intervals that hold, and the command that measures them."""

import re

from scripts import ROOT, load_script

coverage = load_script(ROOT / "experiments" / "coverage" / "run.py")
LEAST = 92  # per cent
LEAST_OF_FEW = 89  # of one cell: 6 schedules, 400 repeats, 3 standard errors below 92 to 95


def table(page, name: str) -> list[str]:
    (found,) = re.findall(rf"<!-- table {name} -->\n(.*?)\n<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    return found.split("\n")


def test_the_page_on_trust_shows_the_recorded_table_in_short() -> None:
    assert table(coverage.VALIDITY, "coverage in short") == coverage.in_short(table(coverage.PAGE, "coverage")).split(
        "\n"
    )


def test_recorded_intervals_hold_as_often_as_they_say_except_where_a_remark_says_that_they_cannot() -> None:
    for line in table(coverage.PAGE, "coverage")[2:]:
        name, _, step, speedup, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        if not name.endswith("*"):
            assert min(float(span.split(" to ")[0]) for span in (step, speedup)) >= LEAST_OF_FEW, line


def test_shares_of_a_small_pool_are_measured() -> None:
    scenario = coverage.loads(coverage.SCENARIO.format(disturbance=coverage.DELAYS["0.02 % x 2 s"]))
    pools = [coverage.pool(scenario, each, 60) for each in scenario.schedules[:2]]
    costs = [each.costs(3) for each in pools]
    true_s = [0.1148, 0.1157]  # the mean of 8,000 seeds
    held, *_ = coverage.shares(pools, costs, true_s, 3, 20)
    plain, *_ = coverage.shares(pools, [[], []], true_s, 3, 20)
    assert float(held.split(" to ")[0]) >= 90
    assert float(plain.split(" to ")[0]) < 80
