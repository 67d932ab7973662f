"""Simulate, run and compare synchronisation schedules for distributed training.

>>> import simdist
>>> from simdist.scenario import presets
>>> scenario = simdist.load(presets.path("scenarios", "cloud-stragglers"))
>>> trace = simdist.simulate(scenario.changed(steps=4), label="sync")
>>> trace.plan.n_steps
4
"""

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = [
    "build",
    "compare",
    "html_of",
    "load",
    "plot",
    "simulate",
]  # the types of what comes on demand stand in __init__.pyi

__version__ = "0.1.0"


def exporting(package: str, module_of: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package that imports a module of it when a name is asked for.

    A command then imports what it uses, not all that its packages hold. `dir`, and with it the completion of notebooks,
    lists the names all the same.

    Args:
        package: Name of the package.
        module_of: Exported name -> the module, below the package, that defines it.

    Source:
        PEP 562, Module __getattr__ and __dir__.
    """

    def exported(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(importlib.import_module(f"{package}.{module_of[name]}"))[name]

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return exported, names


__getattr__, __dir__ = exporting(
    __name__,
    {
        "build": "runs.building",
        "compare": "studies.comparison",
        "html_of": "report.notebooks",
        "load": "scenario.scenario",
        "plot": "report.notebooks",
        "simulate": "runs.building",
    },
)
