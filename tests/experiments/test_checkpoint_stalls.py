"""Published times of checkpoints: how near bytes over stated bandwidths come, and that no row is left out."""

from statistics import median

import pytest
from scripts import ROOT, load_script

from simdist.report import insert_tables

run = load_script(ROOT / "experiments" / "checkpoint_stalls" / "run.py")


def test_the_page_has_the_tables_of_the_program() -> None:
    page = (ROOT / "experiments" / "checkpoint_stalls" / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, run.tables()) == page


def test_times_that_a_slow_storage_decides_are_met() -> None:
    assert run.median_error("save", "load") < 0.15
    assert all(abs(each.error) < 0.25 for each in run.rows() if each.does != "copy")


def test_copies_to_pageable_memory_take_as_long_as_on_other_machines() -> None:
    pageable = [each for each in run.rows() if each.memory == "pageable"]
    within = [each for each in pageable if each.range_s[0] <= each.published_s <= each.range_s[1]]
    assert (len(within), len(pageable)) == (5, 6)
    assert median(abs(each.error) for each in pageable) < 0.4


def test_copies_to_pinned_memory_are_a_lower_bound() -> None:
    errors = [each.error for each in run.rows() if each.memory == "pinned"]
    assert len(errors) == 2
    assert all(error < 0 for error in errors)


@pytest.mark.parametrize("does", ["save", "load", "copy"])
def test_every_kind_has_rows(does) -> None:
    assert any(each.does == does for each in run.rows())
