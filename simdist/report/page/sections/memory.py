"""Memory of a device over the first steps of each schedule, by what it is for."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from simdist.report.page.charts import ticks
from simdist.report.page.document import Section
from simdist.report.page.html import Html, conclusions, duration, join, table, tag
from simdist.report.page.model import ReportedRun, RunsReport
from simdist.report.palette import time_unit
from simdist.runs.memory import memory_of_trace, not_counted
from simdist.settings.units import format_nbytes
from simdist.traces.memory import MEMORY_KINDS, MemoryKind, Occupancy
from simdist.traces.waiting import first_steps

_STEPS = 2  # shown of each run
_MOMENTS = 400  # most moments of a curve; of several in one part of the time, the one with most memory
_TOP = 6  # pixels, as the next two
_HEIGHT = 150
_AXIS = 40
_WIDE = 1000.0  # of the curves, which are stretched to the width of the page
_ABOUT = (
    "What is in use on the device of rank 0 over the first two steps, by what it is for. Each picture has a scale of "
    "its own; a dashed line is the memory that the device has, if more is in use. PyTorch's allocator reserves a "
    "little more."
)
#: What memory is for, in words.
_KIND_WORDS: dict[MemoryKind, str] = {
    "parameters": "parameters, or slices of them",
    "optimizer": "state of the optimizer",
    "units": "gathered units",
    "gradients": "gradients",
    "activations": "activations",
    "communication": "inputs and outputs of collectives",
    "other": "inputs, residuals and checkpoints",
}


def memory_section(report: RunsReport) -> Section | None:
    """Show the memory of each run if a schedule shards the model or does not fit; None otherwise."""
    found = [(run, _occupancy(run)) for run in report.runs]
    if not any(_is_told(run, memory) for run, memory in found):
        return None
    charts = [_chart(run, memory) for run, memory in found]
    answers = conclusions(_conclusion(run, memory) for run, memory in found)
    parts = [tag("p", _ABOUT), answers, _legend([memory for _, memory in found]), *charts, _table(found)]
    return Section("memory", "Memory of a device", join(parts))


def _occupancy(run: ReportedRun) -> Occupancy:
    trace = next(iter(run.executions.values())).trace
    return memory_of_trace(first_steps(trace, min(_STEPS, trace.plan.n_steps)), run.run.scenario.workload)


def _is_told(run: ReportedRun, memory: Occupancy) -> bool:
    limit_nbytes = _limit_nbytes(run)
    does_fit = limit_nbytes is None or memory.peak_nbytes <= limit_nbytes
    return not does_fit or any(schedule.shards for schedule in run.run.scenario.schedules)


def _limit_nbytes(run: ReportedRun) -> int | None:
    return run.run.scenario.cluster.device.memory_nbytes


def _conclusion(run: ReportedRun, memory: Occupancy) -> str:
    """Say how much is in use at most, and whether the device has it."""
    limit_nbytes = _limit_nbytes(run)
    in_part = not_counted(run.run.scenario.workload)
    peak = f"{run.label}: {'at least' if in_part else 'at most'} {format_nbytes(memory.peak_nbytes)}"
    if limit_nbytes is None:
        return f"{peak}."
    has = f"a device has {format_nbytes(limit_nbytes)}"
    if in_part and memory.peak_nbytes <= limit_nbytes:
        return f"{peak}, and {has}: whether it fits is not known, {in_part}."
    return f"{peak}, and {has}." if memory.peak_nbytes <= limit_nbytes else f"{peak}, which does not fit: {has}."


def _table(found: Sequence[tuple[ReportedRun, Occupancy]]) -> Html:
    kinds = _kinds([memory for _, memory in found])
    lines = [
        [
            run.label,
            format_nbytes(memory.peak_nbytes),
            duration(memory.peak_s),
            *(format_nbytes(memory.at_peak[kind]) for kind in kinds),
        ]
        for run, memory in found
    ]
    return table("Most memory in use, when that is, and what for", ["schedule", "most", "at", *kinds], lines)


def _kinds(found: Sequence[Occupancy]) -> list[MemoryKind]:
    """Return what any memory is for."""
    return [kind for kind in MEMORY_KINDS if any(memory.nbytes[kind].any() for memory in found)]


def _legend(found: Sequence[Occupancy]) -> Html:
    box = {"width": 14, "height": 14}
    items = [
        tag("li", tag("svg", tag("rect", class_=f"fill {kind}", **box), aria_hidden="true", **box), _KIND_WORDS[kind])
        for kind in _kinds(found)
    ]
    return tag("ul", *items, class_="legend")


def _chart(run: ReportedRun, memory: Occupancy) -> Html:
    """Return the curves of one run, stacked, with axes of bytes and of time."""
    end_s = float(memory.at_s[-1]) or 1.0
    areas = tag(
        "svg",
        *_areas(memory, end_s),
        viewBox=f"0 0 {_WIDE:g} {_HEIGHT}",
        preserveAspectRatio="none",
        y=_TOP,
        width="100%",
        height=_HEIGHT,
    )
    title = f"Memory of {run.label} over {duration(end_s)}, stacked by what it is for; the table below has the peaks"
    chart = tag(
        "svg",
        areas,
        *_bytes_axis(memory.peak_nbytes, _limit_nbytes(run)),
        *_time_axis(end_s),
        class_="chart",
        role="img",
        aria_label=title,
        width="100%",
        height=_TOP + _HEIGHT + _AXIS,
    )
    return tag("div", tag("h3", run.label), chart)


def _areas(memory: Occupancy, end_s: float) -> Iterator[Html]:
    """Yield an area for each kind, from the top of the one below it."""
    chosen = _moments(memory, end_s)
    x = _WIDE * memory.at_s[chosen] / end_s
    lower = np.zeros(len(chosen))
    for kind in _kinds([memory]):
        upper = lower + memory.nbytes[kind][chosen]
        there = [
            _steps(x, _HEIGHT * (1 - upper / memory.peak_nbytes)),
            _steps(x, _HEIGHT * (1 - lower / memory.peak_nbytes))[::-1],
        ]
        points = " ".join(f"{across:.5g},{down:.4g}" for line in there for across, down in line)
        words = tag("title", f"{_KIND_WORDS[kind]}: at most {format_nbytes(int(memory.nbytes[kind].max()))}")
        yield tag("polygon", words, points=points, class_=f"fill {kind}")
        lower = np.asarray(upper)


def _moments(memory: Occupancy, end_s: float) -> list[int]:
    """Return the moments that are drawn: of each short part of the time, the one with most memory, and the last."""
    part = np.minimum(_MOMENTS - 1, (_MOMENTS * memory.at_s / end_s).astype(int))
    total = memory.total_nbytes
    chosen = [int(at[np.argmax(total[at])]) for each in np.unique(part) for at in [np.flatnonzero(part == each)]]
    return sorted({*chosen, len(total) - 1})


def _steps(x: NDArray[np.float64], y: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps each height until the next moment."""
    across = np.repeat(x, 2)[1:]
    down = np.repeat(y, 2)[:-1]
    return list(zip(across.tolist(), down.tolist(), strict=True))


