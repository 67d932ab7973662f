"""Simulate, run and compare synchronisation schedules for distributed training.

>>> import simdist
>>> scenario = simdist.load("cloud-stragglers")
>>> trace = simdist.simulate(scenario.changed(steps=4), label="sync")
>>> trace.plan.n_steps
4
"""

import importlib
import sys
from collections.abc import Callable, Mapping

__version__ = "0.1.0"


def exporting(package: str, module_of: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package that imports a module of it when a name is asked for.

    A command then imports what it uses, not all that its packages hold. `dir`, and with it the completion of notebooks,
    lists what the package has in `__all__` and nothing else.

    Args:
        package: Name of the package.
        module_of: Exported name -> the module, below the package, that defines it. A colon at the end: the module
            itself.

    Source:
        PEP 562, Module __getattr__ and __dir__.
    """

    def exported(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, is_module, _ = module_of[name].partition(":")
        module = importlib.import_module(f"{package}.{path}")
        return module if is_module else vars(module)[name]

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return exported, names


_MODULE_OF = {  # the types stand in __init__.pyi, which a test compares
    "DiLoCo": "schedules.diloco",
    "FSDP": "schedules.fsdp",
    "GTopK": "schedules.gtopk",
    "Gossip": "schedules.gossip",
    "HSDP": "schedules.hsdp",
    "HiTopK": "schedules.hitopk",
    "HierarchicalSGD": "schedules.hierarchical_sgd",
    "LocalSGD": "schedules.local_sgd",
    "NaiveAllGather": "schedules.naive_ag",
    "ParameterServer": "schedules.parameter_server",
    "PowerSGD": "schedules.powersgd",
    "Scenario": "scenario.scenario",
    "Sync": "schedules.sync",
    "Torus": "schedules.torus",
    "build": "runs.building",
    "compare": "questions",
    "errors": "errors:",
    "goodput": "questions",
    "html_of": "report.notebooks",
    "import_traces": "questions",
    "learn": "questions",
    "load": "scenario.scenario",
    "plot": "report.notebooks",
    "presets": "scenario.presets:",
    "results": "questions",
    "simulate": "questions",
    "sweep": "questions",
    "tune": "questions",
    "validate": "questions",
    "whatif": "questions",
}

__all__ = sorted(_MODULE_OF)

__getattr__, __dir__ = exporting(__name__, _MODULE_OF)
