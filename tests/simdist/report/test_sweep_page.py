"""Pages about sweeps: their numbers are those of the frame, nothing gets in or out, and everybody can read them."""

import json
import re
import shutil
from pathlib import Path

import pytest
from browser import chromium, opened
from commandline import SMALL, call, edited, write
from html_pages import Page, contrast, page_of

from simdist import sweeps
from simdist.files import read_jsonl
from simdist.jobs.store import DESIGN, ROWS
from simdist.report.page.document import DARK, LIGHT
from simdist.report.page.pages import sweep_page
from simdist.report.page.sections.sweep_chart import marks
from simdist.report.page.sections.sweep_fastest import fastest_conclusion
from simdist.report.page.sections.sweep_rows import sweep_data
from simdist.report.page.sweep_model import read_sweep_report, varying_fields
from simdist.sweeps import InProcess, frame, load, read_results
from simdist.sweeps.fastest import fastest
from simdist.sweeps.fields import Choice

GRID = """\
scenario: small.yaml
vary:
  cluster.nodes: [2, 4, 8]
  disturbances[0].probability: [1%, 20%]
  cluster.network.bandwidth: [1 Gbit/s, 100 Gbit/s]
seeds: 3
"""
SAMPLE = """\
scenario: small.yaml
vary:
  cluster.network.bandwidth: {log_uniform: [1 Gbit/s, 100 Gbit/s]}
  disturbances[0].delay: {uniform: [1 ms, 50 ms]}
  cluster.network: [{latency: 5 us}, {latency: 50 us}]
sample: {kind: sobol, points: 16}
seeds: 2
"""
TIES = """\
scenario: small.yaml
vary: {cluster.network.bandwidth: [1 Gbit/s, 25 Gbit/s, 400 Gbit/s], workload.forward: [20 ms, 21 ms]}
seeds: 2
"""
SAME = """\
  - {kind: hierarchical_sgd, levels: {4: world}, intra_node_gradients: false, label: same}
  - {kind: sync, label: s2}
"""
TICKS = "(texts) => texts.map((text) => text.textContent)"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
EVIL = "<script>alert(1)</script>"
TWO = SMALL.replace("  - {kind: hierarchical_sgd, levels: {2: 4, 4: world}}\n", "")
TIED = TWO + SAME  # `same` is `local-4` once more, and `s2` is `sync`
EVIL_LABEL = "<img src=x onerror=alert(2)>"  # without /, because it names folders
EVIL_SCENARIO = edited(("period: 4}", f'period: 4, label: "{EVIL_LABEL}"}}'), text=TWO)


# ---------------------------------------------------------------- sweeps and pages


def swept(folder: Path, sweep: str, scenario: str = SMALL) -> Path:
    """Compute a sweep in this process; return its folder."""
    folder.mkdir(exist_ok=True)
    write(folder / "small.yaml", scenario)
    sweeps.sweep(load(write(folder / "study.yaml", sweep)), folder / "out", workers=InProcess())
    return folder / "out"


def reported(folder: Path) -> Path:
    """Write the page of a sweep beside it."""
    page = folder.parent / f"{folder.name}.html"
    page.write_text(sweep_page(read_sweep_report(folder, baseline=None)), encoding="utf-8")
    return page


def page_of_sweep(folder: Path) -> Page:
    return page_of(reported(folder))


def data_of(page: Page) -> dict:
    (found,) = [each for each in page.all("script") if each.attributes.get("id") == "sweep-data"]
    return json.loads(found.text)


def section_names(page: Page) -> list[str]:
    *names, last = [str(each.attributes["id"]) for each in page.all("section")]
    assert last == "making"
    return names


def edit_rows(folder: Path, change) -> None:
    """Change the records of a sweep: `change` returns a new one of each, or None to drop it."""
    records = list(read_jsonl(folder / ROWS))  # without checksums: lines that were edited have none
    plain = [{key: each for key, each in record.items() if key not in ("run_s", "unseen_s")} for record in records]
    kept = [new for number, record in enumerate(plain) if (new := change(number, record)) is not None]
    (folder / ROWS).write_text("".join(f"{json.dumps(record)}\n" for record in kept))


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    """Return a grid in which `sync` is made the fastest where there are 8 nodes, so that the fastest one changes."""
    folder = swept(tmp_path_factory.mktemp("grid"), GRID)
    design = [json.loads(line) for line in (folder / DESIGN).read_text().splitlines()[1:]]
    keys = {line["key"] for line in design if line["schedule"] == "sync" and line["values"][0] == 8}

    def change(_, record):
        return record | {"step_s": [seconds / 2 for seconds in record["step_s"]]} if record["key"] in keys else record

    edit_rows(folder, change)
    return folder


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return swept(tmp_path_factory.mktemp("sample"), SAMPLE)


