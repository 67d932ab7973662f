"""What failures leave of the time of the whole job, if the scenario has any."""

import base64
from collections.abc import Mapping, Sequence

from simdist.report.figures import svg
from simdist.report.goodput import goodput_figure
from simdist.report.page.document import Section
from simdist.report.page.html import Html, conclusions, join, prose, table, tag
from simdist.report.page.model import RunsReport
from simdist.settings.base import unchecked_copy
from simdist.settings.units import format_share
from simdist.studies.columns import Column, without_repeated
from simdist.studies.goodput import GoodputStudy, goodput
from simdist.studies.remarks import below_table

_SEEDS = 20
_ABOUT = (
    "The whole job, which meets the same failures under each schedule. Goodput is calm steps that count, without data "
    "stalls, over the time of the job; ETTR also counts slow steps. `simdist goodput` shows the same."
)


def goodput_section(report: RunsReport) -> Section | None:
    """Show the goodput of the runs whose scenario has the failures of the first one; None if it has none."""
    first = report.runs[0].run.scenario
    if first.failures is None or first.train_for is None:
        return None
    alike = [
        run.run.scenario for run in report.runs if unchecked_copy(run.run.scenario, schedules=first.schedules) == first
    ]
    study = goodput(unchecked_copy(first, schedules=tuple(each.schedules[0] for each in alike)), n_seeds=_SEEDS)
    picture = base64.b64encode(svg(goodput_figure(study))).decode()
    image = tag("img", src=f"data:image/svg+xml;base64,{picture}", alt="lost time, and goodput by the rate of failures")
    parts = [_table(*each) for each in study.tables()]
    said = conclusions([_best(study), *below_table(each for each in study.remarks if each.kind == "result")])
    return Section(
        "goodput", "Failures: how much of the time trains", join([tag("p", prose(_ABOUT)), said, image, *parts])
    )


def _best(study: GoodputStudy) -> str:
    """Say which row trains most."""
    most = max(study, key=lambda row: row.speedup or 0.0)
    return f"{most.label} trains most, with a goodput of {format_share(most.goodput)}."


def _table(title: str, columns: Sequence[Column], records: Sequence[Mapping[str, object]]) -> Html:
    columns, repeated = without_repeated(columns, records)
    rows = [[column.cell(record) for column in columns] for record in records]
    words = [column.heading for column in columns if column.is_words]
    found = table(title, [column.heading for column in columns], rows, words=words)
    return join([found, tag("p", repeated)]) if repeated else found
