"""`simdist presets`.

Columns:
    kind, name, path (str): `clusters`, `workloads`, `failures` or `scenarios`; name; file.
    settings (object): The file, with the keys of a scenario.
"""

import math
from collections.abc import Callable
from textwrap import shorten
from typing import TypeAlias, get_args

import click

from simdist.cli import common
from simdist.scenario import load, load_cluster, load_failures, load_workload, presets
from simdist.scenario.presets import PresetKind
from simdist.scenario.strict_yaml import parse
from simdist.settings.base import picked
from simdist.settings.units import format_Bps, format_like, format_nbytes, format_share
from simdist.studies.columns import Column, count
from simdist.studies.tables import table_text

_SOURCE_LENGTH = 90
_YEAR_S = 8760 * 3600.0
_DAY_S = 86_400.0
_OF_GPU = {"gpu": 1.0, "node": 1 / 8}  # of a component's failures

_Facts: TypeAlias = dict[str, object]


def _source_text(source: str) -> str:
    return shorten(source, _SOURCE_LENGTH, placeholder=" ...")


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "clusters": (
        Column("name"),
        Column("ranks", form=count),
        Column("nodes", form=count),
        Column("GPUs/node", "gpus_per_node", form=count),
        Column("device"),
        Column("network", form=str),
        Column("source", words=_source_text),
    ),
    "workloads": (
        Column("name"),
        Column("parameters", form=count),
        Column("size", "nbytes", form=format_nbytes),
        Column("tensors", form=count),
        Column("batch", "batch_size", form=count),
        Column("source", words=_source_text),
    ),
    "failures": (
        Column("name"),
        Column("per GPU-year", "per_gpu_year", form=format_share),
        Column("of each job", "per_job_day", form=lambda n: f"{n:.2g} per day" if n else "-"),
        Column("causes", words=", ".join),
        Column("source", words=_source_text),
    ),
    "scenarios": (
        Column("name"),
        Column("ranks", form=count),
        Column("steps", form=count),
        Column("cluster"),
        Column("workload"),
        Column("schedules", words=", ".join),
    ),
}


@click.command("presets")
@click.argument("kind", type=click.Choice(get_args(PresetKind)), required=False)
@click.argument("name", required=False)
@common.options
def command(session: common.CliSession, *, kind: PresetKind | None, name: str | None) -> None:
    """Show the clusters, workloads, failures and scenarios that ship.

    A kind limits the list. A kind and a NAME print the preset's YAML.
    """
    if kind is not None and name is not None:
        path = presets.path(kind, name)
        text = path.read_text(encoding="utf-8")
        document = {"kind": kind, "name": name, "path": str(path), "settings": parse(text).root}
        session.result(document, text.rstrip("\n"))
        return
    kinds: tuple[PresetKind, ...] = get_args(PresetKind) if kind is None else (kind,)
    facts = {each: _facts_of(each) for each in kinds}
    shown = {each: [_as_written(fact) if each == "clusters" else fact for fact in facts[each]] for each in kinds}
    session.result(facts, "\n\n".join(_table(each, shown[each]) for each in kinds))


def _facts_of(kind: PresetKind) -> list[_Facts]:
    """Return the presets of a kind by name; the sizes of a model in ascending order."""
    found = [{"name": preset} | _FACTS[kind](preset) for preset in presets.names(kind)]
    return sorted(found, key=_family_and_size) if kind == "workloads" else found


def _family_and_size(fact: _Facts) -> tuple[str, int]:
    """Return the order of workloads: `llama2-7b` and `llama2-70b` are of one family."""
    return str(fact["name"]).partition("-")[0], int(str(fact["parameters"]))


def _as_written(fact: _Facts) -> _Facts:
    """Return a cluster with the bandwidth of its network in the unit of its file."""
    root = parse(presets.path("clusters", str(fact["name"])).read_text(encoding="utf-8")).root
    network = root.get("network") if isinstance(root, dict) else None
    written = network.get("bandwidth") if isinstance(network, dict) else None
    bandwidth = fact["network_Bps"]
    return fact | {"network": format_like(written, bandwidth, format_Bps) if isinstance(bandwidth, float) else None}


def _cluster(name: str) -> _Facts:
    """Return a cluster that ships as JSON.

    Columns:
        name, device, source (str): Name, GPU, source of its numbers.
        ranks, nodes, gpus_per_node (int): Ranks, machines, ranks of a machine.
        network_Bps (float or null): Line rate of a NIC.
    """
    cluster = load_cluster(presets.path("clusters", name))
    return {
        **picked(cluster, "nodes", "gpus_per_node", "source", ranks="world_size"),
        "device": cluster.device.name,
        "network_Bps": cluster.network.bandwidth_Bps,
    }


def _workload(name: str) -> _Facts:
    """Return a workload that ships as JSON.

    Columns:
        name, source (str): Name, source of its numbers.
        tensors, parameters, nbytes (int): Number of tensors, elements, size.
        batch_size (int): Samples per GPU and pass.
    """
    workload = load_workload(presets.path("workloads", name))
    return {
        **picked(workload, "nbytes", "batch_size", "source"),
        "parameters": sum(workload.tensor_counts),
        "tensors": len(workload.tensors),
    }


def _failures(name: str) -> _Facts:
    """Return rates of failures that ship as JSON.

    Columns:
        name, source (str): Name, source of its numbers.
        causes (list): Names of the causes (str).
        per_gpu_year (float): Failures of each GPU per year of 8,760 h, with those of its node, 8 GPUs.
        per_job_day (float): Failures of each job per day beside them, whatever its size.
    """
    failures = load_failures(presets.path("failures", name))
    rates = [(each.of, each.rate_per_s or 0.0) for each in failures.causes]
    return {
        "source": failures.source,
        "causes": [each.cause for each in failures.causes],
        "per_gpu_year": _YEAR_S * math.fsum(_OF_GPU.get(of, 0.0) * per_s for of, per_s in rates),
        "per_job_day": _DAY_S * math.fsum(per_s for of, per_s in rates if of == "job"),
    }


def _scenario(name: str) -> _Facts:
    """Return a scenario that ships as JSON.

    Columns:
        name, cluster, workload (str): Its name, cluster and workload.
        ranks, steps (int): Ranks and steps.
        schedules (list): Labels.
    """
    scenario = load(presets.path("scenarios", name))
    return {
        "ranks": scenario.cluster.world_size,
        "steps": scenario.steps,
        "cluster": scenario.cluster.name,
        "workload": scenario.workload.name,
        "schedules": [schedule.name for schedule in scenario.schedules],
    }


_FACTS: dict[PresetKind, Callable[[str], _Facts]] = {
    "clusters": _cluster,
    "workloads": _workload,
    "failures": _failures,
    "scenarios": _scenario,
}


def _table(kind: PresetKind, facts: list[_Facts]) -> str:
    return table_text(kind, _COLUMNS[kind], facts) if facts else f"{kind}\n\nnone"
