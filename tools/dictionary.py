"""Write the columns in docs/reference/data-dictionary.md from docstrings.

    python tools/dictionary.py            write
    python tools/dictionary.py --check    exit with 1 if the page is out of date

The docstring of the function, class or module that makes a table has a section `Columns:` with a line for each column,
`name (type): meaning`; several names of one meaning stand together. Further tables of the same function have sections
`Columns of NAME:`. A dataclass describes its fields in `Args:`, and their types follow from its annotations. The page
has a marker `<!-- columns OBJECT -->` or `<!-- columns OBJECT NAME -->` where they go; they end at the next heading.
The name of a heading in double quotes becomes a link to it. Sources are parsed, not imported, so this needs neither
torch nor simdist.
"""

import argparse
import ast
import inspect
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "data-dictionary.md"
MARKED = re.compile(r"(<!-- columns (\S+)(?: (\w+))? -->\n).*?(?=\n#|\Z)", re.S)
ENTRY = re.compile(r"([\w, ]+?)(?: \(([^)]*)\))?: (.*)")
OF_ANNOTATION = {
    "Mapping": "object",
    "Sequence": "list",
    "dict": "object",
    "float": "float",
    "int": "int",
    "list": "list",
    "str": "str",
    "tuple": "list",
}
"""Type in Python -> type in JSON."""

Definition = ast.Module | ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Columns:
    """Columns of one meaning."""

    names: tuple[str, ...]
    type: str
    meaning: str


@cache
def definition(name: str) -> Definition:
    """Return a module, or a class or function in one, by its dotted name."""
    parts = name.split(".")
    for n_parts in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:n_parts]).with_suffix(".py")
        if path.exists():
            found: Definition = ast.parse(path.read_text(encoding="utf-8"))
            for inner in parts[n_parts:]:
                named = (each for each in found.body if isinstance(each, ast.ClassDef | ast.FunctionDef))
                found = next(each for each in named if each.name == inner)
            return found
    raise LookupError(f"there is no {name}")


def columns(name: str, table: str | None = None) -> list[Columns]:
    """Return the columns that a docstring describes, in its order."""
    node = definition(name)
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    is_data = isinstance(node, ast.ClassDef)
    heading = "Args" if is_data else f"Columns of {table}" if table else "Columns"
    types = _types(node) if isinstance(node, ast.ClassDef) else {}
    found = []
    for line in _section(text, heading):
        match = ENTRY.fullmatch(line)
        if not match:
            raise ValueError(f"{name}: {line!r} is no `name (type): meaning`")
        names = tuple(match[1].split(", "))
        found.append(Columns(names, match[2] or types[names[0]], match[3]))
    return found


def _section(text: str, heading: str) -> list[str]:
    """Return the entries of a section, each in one line."""
    begin = re.search(rf"^{heading}:\n", text, re.M)
    if not begin:
        raise LookupError(f"no section {heading}:")
    block = re.match(r"(?:    .*\n?|\n(?=    ))*", text[begin.end() :])
    assert block
    entries = re.split(r"\n(?=\S)", inspect.cleandoc(block[0]))
    return [re.sub(r"\s*\n\s+", " ", entry) for entry in entries]


def _types(node: ast.ClassDef) -> dict[str, str]:
    """Return the JSON types of the fields of a dataclass."""
    return {
        each.target.id: _type(each.annotation)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _type(annotation: ast.expr) -> str:
    """Return the type that JSON has; a name that stands for others must be stated in the docstring."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_type(left)} or {_type(right)}"
        case ast.Constant(value=None):
            return "null"
        case ast.Subscript(value=value):
            return _type(value)
        case ast.Name(id=name):
            return OF_ANNOTATION.get(name, name)
    raise ValueError(f"no type of JSON: {ast.unparse(annotation)}")


def updated(text: str) -> str:
    """Return the page with the columns that docstrings describe now."""
    headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]

    def linked(meaning: str) -> str:
        for heading in headings:
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            meaning = meaning.replace(f'"{heading}"', f"[{heading}](#{anchor})")
        return meaning

    def described(match: re.Match[str]) -> str:
        lines = [
            f"* {', '.join(f'`{name}`' for name in each.names)} ({each.type}): {linked(each.meaning)}\n"
            for each in columns(match[2], match[3])
        ]
        return f"{match[1]}\n{''.join(lines)}"

    return MARKED.sub(described, text)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = updated(old)
    if new != old:
        print(f"{PAGE.relative_to(ROOT)}: {'out of date' if check else 'written'}")
        if not check:
            PAGE.write_text(new, encoding="utf-8")
    return int(check and new != old)


if __name__ == "__main__":
    sys.exit(main())
