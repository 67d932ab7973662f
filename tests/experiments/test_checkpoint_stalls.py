"""Published times of checkpoints: how near bytes over stated bandwidths come, and that no row is left out."""

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


def test_copies_to_the_host_take_longer_than_the_bus_needs() -> None:
    errors = [each.error for each in run.rows() if each.does == "copy"]
    assert len(errors) == 7
    assert all(error < 0 for error in errors)


@pytest.mark.parametrize("does", ["save", "load", "copy"])
def test_every_kind_has_rows(does) -> None:
    assert any(each.does == does for each in run.rows())
