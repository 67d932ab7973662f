"""From a sweep file to a sweep, with every problem at once."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError
from pydantic import Field as Setting

from simdist import scenario as scenarios
from simdist.engines.choose import Engine
from simdist.errors import ScenarioError
from simdist.scenario import Scenario, presets, strict_yaml
from simdist.scenario.fields import ScenarioField
from simdist.scenario.loading import problems_of, read_text, scenario_error, validated
from simdist.scenario.strict_yaml import Document, Problem, path_text
from simdist.scenario.workload import other_batch_fault
from simdist.settings.base import FromFile, Settings, nearest, shown
from simdist.settings.units import Seconds, Whole
from simdist.studies.comparison import default_baseline, find_baseline
from simdist.sweeps.axes import Reader
from simdist.sweeps.definition import Case, Sweep, SweepAxis
from simdist.sweeps.python_values import as_in_a_file
from simdist.sweeps.sampling import Sampling

_MAX_POINTS = 1_000_000
_WORKLOAD = "workload"
_BATCH_SIZE = (_WORKLOAD, "batch_size")
_LINE = re.compile(r"^sweep:\d+: ", re.MULTILINE)
_SHAPE = "write scenario: FILE and vary: {path: [values]}"


def _check_scenario(value: object) -> object:
    if not isinstance(value, str | dict):
        raise ValueError(f"{shown(value)}: write the name of a file or of a preset, or the scenario itself")
    return value


class SweepFile(Settings):
    """The keys of a sweep file.

    Args:
        scenario: Name of a file beside this one or of a preset, or the scenario itself.
        vary: Path of a field -> its values; all combinations are taken, or a sample of them.
        cases: Fields that change together: a mapping of paths to values for each case, and its `name`.
        sample: Which points are taken.
        baseline: Label or kind of the schedule that speed-ups are over; absent: `sync`, or else the first.
        seeds: Number of seeds of delays that each row is measured with.
        engine: `auto` takes the fast engine wherever it is exact.
        time_limit_s: Seconds after which a row is given up.
    """

    scenario: Annotated[str | dict[str, Any], BeforeValidator(_check_scenario), Setting(examples=["first.yaml"])]
    vary: dict[str | int, Any] = Setting(default_factory=dict)
    cases: tuple[dict[str | int, Any], ...] = ()
    sample: Sampling = Sampling()
    baseline: str | None = None
    seeds: Annotated[Whole, Setting(ge=1, le=1_000_000)] = 20
    engine: Engine = "auto"
    time_limit_s: Seconds = 3600.0


def load(sweep: str | Path | Mapping[str, object]) -> Sweep:
    """Return a sweep from a file, or from a mapping in Python.

    Args:
        sweep: Name of a file; or a mapping with the keys of one. There, `scenario` may be all that
            `simdist.scenario.load` takes, and varied values may be an array or a column, of which each may be an object
            or a mapping. As there, a quantity is text with its unit (`"disturbances[0].delay": ["0.1 s"]`) or a number
            in SI units under the name of the attribute (`"disturbances[0].delay_s": [0.1]`). Files are relative to the
            current directory.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.

    >>> load({"scenario": "cloud-stragglers", "vary": {"cluster.nodes": [2, 4, 8]}}).n_points
    3
    """
    if isinstance(sweep, Mapping):
        text = strict_yaml.dump(as_in_a_file(sweep, SweepFile))
        try:
            return loads(text, name="sweep")
        except ScenarioError as error:
            raise ScenarioError(_LINE.sub("sweep: ", str(error))) from None  # of a text that no user has written
    path = Path(sweep)
    return loads(read_text(path), name=str(path), folder=path.parent)


def loads(text: str, *, name: str = "<text>", folder: Path = Path()) -> Sweep:
    """Read a sweep from text.

    Args:
        text: YAML.
        name: Of the file, for messages; its stem names the sweep.
        folder: Files that the text names are relative to it.

    Raises:
        ScenarioError: It is wrong; a line for every problem, each beginning with `name` and the line's number.
    """
    document = strict_yaml.parse(text)
    root = document.root
    if isinstance(root, dict) and "scenario" not in root and root.keys() & {"cluster", "workload", "schedules"}:
        hint = f"simdist compare {name}; a sweep names it, and what it varies: {_SHAPE}"
        raise ScenarioError(f"{name}: is a scenario, and no sweep: {hint}")
    file = validated(SweepFile, document, name=name, folder=folder, shape=f"a sweep: {_SHAPE}")
    return _sweep(document, file, name, folder)


def _sweep(document: Document, file: SweepFile, name: str, folder: Path) -> Sweep:
    stem = Path(name).stem.strip("<>")
    tree, base_folder, scenario = _base(document, file.scenario, name, folder)
    reader = Reader(document, scenario, tree, base_folder, is_grid=file.sample.kind == "grid")
    axes, cases = reader.read(file.vary, file.cases)
    baseline = _default_baseline(scenario, axes, cases) if file.baseline is None else file.baseline
    how = file.sample, baseline, file.seeds, file.engine, file.time_limit_s
    sweep = Sweep(stem, tree, scenario, base_folder, axes, cases, *how)
    if not reader.problems:
        _check(reader, sweep)
        _check_batches(reader, sweep)
    if reader.problems:
        raise scenario_error(name, reader.problems)
    return sweep


def _check(reader: Reader, sweep: Sweep) -> None:
    """Collect errors of the sweep as a whole."""
    if not sweep.axes and not sweep.cases:
        reader.fault((), f"nothing is varied: {_SHAPE}")
    if sweep.sampling.kind != "grid" and not sweep.axes:
        reader.fault(("sample",), "there is nothing to sample: write vary, or no sample")
    if sweep.n_points > _MAX_POINTS:
        at = ("vary",) if sweep.sampling.kind == "grid" else ("sample", "points")
        reader.fault(at, f"{sweep.n_points:,} points: write {_MAX_POINTS:,} or fewer")
    if not any(field.path[0] == "schedules" for field in sweep.fields):
        try:
            find_baseline(sweep.scenario, sweep.baseline)
        except ScenarioError as error:
            reader.fault(("baseline",), f"{str(error).partition(': ')[2]}: write one of them")


def _default_baseline(scenario: Scenario, axes: Iterable[SweepAxis], cases: Iterable[Case]) -> str:
    """Return the default baseline: by its kind where labels may differ between points."""
    fields = [*(axis.field for axis in axes), *(field for case in cases for field, _ in case.choices)]
    varies = any(field.path[0] == "schedules" for field in fields)
    return default_baseline([(each.kind if varies else each.name, each.kind) for each in scenario.schedules])


def _check_batches(reader: Reader, sweep: Sweep) -> None:
    """Collect batch sizes that are varied while seconds stay that were measured at another one."""
    workload = sweep.scenario.workload
    every = _keys_of_workload(sweep.fields)
    for axis in sweep.axes:
        if axis.field.path == _BATCH_SIZE:
            sizes = [each.written for each in axis.choices] or [axis.field.text(each) for each in axis.bounds[-1:]]
            faults = [other_batch_fault(workload, each, every) for each in sizes]
            if fault := next(filter(None, faults), None):
                reader.fault(("vary", path_text(_BATCH_SIZE)), fault)
    varied = _keys_of_workload(axis.field for axis in sweep.axes)
    for number, case in enumerate(sweep.cases):
        keys = [*varied, *_keys_of_workload(field for field, _ in case.choices)]
        for field, choice in case.choices:
            if field.path == _BATCH_SIZE and (fault := other_batch_fault(workload, choice.written, keys)):
                reader.fault(("cases", number, path_text(_BATCH_SIZE)), fault)


def _keys_of_workload(fields: Iterable[ScenarioField]) -> list[str | int]:
    """Return the keys of the workload that are set; a workload as a whole is another preset."""
    paths = [field.path for field in fields if field.path[0] == _WORKLOAD]
    return [path[1] if len(path) > 1 else "preset" for path in paths]


def _base(
    document: Document, written: str | dict[str, Any], name: str, folder: Path
) -> tuple[dict[str, Any], Path, Scenario]:
    """Return the scenario as a file has it, the folder of its files, and the scenario itself."""
    if isinstance(written, dict):
        try:
            tree = {"name": Path(name).stem.strip("<>"), **written}
            return written, folder, Scenario.model_validate(tree, context=FromFile(folder))
        except ValidationError as error:
            raise scenario_error(name, problems_of(error, document, below=("scenario",))) from None
    path = folder / written
    if not path.is_file():
        known = presets.names("scenarios")
        if written not in known:
            place, at = document.locate(("scenario",))
            message = f"there is no file {path}, nor a preset {shown(written)}: {nearest(written, known)}"
            raise scenario_error(name, [Problem(place.line, at, message)])
        path = presets.path("scenarios", written)
    scenario = scenarios.load(path)
    root = strict_yaml.parse(read_text(path)).root
    assert isinstance(root, dict)  # it was read as a scenario
    return root, path.parent, scenario