@pytest.fixture(scope="module")
def ties(tmp_path_factory) -> Path:
    """Return a grid in which two schedules are always the fastest together, and another is the baseline again."""
    return swept(tmp_path_factory.mktemp("ties"), TIES, TIED)


@pytest.fixture(scope="module")
def ties_path(ties) -> Path:
    return reported(ties)


@pytest.fixture(scope="module")
def grid_path(grid) -> Path:
    return reported(grid)


@pytest.fixture(scope="module")
def sample_path(sample) -> Path:
    return reported(sample)


@pytest.fixture(scope="module")
def grid_page(grid_path) -> Page:
    return page_of(grid_path)


@pytest.fixture(scope="module")
def sample_page(sample_path) -> Page:
    return page_of(sample_path)


@pytest.fixture
def mine(grid, tmp_path) -> Path:
    """Return a copy of the grid, to damage."""
    return shutil.copytree(grid, tmp_path / "out")


# ---------------------------------------------------------------- the numbers


def test_data_of_the_page_are_the_frame_with_six_digits(grid, grid_page):
    table, rows = frame(grid), data_of(grid_page)["rows"]
    assert rows["point"] == table.point.tolist()
    for key, column in {
        "step": "step_s",
        "stepLow": "step_s_ci95_low",
        "speedup": "speedup",
        "speedupHigh": "speedup_ci95_high",
        "wait": "wait_s",
        "host": "host_s",
    }.items():
        assert rows[key] == pytest.approx(table[column].tolist(), rel=1e-5, abs=1e-15), key
    data = data_of(grid_page)
    assert [data["labels"][place] for place in rows["label"]] == table.schedule.tolist()
    sizes = {"cluster.nodes": 1, "disturbances[0].probability": 100, "cluster.network.bandwidth_Bps": 8e-9}
    for field, (column, size) in zip(data["fields"], sizes.items(), strict=True):
        numbers = [field["numbers"][field["codes"][point]] for point in rows["point"]]
        assert numbers == pytest.approx((table[column] * size).tolist())


def leads_of(report, label: str) -> tuple[list[int], list[bool | None]]:
    """Return the points at which a schedule is the fastest, and whether its leads are clear where it is so alone."""
    points = [point for point, labels in report.leaders.items() if label in labels]
    return points, [report.best[point].is_clear for point in points if len(report.leaders[point]) == 1]


def test_leaders_have_the_least_mean_step_time(grid):
    table = frame(grid)
    for point, leaders in read_sweep_report(grid, baseline=None).leaders.items():
        own = table[table.point == point]
        near = own[own.step_s <= own.step_s.min() * (1 + 1e-9)]
        assert list(leaders) == near.schedule.tolist()


def test_schedules_are_counted_as_the_frame_counts_them(grid, grid_page):
    table, report = frame(grid), read_sweep_report(grid, baseline=None)
    lines = grid_page.rows("Schedules, with the range of their speed-up over sync")
    for label, own in table.groupby("schedule"):
        points, clear = leads_of(report, label)
        n_points, n_wins, _, *equal, n_clear, least, median, most = lines[label]
        assert (n_points, n_wins, sum(equal)) == (12, len(points), len(points) - len(clear))
        assert n_clear == sum(each is True for each in clear)
        assert (least, most) == (own.speedup.min(), own.speedup.max())
        assert median == pytest.approx(own.speedup.median())


def test_conclusion_says_how_often(grid):
    report = read_sweep_report(grid, baseline=None)
    points, clear = leads_of(report, "local-4")
    where = f"at {len(points)} ({100 * len(points) / 12:.0f} %) of 12 points"
    assert fastest_conclusion(report) == f"local-4 is the fastest {where}, clearly at {len(clear)}."


def test_conclusion_says_at_how_many_points_a_lead_is_clear(mine):
    """At the points with 8 nodes it is only just ahead; at the others, twice as fast in every seed."""
    design = [json.loads(line) for line in (mine / DESIGN).read_text().splitlines()[1:]]
    noisy = {line["key"] for line in design if line["values"][0] == 8}

    def change(_, record):
        steps_s = [1.0, 2.0, 3.0] if record["schedule"] != "local-4" else [0.5, 1.0, 1.5]
        if record["key"] in noisy and record["schedule"] == "local-4":
            steps_s = [3.0, 1.0, 1.9]
        return record | {"step_s": steps_s}

    edit_rows(mine, change)
    assert fastest_conclusion(read_sweep_report(mine, baseline=None)) == (
        "local-4 is the fastest at every one of 12 points, clearly at 8."
    )


def test_conclusion_of_one_seed_claims_no_clear_lead(tmp_path):
    report = read_sweep_report(swept(tmp_path, GRID.replace("seeds: 3", "seeds: 1")), baseline=None)
    assert "clear" not in fastest_conclusion(report)


