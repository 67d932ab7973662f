"""Tables of README and docs are those of recorded results, and each is held to them by some test."""

import re
from statistics import median

import pytest
from scripts import ROOT, load_script

tables = load_script(ROOT / "tools" / "tables.py")
ELSEWHERE = {  # table -> the test that holds it to what was recorded
    "coverage in short": "tests/experiments/test_coverage.py",
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


MEDIANS = {  # the median error of each family of published rows, in percent or points, at most
    "hsgd_stragglers": (6, 3),
    "one_machine": (3, 2, 2),
    "horovod_scaling": (4, 5, 5, 4, 4),
    "aws_p3_scaling": (3, 2, 13),
    "dawnbench_resnet50": (3, 9, 2),
    "published_sharding": (3, 3, 2, 2, 2, 13, 51),
    "nccl_tables": (2, 6, 4, 2, 4, 2, 6, 12, 4, 5, 12, 5, 40, 3),
    "hitopk_communication": (14, 133),
    "gtopk_1gbe": (5, 6, 12, 9),
    "mlperf_storage": (6,),
    "efs_k80": (2, 2, 3, 27),
    "backup_workers": (11,),
    "garbage_collection": (37,),
    "streaming_diloco": (21, 74),
    "netai_whatif": (1,),
}


def test_no_family_of_published_rows_is_met_worse_than_it_was() -> None:
    found = {name: [median(map(abs, each.found(name).errors)) for each in of] for name, of in tables.FAMILIES.items()}
    assert found.keys() == MEDIANS.keys()
    worse = {
        (name, tables.FAMILIES[name][number].what): error
        for name, errors in found.items()
        for number, (error, most) in enumerate(zip(errors, MEDIANS[name], strict=True))
        if error > most
    }
    assert worse == {}


@pytest.mark.parametrize(("collectives", "most", "met"), [(False, 3.1, 0.87), (True, 7.0, 0.9)])
def test_published_rows_are_met_within_10_percent_or_in_their_intervals(collectives, most, met) -> None:
    every = tables.all_rows(collectives=collectives)
    assert median(map(abs, every.errors)) < most
    assert every.n_met / len(every.errors) >= met
    assert 0.9 <= sum(every.in_intervals) / len(every.in_intervals) <= 1
