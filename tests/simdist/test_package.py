"""Functions of the package, which are imported only when they are asked for."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import simdist
from simdist import compare
from simdist.errors import UnsupportedError
from simdist.report import timeline_figure
from simdist.scenario import presets

SCENARIO = presets.path("scenarios", "cloud-stragglers")
IMPORTED = """
import sys, simdist
print(sorted(name for name in sys.modules if name.startswith("simdist.") or name in ("numpy", "pydantic")))
"""


def test_scenario_is_loaded_and_its_schedules_are_compared() -> None:
    scenario = simdist.load(SCENARIO).changed(steps=4)
    assert [row.schedule for row in compare(scenario, n_seeds=1)] == [each.name for each in scenario.schedules]


def test_import_of_the_package_imports_nothing_else() -> None:
    found = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(simdist.__file__).parents[1],
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["simdist", "simdist.cost", "simdist.plan", "simdist.schedules"])
def test_dir_lists_what_is_exported_and_nothing_else(package: str) -> None:
    module = importlib.import_module(package)
    assert [*dir(module)] == sorted(module.__all__)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'simdist' has no attribute 'simulator'"):
        _ = simdist.simulator  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("matplotlib", "figures", lambda trace: timeline_figure(trace)),
        ("pandas", "tables", lambda trace: trace.frame()),
    ],
)
def test_what_needs_an_extra_names_it(package: str, extra: str, use, monkeypatch) -> None:
    trace = simdist.simulate(simdist.load(SCENARIO).changed(steps=4))
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"needs {package}, which is not installed: pip install 'simdist-training\[{extra}\]'"
    with pytest.raises(UnsupportedError, match=message):
        use(trace)


def test_real_without_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(simdist.__file__).parents[1] / "real" / "__init__.py"
    spec = importlib.util.spec_from_file_location("real_again", file)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"real needs torch.*pip install 'simdist-training\[real\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
