"""The real backend: the plans of simdist, executed with torch.distributed.

A training script gets what it needs when it asks for it, because `python -m real` does not need that.
"""

from typing import TYPE_CHECKING

from simdist import _exporting

if TYPE_CHECKING:
    from real.programs.optimizers import Lars
    from real.training import Worker, wrap

__all__ = ["Lars", "Worker", "wrap"]

__getattr__ = _exporting(__name__, {"Lars": "programs.optimizers", "Worker": "training", "wrap": "training"})
