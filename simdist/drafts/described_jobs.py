"""What `simdist init --from` writes of a job that another program describes."""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from simdist.configurations.accelerate import described_accelerate
from simdist.configurations.deepspeed import read_deepspeed
from simdist.configurations.described import GUESS, DescribedJob, Mesh, WorkloadKey, combined_job
from simdist.configurations.huggingface import json_of, read_config
from simdist.configurations.keys import Keys
from simdist.configurations.llm_foundry import described_llm_foundry
from simdist.configurations.rates import Estimate, estimate, rounded
from simdist.configurations.torchtitan import read_job
from simdist.errors import ScenarioError
from simdist.runs.measured_rates import utilization_of_rate
from simdist.scenario import Cluster, Workload, load_workload, presets, strict_yaml
from simdist.scenario.by_name import find_file
from simdist.scenario.loading import read_text, scenario_error
from simdist.schedules.rivals import rivals_of_copies, rivals_of_shards, sharded
from simdist.settings.precision import Precision

#: Suffixes of files of other programs.
DESCRIBED = (".toml", ".json", ".yaml", ".yml")

_PLAIN = re.compile(r"[\w.%+-]+( [\w/]+)?", re.ASCII)
_OPTION = "option --sequence"
_WORKLOAD = "option --workload"
_OF_DEEPSPEED = frozenset(
    ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16")
)
_OF_ACCELERATE = frozenset(("distributed_type", "compute_environment", "num_processes", "deepspeed_config"))
_OF_LLM_FOUNDRY = frozenset(("global_train_batch_size", "device_train_microbatch_size", "train_loader"))
_ANY_SHARE = 0.5  # of the peak, where only FLOPs are asked for
_MOST_WHOLE = 3e9  # parameters: with Adam, 16 B each are 48 GB, which leaves room for activations on a GPU of 80 GB


def read_described_job(paths: Sequence[Path], *, sequence: int | None) -> DescribedJob:
    """Read the files that describe a job together: one of them has the model, and others how it is trained.

    Raises:
        ScenarioError: A file cannot be read, or has something that is not supported, or two contradict each other.
    """
    found = [(path, _read_file(path, sequence=sequence)) for path in paths]
    jobs = [replace(each, remarks=tuple(f"{path}: {remark}" for remark in each.remarks)) for path, each in found]
    stated = next((each for each in jobs if each.sequence is not None), None)
    if stated is not None and sequence is None:
        models = [_of_model(path, stated) for path, each in zip(paths, jobs, strict=True) if each.has_model]
        jobs = [*models, *(each for each in jobs if not each.has_model)]
    return functools.reduce(combined_job, sorted(jobs, key=lambda each: not each.has_model))


def _of_model(path: Path, stated: DescribedJob) -> DescribedJob:
    """Return a model with the sequence that another file states."""
    job = _read_file(path, sequence=stated.sequence)
    keys = (replace(each, source=each.source.replace(_OPTION, stated.sequence_source)) for each in job.workload)
    return replace(job, workload=tuple(keys))


def _read_file(path: Path, *, sequence: int | None) -> DescribedJob:
    """Read a file by its suffix and its keys."""
    if not path.is_file():
        found = "is no regular file" if path.exists() else "there is no such file"
        raise ScenarioError(f"--from {path}: {found}")
    match path.suffix:
        case ".toml":
            return read_job(path, sequence=sequence)
        case ".json":
            keys = json_of(path)
            of_deepspeed = not _OF_DEEPSPEED.isdisjoint(keys) and "model_type" not in keys
            return read_deepspeed(path) if of_deepspeed else read_config(path, sequence=sequence)
        case ".yaml" | ".yml":
            return _read_yaml(path, sequence=sequence)
        case _:
            raise _unknown(path)


def _read_yaml(path: Path, *, sequence: int | None) -> DescribedJob:
    document = strict_yaml.parse(read_text(path))
    if document.problems:
        raise scenario_error(str(path), document.problems)
    values = document.root if isinstance(document.root, dict) else {}
    if isinstance(values.get("parameters"), dict):  # of a run on MosaicML's platform
        values = values["parameters"]
    keys = Keys(str(path), values)
    if not _OF_LLM_FOUNDRY.isdisjoint(values):
        return described_llm_foundry(keys, sequence=sequence)
    if not _OF_ACCELERATE.isdisjoint(values):
        return described_accelerate(keys)
    raise _unknown(path)


