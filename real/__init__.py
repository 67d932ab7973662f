"""The real backend: the plans of simdist, executed with torch.distributed."""

from typing import TYPE_CHECKING

from simdist import exporting

if TYPE_CHECKING:
    from real.checkpoints.checkpoint import load_checkpoint
    from real.programs.optimizers import Lars
    from real.training import Worker, plan_for, wrap

__all__ = ["Lars", "Worker", "load_checkpoint", "plan_for", "wrap"]

# A training script imports them on demand, because `python -m real` does not need them.
__getattr__ = exporting(
    __name__,
    {
        "Lars": "programs.optimizers",
        "Worker": "training.wrapping",
        "load_checkpoint": "checkpoints.checkpoint",
        "plan_for": "training.planning",
        "wrap": "training.wrapping",
    },
)
