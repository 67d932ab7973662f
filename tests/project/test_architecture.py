"""Imports point one way, torch stays out of simdist, and one name means one thing.

That every public name has a docstring, and that every `__all__` is sorted and right, are rules of ruff.
"""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from scripts import ROOT

# Packages from the bottom up: modules may import their own package, and those named before it.
LAYERS: dict[str, str] = {
    "simdist.errors": "",
    "simdist.files": "errors",
    "simdist.machine": "",
    "simdist.arrays": "files",
    "simdist.progress": "",
    "simdist.display": "",
    "simdist.settings": "errors",
    "simdist.jobs": "errors files settings",
    "simdist.failure_logs": "errors files settings",
    "simdist.plan": "errors files settings",
    "simdist.caching": "plan",
    "simdist.proof": "errors plan",
    "simdist.traces": "arrays caching display errors files plan settings",
    "simdist.schedules": "errors plan settings",
    "simdist.scenario": "arrays display errors files plan schedules settings",
    "simdist.configurations": "errors scenario settings",
    "simdist.cost": "caching errors plan scenario settings",
    "simdist.engines": "cost errors plan traces",
    "simdist.runs": "arrays configurations cost engines errors files plan proof scenario schedules settings traces",
    "simdist.chakra": "cost errors files plan runs scenario settings",
    "simdist.studies": "cost display engines errors plan runs scenario schedules settings traces",
    "simdist.drafts": "configurations cost errors failure_logs files jobs plan runs scenario schedules settings studies"
    " traces",
    "simdist.sweeps": "display engines errors files jobs machine plan runs scenario schedules settings studies traces",
    "simdist.learning": "display engines errors files jobs plan proof runs scenario schedules settings studies traces",
    "simdist.stragglers": "cost display engines errors files plan runs scenario schedules settings studies traces",
    "simdist.profiles": "cost engines errors files jobs machine plan runs scenario schedules settings stragglers"
    " studies traces",
    "simdist.tuning": "cost display engines errors learning plan runs scenario schedules settings studies traces",
    "simdist.testing": "cost engines errors plan runs scenario schedules tuning",
    "simdist.report": "errors files jobs learning plan runs scenario settings stragglers studies sweeps traces tuning",
    "simdist.questions": "engines errors jobs learning machine profiles runs scenario settings stragglers studies"
    " sweeps traces tuning",
    "simdist.cli": "chakra configurations cost drafts engines errors files jobs learning machine plan profiles progress"
    " proof report runs scenario schedules settings stragglers studies sweeps traces tuning",
}

# Executors of plans know plans and traces. How schedules, scenarios and costs become plans, only those know that
# talk to the user.
EXECUTES = {
    "simdist",
    *(f"simdist.{name}" for name in ("arrays", "caching", "errors", "files", "machine", "plan", "settings", "traces")),
}
TALKS_TO_USERS = {
    "real.__main__",
    "real.calibrate",
    "real.calibration",
    "real.cli",
    "real.frameworks",
    "real.jobs",
    "real.loops",
    "real.options",
    "real.watching",
}
WORDS_OF_SCHEDULES = {"period", "periods", "level", "levels", "warmup_steps"}
IMPORTED_ON_DEMAND = {"scipy", "matplotlib", "numba", "pandas"}


@dataclass(frozen=True)
class Module:
    """A module and what it says: `imports` are pairs of line and name, those in functions included."""

    name: str
    tree: ast.Module
    imports: list[tuple[int, str]]
    is_package: bool

    @property
    def package(self) -> str:
        """Return its first two parts, such as `simdist.plan`; `simdist` for what stands above all packages."""
        return package_of(self.name)


def package_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def read(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return Module(name, tree, imports_of(tree), path.name == "__init__.py")


def imports_of(tree: ast.Module) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if name in EVERY_MODULE else str(node.module)) for name in names]
    return found


def names_of_modules(folder: str) -> set[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / folder).rglob("*.py"))
    return {".".join(path.parts).removesuffix(".__init__") for path in paths}


