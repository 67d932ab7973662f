"""Hashes of all inputs of a row's numbers: the scenario as written, the files that it names, and simdist.

Equally written scenarios share rows across sweeps. Not all that mean the same are written alike (`1 s` and `1000 ms`):
then a row is computed twice, and is right both times.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import final

import simdist
from simdist import schedules
from simdist.files import open_regular, read_content
from simdist.scenario import strict_yaml
from simdist.settings.plugins import user_code_digest

_NAMING_FILES = ("file", "tensors_file", "index")  # keys of a scenario whose values are names of files
_NAMING_CODE = ("kind", "algorithm", "quantile")  # those whose values may name classes and functions of users
_NO_NUMBERS = ("cli", "report", "sweeps")  # parts of simdist that do not change what a scenario comes to
_CODE = (".py", ".yaml", ".csv")
_UNREADABLE = "unreadable"  # the error of the scenario that names the file says more
_NONE: Mapping[int, str] = MappingProxyType({})


def canonical(value: object, *, digest: Callable[[str], str] | None = None, known: Mapping[int, str] = _NONE) -> str:
    """Write a value so that equal ones are written alike.

    Keys that are text are sorted. Keys that are numbers stay in their order: that of the levels of a hierarchy counts.

    Args:
        value: Of a scenario, as a file has it.
        digest: Called with names of files; its result stands in their place, so that equal files give equal text. To
            names of users' classes a digest of their code is appended.
        known: Earlier results of this function for mappings and lists, by their ids.

    >>> canonical({"b": [1.0, 2.5], "a": {4: "x", 2: "y"}})
    "{'a':{4:'x',2:'y'},'b':[1,2.5]}"
    """
    if id(value) in known and isinstance(value, dict | list):
        return known[id(value)]
    match value:
        case dict():
            items = [_item(key, item, digest, known) for key, item in value.items()]
            return f"{{{','.join(items if any(isinstance(key, int) for key in value) else sorted(items))}}}"
        case list() | tuple():
            return f"[{','.join(canonical(item, digest=digest, known=known) for item in value)}]"
        case float() if value.is_integer():
            return str(int(value))
        case _:
            return repr(value)


def _item(key: object, item: object, digest: Callable[[str], str] | None, known: Mapping[int, str]) -> str:
    written = f"{key!r}:{canonical(item, digest=digest, known=known)}"
    if not digest or not isinstance(item, str):
        return written
    if key in _NAMING_FILES:
        content = digest(item)
        return f"{written} {content}" if content == _UNREADABLE else f"{key!r}:{content}"
    code = user_code_digest(item) if key in _NAMING_CODE else ""
    return f"{written} {code}" if code else written


def key_of_point(keys: Iterable[str]) -> str:
    """Return the key of a point, by which its remarks are stored: a hash of the keys of its rows.

    >>> key_of_point(["a", "b"])
    'c8687a08aa5d6ed2044328fa6a697ab8'
    """
    return hashlib.sha256(" ".join(keys).encode()).hexdigest()[:32]


@final
class Content:
    """Writes scenarios that differ from one in a few places, with the contents of the files that they name."""

    def __init__(self, tree: Mapping[str, object], folder: Path) -> None:
        """Store the text of `tree`; names of files are relative to `folder`."""
        self._folder = folder
        self._tree = tree  # as long as it lives, nothing else has the ids of its parts
        self._digests: dict[str, str] = {}
        self._known: dict[int, str] = {}
        for part in _parts(tree):
            self._known[id(part)] = self.text(part)

    def text(self, value: object) -> str:
        """Write a part of a scenario: the same text just if the same numbers follow from it."""
        return canonical(value, digest=self._digest, known=self._known)

    def digests(self, trees: Iterable[object]) -> dict[str, str]:
        """Return the digest of each file that scenarios name, by its name."""
        if not self._digests:
            return {}
        return {name: self._digest(name) for tree in trees for name in _file_names(tree)}

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = file_digest(self._folder / name)
        return self._digests[name]


def code_digest() -> str:
    """Hash the modules and presets of simdist that numbers follow from: one that is edited gives other numbers."""
    package = resources.files(simdist)
    assert isinstance(package, Path)  # it is installed as files
    named = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.suffix in _CODE}
    named |= {f"schedules/{path.name}": path for folder in schedules.__path__ for path in Path(folder).glob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(name for name in named if name.partition("/")[0] not in _NO_NUMBERS):
        content = named[name].read_bytes().replace(b"\r\n", b"\n")  # as some checkouts have it
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def code_version() -> str:
    """Return the version of simdist and of the code of this process, which is read once."""
    return _code_version(tuple(schedules.__path__))


@functools.cache
def _code_version(folders: tuple[str, ...]) -> str:
    return f"{simdist.__version__}, code {code_digest()[:12]}"


def _parts(tree: object) -> Iterator[object]:
    """Yield all mappings and lists, those inside first."""
    if isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _parts(item)
        yield tree


def _file_names(tree: object) -> Iterator[str]:
    for part in _parts(tree):
        if isinstance(part, dict):
            yield from (item for key, item in part.items() if key in _NAMING_FILES and isinstance(item, str))


def file_digest(path: Path) -> str:
    """Hash a file; for YAML, also the files that it names."""
    try:
        if not path.is_file():  # to open a pipe would wait for a writer
            return _UNREADABLE
        if path.suffix not in (".yaml", ".yml"):
            with open_regular(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        content = read_content(path)
    except OSError:
        return _UNREADABLE
    digest = hashlib.sha256(content)
    for name in sorted(set(_file_names(strict_yaml.parse(content.decode("utf-8", "replace")).root))):
        digest.update(file_digest(path.parent / name).encode())
    return digest.hexdigest()
