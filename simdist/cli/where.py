"""Where the steps of an imported job go, as a table."""

import math
from collections.abc import Mapping

from simdist.cli.tables import table_text
from simdist.scenario import Imported, Scenario
from simdist.scenario.facts import part_in_words
from simdist.settings.units import format_seconds, format_share
from simdist.studies.columns import Column

Seen = tuple[float, int]  # seconds, and the rank


def _of_rank(seen: Seen) -> str:
    return f"{format_seconds(seen[0])} (rank {seen[1]})"


_COLUMNS = (Column("part", words=str), Column("time", form=format_seconds), Column("share", form=format_share))
_RANK_COLUMNS = (Column("least", form=_of_rank), Column("most", form=_of_rank))


def where_text(
    title: str, parts_s: Mapping[str, float], extremes: Mapping[str, tuple[Seen, Seen]] | None = None
) -> str:
    """Return a table of the parts of a step.

    Args:
        title: Above it.
        parts_s: Part, as `StepPart` names it in small letters -> seconds; they add up to the step.
        extremes: Part -> the rank that has least of it, and the one that has most; None with one rank.
    """
    step_s = math.fsum(parts_s.values())
    records = [
        {
            "part": part_in_words(part),
            "time": seconds,
            "share": seconds / step_s if step_s else 0.0,
            **dict(zip(("least", "most"), extremes[part] if extremes else (), strict=False)),
        }
        for part, seconds in parts_s.items()
    ]
    return table_text(title, (*_COLUMNS, *(_RANK_COLUMNS if extremes else ())), records)


def not_compared(scenario: Scenario) -> str | None:
    """Say that schedules are not compared, if the scenario leaves out a part of the job that it was imported from."""
    facts = scenario.imported
    return f"no schedules are compared: {facts.problem}" if facts and facts.left_out else None


def without_text(step_s: float, share: float) -> str:
    """Say what a traced step would take without the stragglers that the import names."""
    return f"without them a step would take {format_seconds(step_s)}: {format_share(share)} of the step is lost to them"


def facts_text(facts: Imported) -> str:
    """Return where the steps of the job went that a scenario was imported from, and what it is bound by."""
    return f"{where_text('where a step of the traced job goes', facts.parts)}\n{facts.verdict}."


def facts_record(facts: Imported) -> dict[str, object]:
    """Return the facts of a traced job as JSON has them."""
    numbers = {
        "step_s": facts.step_s,
        "error": facts.error,
        "parts_s": dict(facts.parts),
        "without_stragglers_s": facts.without_stragglers_s,
        "straggling_share": facts.straggling_share,
    }
    return numbers | {"left_out": facts.left_out, "verdict": facts.verdict}
