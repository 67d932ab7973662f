"""Plain code: one thing per statement, and no value that is multiplied by a condition."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts import ROOT

CONDITIONS = {"all", "any", "bool", "hasattr", "isinstance", "issubclass"}


def packed(node: ast.AST) -> bool:
    """Tell whether a statement assigns several values to several targets, but for a swap, which needs all at once."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.targets) == 1):
        return False
    if not isinstance(node.targets[0], ast.Tuple):
        return False
    targets = [ast.dump(each).replace("Store()", "Load()") for each in node.targets[0].elts]
    return sorted(targets) != sorted(map(ast.dump, node.value.elts))


def is_condition(node: ast.expr) -> bool:
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in CONDITIONS
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.startswith(("is_", "has_", "was_"))
        case _:
            return False


def times_condition(node: ast.AST) -> bool:
    """Tell whether a value is multiplied by a condition in place of an `if`."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and (is_condition(node.left) or is_condition(node.right))
    )


def starred_literal(node: ast.AST) -> bool:
    """Tell whether a literal is unpacked where its elements could stand."""
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)


def walrus_in_arguments(node: ast.AST) -> bool:
    """Tell whether an argument of a call names a value on its way."""
    if not isinstance(node, ast.Call):
        return False
    return any(isinstance(each, ast.NamedExpr) for each in (*node.args, *(keyword.value for keyword in node.keywords)))


IDIOMS = {
    "a, b = 1, 2": packed,
    "text * condition": times_condition,
    "[*(1, 2)]": starred_literal,
    "f(a := 1)": walrus_in_arguments,
}


def found(source: str, where: str = "") -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for idiom, holds in IDIOMS.items():
            if holds(node):
                yield f"{where}:{getattr(node, 'lineno', 0)}: {idiom}"


@pytest.mark.parametrize("folder", ["simdist", "real"])
def test_code_is_plain(folder: str) -> None:
    paths: list[Path] = sorted((ROOT / folder).rglob("*.py"))
    assert [
        each for path in paths for each in found(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ] == []


@pytest.mark.parametrize(
    ("source", "idioms"),
    [
        ("a, b = 1, 2", ["a, b = 1, 2"]),
        ("self.a, self.b = a, b", ["a, b = 1, 2"]),
        ("a, b = b, a", []),
        ("a, b = pair", []),
        ("text = 's' * (n > 1)", ["text * condition"]),
        ("text = is_one * 's'", ["text * condition"]),
        ("text = [x] * bool(y)", ["text * condition"]),
        ("area = (width or 1) * height", []),
        ("x = [*(1, 2), 3]", ["[*(1, 2)]"]),
        ("x = [*pair, 3]", []),
        ("f(a := 1)", ["f(a := 1)"]),
        ("f(key=(a := 1))", ["f(a := 1)"]),
        ("if a := f(): pass", []),
    ],
)
def test_idioms_are_told_apart_from_plain_code(source: str, idioms: list[str]) -> None:
    assert [each.partition(": ")[2] for each in found(source)] == idioms
