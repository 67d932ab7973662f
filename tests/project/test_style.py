"""Plain code: one thing per statement, exact sums of floats, short functions, small classes, one meaning per name."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
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


MOST_STATEMENTS = 45  # of a function
MOST_ATTRIBUTES = 12  # that a constructor sets; fields of dataclasses do not count

# What is larger, with its size. An entry goes when its code is small enough.
LONG_FUNCTIONS: dict[str, int] = {}
LARGE_CLASSES: dict[str, int] = {}

# Names that say the same in each package: a command, a format, an interface.
_ASKED = "simdist.NAME takes plain arguments and calls the package's"
SHARED_NAMES: dict[str, str] = {
    "compare": _ASKED,
    "goodput": _ASKED,
    "learn": _ASKED,
    "simulate": _ASKED,
    "sweep": _ASKED,
    "tune": _ASKED,
    "validate": _ASKED,
    "Floats": "an array of float64",
    "KINDS": "all kinds of what the package describes",
    "Progress": "a function that is called with how much is done",
    "find": "the entry of a registry that has a name",
    "frame": "a pandas table of the package's results",
    "load": "what the package describes, from a file, as in json",
    "loads": "what the package describes, from text, as in json",
    "main": "the entry point of a program",
    "names": "the names in a registry",
    "save": "what the package makes, to a file",
}


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def sizes_of_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield each function with its statements: those of inner functions count, texts do not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, sum(isinstance(each, ast.stmt) and not is_text(each) for each in ast.walk(node)) - 1


def attributes_of_classes(source: str) -> Iterator[tuple[str, int]]:
    """Yield each class that has a constructor with the attributes that it sets."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield node.name, len({ast.unparse(each) for each in ast.walk(method) if is_set_on_self(each)})


def is_set_on_self(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            return True
        case _:
            return False


def public_names(source: str) -> Iterator[str]:
    """Yield the classes, functions and constants that a module defines at its top level without an underscore."""
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (each.id for each in targets if isinstance(each, ast.Name))


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("simdist", "real"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def packages_of_names() -> dict[str, set[str]]:
    """Return the packages that define each public name, such as `simdist/plan`."""
    packages: dict[str, set[str]] = defaultdict(set)
    for path, source in sources():
        parts = Path(path).parts[:-1]
        for name in public_names(source):
            if not name.startswith("_"):
                packages[name].add("/".join(parts[:2]))
    return packages


def check_sizes(found: Mapping[str, int], listed: Mapping[str, int]) -> None:
    """Check that nothing is larger than listed, and that what has become small enough is off the list."""
    grown = {name: size for name, size in found.items() if size > listed.get(name, 0)}
    assert not grown, f"make these smaller: {grown}"
    gone = sorted(listed.keys() - found.keys())
    assert not gone, f"these are small enough now: take them off the list: {gone}"


def test_functions_are_short() -> None:
    sizes = {f"{path}:{name}": n for path, source in sources() for name, n in sizes_of_functions(source)}
    check_sizes({name: n for name, n in sizes.items() if n > MOST_STATEMENTS}, LONG_FUNCTIONS)


def test_constructors_set_few_attributes() -> None:
    sizes = {f"{path}:{name}": n for path, source in sources() for name, n in attributes_of_classes(source)}
    check_sizes({name: n for name, n in sizes.items() if n > MOST_ATTRIBUTES}, LARGE_CLASSES)


def test_a_public_name_belongs_to_one_package() -> None:
    found = {name: sorted(where) for name, where in packages_of_names().items() if len(where) > 1}
    new = {name: where for name, where in found.items() if name not in SHARED_NAMES}
    assert not new, f"rename one, or write in SHARED_NAMES why both have the name: {new}"
    gone = sorted(SHARED_NAMES.keys() - found.keys())
    assert not gone, f"one package has these now: take them off the list: {gone}"


def test_exemptions_from_the_linter_stand_in_the_code() -> None:
    """They say why, beside what they are for: `# noqa: C901 (one match over all operations)`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    exempt = settings["tool"]["ruff"]["lint"]["per-file-ignores"]
    assert [each for each in exempt if each.startswith(("simdist", "real"))] == []
    bare = r"# noqa: (C901|PLR\d+)(, \w+)*$"
    assert [path for path, source in sources() if re.search(bare, source, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("source", "functions", "classes", "names"),
    [
        ("def f():\n 'A text.'\n x = 1\n def g():\n  return x", [("f", 3), ("g", 1)], [], ["f"]),
        (
            "class A:\n def __init__(self):\n  self.a = self.b = 1\n  self.a += 1\n  other.c = 1",
            None,
            [("A", 2)],
            ["A"],
        ),
        ("A = B = 1\nC: int = 1\na.b = 1", [], [], ["A", "B", "C"]),
    ],
)
def test_what_counts(
    source: str, functions: list[tuple[str, int]] | None, classes: list[tuple[str, int]], names: list[str]
) -> None:
    assert functions is None or [*sizes_of_functions(source)] == functions
    assert [*attributes_of_classes(source)] == classes
    assert [*public_names(source)] == names
