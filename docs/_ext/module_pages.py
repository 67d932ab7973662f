"""A page for a Python module: what it is for and all public names, from its docstrings.

Docstrings are of Google's style, with plain text in the manner of Markdown: single backquotes around code, an indented
block for a formula. Sphinx reads reStructuredText, so that is translated first.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Protocol, get_origin

import numpy as np
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.parsers import RSTParser

from simdist.settings.base import Settings

_ARRAY = re.compile(r"~?(?:numpy\.)?ndarray\[tuple\[~?(?:typing\.)?Any, \.\.\.\], ~?(?:numpy\.)?dtype\[(.*?)\]\]")
_SPECIAL = re.compile(r"[|]|(?<=\w)_(?=[\s,.;:)]|$)|[*]{2}(?=\S)")
_SECTION = re.compile(r"\w+:$")
_VALUES, _COLON = {"attribute", "data", "property"}, "\ue000"  # napoleon would take their `X: Y` for type X; so hide it


def module_name(path: Path) -> str:
    """Return the name of the module in a file: the folders above it that are packages, and its own.

    >>> import simdist.engines
    >>> module_name(Path(simdist.engines.__file__))
    'simdist.engines'
    """
    names = [] if path.stem == "__init__" else [path.stem]
    folder = path.resolve().parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names)


def page(name: str, path: Path) -> str:
    """Return the page of a module, in reStructuredText; a package that exports nothing shows its modules."""
    module = import_module(name)
    text = f"{name}\n{'=' * len(name)}\n\n{_members(module)}"
    if path.stem == "__init__" and not _exported(module):
        for inner in (f"{name}.{each.name}" for each in iter_modules([str(path.parent)])):
            text += f"\n{inner}\n{'-' * len(inner)}\n\n{_members(import_module(inner))}"
    return text


def _members(module: ModuleType) -> str:
    """Return the directives for all public names: classes and functions, then constants and names of types."""
    values = {name: value for name in _exported(module) if not _has_docstring(value := getattr(module, name))}
    text = f".. automodule:: {module.__name__}\n   :members:\n"
    if values:
        text += f"   :exclude-members: {', '.join(values)}\n"
    for name, value in values.items():
        if not inspect.ismodule(value):
            text += f"\n.. autodata:: {module.__name__}.{name}\n"
    return text


def _exported(module: ModuleType) -> list[str]:
    """Return what `__all__` names; without one, what the module itself defines without an underscore."""
    if "__all__" in vars(module):
        return list(module.__all__)
    statements = ast.parse(inspect.getsource(module)).body
    names = [name for statement in statements for name in _defined(statement) if not name.startswith("_")]
    return [name for name in names if _is_shown(vars(module)[name])]


def _is_shown(value: object) -> bool:
    """Tell whether a public value is shown: not one whose docstring is that of its type, such as of a dictionary."""
    if get_origin(value) is not None:
        return get_origin(value) is not np.ndarray
    return _has_docstring(value) or isinstance(value, str | int | float)


def _defined(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
        case _:
            return []


def _has_docstring(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


class ModuleParser(RSTParser):
    """Reads a Python file as the page of its module."""

    supported = ("module",)

    def parse(self, inputstring: str, document: nodes.document) -> None:  # type: ignore[override]
        """Put the page into the document; the text itself is read by autodoc."""
        env = document.settings.env
        path = Path(env.doc2path(env.docname))
        with mock(env.config.autodoc_mock_imports):
            text = page(module_name(path), path)
        super().parse(text, document)


def as_restructured(lines: list[str]) -> list[str]:
    """Translate a docstring: indented blocks after plain text are shown as they stand, and signs are no markup."""
    out: list[str] = []
    text, in_block = "", False  # the last line that stands at the margin
    for number, line in enumerate(lines):
        after_blank = number == 0 or not lines[number - 1].strip()
        if line.strip() and not line.startswith(" "):
            text, in_block = line, False
        elif line.startswith("    ") and after_blank and not in_block and text and not _opens_section(lines, number):
            out += ["::", ""]
            in_block = True
        out.append(line if in_block else _escaped(line))
    return out


def _opens_section(lines: list[str], number: int) -> bool:
    """Whether the margin line before a line is a heading such as `Args:`, below which everything is indented."""
    above = (line for line in reversed(lines[:number]) if line.strip() and not line.startswith(" "))
    return _SECTION.match(next(above, "")) is not None


def _escaped(line: str) -> str:
    """Escape what would be markup outside of backquotes."""
    if line.lstrip().startswith(">>>"):
        return line
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else _SPECIAL.sub(r"\\\g<0>", part) for part in parts)


def _translate(_: Sphinx, what: str, __: str, ___: object, ____: object, lines: list[str]) -> None:
    lines[:] = as_restructured(lines)
    if what in _VALUES:
        lines[:] = [line.replace(":", _COLON) for line in lines]


def _restore(_: Sphinx, what: str, __: str, ___: object, ____: object, lines: list[str]) -> None:
    if what in _VALUES:
        lines[:] = [line.replace(_COLON, ":") for line in lines]


def _simplify(
    _: Sphinx, __: str, ___: str, documented: object, ____: object, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Name arrays shortly. Settings have keys with units, in the reference of scenarios; protocols take nothing."""
    if inspect.isclass(documented) and (issubclass(documented, Settings) or Protocol in documented.__bases__):
        return "", None
    return tuple(each and _ARRAY.sub(r"NDArray[\1]", each) for each in (arguments, returned))  # type: ignore[return-value]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_source_parser(ModuleParser)
    app.connect("autodoc-process-docstring", _translate, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _restore, priority=600)  # after it
    app.connect("autodoc-process-signature", _simplify)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
