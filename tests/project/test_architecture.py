"""Imports point one way, torch stays out, and every public name is documented and listed."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import real
import simdist

PACKAGE = Path(simdist.__file__).parent
REAL = Path(real.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
REAL_MODULES = sorted(REAL.rglob("*.py"))

# What the modules of each package may import, besides their own package: those named before it.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "settings": set(),
    "progress": set(),
    "plan": {"errors", "settings"},
    "caching": {"plan"},
    "proof": {"errors", "plan"},
    "traces": {"caching", "errors", "plan", "settings"},
    "schedules": {"errors", "plan", "settings"},
    "scenario": {"errors", "plan", "schedules", "settings"},
    "cost": {"caching", "errors", "plan", "scenario", "settings"},
    "engines": {"cost", "errors", "plan", "traces"},
    "runs": {"cost", "engines", "errors", "plan", "proof", "scenario", "schedules", "traces"},
    "chakra": {"cost", "errors", "plan", "runs", "scenario", "settings"},
    "studies": {"cost", "engines", "errors", "plan", "runs", "scenario", "schedules", "settings", "traces"},
    "sweep": {"engines", "errors", "plan", "runs", "scenario", "schedules", "settings", "studies", "traces"},
    "whatif": {"cost", "engines", "errors", "plan", "runs", "scenario", "schedules", "studies", "traces"},
    "profiles": {
        "cost",
        "engines",
        "errors",
        "plan",
        "runs",
        "scenario",
        "schedules",
        "settings",
        "studies",
        "sweep",
        "traces",
    },
    "tune": {
        "cost",
        "errors",
        "plan",
        "runs",
        "scenario",
        "schedules",
        "settings",
        "studies",
        "traces",
    },
    "report": {"errors", "plan", "runs", "settings", "studies", "sweep", "traces", "tune", "whatif"},
    "cli": {
        "chakra",
        "cost",
        "engines",
        "errors",
        "plan",
        "profiles",
        "progress",
        "proof",
        "report",
        "runs",
        "scenario",
        "schedules",
        "settings",
        "studies",
        "sweep",
        "traces",
        "tune",
        "whatif",
    },
}


# What executes a plan knows plans and traces. How schedules, scenarios and costs become plans, only those know that
# talk to the user.
EXECUTES = {"caching", "errors", "plan", "settings", "traces"}
TALKS_TO_USERS = {"__main__", "calibrate", "calibration", "cli", "jobs", "training"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """Return the part after `simdist.`: `plan` for `simdist.plan.walk`; empty for `simdist` itself."""
    return (*module.split("."), "")[1]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every import of a file, those in functions included."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source == "simdist":
                yield from ((node.lineno, f"simdist.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, source


each_module = pytest.mark.parametrize("path", MODULES, ids=module_name)
each_real_module = pytest.mark.parametrize("path", REAL_MODULES, ids=module_name)
every_module = pytest.mark.parametrize("path", MODULES + REAL_MODULES, ids=module_name)


@each_module
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    layer = layer_of(module_name(path))
    if layer in {"", "__main__"}:
        return
    for line, name in imports(path):
        if name.split(".")[0] == "simdist":
            used = layer_of(name)
            assert used in {layer, "", "__version__", "_exporting"} | LAYERS[layer], (
                f"{path}:{line}: {layer} imports {name}"
            )


@each_module
def test_module_does_not_import_torch_or_the_real_executor(path: Path) -> None:
    for line, name in imports(path):
        assert name.split(".")[0] not in {"torch", "real"}, f"{path}:{line}: {name}"


@each_real_module
def test_what_executes_knows_plans_and_traces_only(path: Path) -> None:
    if layer_of(module_name(path)) in TALKS_TO_USERS:
        return
    for line, name in imports(path):
        if name.split(".")[0] == "simdist":
            assert layer_of(name) in EXECUTES, f"{path}:{line}: {name}"


@each_real_module
def test_what_executes_knows_nothing_of_schedules(path: Path) -> None:
    """No period, level or warm-up of a schedule is decided in `real`: those words do not occur as names."""
    names = {node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)}
    assert not names & {"period", "periods", "level", "levels", "warmup_steps"}


def test_layers_have_no_cycle() -> None:
    reached: dict[str, set[str]] = {}
    for layer, below in LAYERS.items():
        assert below <= reached.keys(), f"{layer} stands before what it imports: {below - reached.keys()}"
        reached[layer] = below


def test_every_layer_exists() -> None:
    assert LAYERS.keys() <= {layer_of(module_name(path)) for path in MODULES}


@every_module
def test_module_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path} has no docstring"
    assert re.search(r"[.:?]$", docstring.splitlines()[0]), f"{path}: the first line is a sentence"


@every_module
def test_all_lists_what_a_package_exports_in_order(path: Path) -> None:
    """What a module defines without an underscore is public; a package says in `__all__` what it hands on."""
    module = importlib.import_module(module_name(path))
    if not hasattr(module, "__all__"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    public = {name for name in defined if not name.startswith("_")}
    names = list(module.__all__)
    assert public <= set(names), f"{path}: not in __all__: {sorted(public - set(names))}"
    assert names == sorted(names, key=_as_ruff_sorts), f"{path}: __all__ is not sorted"
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(module, name), f"{path}: __all__ names {name}, which does not exist"


def _as_ruff_sorts(name: str) -> tuple[int, list[tuple[int, str | int]]]:
    """Sort constants first, then classes, then the rest, each in natural order (rule RUF022)."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


@every_module
def test_every_public_class_function_and_method_has_a_docstring(path: Path) -> None:
    missing = list(undocumented(ast.parse(path.read_text(encoding="utf-8")), ""))
    assert not missing, f"{path}: no docstring: {', '.join(missing)}"


def undocumented(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{prefix}{node.name} (line {node.lineno})"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node, f"{prefix}{node.name}.")


def test_what_help_needs_imports_no_heavy_library() -> None:
    heavy = {"scipy", "matplotlib", "pandas"}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not heavy & {name.split(".")[0] for name in names}, (
                    f"{path}:{node.lineno}: import it where it is used"
                )
