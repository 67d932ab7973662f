"""The real backend: the plans of simdist, executed with torch.distributed."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from real.programs.optimizers import Lars
    from real.training import Worker, wrap

__all__ = ["Lars", "Worker", "wrap"]

_MODULES = {"Lars": "real.programs.optimizers", "Worker": "real.training", "wrap": "real.training"}


def __getattr__(name: str) -> object:
    """Import what a training script needs when it asks for it, because `python -m real` does not."""
    if name in _MODULES:
        return vars(importlib.import_module(_MODULES[name]))[name]
    raise AttributeError(f"module 'real' has no attribute {name!r}")
