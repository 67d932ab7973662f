"""`simdist presets`."""

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import TypeAlias, get_args

from simdist.cli.session import Session
from simdist.cli.tables import table_text
from simdist.scenario import Cluster, Workload, load, presets
from simdist.scenario.presets import Kind
from simdist.scenario.strict_yaml import parse
from simdist.settings.base import FromFile
from simdist.settings.units import format_Bps, format_nbytes

_WORDS = ("name", "device", "cluster", "workload", "schedules", "source")
_SOURCE_LENGTH = 90

_Facts: TypeAlias = dict[str, object]


def show(session: Session, kind: str | None, name: str | None) -> None:
    """Print tables of what ships, or one preset as it stands in its file.

    Raises:
        ScenarioError: There is none of that name.
    """
    kinds: dict[str, Kind] = {each: each for each in get_args(Kind)}
    if kind is not None and name is not None:
        path = presets.path(kinds[kind], name)
        text = path.read_text(encoding="utf-8")
        document = {"kind": kind, "name": name, "path": str(path), "settings": parse(text).root}
        session.result(document, text.rstrip("\n"))
        return
    chosen = [each for each in kinds.values() if kind in (None, each)]
    facts = {each: [_facts(each, preset) for preset in presets.names(each)] for each in chosen}
    session.result(facts, "\n\n".join(_table(each, facts[each]) for each in chosen))


def _facts(kind: Kind, name: str) -> _Facts:
    describe: dict[Kind, Callable[[str], _Facts]] = {
        "clusters": _cluster,
        "workloads": _workload,
        "scenarios": _scenario,
    }
    return {"name": name, **describe[kind](name)}


def _cluster(name: str) -> _Facts:
    cluster = Cluster.model_validate(
        presets.read("clusters", name), context=FromFile(Path()), by_alias=True, by_name=False
    )
    return {
        "ranks": cluster.world_size,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "device": cluster.device.name,
        "network_Bps": cluster.network.bandwidth_Bps,
        "source": cluster.source,
    }


def _workload(name: str) -> _Facts:
    workload = Workload.model_validate(
        presets.read("workloads", name), context=FromFile(Path()), by_alias=True, by_name=False
    )
    return {
        "parameters": sum(workload.tensor_counts),
        "nbytes": workload.nbytes,
        "tensors": len(workload.tensors),
        "batch_size": workload.batch_size,
        "source": workload.source,
    }


def _scenario(name: str) -> _Facts:
    scenario = load(presets.path("scenarios", name))
    return {
        "ranks": scenario.cluster.world_size,
        "steps": scenario.steps,
        "cluster": scenario.cluster.name,
        "workload": scenario.workload.name,
        "schedules": [schedule.name for schedule in scenario.schedules],
    }


def _table(kind: Kind, facts: list[_Facts]) -> str:
    if not facts:
        return f"{kind}\n\nnone"
    shown = {"network_Bps": "network", "nbytes": "size", "gpus_per_node": "GPUs/node", "batch_size": "batch"}
    header = [shown.get(name, name) for name in facts[0]]
    return table_text(
        kind, header, [[_cell(name, value) for name, value in each.items()] for each in facts], words=_WORDS
    )


def _cell(name: str, value: object) -> str:
    match value:
        case float() if name == "network_Bps":
            return format_Bps(value)
        case int() if name == "nbytes":
            return format_nbytes(value)
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(map(str, value))
        case _:
            return shorten(str(value), _SOURCE_LENGTH, placeholder=" ...")
