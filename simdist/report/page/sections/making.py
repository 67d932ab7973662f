"""What a page was made of: the files with their digests, seeds, versions, the command or call, and the date.

Nothing here tells who made the page: of paths it shows the names of files, and the home folder in a command is `~`.
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import simdist
from simdist.report.page.document import Section
from simdist.report.page.html import join, table, tag

_PACKAGES = ("numpy", "scipy", "pydantic", "simpy", "numba")  # which numbers may depend on
_DIGITS = 16  # of a digest
_ABOUT = (
    f"The first {_DIGITS} digits of SHA-256 tell whether a file is the one that this page is of: sha256sum FILE prints "
    f"all 64."
)


@dataclass(frozen=True)
class Making:
    """How a page is made.

    Args:
        call: Command or call in Python.
        date: Day in UTC, such as 2026-11-27.
    """

    call: str
    date: str

    @classmethod
    def now(cls, call: str) -> "Making":
        """Return how a page is made today, or on the day that `SOURCE_DATE_EPOCH` states in seconds.

        Source:
            https://reproducible-builds.org/specs/source-date-epoch
        """
        stated = os.environ.get("SOURCE_DATE_EPOCH", "")
        is_stated = stated.isascii() and stated.isdecimal() and len(stated) <= 11
        moment = datetime.fromtimestamp(int(stated), UTC) if is_stated else datetime.now(UTC)
        return cls(_without_home(call), f"{moment:%Y-%m-%d}")


def _without_home(text: str) -> str:
    """Return a text in which the home folder of the user is `~`."""
    home = os.path.expanduser("~")
    return text if home in ("~", "/", "") else text.replace(home, "~")


def making_section(making: Making, files: Mapping[str, Path], more: Iterable[tuple[str, str]] = ()) -> Section:
    """Return the section.

    Args:
        making: How the page is made.
        files: What the page is of: name -> file; those that are not there are left out.
        more: Further facts, such as seeds, each with its name.
    """
    facts = [("made by", making.call), ("on", making.date), *more, ("with", _versions())]
    items = join(tag("div", tag("dt", name), tag("dd", text), class_="wide") for name, text in facts)
    rows = [_row(name, path) for name, path in files.items() if path.is_file()]
    listed = table("Files", ["file", "bytes", "SHA-256"], rows, words=["SHA-256"])
    body = join([tag("dl", items, class_="facts"), listed, tag("p", _ABOUT)])
    return Section("making", "What this page was made of", body)


def _row(name: str, path: Path) -> Sequence[str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return name, f"{path.stat().st_size:,}", tag("code", digest[:_DIGITS])


def _versions() -> str:
    found = [f"simdist {simdist.__version__}", f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
