"""Tables of records: what stands in a cell, and on which side of its column."""

from simdist.studies.columns import Column
from simdist.studies.tables import table_text

COLUMNS = (
    Column("schedule", "label"),
    Column("step time", "step_s", form="{:.1f} s".format),
    Column("speed-up", "speedup", "error", form=lambda speedup, error: f"{speedup} ± {error}"),
)


def lines(*records):
    title, _, heading, _, *rows = table_text("all", COLUMNS, records).splitlines()
    assert title.strip() == "all"
    return [heading, *rows]


def test_words_are_aligned_to_the_left_and_numbers_to_the_right():
    assert lines({"label": "a", "step_s": 0.5, "speedup": 1, "error": 2}, {"label": "long", "step_s": 12.5}) == [
        " schedule  step time  speed-up",
        " a             0.5 s     1 ± 2",
        " long         12.5 s",
    ]


def test_a_key_that_is_missing_leaves_the_cell_empty_and_none_is_a_dash():
    _, row = lines({"label": "...", "speedup": None, "error": None})
    assert row.split() == ["...", "-"]


def test_a_column_of_words_at_the_end_folds_and_nothing_is_cut():
    text = table_text("all", (Column("n", form=str), Column("words")), [{"n": 1, "words": "word " * 100}])
    assert text.count("word ") + text.count("word\n") + text.endswith("word") >= 100
    assert max(map(len, text.splitlines())) <= 200


def test_a_column_with_one_value_is_stated_once_below_the_table():
    columns = (Column("schedule"), Column("io"), Column("failed"), Column("engine"), Column("step time"))
    same = {"io": "0 s", "engine": "fast"}
    records = [{"schedule": "sync", "step time": "1 s"} | same, {"schedule": "local-4", "step time": "2 s"} | same]
    _, _, heading, _, *rest = table_text("all", columns, records).splitlines()
    assert heading.split() == ["schedule", "step", "time"]
    assert rest == [" sync      1 s", " local-4   2 s", "", "In every row: io 0 s; engine fast."]


def test_one_row_or_equal_rows_keep_all_columns():
    record = {"label": "a", "step_s": 0.5, "speedup": 1, "error": 2}
    for records in ([record], [record, record], []):
        heading, *rows = lines(*records)
        assert heading.split() == ["schedule", "step", "time", "speed-up"]
        assert len(rows) == len(records)


def test_a_value_that_some_rows_lack_keeps_its_column():
    heading, *_ = lines({"label": "a", "step_s": 0.5}, {"label": "b"})
    assert heading.split() == ["schedule", "step", "time"]


def test_a_long_repeated_value_folds_below_the_table():
    records = [{"label": label, "why": "word " * 60, "step": label} for label in "ab"]
    text = table_text("all", (Column("schedule", "label"), Column("why"), Column("step")), records)
    assert text.count("word") == 60
    assert max(map(len, text.splitlines())) <= 100
