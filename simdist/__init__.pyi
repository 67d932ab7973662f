from collections.abc import Callable, Mapping

from simdist.report.notebooks import html_of, plot
from simdist.runs.building import build, simulate
from simdist.scenario import load
from simdist.studies.comparison import compare

__all__ = ["build", "compare", "html_of", "load", "plot", "simulate"]

__version__: str

def exporting(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]: ...