def _unknown(path: Path) -> ScenarioError:
    return ScenarioError(
        f"--from {path}: is none of: a torchtitan job (.toml), the config.json of a Hugging Face model, a DeepSpeed "
        f"configuration (.json), an Accelerate configuration or an llm-foundry job (.yaml), a PyTorch model "
        f"(module:function), a log of failures (sacct, torchrun, ml-goodput-measurement), a table of nccl-tests (any "
        f"other file)"
    )


def model_of_workload(name: str, *, source: str = _WORKLOAD) -> DescribedJob:
    """Return the model of a workload preset or file, for a job without a model."""
    path = find_file("workloads", name, option="--workload")
    is_file = Path(name).is_file()
    key = WorkloadKey("file", str(path.resolve()), source) if is_file else WorkloadKey("preset", name, source)
    workload = load_workload(path)
    return DescribedJob(workload=(key,), batch_size=workload.batch_size, batch_size_source=f"{GUESS}: as in {name}")


def states_time(job: DescribedJob) -> bool:
    """Tell whether the workload of `--workload` states the seconds of its passes."""
    return any(each.source == _WORKLOAD for each in job.workload) and workload_of(job, "--workload").has_seconds


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
    share_of = functools.partial(utilization_of_rate, cluster=cluster, precision=precision)
    workload = workload_of(job, name)
    found = estimate(workload, cluster.device, precision, is_compiled=bool(job.is_compiled), share_of=share_of)
    if found is None:
        stated = ", ".join(cluster.device.peak_flops.stated) or "none"
        device = cluster.device.name or "this device"
        raise ScenarioError(
            f"{name}: the peak of {device} in {precision} is not known (stated: {stated}): write --precision, or "
            f"--forward with its measured time, e.g. --forward '20 ms'"
        )
    return found


def workload_lines(job: DescribedJob, more: list[WorkloadKey], folder: Path) -> list[str]:
    """Return the workload as lines of a scenario, each with its source."""
    lines = [(each, each.value) for each in (*job.workload, *more)]
    lines = [(each, _beside(value, folder) if each.key == "file" else value) for each, value in lines]
    return ["workload:", *(f"  {each.key}: {_flow(value)}  # {printable(each.source)}" for each, value in lines)]


def _beside(file: object, folder: Path) -> object:
    """Return the name of a file in a folder, or the whole path of one elsewhere."""
    path = Path(str(file))
    return path.name if path.parent == folder.resolve() else file


def range_lines(precision: Precision, found: Estimate) -> list[str]:
    """Return the range of the utilization as an entry of `uncertain`; none if it was measured."""
    ends = {"from": rounded(found.low), "to": rounded(found.high)}
    if ends["from"] == ends["to"]:
        return []
    about = {"source": found.range_source, "measure": "time of a step on one GPU, or of its compute in a profile"}
    return [f"  workload.utilization.{precision}: {_flow(ends | about)}"]


def schedules_of(job: DescribedJob, name: str, n_nodes: int, per_node: int) -> tuple[str, ...]:
    """Return the schedules to compare as a scenario has them: the job's own, then others that suit it.

    A model without a mesh, if large, is sharded over all ranks. A small one has no schedule of its own.

    Raises:
        ScenarioError: The ranks do not form the mesh.
    """
    world_size = n_nodes * per_node
    is_large = sum(workload_of(job, name).tensor_counts) >= _MOST_WHOLE
    mesh = job.mesh
    if mesh is None:
        if not is_large or world_size == 1:
            return ()
        mesh = Mesh(1, None, settings=(("param_dtype", "bfloat16"), ("reduce_dtype", "float32")))
    shard = mesh.shard_among(world_size, per_node)
    if shard == 1:
        own = {"kind": "sync"} | dict(mesh.whole)
        return tuple(
            _flow(each) if len(each) > 1 else "sync" for each in (own, *rivals_of_copies(own, n_nodes, per_node))
        )
    own = sharded(shard, world_size) | dict(mesh.settings)
    rivals = rivals_of_shards(own, world_size, per_node, is_large=is_large)
    return tuple(dict.fromkeys(_flow(each) for each in (own, *rivals)))


def printable(text: str) -> str:
    """Return a text as a comment of one line."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _flow(value: object) -> str:
    """Return a value as YAML has it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
