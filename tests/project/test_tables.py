"""Tables of README and docs are those of recorded results, and each is held to them by some test."""

import re

import pytest
from scripts import ROOT, load_script

tables = load_script(ROOT / "tools" / "tables.py")
ELSEWHERE = {  # table -> the test that holds it to what was recorded
    "emulated": "tests/experiments/test_emulated_cluster.py",
    "emulated checkpoints": "tests/experiments/test_emulated_cluster.py",
    "emulated communication": "tests/experiments/test_emulated_cluster.py",
    "emulated synchronization ordinary": "tests/experiments/test_emulated_cluster.py",
    "emulated communication ordinary": "tests/experiments/test_emulated_cluster.py",
    "emulated links": "tests/experiments/test_emulated_cluster.py",
    "published": "tests/project/test_docs.py",
    "round trip": "tests/experiments/test_profile_round_trip.py",
    "storage overview": "tests/experiments/test_emulated_storage.py",
}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_shows_what_was_recorded(page) -> None:
    assert tables.updated(page) == page.read_text(encoding="utf-8")


def test_every_marked_table_is_held_to_something() -> None:
    marked = {match[2] for page in tables.PAGES for match in tables.MARKED.finditer(page.read_text(encoding="utf-8"))}
    assert marked == tables.TABLES.keys() | ELSEWHERE.keys()
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).exists()] == []


def test_every_marker_is_written_the_same_way() -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall("<!-- table", text)) == len(list(tables.MARKED.finditer(text))), page


@pytest.mark.parametrize(("values", "text"), [([1.2, -4.6], "-5 to +1 %"), ([13.4], "+13 %"), ([0.2, 0.4], "0 %")])
def test_ranges_of_errors_are_rounded_to_whole_percent(values, text) -> None:
    assert tables.percent(values) == text


def test_a_table_on_the_page_on_trust_without_a_row_that_is_known_is_refused() -> None:
    with pytest.raises(AssertionError, match="no such rows"):
        tables.trust(ROOT, "| a | b | c |\n|---|---|---|\n| which schedule | yes | |")
