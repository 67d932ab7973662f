"""Traces of `fully_shard` in gloo processes, by PyTorch's profiler: the import finds how the job shards its model.

On CPUs every collective blocks the host, so what the import says of times is not tested here.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fsdp_settings import MicroBatch
from pool import Pool
from trainings import Training

if torch.__version__ < "2.13":
    pytest.skip("names of operators and annotations are those of torch 2.13", allow_module_level=True)

from fsdp_trainings import Sharded, padded_count, profiled, units_of

from simdist.errors import ScenarioError, TraceError
from simdist.profiles import ImportedJob, ImportOptions, import_job
from simdist.profiles.estimates.sharded_model import ShardedModel
from simdist.profiles.steps.ranks import profile_rank

N_STEPS = 3
BF16 = torch.bfloat16
NO_SYNC = MicroBatch(reduces=False)
NO_ALL_REDUCE = MicroBatch(all_reduces=False)
NO_RESHARD = MicroBatch(reshards=False)
LAST = MicroBatch()
JOBS: dict[str, tuple[Sharded, dict[str, object]]] = {
    "4": (Sharded((4,)), {"kind": "fsdp"}),
    "2 x 2": (Sharded((2, 2)), {"kind": "hsdp", "shard": 2}),
    "kept": (Sharded((4,), reshard_after_forward=False), {"kind": "fsdp", "reshard_after_forward": False}),
    "in 2 parts": (Sharded((4,), reshard_after_forward=2), {"kind": "fsdp", "reshard_after_forward": 2}),
    "the root, too": (
        Sharded((4,), root_children=(6,), reshard_after_forward=True),
        {"kind": "fsdp", "wrap": "blocks", "reshard_after_forward": True},
    ),
    "a root": (Sharded((2, 2), root_children=(0,)), {"kind": "hsdp", "shard": 2, "wrap": "blocks"}),
    "mixed": (
        Sharded((2, 2), param_dtype=BF16, reduce_dtype=torch.float32),
        {"kind": "hsdp", "shard": 2, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    ),
    "reduced in the last": (
        Sharded((2, 2), micro_batches=(NO_SYNC, NO_SYNC, LAST)),
        {"kind": "hsdp", "shard": 2, "accumulation": "local"},
    ),
    "averaged in the last": (
        Sharded((2, 2), micro_batches=(NO_ALL_REDUCE, LAST)),
        {"kind": "hsdp", "shard": 2, "all_reduce": "last"},
    ),
    "kept between micro-batches": (
        Sharded((4,), micro_batches=(NO_RESHARD, LAST)),
        {"kind": "fsdp", "reshard_after_backward": False},
    ),
    "clipped": (Sharded((4,), max_norm=0.05), {"kind": "fsdp"}),
}
Traced = Callable[[str], Path]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """Return the folder with the traces of a job."""
    pool = Pool(4)
    done: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("traces")
            pool.run(profiled, JOBS[name][0], Training("odd", "adamw", torch.float32), N_STEPS, str(done[name]))
        return done[name]

    yield folder_of
    pool.close()


def imported(folder: Path, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> ImportedJob:
    profiles = [profile_rank(folder / f"rank{rank}.json.gz") for rank in ranks]
    return import_job(profiles, name="job", options=ImportOptions(nodes=1))


@pytest.mark.parametrize("name", JOBS)
def test_units_groups_and_schedule_are_found(traced: Traced, name: str) -> None:
    how, settings = JOBS[name]
    model = imported(traced(name)).model
    assert isinstance(model, ShardedModel)
    sharding = model.sharding
    module, _ = Training("odd", "adamw", torch.float32).make()
    units = units_of(module, how)
    if how.root_children:
        units.insert(0, units.pop())  # it is gathered first
    assert [unit.count for unit in sharding.units] == [padded_count(unit, how.shard) for unit in units]
    assert [unit.shapes for unit in sharding.units] == [tuple(tuple(each.shape) for each in unit) for unit in units]
    assert sum(tensor.count for tensor in model.tensors) == sum(each.numel() for unit in units for each in unit)
    assert (sharding.shard, sharding.replicas) == (how.shard, how.replicas)
    assert model.schedule.model_dump(exclude_unset=True) | {"kind": model.schedule.kind} == settings | {
        "blocking": True
    }
    assert len(sharding.usual) == len(how.micro_batches)


def test_a_missing_rank_is_told(traced: Traced) -> None:
    found = imported(traced("2 x 2"), ranks=(0, 1, 3))
    assert isinstance(found.model, ShardedModel)
    assert found.model.sharding.shard == 2
    assert found.job.missing == (2,)
    assert found.notes[0].startswith("no trace of rank 2 of 4: taken to be like the typical rank of each step")


def test_ranks_of_two_jobs_are_refused(traced: Traced, tmp_path: Path) -> None:
    later = json.loads(gzip.decompress((traced("kept") / "rank1.json.gz").read_bytes()))
    for event in later["traceEvents"]:
        if "ts" in event:
            event["ts"] = float(event["ts"]) + 3600e6  # the clock alone tells steps apart that are alike
    path = tmp_path / "rank1.json.gz"
    path.write_bytes(gzip.compress(json.dumps(later).encode()))
    profiles = [profile_rank(traced("4") / "rank0.json.gz"), profile_rank(path)]
    with pytest.raises(TraceError, match="give the traces of one run"):
        import_job(profiles, name="job", options=ImportOptions(nodes=1))


def test_another_degree_than_that_of_the_traces_is_refused(traced: Traced) -> None:
    profiles = [profile_rank(traced("2 x 2") / f"rank{rank}.json.gz") for rank in range(4)]
    with pytest.raises(ScenarioError, match="--shard 4: 2 ranks share a unit, as the traces tell: leave it out"):
        import_job(profiles, name="job", options=ImportOptions(nodes=1, shard=4))
