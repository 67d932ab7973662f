"""Figures as files."""

from pathlib import Path
from typing import TYPE_CHECKING

from simdist.errors import RunError, ScenarioError
from simdist.report.lettering import literal_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_UNDATED: dict[str, dict[str, str | None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Metadata that would make equal figures differ, by the suffixes of what can be written."""


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`; equal figures give equal bytes.

    Raises:
        ScenarioError: The suffix is another.
        RunError: The file cannot be written.
    """
    import matplotlib

    suffix = path.suffix.lower()
    if suffix not in _UNDATED:
        found = f"{suffix!r} is no picture that can be written" if suffix else "the file needs a suffix"
        raise ScenarioError(f"{path}: {found}; write e.g. {path.with_suffix('.png').name}, .svg or .pdf")
    try:
        with literal_text(), matplotlib.rc_context({"svg.hashsalt": "simdist"}):
            figure.savefig(path, dpi=150, metadata=_UNDATED[suffix])
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{path}: cannot be written ({reason}); give a file in a folder that exists") from None
