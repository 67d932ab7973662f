from collections.abc import Callable, Mapping

from simdist.runs.building import build, simulate
from simdist.scenario import load
from simdist.studies.comparison import compare

__all__ = ["build", "compare", "load", "simulate"]

__version__: str

def exporting(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]: ...
