"""How much wider a doubt is because few families tell it."""

import math
import sys

import pytest
from scipy.stats import norm, t
from scripts import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "published_rows"))
import estimate
from estimate import Residual


def rows(family, *logs):
    return [Residual(family, "collective", ("network",), log) for log in logs]


def test_families_that_differ_need_the_predictive_factor_of_students_t():
    """Three families of one row each: nothing differs within them."""
    found = [*rows("a", -1.0), *rows("b", 0.0), *rows("c", 1.0)]
    ratio = t.ppf(0.95, 2) / norm.ppf(0.95) * math.sqrt(1 + 1 / 3)
    assert estimate.of_few_families(found, "network") == pytest.approx(ratio * math.sqrt(3 / 2))


def test_rows_that_differ_within_families_only_need_no_factor():
    found = [each for family in "abc" for each in rows(family, -1.0, 1.0)]
    assert estimate.of_few_families(found, "network") == pytest.approx(1.0)


def test_more_families_need_less():
    few, many = ([each for number in range(n) for each in rows(str(number), (-1.0) ** number)] for n in (4, 40))
    factors = [estimate.of_few_families(each, "network") for each in (few, many)]
    assert factors[0] > 1.5 > factors[1] > 1


def test_one_family_tells_nothing_of_others():
    assert estimate.of_few_families(rows("a", -1.0, 1.0), "network") == 1.0


def test_a_row_of_a_further_storage_is_as_far_as_students_t_says():
    """Place 38 of 40 is the quantile of 95 %."""
    apart = [*rows("a", -1.0), *rows("b", 0.0), *rows("c", 1.0)]
    found = estimate.predictive(apart, [apart])
    assert found[38] == pytest.approx(t.ppf(0.95, 2) * math.sqrt(1 + 1 / 3))
    assert found[2] == pytest.approx(-found[38])
    alike = [each for family in "abc" for each in rows(family, -1.0, 1.0)]
    assert estimate.predictive(alike, [alike])[38] == pytest.approx(norm.ppf(0.95))
    assert estimate.predictive(alike, [alike, apart])[38] > norm.ppf(0.95)


def test_short_steps_of_both_kinds_have_one_distribution():
    def read(family: str, kind: str, log: float, *, short: bool) -> Residual:
        return Residual(family, kind, (kind, estimate.SHORT) if short else (kind,), log)

    found = [
        read(family, kind, log, short=short)
        for number, family in enumerate("abc")
        for kind, log, short in (
            ("storage", 0.3, True),
            ("input", 0.2, True),
            ("storage", 0.1 * number, False),
            ("input", 0.02, False),
        )
    ]
    classes = {kind: estimate.of_storage(found, kind) for kind in estimate.STORAGE}
    assert classes["storage"]["logs"][0] == classes["input"]["logs"][0]
    middles = [classes[kind]["logs"][part][20] for kind in ("storage", "input") for part in (0, 1)]
    assert middles == pytest.approx([0.25, 0.1, 0.25, 0.02])