EVERY_MODULE = names_of_modules("simdist") | names_of_modules("real")


@functools.cache
def modules_of(folder: str) -> list[Module]:
    return [read(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def arrows(modules: list[Module], top: str) -> list[tuple[str, str, str]]:
    """Return where one package imports from another: importing package, imported package, where."""
    return [
        (module.package, package_of(name), f"{module.name}, line {line}: {name}")
        for module in modules
        for line, name in module.imports
        if name.split(".")[0] == top and package_of(name) != module.package
    ]


def test_a_package_imports_only_what_its_layer_may() -> None:
    allowed = {name: {"simdist", *(f"simdist.{each}" for each in below.split())} for name, below in LAYERS.items()}
    packages = {module.package for module in modules_of("simdist")} - {
        "simdist",
        "simdist.__main__",
    }  # these import all, on demand
    assert packages == set(LAYERS)
    assert [
        where
        for package, used, where in arrows(modules_of("simdist"), "simdist")
        if used not in allowed.get(package, {used})
    ] == []


def test_layers_stand_above_what_they_import() -> None:
    names = list(LAYERS)
    upward = [
        (name, each)
        for number, (name, below) in enumerate(LAYERS.items())
        for each in below.split()
        if f"simdist.{each}" not in names[:number]
    ]
    assert upward == []


def test_simdist_knows_nothing_of_torch_and_the_real_backend() -> None:
    found = [(module.name, line, name) for module in modules_of("simdist") for line, name in module.imports]
    assert [each for each in found if each[2].split(".")[0] in {"torch", "real"}] == []


def test_what_executes_knows_plans_and_traces_only() -> None:
    found = arrows([module for module in modules_of("real") if module.package not in TALKS_TO_USERS], "simdist")
    assert [where for _, used, where in found if used not in EXECUTES] == []


def test_what_executes_knows_nothing_of_schedules() -> None:
    """No period, level or warm-up of a schedule is decided in `real`: those words do not occur as names."""
    found = [
        (module.name, node.id)
        for module in modules_of("real")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and node.id in WORDS_OF_SCHEDULES
    ]
    assert found == []


def test_tests_of_simdist_import_neither_torch_nor_real() -> None:
    """Nor do the helpers that they import, so that they start fast and run without torch."""
    by_name = {module.name.removeprefix("tests."): module for module in modules_of("tests")}
    todo = [
        module
        for module in modules_of("tests")
        if module.name.startswith("tests.simdist.") or module.name == "tests.conftest"
    ]
    seen = {module.name for module in todo}
    found = []
    while todo:
        module = todo.pop()
        for line, name in module.imports:
            if name.split(".")[0] in {"torch", "real"}:
                found.append(f"{module.name}, line {line}: {name}")
            helper = by_name.get(name.removeprefix("tests."))
            if helper is not None and helper.name not in seen:
                seen.add(helper.name)
                todo.append(helper)
    assert found == []


def test_runs_and_loops_make_their_parts_in_a_session_only() -> None:
    """`python -m real` and `real.wrap` open a session; neither makes memory, process groups or a recorder itself."""
    performing = {"real.cli", "real.jobs", "real.execution.running"}
    modules = [each for each in modules_of("real") if each.name in performing or each.name.startswith("real.loops.")]
    made = {(each.name, name) for each in modules for name in names_called_in(each.tree)}
    assert {pair for pair in made if pair[1] in {"Memory", "ProcessWorld", "Recorder", "Session"}} == set()
    assert {name for name, called in made if called == "open_session"} == {"real.execution.running", "real.loops.wrap"}
    session = next(each for each in modules_of("real") if each.name == "real.session")
    assert {"Memory", "ProcessWorld", "Recorder", "Session"} <= names_called_in(session.tree)


def names_called_in(tree: ast.Module) -> set[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {each.id for each in calls if isinstance(each, ast.Name)}


def test_constructors_finish_their_objects() -> None:
    """An attribute that a method of `real` sets, its constructor has set before."""
    found = [
        f"{module.name}, line {line}: {node.name}.{name}"
        for module in modules_of("real")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        for name, line in set_after_construction(node).items()
    ]
    assert found == []


def set_after_construction(node: ast.ClassDef) -> dict[str, int]:
    """Return the attributes that methods of a class set, and neither its constructor nor its body, with their lines."""
    known: set[str] = set()
    later: dict[str, int] = {}
    for each in node.body:
        match each:
            case ast.FunctionDef(name="__init__"):
                known |= attributes_set_in(each).keys()
            case ast.FunctionDef(name=name) if is_property(each):
                known.add(name)
                later |= attributes_set_in(each)
            case ast.FunctionDef():
                later |= attributes_set_in(each)
            case ast.AnnAssign(target=ast.Name(id=name)):
                known.add(name)
    return {name: line for name, line in later.items() if name not in known}


def is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in function.decorator_list)


def attributes_set_in(function: ast.FunctionDef) -> dict[str, int]:
    return {
        node.attr: node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("top", ["simdist", "real"])
def test_packages_do_not_import_each_other_in_a_circle(top: str) -> None:
    below: dict[str, set[str]] = defaultdict(set)
    for package, used, _ in arrows(modules_of(top), top):
        if used != top:
            below[package].add(used)
    while free := [package for package, used in below.items() if not used & below.keys()]:
        for package in free:
            del below[package]
    assert below == {}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Neither when they are loaded, nor in functions, nor for their types."""
    used = {
        module.name: {name for _, name in module.imports} & EVERY_MODULE
        for module in modules_of("simdist") + modules_of("real")
    }
    list(TopologicalSorter(used).static_order())  # CycleError names the modules of a circle


def test_one_class_name_means_one_thing() -> None:
    defined: dict[str, set[str]] = defaultdict(set)
    for module in modules_of("simdist") + modules_of("real"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].add(module.name)
    twice = {name: modules for name, modules in defined.items() if len(modules) > 1}
    assert len(twice) <= 5, twice


def test_modules_of_experiments_have_names_of_their_own() -> None:
    """Tests import them and their own helpers by bare names, so those of one process would be mixed up."""
    files: dict[str, list[str]] = defaultdict(list)
    for file in (*(ROOT / "experiments").glob("*/*.py"), *(ROOT / "tests").glob("*.py")):
        files[file.name].append(file.parent.name)
    assert [name for name, folders in files.items() if len(folders) > 1] == ["run.py"]


def test_no_package_hands_on_a_function_under_the_name_of_one_of_its_modules() -> None:
    """`from simdist.plan import check` must leave no doubt about what is imported."""
    found = [
        f"{module.name}.{alias.asname or alias.name}"
        for module in modules_of("simdist") + modules_of("real")
        if module.is_package
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{module.name}.{alias.asname or alias.name}" in EVERY_MODULE
        and f"{node.module}.{alias.name}" != f"{module.name}.{alias.name}"
    ]
    assert found == []


def test_what_help_needs_imports_no_heavy_library() -> None:
    found = [
        f"{module.name}, line {node.lineno}: import it where it is used"
        for module in modules_of("simdist")
        for node in module.tree.body
        for name in _imported_at_start(node)
        if name.split(".")[0] in IMPORTED_ON_DEMAND
    ]
    assert found == []


def _imported_at_start(node: ast.stmt) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module):
            return [module or ""]
        case _:
            return []


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("import simdist.schedules.hierarchical_sgd", 22),
        ("import simdist.engines.des", 28),
        ("from simdist.cli import main; main(['compare', 'docs/examples/first.yaml', '--seeds', '2', '--json'])", 102),
    ],
)
def test_a_reader_of_the_core_needs_few_modules(code: str, most: int) -> None:
    count = "import sys; print(*(name for name in sys.modules if re.match(r'simdist(\\.|$)', name)), file=sys.stderr)"
    ended = subprocess.run(
        [sys.executable, "-c", f"import re; {code}; {count}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = ended.stderr.split("\n")[-2].split()
    assert len(names) <= most, re.sub(r"\s+", "\n", " ".join(sorted(names)))