def test_schedules_that_always_tie_are_the_fastest_together(ties):
    assert fastest_conclusion(read_sweep_report(ties, baseline=None)) == (
        "No lead is clear: local-4 and same each have the least mean step time at every one of 6 points."
    )


def test_a_tie_counts_for_all_and_has_no_lead(ties):
    page = page_of_sweep(ties)
    lines = page.rows("Schedules, with the range of their speed-up over sync")
    assert lines["local-4"][:5] == [6.0, 6.0, "100 %", 6.0, 0.0]
    assert lines["same"] == lines["local-4"]
    assert {tuple(lines) for lines in data_of(page)["best"]["tied"].values()} == {(1, 2)}


def set_steps(folder: Path, steps_s: dict[str, list[float]]) -> None:
    edit_rows(folder, lambda _, record: record | {"step_s": steps_s[record["schedule"]]})


NOISY_THIRD = {"local-4": [1.0, 1.1, 1.2], "sync": [1.01, 1.111, 1.212], "hsgd-2-4,4-world": [1.4, 0.9, 1.1]}


def test_a_lead_is_not_clear_where_a_third_may_be_faster(mine):
    set_steps(mine, NOISY_THIRD)
    page = page_of_sweep(mine)
    assert page.rows("Schedules, with the range of their speed-up over sync")["local-4"][3] == 0
    assert set(data_of(page)["best"]["clear"]) == {0}
    assert "No lead is clear: local-4 has the least mean step time at every one of 12 points." in page.text


def test_leads_without_noise_are_never_nothing(mine):
    set_steps(mine, {"local-4": [0.1] * 3, "sync": [0.10004] * 3, "hsgd-2-4,4-world": [0.2] * 3})
    page = page_of_sweep(mine)
    assert "local-4 is the fastest at every one of 12 points, clearly at 12." in page.text
    assert set(data_of(page)["best"]["gain"]) == {0.0004}


def test_page_says_that_chance_makes_some_leads_look_clear(grid_page, tmp_path):
    words = "about one lead in twenty looks clear all the same"
    assert words in grid_page.text
    assert words not in page_of_sweep(swept(tmp_path, GRID.replace("seeds: 3", "seeds: 1"))).text


def test_samples_have_no_map(sample_page):
    assert section_names(sample_page) == ["fastest", "chart", "rows"]


def test_heading_says_what_is_varied_with_units(grid_page, sample_page):
    lines = grid_page.rows("Varied fields")
    assert lines["cluster.network.bandwidth_Bps"] == ["1 Gbit/s, 100 Gbit/s", "2"]
    assert lines["cluster.nodes"] == ["2, 4, 8", "3"]
    low, _, high = sample_page.rows("Varied fields")["disturbances[0].delay_s"][0].partition(" to ")
    assert low.endswith(" ms")
    assert high.endswith(" ms")


# ---------------------------------------------------------------- all kinds of sweeps


def test_numbers_are_put_in_order_and_get_a_scale_that_suits():
    (field,) = varying_fields(
        ["a.delay_s"], [[Choice("100 ms", 0.1)], [Choice("1 ms", 0.001)], [Choice("10 ms", 0.01)]]
    )
    assert field.texts == ("1 ms", "10 ms", "100 ms")
    assert field.codes == (2, 0, 1)
    assert (field.is_log, field.unit, field.unit_size) == (True, "ms", 1e-3)


def test_values_that_a_rule_has_made_keep_the_unit_of_the_user(tmp_path):
    rule = "{geometric: [1 Gbit/s, 100 Gbit/s, 8]}"
    folder = swept(tmp_path, GRID.replace("[1 Gbit/s, 100 Gbit/s]", rule))
    field = read_sweep_report(folder, baseline=None).columns[2]
    expected = ("1", "1.931", "3.728", "7.197", "13.895", "26.827", "51.79", "100")
    assert field.texts == tuple(f"{number} Gbit/s" for number in expected)
    assert (field.unit, field.unit_size) == ("Gbit/s", 0.125e9)
    assert data_of(page_of_sweep(folder))["fields"][2]["texts"][-1] == "100 Gbit/s"


@pytest.mark.parametrize(
    ("column", "written", "texts", "unit"),
    [
        ("a.share", ["0.33333%", "33.3333333%"], ("0.3333%", "33.33%"), ("%", 0.01)),
        ("a.size_nbytes", ["12345678 KiB", "1 KiB"], ("1 KiB", "12345678 KiB"), ("KiB", 1024.0)),
        ("a.delay_s", ["1.23456789 min", "90 min"], ("1.235 min", "90 min"), ("min", 60.0)),
        ("a.delay_s", ["1.23456789 min", "1.23456788 min"], ("1.23456788 min", "1.23456789 min"), ("min", 60.0)),
        ("a.delay_s", ["1.23456789 min", "90 s"], ("74.1 s", "90 s"), ("s", 1.0)),
    ],
    ids=["percent", "binary", "minutes", "nearly equal", "two units"],
)
def test_long_values_are_rounded_in_the_only_unit_of_their_field(column, written, texts, unit):
    (field,) = varying_fields([column], [[Choice(each, in_si(each))] for each in written])
    assert field.texts == texts
    assert (field.unit, field.unit_size) == unit


