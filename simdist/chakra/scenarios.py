"""A scenario of an imported job: on given machines, with buckets as they were."""

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from simdist.chakra.importing import Imported
from simdist.errors import ScenarioError
from simdist.scenario import Cluster, Scenario, Workload, dump, presets
from simdist.scenario.files import read_part
from simdist.settings.base import FromFile, nearest


def fit_cluster(name: str, world_size: int) -> Cluster:
    """Return a cluster with as many nodes as a job needs.

    Args:
        name: A cluster file, or a preset.
        world_size: Ranks of the job; fewer than a node has take one node with as many GPUs.

    Raises:
        ScenarioError: There is no such cluster, or ranks do not fill its nodes.
    """
    path = Path(name)
    if path.is_file():
        keys = read_part("cluster", path)
    elif name in presets.names("clusters"):
        keys = presets.read("clusters", name)
    else:
        known = presets.names("clusters")
        raise ScenarioError(f"{name}: there is no such cluster file, nor a preset of that name: {nearest(name, known)}")
    whole = Cluster.model_validate(keys, context=FromFile(path.parent))
    gpus_per_node = min(whole.gpus_per_node, world_size)
    if world_size % gpus_per_node:
        raise ScenarioError(
            f"{name}: {world_size} ranks do not fill nodes of {gpus_per_node} GPUs: write a cluster file with another "
            f"gpus_per_node"
        )
    keys |= {"nodes": world_size // gpus_per_node, "gpus_per_node": gpus_per_node}
    try:
        return Cluster.model_validate(keys, context=FromFile(path.parent))
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ScenarioError(f"{name}: does not fit {world_size} ranks: {problem}") from None


def scenario_of(imported: Imported, cluster: Cluster, *, name: str) -> Scenario:
    """Return the scenario: the job as it was traced, synchronous, every tensor a bucket."""
    return Scenario.model_validate(
        {
            "name": name,
            "cluster": cluster,
            "workload": _in_ns(imported.workload),
            "steps": imported.n_steps,
            "schedules": [{"kind": "sync", "first_bucket_nbytes": 1, "bucket_nbytes": 1}],
        }
    )


def _in_ns(workload: Workload) -> Workload:
    """Round times to nanoseconds, as traces tell no less; rounded sums, so that many buckets add up as they did."""
    ends_s = np.round(np.cumsum([0.0, *(tensor.backward_s or 0.0 for tensor in workload.tensors)]), 9)
    tensors = tuple(
        tensor.model_copy(update={"backward_s": round(float(seconds), 9)})
        for tensor, seconds in zip(workload.tensors, np.diff(ends_s), strict=True)
    )
    forward_s, optimize_s = (round(seconds or 0.0, 9) for seconds in (workload.forward_s, workload.optimize_s))
    return workload.model_copy(update={"tensors": tensors, "forward_s": forward_s, "optimize_s": optimize_s})


def scenario_text(scenario: Scenario, imported: Imported) -> str:
    """Return the file: what to know about it as comments, then the scenario."""
    about = ["Imported from Chakra execution traces.", "bucket_size 1 B: every tensor is a bucket, as it was traced."]
    lines = [*about, *(f"Note: {note}." for note in imported.notes)]
    return "".join(f"# {line}\n" for line in lines) + dump(scenario)
