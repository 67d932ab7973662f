"""`simdist trace`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from simdist import rundir
from simdist.cli.session import Session
from simdist.errors import ScenarioError
from simdist.plan import load
from simdist.progress import ProgressBar
from simdist.trace import Trace

__all__ = ["trace"]


def trace(session: Session, run: Path, *, chrome: Path, steps: range | None, ranks: Sequence[int] | None) -> None:
    """Convert a trace to the JSON that Perfetto and chrome://tracing read.

    Args:
        session: This run of the command line.
        run: A trace, or a run directory with one.
        chrome: What to write.
        steps: Which steps; a stop of `sys.maxsize` is the end of the trace.
        ranks: Which ranks.
    """
    from simdist.chrome import write_chrome

    with ProgressBar(sys.stderr) as bar:
        bar.update("read the trace", 0, None)
        path, loaded = _load(run)
        n_steps = loaded.plan.n_steps
        if steps is not None and steps.stop == sys.maxsize:
            steps = range(steps.start, max(n_steps, steps.start + 1))
        bar.update("write it for viewers", 0, None)
        write_chrome(loaded, chrome, steps=steps, ranks=ranks)
    session.wrote(chrome)
    document = {
        "trace": str(path),
        "chrome": str(chrome),
        "plan": loaded.plan.name,
        "digest": loaded.plan.digest(),
        "source": loaded.source,
        "steps": n_steps,
        "world_size": loaded.plan.world_size,
        "makespan_s": loaded.makespan_s,
    }
    session.result(document, f"{path}, {loaded.source}: open {chrome} in https://ui.perfetto.dev")


def _load(path: Path) -> tuple[Path, Trace]:
    """Read a trace, or the only one in a run directory."""
    if not path.exists():
        raise ScenarioError(
            f"{path}: there is no such trace or run directory; `simdist simulate SCENARIO -o RUN` writes one"
        )
    if not path.is_dir():
        return path, rundir.read_trace(path)
    runs = rundir.find(path)
    if len(runs) > 1:
        raise ScenarioError(f"{path}: holds several runs; name one of {', '.join(map(str, runs))}")
    traces = sorted(runs[0].glob("trace.*.npz"))
    if not traces:
        raise ScenarioError(f"{runs[0]}: holds no trace yet; `simdist simulate {runs[0]}` writes one")
    if len(traces) > 1:
        raise ScenarioError(f"{runs[0]}: holds several traces; name one of {', '.join(map(str, traces))}")
    return traces[0], rundir.read_trace(traces[0], plan=load(runs[0] / rundir.PLAN))
