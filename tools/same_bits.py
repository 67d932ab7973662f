"""Compare what several Pythons compute from the same scenarios, to the last bit.

    python tools/same_bits.py PYTHON PYTHON ...     Pythons with what simdist needs
    python tools/same_bits.py --digests             what this one computes, as JSON

For each schedule of each scenario, four digests must agree: of the plan, of the delays, and of the times of all
operations in either engine. Exit status: 0 if all agree, 1 if one differs, 2 if a Python fails.
"""

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from child_answers import answer_of, differing

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # every Python runs the code of this clone
TIMEOUT_S = 600.0
MAX_STEPS, MAX_RANKS_OF_DES = 60, 128


def scenarios() -> Iterator[Path]:
    """Yield scenario files: the examples of the docs, those of the experiments, and those that ship."""
    from simdist.scenario import presets

    for path in (*sorted(ROOT.glob("docs/examples/*.yaml")), *sorted(ROOT.glob("experiments/*/*.yaml"))):
        keys = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
        if {"cluster", "workload", "schedules", "steps"} <= keys and "sweep" not in keys:
            yield path
    for name in presets.names("scenarios"):
        yield presets.path("scenarios", name)


def digests(path: Path) -> Iterator[tuple[str, str]]:
    """Yield names and digests of what a scenario gives: of at most 60 steps, and by `des` of at most 128 ranks."""
    import simdist
    from simdist.engines.observers import WholeTrace
    from simdist.engines.run import run
    from simdist.errors import UnsupportedError
    from simdist.runs import building

    source, found = path.relative_to(ROOT).as_posix(), simdist.load(path)
    found = found.model_copy(update={"steps": min(found.steps, MAX_STEPS)})
    drawn = building.delays(found)
    yield f"{source} delays", _digest(*(drawn[channel] for channel in sorted(drawn)))
    for schedule in found.schedules:
        built = building.build(found, schedule)
        yield f"{source} {schedule.name} plan", built.plan.digest()
        live = building.live_of(found, built.costs)
        for engine in ("fast", "des"):
            if engine == "des" and built.plan.world_size > MAX_RANKS_OF_DES:
                continue
            try:
                trace = run(built.plan, built.costs, drawn, observe=WholeTrace(), engine=engine, live=live)
            except UnsupportedError:
                continue  # not every plan is exact with the fast engine
            yield f"{source} {schedule.name} {engine}", _digest(trace.ready_s, trace.start_s, trace.end_s)


def _digest(*arrays: Any) -> str:
    state = hashlib.sha256()
    for array in arrays:
        state.update(str(array.shape).encode())
        state.update(array.astype("<f8").tobytes())
    return state.hexdigest()


def here() -> dict[str, Any]:
    """Return what this Python computes, and the releases that it computes with."""
    import numba
    import numpy as np

    return {
        "releases": f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}",
        "digests": dict(pair for path in scenarios() for pair in digests(path)),
    }


def there(python: str) -> dict[str, Any]:
    """Return what another Python computes.

    Raises:
        RuntimeError: It fails, or takes longer than ten minutes.
    """
    return answer_of(python, [python, str(Path(__file__).resolve()), "--digests"], timeout_s=TIMEOUT_S)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="a Python with what simdist needs")
    parser.add_argument("--digests", action="store_true", help="print what this Python computes, as JSON")
    options = parser.parse_args(args)
    if options.digests:
        json.dump(here(), sys.stdout)
        return 0
    if len(options.pythons) < 2:
        parser.error("name two Pythons or more")
    try:
        found = [there(python) for python in options.pythons]
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    n_different = 0
    for each in found:
        names = {*found[0]["digests"], *each["digests"]}
        different = differing(found[0]["digests"], each["digests"])
        n_different += len(different)
        print(f"{each['releases']}: {len(names) - len(different)} of {len(names)} digests are those of the first")
        for name in different:
            print(f"  differs: {name}")
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
