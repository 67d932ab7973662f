"""From a file to settings, with every problem at once: `file.yaml:12: cluster.network.bandwidth: ...`.

Clusters, workloads and failures stand in files of their own, too, in the form of the presets.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from pydantic import ValidationError

from simdist.errors import ScenarioError, naming_file
from simdist.files import read_content
from simdist.scenario import strict_yaml
from simdist.scenario.cluster import Cluster
from simdist.scenario.failures import Failures
from simdist.scenario.strict_yaml import Document, Problem, path_text
from simdist.scenario.workload import Workload
from simdist.settings.base import FromFile, Settings, shown

Part: TypeAlias = Literal["cluster", "workload", "failures"]
SettingsT = TypeVar("SettingsT", bound=Settings)

_MAX_LINES = 100
_CLUSTER = "a cluster: write nodes, gpus_per_node, fabric and network, each as `key: value`"
_WORKLOAD = "a workload: write tensors_file, batch_size and forward, each as `key: value`"
_FAILURES = "failures: write causes, each with cause, of, rate and effect"


_PARTS: dict[Part, tuple[type[Settings], str]] = {
    "cluster": (Cluster, _CLUSTER),
    "workload": (Workload, _WORKLOAD),
    "failures": (Failures, _FAILURES),
}


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file: the keys of `cluster` in a scenario.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    return _read_file(Cluster, Path(path), _CLUSTER)[0]


def load_workload(path: str | Path) -> Workload:
    """Read a workload file: the keys of `workload` in a scenario. A `tensors_file` is relative to it.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    return _read_file(Workload, Path(path), _WORKLOAD)[0]


def load_failures(path: str | Path) -> Failures:
    """Read a file of failures: the keys of `failures` in a scenario.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    return _read_file(Failures, Path(path), _FAILURES)[0]


def dump_cluster(cluster: Cluster) -> str:
    """Write YAML that `load_cluster` reads as an equal cluster.

    >>> from simdist.scenario import Link
    >>> print(dump_cluster(Cluster(nodes=2, gpus_per_node=4, fabric=Link.ideal(), network=Link.ideal())), end="")
    name: ''
    source: ''
    nodes: 2
    gpus_per_node: 4
    fabric: ideal
    network: ideal
    topology: {nics_per_node: 1, oversubscription: 1.0, host_bridge: unlimited}
    collectives: {library: nccl, in_switch_reduction: false, chunkwise: false, overhead: 0 s}
    device:
      name: ''
      memory_bandwidth: unlimited
      host_bandwidth: unlimited
      peak: {}
      speed: 1.0
    slow_devices: []
    """
    return strict_yaml.dump(cluster.model_dump(mode="json"))


def dump_workload(workload: Workload) -> str:
    """Write YAML that `load_workload` reads as an equal workload, without any other file."""
    return strict_yaml.dump(workload.model_dump(mode="json"))


def read_part(part: Part, path: Path) -> dict[str, object]:
    """Return the keys and values of a file that is right by itself, for others to override.

    A `tensors_file` in it becomes an absolute path.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    cls, shape = _PARTS[part]
    _, keys = _read_file(cls, path, shape)
    tensors_file = keys.get("tensors_file")
    if isinstance(tensors_file, str):
        keys["tensors_file"] = str((path.parent / tensors_file).absolute())
    return keys


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ScenarioError: It cannot be read, or is not UTF-8.
    """
    with naming_file(path, "read", ScenarioError):
        content = read_content(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        message = f"byte {content[error.start]:#04x} is not UTF-8: save the file as UTF-8"
        raise scenario_error(str(path), [Problem(line, (), message)]) from None


def _read_file(cls: type[SettingsT], path: Path, shape: str) -> tuple[SettingsT, dict[str, object]]:
    """Return what a file says, and its keys and values as they stand there."""
    document = strict_yaml.parse(read_text(path))
    settings = validated(cls, document, name=str(path), folder=path.parent, shape=shape)
    return settings, dict(document.root) if isinstance(document.root, dict) else {}


def validated(
    cls: type[SettingsT],
    document: Document,
    *,
    name: str,
    folder: Path,
    shape: str,
    defaults: Mapping[str, object] | None = None,
) -> SettingsT:
    """Validate a document as settings.

    Args:
        cls: Which settings.
        document: As it was parsed.
        name: Of the file, for messages.
        folder: Files that the document names are relative to it.
        shape: Expected document, and the text to write, for messages.
        defaults: Keys and values that the document may leave out.

    Raises:
        ScenarioError: It is wrong; a line for every problem.
    """
    problems = list(document.problems)
    settings = None
    if isinstance(document.root, dict):
        try:
            settings = cls.model_validate({**(defaults or {}), **document.root}, context=FromFile(folder))
        except ValidationError as error:
            problems += problems_of(error, document)
    elif document.root is not None:
        problems.append(Problem(1, (), f"{shown(document.root)} is not {shape}"))
    elif not problems:
        problems.append(Problem(1, (), f"is empty, not {shape}"))
    if settings is None or problems:
        raise scenario_error(name, problems)
    return settings


def problems_of(error: ValidationError, document: Document, *, below: strict_yaml.Path = ()) -> list[Problem]:
    """Return the problems of a failed validation of the value at `below`, each with its line in the document."""
    problems = []
    for details in error.errors(include_url=False, include_context=False, include_input=False):
        place, path = document.locate((*below, *details["loc"]))
        problems.append(Problem(place.line, path, details["msg"]))
    return problems


def scenario_error(name: str, problems: Iterable[Problem]) -> ScenarioError:
    """Return one error for all problems of a file, a line each, from top to bottom."""
    problems = list(problems)
    lines = [_line(name, problem) for problem in sorted(problems, key=lambda problem: problem.line)]
    hidden = len(lines) - _MAX_LINES
    lines = lines[:_MAX_LINES] + ([f"{name}: and {hidden} more"] if hidden > 0 else [])
    return ScenarioError("\n".join(lines))


def _line(name: str, problem: Problem) -> str:
    path = f"{path_text(problem.path)}: " if problem.path else ""
    return f"{name}:{problem.line}: {path}{problem.message}"
