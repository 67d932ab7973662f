from collections.abc import Callable, Mapping

from simdist import errors as errors
from simdist.questions import compare, goodput, import_traces, learn, results, simulate, sweep, tune, validate, whatif
from simdist.report.notebooks import html_of, plot
from simdist.runs.building import build
from simdist.scenario import Scenario, load
from simdist.scenario import presets as presets
from simdist.schedules import (
    FSDP,
    HSDP,
    DiLoCo,
    Gossip,
    GTopK,
    HierarchicalSGD,
    HiTopK,
    LocalSGD,
    NaiveAllGather,
    ParameterServer,
    PowerSGD,
    Sync,
    Torus,
)

__all__ = [
    "FSDP",
    "HSDP",
    "DiLoCo",
    "GTopK",
    "Gossip",
    "HiTopK",
    "HierarchicalSGD",
    "LocalSGD",
    "NaiveAllGather",
    "ParameterServer",
    "PowerSGD",
    "Scenario",
    "Sync",
    "Torus",
    "build",
    "compare",
    "errors",
    "goodput",
    "html_of",
    "import_traces",
    "learn",
    "load",
    "plot",
    "presets",
    "results",
    "simulate",
    "sweep",
    "tune",
    "validate",
    "whatif",
]

__version__: str

def exporting(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]: ...