def in_si(written: str) -> float:
    number, word = re.fullmatch(r"([\d.]+) ?(\D+)", written).groups()
    return float(number) * {"%": 0.01, "KiB": 1024, "min": 60, "s": 1}[word]


def edit_header(folder: Path, **settings: object) -> None:
    header, *lines = (folder / DESIGN).read_text().splitlines(keepends=True)
    found = {key: value for key, value in (json.loads(header) | settings).items() if value is not None}
    (folder / DESIGN).write_text("".join([f"{json.dumps(found)}\n", *lines]))


@pytest.mark.parametrize(
    ("sampling", "is_grid", "how"),
    [
        ("grid", True, "all combinations of their values"),
        ("random", False, "a random sample of their values"),
        ("sobol", False, "a Sobol sequence of their values"),
    ],
)
def test_the_design_says_how_points_were_taken(mine, sampling, is_grid, how):
    edit_header(mine, sampling=sampling)
    assert read_sweep_report(mine, baseline=None).is_grid == is_grid
    assert f"with 3 fields varied: {how}." in page_of_sweep(mine).text


def test_a_mapping_and_a_truth_value_are_texts():
    first, second = varying_fields(
        ["cluster.network", "x"],
        [
            [Choice({"latency": "5 us"}, "{latency: 5 us}"), Choice(True, True)],
            [Choice("ideal", "ideal"), Choice(1, 1)],
        ],
    )
    assert first.texts == ("{latency: 5 us}", "ideal")
    assert (first.numbers, second.numbers) == (None, None)
    assert second.codes == (0, 1)


def test_a_mapping_as_a_value_is_a_field_of_words(sample_page):
    assert "cluster.network" in sample_page.rows("Varied fields")
    (field,) = [each for each in data_of(sample_page)["fields"] if each["name"] == "network"]
    assert field["numbers"] is None
    assert len(field["texts"]) == 2


def test_one_varied_field_has_a_chart_and_no_map(tmp_path):
    page = page_of_sweep(swept(tmp_path, "{scenario: small.yaml, vary: {cluster.nodes: [2, 4]}, seeds: 1}"))
    assert section_names(page) == ["fastest", "chart", "rows"]
    assert "With one seed there are no intervals" in page.text


def test_a_single_point_has_neither_chart_nor_map(tmp_path):
    page = page_of_sweep(swept(tmp_path, "{scenario: small.yaml, vary: {cluster.nodes: [2]}, seeds: 2}"))
    assert section_names(page) == ["fastest", "rows"]


def test_cases_are_one_field_and_what_they_set_is_shown_beside(tmp_path):
    sweep = """\
scenario: small.yaml
vary: {cluster.nodes: [1, 2]}
cases:
  - {name: slow, cluster.network.bandwidth: 1 Gbit/s, cluster.network.latency: 50 us}
  - {name: fast, cluster.network.bandwidth: 100 Gbit/s}
seeds: 2
"""
    folder = swept(tmp_path, sweep)
    report = read_sweep_report(folder, baseline=None)
    assert [field.column for field in report.axes] == ["case", "cluster.nodes"]
    assert report.is_grid
    page = page_of_sweep(folder)
    assert page.rows("Varied fields")["case"] == ["slow, fast", "2"]
    assert "map" in section_names(page)
    assert page.rows("Varied fields")["cluster.network.latency_s"] == ["50 us, or as in the scenario", "1"]
    fields = {field["name"]: field["axis"] for field in data_of(page)["fields"]}
    assert fields == {"case": True, "nodes": True, "bandwidth": False, "latency": False}
    (latency,) = [field for field in data_of(page)["fields"] if field["name"] == "latency"]
    assert (latency["texts"], set(latency["codes"])) == (["50 us"], {0, None})


def test_schedules_whose_settings_vary_share_a_line_by_kind(tmp_path):
    sweep = "{scenario: small.yaml, vary: {schedules.1.period: [2, 4], cluster.nodes: [1, 2]}, seeds: 2}"
    report = read_sweep_report(swept(tmp_path, sweep, TWO), baseline=None)
    assert report.lines == ("sync", "local_sgd")
    assert sweep_data(report)["labels"] == ["sync", "local-2", "local-4"]


