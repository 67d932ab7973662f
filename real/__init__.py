"""The real backend: the plans of simdist, executed with torch.distributed."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from simdist import exporting

if find_spec("torch") is None:
    message = "real needs torch, which is not installed: pip install 'simdist-training[real]'"
    raise ModuleNotFoundError(message, name="torch")

if TYPE_CHECKING:
    from real.checkpoints.loading import load_checkpoint
    from real.loops.options import Averaging, Checkpointing, Experiment, Launch
    from real.loops.planning import plan_for
    from real.loops.worker import Worker
    from real.loops.wrap import wrap
    from real.programs.optimizers import Lars
    from real.watching.watch import Watching, watch

__all__ = [
    "Averaging",
    "Checkpointing",
    "Experiment",
    "Lars",
    "Launch",
    "Watching",
    "Worker",
    "load_checkpoint",
    "plan_for",
    "watch",
    "wrap",
]

# A training script imports them on demand, because `python -m real` does not need them.
__getattr__, __dir__ = exporting(
    __name__,
    {
        "Averaging": "loops.options",
        "Checkpointing": "loops.options",
        "Experiment": "loops.options",
        "Lars": "programs.optimizers",
        "Launch": "loops.options",
        "Watching": "watching.watch",
        "Worker": "loops.worker",
        "load_checkpoint": "checkpoints.loading",
        "plan_for": "loops.planning",
        "watch": "watching.watch",
        "wrap": "loops.wrap",
    },
)
