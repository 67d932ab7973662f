"""Print how large the project is, package by package: files, lines of code, public names.

    python tools/size.py [FOLDER ...]          # simdist and real unless folders are given

A line of code holds code: blank lines, comments and docstrings do not count. A public name is a class, function or
constant that a module defines at its top level without an underscore in front.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, slots=True)
class Size:
    """Files, lines of code and public names of one file or of many."""

    n_files: int = 0
    n_lines: int = 0
    n_names: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.n_files + other.n_files, self.n_lines + other.n_lines, self.n_names + other.n_names)


def size_of(source: str) -> Size:
    """Return the size of one file.

    >>> size_of('"A docstring."' + chr(10) + "x = 1  # a comment" + chr(10))
    Size(n_files=1, n_lines=1, n_names=1)
    """
    tree = ast.parse(source)
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return Size(1, len(lines - _docstring_lines(tree)), sum(_public_names(each) for each in tree.body))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def _public_names(statement: ast.stmt) -> int:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return not name.startswith("_")
        case ast.Assign(targets=targets):
            return sum(isinstance(each, ast.Name) and not each.id.startswith("_") for each in targets)
        case _:
            return 0


def main(folders: list[str]) -> None:
    sizes: dict[str, Size] = {}
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            package = path.parent.as_posix()
            sizes[package] = sizes.get(package, Size()) + size_of(path.read_text(encoding="utf-8"))
    print(f"{'package':36}{'files':>8}{'code lines':>12}{'public names':>14}")
    for package, size in [*sorted(sizes.items()), ("in all", sum(sizes.values(), Size()))]:
        print(f"{package:36}{size.n_files:8,}{size.n_lines:12,}{size.n_names:14,}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["simdist", "real"])