def test_another_baseline_can_be_asked_for(capsys, grid, tmp_path):
    answer = call(capsys, "report", grid, "-o", tmp_path / "page.html", "--baseline", "local_sgd", "--json")
    assert json.loads(answer.out)["baseline"] == "local_sgd"
    rows = data_of(page_of(tmp_path / "page.html"))["rows"]
    expected = frame(grid, baseline="local_sgd").speedup.tolist()
    assert rows["speedup"] == pytest.approx(expected, rel=1e-5)


def test_an_incomplete_sweep_says_so_and_compares_what_is_there(mine):
    edit_rows(mine, lambda number, record: record if number % 5 else None)
    page = page_of_sweep(mine)
    assert "8 of 36 rows are not there yet" in page.text
    table = frame(mine)
    lines = page.rows("Schedules, with the range of their speed-up over sync")
    assert lines["local-4"][0] == (table.schedule == "local-4").sum()
    assert 1 in data_of(page)["best"]["partial"]


def test_nothing_computed_yet_gives_a_page(mine):
    (mine / ROWS).unlink()
    page = page_of_sweep(mine)
    assert section_names(page) == ["fastest", "rows"]
    assert "At no point were two schedules measured" in page.text


def test_messages_of_failed_rows_are_escaped(mine):
    def change(number, record):
        if number % 4 == 0:
            return {"key": record["key"], "failed": "PlanError", "error": EVIL}
        return {"key": record["key"], "failed": "RunError", "error": "killed"} if number == 1 else record

    edit_rows(mine, change)
    assert EVIL not in reported(mine).read_text()
    assert data_of(page_of_sweep(mine))["failures"] == [f"PlanError: {EVIL}", "RunError: killed"]


def test_a_sweep_of_which_all_failed_has_no_chart(mine):
    edit_rows(mine, lambda _, record: {"key": record["key"], "failed": "PlanError", "error": "no"})
    assert section_names(page_of_sweep(mine)) == ["fastest", "rows"]


def test_without_the_baseline_step_times_are_shown(mine):
    keys = {json.loads(line)["key"] for line in (mine / DESIGN).read_text().splitlines()[1::3]}
    edit_rows(mine, lambda _, record: None if record["key"] in keys else record)
    page = page_of_sweep(mine)
    assert "no speed-ups at 12 points" in page.text
    assert data_of(page)["metrics"][0]["key"] == "step"
    assert page.rows("Schedules, with the range of their speed-up over sync")["local-4"][-3:] == ["-", "-", "-"]
    assert section_names(page) == ["fastest", "chart", "map", "rows"]


def test_goodput_can_be_drawn_if_the_job_fails(mine):
    assert "goodput" not in [each["key"] for each in data_of(page_of_sweep(mine))["metrics"]]
    edit_rows(mine, lambda number, record: record | {"goodput": 0.9 + number / 1000, "ettr": 0.95})
    data = data_of(page_of_sweep(mine))
    assert {"key": "goodput", "name": "goodput of the whole job", "unit": "part"} in data["metrics"]
    assert sorted(data["rows"]["goodput"])[:2] == [0.9, 0.901]


def test_what_users_write_is_escaped_everywhere(tmp_path):
    sweep = f"""\
scenario: small.yaml
vary: {{cluster.nodes: [1, 2], disturbances.0.probability: [1%, 9%]}}
cases: [{{name: "{EVIL}", cluster.gpus_per_node: 2}}, {{name: b}}]
seeds: 2
"""
    page = reported(swept(tmp_path, sweep, EVIL_SCENARIO))
    text = page.read_text()
    for evil in (EVIL, EVIL_LABEL):
        assert evil not in text
        assert page_of(page).text.count(evil) > 2
    assert {each.attributes.get("src") for each in page_of(page).all("script")} == {None}


def test_backticks_in_names_of_users_are_shown(mine):
    folder = mine.rename(mine.parent / "a`b`c")
    edit_header(folder, baseline="d`e`")
    edit_rows(folder, lambda number, record: record if number else None)
    page = page_of_sweep(folder)
    assert (
        "1 of 36 rows are not there yet, so all below is of the others: simdist sweep into a`b`c goes on." in page.text
    )
    assert "no schedule called 'd`e`' was measured there" in page.text
    assert "simdist sweep" in {each.text for each in page.all("code")}


def test_commands_in_remarks_are_code_and_have_no_backticks(mine):
    remark = {"kind": "input", "text": "measure it with `simdist validate`", "place": ""}
    edit_header(mine, remarks=[remark])
    page = page_of_sweep(mine)
    assert "measure it with simdist validate." in page.text
    assert "simdist validate" in {each.text for each in page.all("code")}


def test_equal_sweeps_give_equal_pages(grid):
    first, second = (sweep_page(read_sweep_report(grid, baseline=None)) for _ in range(2))
    assert first == second


