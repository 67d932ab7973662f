"""Plain code: one thing per statement, no value that is multiplied by a condition, and exact sums of floats."""

import ast
import re
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


FLOAT = re.compile(r"(^|_)(s|us|ms|Bps|flops|in|length|seconds|share|weight)$")  # how names of floats end


def rounded_sum(node: ast.AST) -> bool:
    """Tell whether floats are summed by `sum`, whose last bit depends on the version of Python, not by `math.fsum`."""
    match node:
        case ast.Call(func=ast.Name(id="sum"), args=[ast.GeneratorExp(elt=element)]):
            return not is_condition(element) and FLOAT.search(last_name(element)) is not None
        case ast.Call(func=ast.Name(id="sum"), args=[summed]):
            return FLOAT.search(last_name(summed)) is not None
        case _:
            return False


def last_name(node: ast.expr) -> str:
    """Return the name that says what a value is: `time_s` of `2 * each.time_s`; nothing of a number."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.BinOp(left=left, right=right):
            return next(filter(FLOAT.search, (last_name(left), last_name(right))), "")
        case ast.BoolOp(values=[first, *_]) | ast.Subscript(value=first) | ast.Call(func=first):
            return last_name(first)
        case _:
            return ""


IDIOMS = {
    "a, b = 1, 2": packed,
    "text * condition": times_condition,
    "[*(1, 2)]": starred_literal,
    "f(a := 1)": walrus_in_arguments,
    "sum(floats)": rounded_sum,
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
        ("sum(each.time_s for each in hops)", ["sum(floats)"]),
        ("sum(n * each.time_s for each in hops)", ["sum(floats)"]),
        ("sum(each.backward_s or 0.0 for each in tensors)", ["sum(floats)"]),
        ("sum(each.alone_s(rate) for each in stages)", ["sum(floats)"]),
        ("sum(parts_s[:1])", ["sum(floats)"]),
        ("sum(each.time_s > 0 for each in hops)", []),
        ("sum(len(each.makespan_s) for each in parts)", []),
        ("sum(each.nbytes for each in buffers)", []),
        ("math.fsum(each.time_s for each in hops)", []),
    ],
)
def test_idioms_are_told_apart_from_plain_code(source: str, idioms: list[str]) -> None:
    assert [each.partition(": ")[2] for each in found(source)] == idioms
