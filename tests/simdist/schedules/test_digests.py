"""Digests of the plans of every schedule: in each shipped scenario, and of each example that a class states.

`WRITE_GOLDEN=1 pytest -n 0 tests/simdist/schedules/test_digests.py` writes tests/golden/digests.json; a digest that
changes is a plan that changed: say so in the change log.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

import simdist
from simdist.plan import Dataset
from simdist.runs import building
from simdist.schedules import InputPath, Job, kinds
from simdist.schedules.job import Checkpoint

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "golden" / "digests.json"
MAX_STEPS = 24
PLAIN = Job(
    world_size=8,
    ranks_per_node=4,
    n_steps=25,
    tensor_counts=(300_000, 300_000, 8, 500),
    tensor_rows=(500, 100, 8, 20),
    batch_nbytes=64,
    delay_channels=frozenset({"host", "compute", "io"}),
)
JOBS = {
    "plain": PLAIN,
    "stored, in 3 micro-batches, with checkpoints": dataclasses.replace(
        PLAIN,
        input_path=InputPath("storage", "pinned", 2, Dataset(330, 4, 4, 16, (5,)), "datacache"),
        micro_batches=3,
        checkpoint=Checkpoint(3, "state", "disk", is_async=True),
    ),
}


def digests_of_scenarios() -> dict[str, dict[str, str]]:
    """Return file -> label -> digest, of plans of at most 24 steps."""
    found = {}
    globs = ("docs/examples/*.yaml", "experiments/*/*.yaml", "simdist/scenario/presets/scenarios/*.yaml")
    for path in (path for pattern in globs for path in sorted(ROOT.glob(pattern))):
        keys = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
        if not {"cluster", "workload", "schedules", "steps"} <= keys or "sweep" in keys:
            continue
        scenario = simdist.load(path)
        scenario = scenario.model_copy(update={"steps": min(scenario.steps, MAX_STEPS)})
        name = f"{path.parent.name}/{path.stem}"
        found[name] = {each.name: building.build(scenario, each).plan.digest()[:16] for each in scenario.schedules}
    return found


def digests_of_examples() -> dict[str, dict[str, str]]:
    """Return job -> label and number -> digest."""
    schedules = [cls(**example) for cls in kinds().values() for example in cls.examples]
    return {
        name: {f"{number} {each.name}": each.plan(job).digest()[:16] for number, each in enumerate(schedules)}
        for name, job in JOBS.items()
    }


@pytest.mark.sentinel
def test_no_plan_has_changed() -> None:
    digests = digests_of_scenarios() | digests_of_examples()
    if os.environ.get("WRITE_GOLDEN"):
        FILE.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    assert digests == json.loads(FILE.read_text(encoding="utf-8"))
