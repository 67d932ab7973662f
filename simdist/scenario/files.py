"""Clusters and workloads in files of their own, in the form of the presets: measured once, used by many scenarios."""

from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from pydantic import ValidationError

from simdist.errors import ScenarioError
from simdist.scenario import strict_yaml
from simdist.scenario.cluster import Cluster
from simdist.scenario.problems import problems_of, scenario_error
from simdist.scenario.strict_yaml import Problem
from simdist.scenario.workload import Workload
from simdist.settings.base import FromFile, shown

Part: TypeAlias = Literal["cluster", "workload"]
PartT = TypeVar("PartT", Cluster, Workload)

_SHAPES: dict[type[Cluster] | type[Workload], str] = {
    Cluster: "a cluster: write nodes, gpus_per_node, fabric and network, each as `key: value`",
    Workload: "a workload: write tensors_file, batch_size and forward, each as `key: value`",
}


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file: the keys of `cluster` in a scenario.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    return _load(Path(path), Cluster)[0]


def load_workload(path: str | Path) -> Workload:
    """Read a workload file: the keys of `workload` in a scenario. A `tensors_file` is relative to it.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    return _load(Path(path), Workload)[0]


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
    nics_per_node: 1
    host_bridge: unlimited
    oversubscription: 1.0
    library: nccl
    collective_overhead: 0 s
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
    _, keys = _load(path, Cluster) if part == "cluster" else _load(path, Workload)
    if isinstance(tensors_file := keys.get("tensors_file"), str):
        keys["tensors_file"] = str((path.parent / tensors_file).absolute())
    return keys


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ScenarioError: It cannot be read, or is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        message = f"byte {content[error.start]:#04x} is not UTF-8: save the file as UTF-8"
        raise scenario_error(str(path), [Problem(line, (), message)]) from None


def _load(path: Path, cls: type[PartT]) -> tuple[PartT, dict[str, object]]:
    """Return what a file says, and its keys and values as they stand there."""
    document = strict_yaml.parse(read_text(path))
    problems, loaded, keys = list(document.problems), None, {}
    if isinstance(document.root, dict):
        keys = dict(document.root)
        try:
            loaded = cls.model_validate(keys, context=FromFile(path.parent))
        except ValidationError as error:
            problems += problems_of(error, document)
    elif document.root is not None:
        problems.append(Problem(1, (), f"{shown(document.root)} is not {_SHAPES[cls]}"))
    elif not problems:
        problems.append(Problem(1, (), f"is empty, not {_SHAPES[cls]}"))
    if loaded is None or problems:
        raise scenario_error(str(path), problems)
    return loaded, keys
