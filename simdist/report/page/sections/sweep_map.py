"""A map: the fastest schedule over two fields of a grid, with its lead."""

from collections.abc import Iterator

from simdist.report.page.document import Section
from simdist.report.page.html import Html, controls, framed_table, join, select, tag
from simdist.report.page.sections.sweep_chart import value_selects
from simdist.report.page.sections.sweep_fastest import compared, lead_percent
from simdist.report.page.sweep_fields import VaryingField
from simdist.report.page.sweep_model import SweepReport
from simdist.sweep.selection import Fastest

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = 6
_MOST_CELLS = 60  # of a row or column; more cannot be read
_ABOUT = (
    "The fastest schedule at each combination, and by how many percent the second takes longer. A cell with ≈ and a "
    "pale ground has a lead that is not clear; one with = has schedules that take equally long; one with * lacks a "
    "schedule that failed or is missing."
)


def marks(report: SweepReport) -> dict[str, str]:
    """Return a letter or two for each line, which stands for it where there is little room."""
    n = len(_LETTERS)
    return {
        line: (_LETTERS[place // n - 1] if place >= n else "") + _LETTERS[place % n]
        for place, line in enumerate(report.lines)
    }


def map_section(report: SweepReport) -> Section | None:
    """Show the map, or nothing where there are no two fields of a grid."""
    if not report.is_grid or len(report.axes) < 2 or not compared(report):
        return None
    readable = [place for place, field in enumerate(report.axes) if field.n_values <= _MOST_CELLS]
    if len(readable) < 2:
        return None
    columns, rows = sorted(readable, key=lambda place: -report.axes[place].n_values)[:2]
    at = tuple(field.n_values // 2 for field in report.axes)
    parts = [
        tag("p", _ABOUT),
        _controls(report, readable, columns, rows, at),
        _legend(report),
        tag("div", _table(report, columns, rows, at), id="sweep-map"),
    ]
    return Section("map", "Map of the fastest schedule", join(parts))


def _controls(report: SweepReport, readable: list[int], columns: int, rows: int, at: tuple[int, ...]) -> Html:
    fields = [(report.axes[place].name, place) for place in readable]
    across = select("sweep-map-columns", "From left to right", fields, columns)
    down = select("sweep-map-rows", "from top to bottom", fields, rows)
    return controls(across, down, *value_selects(report, at, "sweep-map-at"))


def _legend(report: SweepReport) -> Html:
    items = (
        tag("li", tag("span", mark, class_=f"sweep-mark line-{place % _COLOURS}", aria_hidden="true"), f" {line}")
        for place, (line, mark) in enumerate(marks(report).items())
    )
    return tag("ul", *items, class_="legend")


def _table(report: SweepReport, columns: int, rows: int, at: tuple[int, ...]) -> Html:
    across, down = report.axes[columns], report.axes[rows]
    cells = dict(_cells(report, columns, rows, at))
    head = [tag("th", f"{down.name} \\ {across.name}", scope="col", class_="word")]
    head += [tag("th", text, scope="col", class_="cell") for text in across.texts]
    lines = [_line(text, code, across, cells) for code, text in enumerate(down.texts)]
    others = [
        f"{field.name} {field.texts[at[place]]}"
        for place, field in enumerate(report.axes)
        if place not in (columns, rows)
    ]
    caption = f"Fastest schedule by {down.name} and {across.name}{', at ' + ', '.join(others) if others else ''}"
    return framed_table(caption, join(head), lines, class_="sweep-map")


def _line(text: str, row: int, across: VaryingField, cells: dict[tuple[int, int], Html]) -> Html:
    found = (cells.get((code, row), tag("td", "-", class_="cell")) for code in range(across.n_values))
    return tag("tr", tag("th", text, scope="row", class_="word"), *found)


def _cells(report: SweepReport, columns: int, rows: int, at: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], Html]]:
    """Yield column, row and cell."""
    letters = marks(report)
    for point, each in compared(report).items():
        codes = [field.codes[point] for field in report.axes]
        if all(code == at[place] or place in (columns, rows) for place, code in enumerate(codes)):
            first = report.leaders[point][0]
            unclear = " unclear" if report.is_clear(point) is False else ""
            is_partial = each.n_schedules < report.n_schedules[point]
            cell = tag(
                "td",
                tag("b", " = ".join(letters[line] for line in report.leaders[point])),
                f"{_lead_text(report, point, each)}{'*' if is_partial else ''}",
                title=" and ".join(report.leaders[point]),
                class_=f"cell won line-{report.lines.index(first) % _COLOURS}{unclear}",
            )
            yield (int(codes[columns] or 0), int(codes[rows] or 0)), cell


def _lead_text(report: SweepReport, point: int, each: Fastest) -> str:
    """Return by how much the second takes longer, with ≈ if that is not clear; nothing if there is no lead."""
    if len(report.leaders[point]) > 1:
        return ""
    unclear = " ≈" if report.is_clear(point) is False else ""
    return f"{unclear} {lead_percent(each.lead or 1.0)}"
