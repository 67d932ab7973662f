"""How fast does the timeline of a report open, and how smooth is it?

    python benchmarks/report.py            tables; exit code 1 if a target is missed
    python benchmarks/report.py --quick    a tiny trace, to see that it works; seconds
    python benchmarks/report.py --json     the numbers for machines

A span is one operation executed by one rank. Opening is from the start of the navigation to the first painted timeline,
in headless Chromium without a graphics processor, best of several. A frame is all work of the script for one picture,
from shares of pixels to text. Frames are those of zooming in step by step from the whole run, moving, and zooming out
again; of each picture the best of several rounds counts, because other programs take the processor in between, and the
slowest of all is told beside. Needs playwright and a Chromium.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines import SYNC, straggling
from benchmarks.tables import benchmark_parser, conclude, shown
from simdist.report.page.sections.timelines import timeline_assets, timeline_section
from simdist.runs import building
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TARGETS = {"open ms": 2000.0, "median frame ms": 50.0, "95 % frame ms": 50.0}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
JITTER_S = 1e-5  # of every operation, so that no two are alike, as on a real cluster

ZOOM_AND_MOVE = """async (rounds) => {
  const root = document.querySelector(".timeline");
  const canvas = root.querySelector(".timeline-overlay");
  const keys = ["+", "+", "ArrowRight", "ArrowLeft", "+", "+", "ArrowRight", "-", "-", "ArrowLeft", "-", "-", "0"];
  const frames = [];
  for (let round = 0; round < rounds; round++) {
    for (const key of keys) {
      const before = root.timeline.nFrames;
      canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
      while (root.timeline.nFrames === before) await new Promise(requestAnimationFrame);
      frames.push(root.timeline.frameMs);
    }
  }
  return Array.from({ length: rounds }, (_, round) => frames.slice(round * keys.length, (round + 1) * keys.length));
}"""


@dataclass(frozen=True)
class Sizes:
    """How much to show."""

    ranks: int = 8  # all in sight at once
    steps: int = 12_500  # 10 operations a step
    repetitions: int = 3
    rounds: int = 6


QUICK = Sizes(steps=12, repetitions=1, rounds=1)


def jittered(trace: Trace) -> Trace:
    """Return a trace in which every operation is a little longer, by chance, as if it had been measured."""
    later_s = np.cumsum(np.random.default_rng(0).exponential(JITTER_S, trace.ready_s.shape), axis=0)
    moved = {name: getattr(trace, name) + later_s for name in ("ready_s", "start_s", "end_s")}
    return replace(trace, **moved, source="simulated, with jitter")


@contextmanager
def page_of(traces: dict[str, Trace]) -> Iterator[tuple[Path, float]]:
    """Write a page that holds nothing but a timeline; yield its path and the seconds that it took to make."""
    began_s = time.perf_counter()
    css, script = timeline_assets()
    body = timeline_section(traces, element_id="timeline")
    text = f'<!doctype html><meta charset="utf-8"><style>{css}</style>{body}<script>{script}</script>'
    took_s = time.perf_counter() - began_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.html")
        path.write_text(text, encoding="utf-8")
        yield path, took_s


def measured(chromium: "Browser", name: str, traces: dict[str, Trace], sizes: Sizes) -> dict[str, object]:
    """Open a page several times, and zoom and move in it."""
    opens_ms, rounds_ms = [], []
    with page_of(traces) as (path, took_s):
        for _ in range(sizes.repetitions):
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(path.as_uri())
            handle = page.wait_for_function(
                "document.querySelector('.timeline').timeline?.firstPaintMs", timeout=60_000
            )
            opens_ms.append(float(handle.json_value()))
            rounds_ms += page.evaluate(ZOOM_AND_MOVE, sizes.rounds)
            page.close()
        frames_ms = np.min(rounds_ms, axis=0)
        n_spans = sum(trace.ready_s.size for trace in traces.values())
        return {
            "trace": name,
            "spans": n_spans,
            "make_s": took_s,
            "page_MB": path.stat().st_size / 1e6,
            "MB_per_M_spans": path.stat().st_size / n_spans,
            "open_ms": min(opens_ms),
            "frame_median_ms": float(np.median(frames_ms)),
            "frame_95_ms": float(np.percentile(frames_ms, 95)),
            "frame_max_ms": float(frames_ms.max()),
            "slowest_of_all_ms": float(np.max(rounds_ms)),
        }


@contextmanager
def browser() -> Iterator["Browser"]:
    """Start a headless browser of the system."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield started
        started.close()


def verdicts(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Compare the worst row with the targets, which are stated for a million spans."""
    columns = {"open ms": "open_ms", "median frame ms": "frame_median_ms", "95 % frame ms": "frame_95_ms"}
    reached = {what: max(float(str(row[column])) for row in rows) for what, column in columns.items()}
    return [
        {"what": what, "target": f"< {shown(target)}", "reached": reached[what], "holds": reached[what] < target}
        for what, target in TARGETS.items()
    ]


def main() -> int:
    """Run everything and print it; return 1 if a target of the full size is missed."""
    options = benchmark_parser(__doc__).parse_args()
    sizes = QUICK if options.quick else Sizes()
    trace = building.simulate(straggling(sizes.ranks, sizes.steps, [SYNC]))
    noisy = jittered(trace)
    shown_traces = {
        "simulated": {"simulated": trace},
        "with jitter": {"measured": noisy},
        "both": {"simulated": trace, "measured": noisy},
    }
    with browser() as chromium:
        rows = [measured(chromium, name, traces, sizes) for name, traces in shown_traces.items()]
    tables = {f"timeline, {sizes.ranks} ranks x {sizes.steps} steps": rows}
    return conclude(options, sizes, {"pages": rows}, tables, verdicts(rows[:2]))


if __name__ == "__main__":
    sys.exit(main())
