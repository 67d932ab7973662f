"""What `simdist init --from` writes of a job that another program describes."""

import json
from pathlib import Path

from pydantic import ValidationError

from simdist.configurations.described import DescribedJob, WorkloadKey
from simdist.configurations.huggingface import read_config
from simdist.configurations.rates import Estimate, estimate, rounded
from simdist.configurations.torchtitan import read_job
from simdist.errors import ScenarioError
from simdist.scenario import Cluster, Workload, presets
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.settings.precision import Precision

_ANY_SHARE = 0.5  # of the peak, where only FLOPs are asked for
_MOST_WHOLE = 3e9  # parameters: with Adam, 16 B each are 48 GB, which leaves room for activations on a GPU of 80 GB


def read(path: Path, *, sequence: int | None) -> DescribedJob:
    """Read the file that describes a job: by its suffix, one of torchtitan or one of Hugging Face.

    Raises:
        ScenarioError: It is none of them, cannot be read, or has something that is not supported.
    """
    if not path.is_file():
        found = "is no regular file" if path.exists() else "there is no such file"
        raise ScenarioError(f"--from {path}: {found}")
    match path.suffix:
        case ".toml":
            return read_job(path, sequence=sequence)
        case ".json":
            return read_config(path, sequence=sequence)
        case _:
            raise ScenarioError(
                f"--from {path}: is neither a torchtitan job (.toml) nor the config.json of a Hugging Face model"
            )


def workload_of(job: DescribedJob, name: str) -> Workload:
    """Return the workload of a job, with any batch and utilization.

    Raises:
        ScenarioError: Its sizes are wrong.
    """
    keys = {each.key: each.value for each in job.workload} | {"batch_size": 1, "utilization": _ANY_SHARE}
    try:
        return Workload.model_validate(presets.expand("workload", keys))
    except ValidationError as error:
        first = error.errors()[0]
        raise ScenarioError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def utilization_of(job: DescribedJob, name: str, cluster: Cluster, precision: Precision) -> Estimate:
    """Return how much of the GPU's peak the passes reach.

    Raises:
        ScenarioError: The device states no peak of this precision.
    """
    found = estimate(workload_of(job, name), cluster.device, precision, is_compiled=job.is_compiled)
    if found is None:
        stated = ", ".join(cluster.device.peak_flops.stated) or "none"
        device = cluster.device.name or "this device"
        raise ScenarioError(
            f"{name}: the peak of {device} in {precision} is not known (stated: {stated}): write --precision, or "
            f"--forward with its measured time, e.g. --forward '20 ms'"
        )
    return found


def workload_lines(job: DescribedJob, more: list[WorkloadKey]) -> list[str]:
    """Return the workload as lines of a scenario, each with its source.

    Args:
        job: The job.
        more: Further keys.
    """
    return [
        "workload:",
        *(f"  {each.key}: {_flow(each.value)}  # {printable(each.source)}" for each in (*job.workload, *more)),
    ]


def range_lines(precision: Precision, found: Estimate) -> list[str]:
    """Return the range of the utilization as lines of a scenario; none if it was measured."""
    ends = {"from": rounded(found.low), "to": rounded(found.high)}
    if ends["from"] == ends["to"]:
        return []
    about = {"source": found.range_source, "measure": "time of a step on one GPU, or of its compute in a profile"}
    return [
        "uncertain:",
        f"  workload.utilization.{precision}: {_flow(ends | {k: json.dumps(v) for k, v in about.items()})}",
    ]


def schedules_of(job: DescribedJob, name: str, n_nodes: int, per_node: int) -> tuple[str, ...]:
    """Return the schedules to compare as a scenario has them; none if nothing speaks for a certain one.

    A job with a mesh has one. A model without one, if large, is sharded over all ranks, and over those of a node.

    Args:
        job: The job.
        name: Its file, for errors.
        n_nodes: Machines.
        per_node: Ranks of each.

    Raises:
        ScenarioError: The ranks do not form the mesh.
    """
    world_size = n_nodes * per_node
    if job.mesh is not None:
        return (_sharded(job.mesh.shard_among(world_size), world_size, dict(job.mesh.settings)),)
    if sum(workload_of(job, name).tensor_counts) < _MOST_WHOLE or world_size == 1:
        return ()
    settings: dict[str, object] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    shards = dict.fromkeys([world_size, per_node] if per_node > 1 else [world_size])
    return tuple(_sharded(shard, world_size, settings) for shard in shards)


def _sharded(shard: int, world_size: int, settings: dict[str, object]) -> str:
    """Return a schedule in which so many ranks share a copy of the model."""
    if shard == 1:
        return "sync"
    chosen = FSDP() if shard == world_size else HSDP(shard=shard)
    kind: dict[str, object] = {"kind": chosen.kind} | ({"shard": shard} if shard < world_size else {})
    return _flow(kind | settings)


def printable(text: str) -> str:
    """Return a text as a comment of one line."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _flow(value: object) -> str:
    """Return a value as YAML has it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