def _bytes_axis(most_nbytes: int, limit_nbytes: int | None) -> Iterator[Html]:
    """Yield lines at round numbers of bytes, and at what the device has if more is in use."""
    scale = 10.0 ** (3 * ((len(str(most_nbytes)) - 1) // 3))
    for value in ticks(most_nbytes / scale):
        down = _TOP + _HEIGHT * (1 - value * scale / most_nbytes)
        yield tag("line", class_="grid", x1=0, x2="100%", y1=f"{down:.1f}", y2=f"{down:.1f}")
        if value:
            yield tag("text", format_nbytes(int(value * scale)), x=4, y=f"{down + 13:.1f}", class_="axis")
    if limit_nbytes is not None and limit_nbytes < most_nbytes:
        down = _TOP + _HEIGHT * (1 - limit_nbytes / most_nbytes)
        yield tag("line", class_="mark", x1=0, x2="100%", y1=f"{down:.1f}", y2=f"{down:.1f}")


def _time_axis(end_s: float) -> Iterator[Html]:
    unit, scale = time_unit(end_s)
    bottom = _TOP + _HEIGHT
    for value in ticks(end_s * scale):
        at = f"{100 * value / (end_s * scale):.3f}%"
        yield tag("line", class_="grid", x1=at, x2=at, y1=bottom, y2=bottom + 4)
        anchor = "middle" if value else "start"
        yield tag("text", f"{value:g}", x=at, y=bottom + 18, text_anchor=anchor, class_="axis")
    yield tag("text", unit, x=0, y=bottom + 34, class_="axis")
