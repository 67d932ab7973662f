"""A job of four processes that share the GPU, with planted stragglers, profiled and imported: planted against named.

The job is a plain loop with DistributedDataParallel over gloo, `experiments/profile_round_trip/train.py`. A row per
planted straggler, with what `simdist import` names for that rank and step; and one for the step.
"""

import json
import tempfile
from pathlib import Path

import common

JOB = "experiments/profile_round_trip/train.py"
LATE_S = 0.15


def run(part: common.Part) -> None:
    """Emit the rows."""
    import numpy as np

    n_ranks, first, n_steps = (2, 3, 6) if part.dry_run else (4, 10, 30)
    draw = np.random.default_rng(1)
    late_s = np.zeros((first + n_steps + 1, n_ranks))
    chosen = draw.choice(n_steps - 1, size=2 if part.dry_run else 6, replace=False)
    for step in chosen:
        late_s[first + step, draw.integers(n_ranks)] = LATE_S
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savetxt(folder / "late.csv", late_s, delimiter=",", fmt="%g")
        options = ["--device", part.device, "--steps", len(late_s), "--active-steps", n_steps + 1]
        options += ["--model", "mlp", "--width", 64] if part.dry_run else ["--model", "convnet", "--batch-size", 64]
        options += ["--stragglers", folder / "late.csv", "--profile", folder / "traces", "--times", folder / "times"]
        common.ranks([JOB, *options], n_ranks, ranks_per_node=n_ranks, timeout_s=60.0, module=False)
        window = ("--steps", f"{first}:{first + n_steps}")  # in the step after these, ranks write their traces
        shape = ("--nodes", 1, "--gpus-per-node", n_ranks, "--workers", 2)
        found = json.loads(
            common.simdist("import", folder / "traces", "-o", folder / "job.yaml", *window, *shape, "--json")
        )
        stamps_s = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "times").iterdir())]
    _emit(part, late_s, found, np.array(stamps_s)[:, first : first + n_steps, :2])


def _emit(part: common.Part, late_s, found, stamps_s) -> None:
    """Compare what was named with what was planted.

    Args:
        part: Takes the rows.
        late_s: Planted seconds, `[steps, ranks]`.
        found: What `simdist import --json` prints.
        stamps_s: When each step of the window began and ended, `[ranks, steps, 2]`.
    """
    named = {
        (rank, step): 1e3 * each["seconds"]
        for each in found["stragglers"]
        for rank in each["ranks"]
        for step in each["steps"]
    }
    planted = {(int(rank), int(step)): float(late_s[step, rank]) for step, rank in zip(*late_s.nonzero(), strict=True)}
    for (rank, step), seconds in sorted(planted.items()):
        part.emit({"rank": rank, "step": step, "planted_ms": 1e3 * seconds, "named_ms": named.get((rank, step))})
    part.emit(
        {
            "ranks": len(stamps_s),
            "step_ms": 1e3 * float(stamps_s[:, -1, 1].max() - stamps_s[:, 0, 0].mean()) / stamps_s.shape[1],
            "imported_ms": 1e3 * found["step"]["measured_s"],
            "reproduced_ms": 1e3 * found["step"]["predicted_s"],
            "named_and_not_planted": sorted(map(list, named.keys() - planted.keys())),
        }
    )