def test_colours_of_lines_have_contrast_on_both_grounds():
    for theme in (LIGHT, DARK):
        for number in range(6):
            assert contrast(theme[f"line-{number}"], theme["bg"]) >= 3, number


# ---------------------------------------------------------------- command line


def test_report_says_what_the_page_is_of(capsys, grid, tmp_path):
    answer = call(capsys, "report", grid, "-o", tmp_path / "page.html")
    assert answer.code == 0
    assert "study; 12 points, 36 rows;" in answer.out
    document = json.loads(call(capsys, "report", grid, "-o", tmp_path / "page.html", "--json").out)
    counts = {key: document[key] for key in ("sweep", "points", "rows", "failed", "missing")}
    assert counts == {"sweep": "study", "points": 12, "rows": 36, "failed": 0, "missing": 0}
    assert document["nbytes"] == (tmp_path / "page.html").stat().st_size


def test_steps_of_a_sweep_are_refused(capsys, grid, tmp_path):
    answer = call(capsys, "report", grid, "-o", tmp_path / "page.html", "--steps", "1:2")
    assert answer.code == 2
    assert "holds a sweep, which has no timeline" in answer.err


def test_more_rows_than_a_page_holds_are_refused(capsys, grid, tmp_path, monkeypatch):
    monkeypatch.setattr("simdist.report.page.sweep_model.MOST_ROWS", 35)
    answer = call(capsys, "report", grid, "-o", tmp_path / "page.html")
    assert answer.code == 2
    assert "36 rows, of which a page holds 35" in answer.err


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


