"""Print how large the project is, package by package: files, statements, public names; and the lines of scripts.

    python tools/size.py [FOLDER ...]          # simdist and real unless folders are given

Statements are those of Python's grammar, of functions and classes with all that is in them. So no layout changes the
number. Docstrings do not count. A public name is a class, function or constant that a module defines at its top level
without an underscore in front. Of JavaScript and CSS, lines count that are not empty.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Size:
    """Files, statements and public names of one file or of many."""

    n_files: int = 0
    n_statements: int = 0
    n_names: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.n_files + other.n_files, self.n_statements + other.n_statements, self.n_names + other.n_names)


def size_of(source: str) -> Size:
    """Return the size of one file.

    >>> size_of("'A docstring.'" + chr(10) + "x = 1; _y = 2  # two statements on a line" + chr(10))
    Size(n_files=1, n_statements=2, n_names=1)
    """
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not _is_docstring(node)]
    return Size(1, len(statements), sum(_public_names(each) for each in tree.body))


def _is_docstring(node: ast.stmt) -> bool:
    """Tell whether a statement is a text by itself: a docstring, or the text below an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _public_names(statement: ast.stmt) -> int:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return not name.startswith("_")
        case ast.Assign(targets=targets):
            return sum(isinstance(each, ast.Name) and not each.id.startswith("_") for each in targets)
        case _:
            return 0


def n_script_lines(folder: Path) -> dict[str, int]:
    """Return the lines of JavaScript and of CSS in a folder that are not empty."""
    found = {"js": 0, "css": 0}
    for suffix in found:
        for path in folder.rglob(f"*.{suffix}"):
            found[suffix] += sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    return found


def main(folders: list[str]) -> None:
    sizes: dict[str, Size] = {}
    scripts = {"js": 0, "css": 0}
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            package = path.parent.as_posix()
            sizes[package] = sizes.get(package, Size()) + size_of(path.read_text(encoding="utf-8"))
        for suffix, n_lines in n_script_lines(Path(folder)).items():
            scripts[suffix] += n_lines
    print(f"{'package':36}{'files':>8}{'statements':>12}{'public names':>14}")
    for package, size in [*sorted(sizes.items()), ("in all", sum(sizes.values(), Size()))]:
        print(f"{package:36}{size.n_files:8,}{size.n_statements:12,}{size.n_names:14,}")
    print(f"scripts of the report: {scripts['js']:,} lines of JavaScript, {scripts['css']:,} of CSS")


if __name__ == "__main__":
    main(sys.argv[1:] or ["simdist", "real"])
