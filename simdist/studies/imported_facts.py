"""Where the steps of an imported job go, as a table."""

import math
from collections.abc import Mapping

from simdist.scenario import Imported, Scenario
from simdist.scenario.facts import Lost, part_in_words
from simdist.settings.units import format_seconds, format_share
from simdist.studies.columns import Column
from simdist.studies.tables import table_text

_Seen = tuple[float, int]  # seconds, and the rank


def _of_rank(seen: _Seen) -> str:
    return f"{format_seconds(seen[0])} (rank {seen[1]})"


_COLUMNS = (Column("part", words=str), Column("time", form=format_seconds), Column("share", form=format_share))
_RANK_COLUMNS = (Column("least", form=_of_rank), Column("most", form=_of_rank))


def where_text(
    title: str, parts_s: Mapping[str, float], extremes: Mapping[str, tuple[_Seen, _Seen]] | None = None
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


def lost_text(lost: Lost, without_named_s: float) -> str:
    """Say how much of a traced step is lost, to what, and how long it would be without what the import names."""
    text = f"{format_share(lost.total)} of a step is lost"
    if not lost.causes:
        return text
    text = f"{text}: {lost.causes}"
    what = " and ".join(lost.named_causes)
    return f"{text}\nwithout {what}, a step would take {format_seconds(without_named_s)}" if what else text


def lost_record(lost: Lost) -> dict[str, object]:
    """Return shares of a step that are lost as JSON has them.

    Columns:
        stragglers, common, uneven, noise (float): Lost to named delays of ranks and nodes, to delays of all ranks at
            once, to uneven work, to noise.
        total (float): Their sum.
    """
    return {**lost.model_dump(), "total": lost.total}


def facts_text(facts: Imported) -> str:
    """Return where the steps of the job went that a scenario was imported from, and what it is bound by."""
    return f"{where_text('where a step of the traced job goes', facts.parts)}\n{facts.verdict}."


def facts_record(facts: Imported) -> dict[str, object]:
    """Return the facts of a traced job as JSON has them."""
    numbers = {
        "step_s": facts.step_s,
        "error": facts.error,
        "parts_s": dict(facts.parts),
        "without_named_s": facts.without_named_s,
        "lost": lost_record(facts.lost),
    }
    return numbers | {"left_out": facts.left_out, "verdict": facts.verdict}