def cells(page, area: str) -> list[list[str]]:
    """Return the lines of a table as they are shown."""
    return page.eval_on_selector_all(
        f"{area} tbody tr", "rows => rows.map(row => [...row.cells].map(c => c.innerText))"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_pages_open_without_a_request_or_a_complaint(browser, grid_path, sample_path, scheme, width):
    for path in (grid_path, sample_path):
        settings = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
        with opened(browser, path, **settings) as watched:
            watched.page.wait_for_selector("#sweep-chart[data-ready]")
            assert watched.page.evaluate("document.documentElement.scrollWidth") == width


def test_without_scripts_the_page_says_what_is_missing(browser, grid_path):
    with opened(browser, grid_path, java_script_enabled=False) as watched:
        assert "are drawn by scripts, which are off" in watched.page.inner_text("body")
        assert cells(watched.page, "#sweep-rows") == []


def test_tables_have_the_numbers_of_the_frame(browser, grid, grid_path):
    table = frame(grid)
    at = (table["disturbances[0].probability"] == 0.2) & (table["cluster.network.bandwidth_Bps"] == 12.5e9)
    with opened(browser, grid_path) as watched:
        page = watched.page
        page.wait_for_selector("#sweep-rows[data-ready]")
        rows, chart = cells(page, "#sweep-rows"), cells(page, "#sweep-chart-table")
        caption = page.inner_text("#sweep-chart-table caption")
    assert rows[0][:5] == ["0", "2", "1%", "1 Gbit/s", "sync"]
    for column, name, scale in ((5, "step_s", 1e3), (6, "speedup", 1)):
        shown = [float(NUMBER.search(line[column])[0]) for line in rows]
        assert shown == pytest.approx((scale * table[name]).tolist(), rel=0.012)
    assert caption == "Speed-up over sync, by nodes, at disturbances[0].probability 20%, bandwidth 100 Gbit/s"
    for (nodes, own), line in zip(table[at].groupby("cluster.nodes"), chart, strict=True):
        assert line[0] == str(nodes)
        assert [float(NUMBER.search(cell)[0]) for cell in line[1:]] == pytest.approx(own.speedup.tolist(), abs=6e-3)


def test_the_table_of_a_sample_has_the_range_of_the_frame(browser, sample, sample_path):
    table = frame(sample)
    with opened(browser, sample_path) as watched:
        watched.page.wait_for_selector("#sweep-rows[data-ready]")
        lines = {line[0]: line[1:] for line in cells(watched.page, "#sweep-chart-table")}
    own = table[table.schedule == "local-4"].speedup
    expected = [len(own), own.min(), own.median(), own.max()]
    assert [float(cell) for cell in lines["local-4"]] == pytest.approx(expected, abs=6e-3)


def lead_percent(lead: float) -> str:
    """Return by how much the second takes longer than the fastest, as the page writes it."""
    percents = 100 * (lead - 1)
    return f"+{percents:.1f} %" if percents >= 1 else f"+{percents:.2g} %" if percents >= 0.001 else "+<0.001 %"


def test_map_names_the_fastest_schedule_and_its_lead(browser, grid, grid_path):
    best = {
        (each.result.choices["cluster.nodes"].number, each.result.choices["disturbances[0].probability"].number): each
        for each in fastest(read_results([grid]))
        if each.result.choices["cluster.network.bandwidth_Bps"].number == 12.5e9
    }
    report = read_sweep_report(grid, baseline=None)
    letters = marks(report)
    with opened(browser, grid_path) as watched:
        watched.page.wait_for_selector("#sweep-map[data-ready]")
        found = [cell for line in cells(watched.page, "#sweep-map") for cell in line[1:]]
    across = [best[nodes, share] for share in (0.01, 0.2) for nodes in (2, 4, 8)]
    for cell, each in zip(found, across, strict=True):
        sign = "≈ " if each.is_clear is False else ""
        leaders = [letters[label] for label in report.leaders[each.result.point]]
        alone = f"{letters[each.result.schedule]} {sign}{lead_percent(each.lead)}"
        assert cell == (alone if len(leaders) == 1 else " = ".join(leaders))


def test_selectors_change_the_chart_and_its_table(browser, grid, grid_path):
    table = frame(grid)
    with opened(browser, grid_path) as watched:
        page = watched.page
        page.wait_for_selector("#sweep-chart[data-ready='speedup nodes']")
        before = page.get_attribute(".sweep-line.line-1", "d")
        page.select_option("#sweep-at-1", label="1%")
        assert page.get_attribute(".sweep-line.line-1", "d") != before
        page.select_option("#sweep-metric", "wait")
        page.select_option("#sweep-x", label="bandwidth")
        page.wait_for_selector("#sweep-chart[data-ready='wait bandwidth']")
        assert page.is_hidden("#sweep-at-2")
        nodes = page.input_value("#sweep-at-0")
        own = table[(table["disturbances[0].probability"] == 0.01) & (table["cluster.nodes"] == (2, 4, 8)[int(nodes)])]
        shares = own.wait_s / own.step_s
        found = [cell for line in cells(page, "#sweep-chart-table") for cell in line[1:]]
        assert [float(cell.removesuffix(" %")) for cell in found] == pytest.approx(100 * shares, rel=0.06, abs=1e-9)


def test_a_unit_stands_at_the_ticks_or_in_the_title_of_the_axis(browser, grid_path, sample_path):
    for path, expected in (
        (grid_path, " bandwidth, logarithmic"),
        (sample_path, "bandwidth (Gbit/s), logarithmic"),
    ):
        with opened(browser, path) as watched:
            page = watched.page
            page.select_option("#sweep-x", label="bandwidth")
            texts = page.eval_on_selector_all("#sweep-chart text.axis", TICKS)
            assert " ".join(texts).endswith(expected)
            assert ("1 Gbit/s" in texts) == (path == grid_path)


def test_ties_in_the_map_name_all(browser, ties_path):
    with opened(browser, ties_path) as watched:
        page = watched.page
        page.wait_for_selector("#sweep-map[data-ready]")
        assert {cell for line in cells(page, "#sweep-map") for cell in line[1:]} == {"B = C"}
        assert page.get_attribute("#sweep-map td", "title") == "local-4 and same"


def test_schedules_can_be_hidden(browser, grid_path):
    with opened(browser, grid_path) as watched:
        page = watched.page
        assert page.locator(".sweep-chart .sweep-marks.line-1").count() == 1
        page.get_by_label("local-4").uncheck()
        assert page.locator(".sweep-chart .sweep-marks.line-1").count() == 0


@pytest.mark.parametrize("kind", ["grid", "sample"])
def test_keys_read_points_out(browser, kind, request):
    folder = request.getfixturevalue(kind)
    table = frame(folder)
    with opened(browser, request.getfixturevalue(f"{kind}_path")) as watched:
        page = watched.page
        page.focus("#sweep-chart")
        page.keyboard.press("ArrowRight")
        first = page.inner_text("#sweep-readout")
        assert first.startswith("local-4, ")
        page.keyboard.press("ArrowRight")
        second = page.inner_text("#sweep-readout")
        assert second != first
        page.keyboard.press("ArrowDown")
        third = page.inner_text("#sweep-readout")
        assert third.startswith("hsgd-2-4,4-world, ")
        point = int(third.rpartition("(point ")[2].removesuffix(")"))
        own = table[(table.point == point) & (table.schedule == "hsgd-2-4,4-world")]
        assert float(third.partition("speed-up over sync ")[2].split()[0]) == pytest.approx(
            own.speedup.item(), abs=6e-3
        )


def test_map_follows_its_selectors(browser, grid, grid_path):
    letters = marks(read_sweep_report(grid, baseline=None))
    best = {
        (each.result.choices["cluster.nodes"].number, each.result.choices["cluster.network.bandwidth_Bps"].number): each
        for each in fastest(read_results([grid]))
        if each.result.choices["disturbances[0].probability"].number == 0.01
    }
    with opened(browser, grid_path) as watched:
        page = watched.page
        page.select_option("#sweep-map-rows", label="bandwidth")
        page.select_option("#sweep-map-at-1", label="1%")
        found = [cell for line in cells(page, "#sweep-map") for cell in line[1:]]
        expected = [letters[best[nodes, Bps].result.schedule] for Bps in (0.125e9, 12.5e9) for nodes in (2, 4, 8)]
        assert [cell.split()[0] for cell in found] == expected


def test_choosing_the_other_field_of_the_map_swaps_both(browser, grid_path):
    with opened(browser, grid_path) as watched:
        page = watched.page
        before = [line[1:] for line in cells(page, "#sweep-map")]
        page.select_option("#sweep-map-rows", page.input_value("#sweep-map-columns"))
        after = [line[1:] for line in cells(page, "#sweep-map")]
        assert after == [list(line) for line in zip(*before, strict=True)]


def test_rows_are_sorted_and_filtered(browser, grid, grid_path):
    table = frame(grid)
    with opened(browser, grid_path) as watched:
        page = watched.page
        page.fill("#sweep-filter", "LOCAL-4 100")
        lines = cells(page, "#sweep-rows")
        own = table[(table.schedule == "local-4") & (table["cluster.network.bandwidth_Bps"] == 12.5e9)]
        assert [int(line[0]) for line in lines] == own.point.tolist()
        assert page.inner_text("#sweep-count") == "6 of 36 rows."
        header = page.get_by_role("button", name="speed-up")
        header.click()
        header.click()
        assert page.get_attribute("#sweep-rows th[aria-sort]", "aria-sort") == "descending"
        points = [int(line[0]) for line in cells(page, "#sweep-rows")]
        assert [own.speedup[own.point == point].item() for point in points] == sorted(own.speedup, reverse=True)


def test_page_with_evil_words_runs_none_of_them(browser, tmp_path):
    sweep = f"""\
scenario: small.yaml
vary: {{cluster.nodes: [1, 2]}}
cases: [{{name: "{EVIL}", disturbances.0.probability: 5%}}, {{name: b}}]
seeds: 2
"""
    with opened(browser, reported(swept(tmp_path, sweep, EVIL_SCENARIO))) as watched:
        page = watched.page
        page.select_option("#sweep-x", label="case")
        page.select_option("#sweep-x", label="nodes")
        page.focus("#sweep-chart")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#sweep-readout").startswith(EVIL_LABEL)
        assert EVIL in page.inner_text("#sweep-map")


def made_up(folder: Path, n_points: int) -> Path:
    """Write a sweep of random points as if it had been computed."""
    folder.mkdir()
    header = {"simdist": "0", "sweep": "many", "scenario": "x", "columns": ["a.delay_s", "b"], "has_cases": False}
    of_all = {"baseline": "sync", "seeds": 2, "engine": "auto", "sampling": "random", "n_points": n_points}
    design = [header | of_all]
    rows = []
    for point in range(n_points):
        values = [1e-3 + 1e-5 * (point * 7919 % n_points), point * 104729 % n_points / n_points]
        for position, label in enumerate(("sync", "local-4", "other")):
            key = f"{point}-{position}"
            of_row = {"position": position, "schedule": label, "kind": label, "key": key}
            design.append({"point": point, "case": "", "values": values, "written": values, **of_row})
            step_s = 0.1 + values[0] * values[1] * (3 - position)
            states = {"compute_s": 0.1, "comm_s": 0.0, "wait_s": step_s - 0.1, "io_s": 0.0, "host_s": 0.0}
            rows.append({"key": key, "schedule": label, "engine": "fast", "step_s": [step_s, step_s * 1.01], **states})
    for name, records in ((DESIGN, design), (ROWS, rows)):
        (folder / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


@pytest.mark.parametrize("n_points", [1000, pytest.param(10_000, marks=pytest.mark.full)])
def test_thousands_of_points_fit_on_a_page_and_open(browser, tmp_path, n_points):
    path = reported(made_up(tmp_path / "many", n_points))
    assert path.stat().st_size < 2e5 + 580 * n_points
    with opened(browser, path) as watched:
        page = watched.page
        page.wait_for_selector("#sweep-rows[data-ready]")
        assert page.inner_text("#sweep-count") == f"The first 200 of {3 * n_points:,} rows."
        assert page.get_attribute(".sweep-dots.line-2", "d").count("M") == n_points
        page.fill("#sweep-filter", "other")
        page.get_by_role("button", name="point").click()
        assert [line[0] for line in cells(page, "#sweep-rows")] == [str(n_points - 1 - number) for number in range(200)]
