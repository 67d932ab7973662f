"""Hashes of what the numbers of a row follow from: the scenario as written, and the files that it names."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import final

from simdist.scenario import strict_yaml

__all__ = ["Files", "canonical"]

_NAMING_FILES = ("file", "tensors_file", "index")  # keys of a scenario whose values are names of files


def canonical(value: object) -> str:
    """Write a value so that equal ones are written alike; keys of mappings may be whole numbers.

    >>> canonical({"b": [1, 2.5], "a": {2: "x"}})
    '{"a":{"2":"x"},"b":[1,2.5]}'
    """
    match value:
        case dict():
            items = sorted((json.dumps(str(key)), canonical(item)) for key, item in value.items())
            return "{" + ",".join(f"{key}:{item}" for key, item in items) + "}"
        case list() | tuple():
            return "[" + ",".join(map(canonical, value)) + "]"
        case _:
            return json.dumps(value, default=str)


def _file_names(tree: object) -> Iterator[str]:
    match tree:
        case dict():
            for key, item in tree.items():
                if key in _NAMING_FILES and isinstance(item, str):
                    yield item
                else:
                    yield from _file_names(item)
        case list():
            for item in tree:
                yield from _file_names(item)
        case _:
            return


@final
class Files:
    """Hashes of the contents of files, each read once."""

    def __init__(self, folder: Path) -> None:
        """Names are relative to `folder`."""
        self._folder = folder
        self._known: dict[Path, str] = {}

    def digest(self, tree: object) -> str:
        """Return a text that changes with the content of any file that a scenario names."""
        return " ".join(self._digest(self._folder / name) for name in sorted(set(_file_names(tree))))

    def _digest(self, path: Path) -> str:
        if path not in self._known:
            self._known[path] = _digest(path)
        return self._known[path]


def _digest(path: Path) -> str:
    """Hash a file; of one in YAML, also those that it names itself."""
    try:
        content = path.read_bytes()
    except OSError:
        return "unreadable"  # the error of the scenario that names it says more
    digest = hashlib.sha256(content)
    if path.suffix in (".yaml", ".yml"):
        root = strict_yaml.parse(content.decode("utf-8", "replace")).root
        for name in sorted(set(_file_names(root))):
            digest.update(_digest(path.parent / name).encode())
    return digest.hexdigest()
