"""Schedules, one file each. To add one, add a file: `kinds` finds every final `Schedule` in this package."""

import importlib
import inspect
import pkgutil

from simdist.schedules.base import Schedule
from simdist.schedules.every import Every
from simdist.schedules.hierarchical_sgd import HierarchicalSGD
from simdist.schedules.job import InputPath, Job
from simdist.schedules.local_sgd import LocalSGD
from simdist.schedules.sync import Sync

__all__ = ["Every", "HierarchicalSGD", "InputPath", "Job", "LocalSGD", "Schedule", "Sync", "kinds"]


def kinds() -> dict[str, type[Schedule]]:
    """Return every schedule class by the `kind` that scenarios call it, in alphabetical order.

    >>> kinds()["sync"].__name__
    'Sync'
    """
    found: dict[str, type[Schedule]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and issubclass(value, Schedule) and not inspect.isabstract(value):
                kind = value.model_fields["kind"].default
                if found.setdefault(kind, value) is not value:
                    raise TypeError(f"{value.__module__} and {found[kind].__module__} both define schedule {kind!r}")
    return dict(sorted(found.items()))
