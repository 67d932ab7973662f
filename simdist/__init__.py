"""Simulate, run and compare synchronisation schedules for distributed training.

>>> import simdist
>>> from simdist.scenario import presets
>>> scenario = simdist.load(presets.path("scenarios", "cloud-stragglers"))
>>> trace = simdist.simulate(scenario.changed(steps=4), label="sync")
>>> trace.plan.n_steps
4
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simdist.runs.build import build, simulate
    from simdist.scenario import load
    from simdist.studies.comparison import compare

__all__ = ["build", "compare", "load", "simulate"]

__version__ = "0.1.0"

_MODULES = {
    "build": "simdist.runs.build",
    "compare": "simdist.studies.comparison",
    "load": "simdist.scenario",
    "simulate": "simdist.runs.build",
}


def __getattr__(name: str) -> object:
    """Import what a Python user starts with when it is asked for: a command imports only what it needs."""
    if name in _MODULES:
        return vars(importlib.import_module(_MODULES[name]))[name]
    raise AttributeError(f"module 'simdist' has no attribute {name!r}")
