"""Every way in which a plan's data set and its loads can be illegal, with its message; and what is legal passes."""

import dataclasses
import re

import pytest
from data_sets import data_plans
from hypothesis import given

from simdist.errors import PlanError
from simdist.plan import Buffer, Dataset, Load, Op, Plan, StageIn, dumps, loads, op_text
from simdist.plan.check import check
from simdist.plan.group import Group

GOOD = Dataset(n_samples=100, batch_size=4, ranks_per_node=2, sample_nbytes=10, file_nbytes=(7,))
BATCH = Buffer("batch", 40, "uint8", place="host")
LOAD = Load("batch", ("disk", "storage"), ("disk",))


def plan_of(*ops: Op, dataset: Dataset | None = GOOD, batch: Buffer = BATCH) -> Plan:
    return Plan.from_steps("data", world_size=8, buffers=[batch], steps=[ops], dataset=dataset)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"batch_size": 0}, "batch_size 0; must be at least 1"),
        ({"ranks_per_node": 0}, "ranks_per_node 0; must be at least 1"),
        ({"sample_nbytes": 0}, "sample_nbytes 0; must be at least 1"),
        ({"readers": 0}, "readers 0; must be at least 1"),
        ({"decoders": -1}, "decoders -1; must be at least 1"),
        ({"ranks_per_node": 3}, "ranks_per_node 3 does not divide 8 ranks"),
        ({"n_samples": 31}, "n_samples 31; a step of 8 ranks reads 32, and an epoch has one step or more"),
        ({"file_nbytes": (1, 2)}, "file_nbytes has 2 numbers; write one for all files, or 100"),
        ({"file_nbytes": ()}, "file_nbytes has 0 numbers; write one for all files, or 100"),
        ({"file_nbytes": (5, 0, *[7] * 98)}, "file_nbytes[1] is 0; a file has at least 1 byte"),
        ({"file_nbytes": (10**30,)}, f"file_nbytes[0] is {10**30}; a file has at most 2^40 bytes"),
        ({"n_samples": 2**31 + 1}, "n_samples 2147483649; must be at most 2147483648"),
        ({"n_samples": 2**23, "file_nbytes": (2**40,)}, f"all files have {2**63} bytes; must be at most 2^62"),
        ({"disk_nbytes": -1}, "disk_nbytes -1; must be at least 0, or null for no limit"),
        ({"memory_nbytes": -5}, "memory_nbytes -5; must be at least 0, or null for no limit"),
        ({"shuffle": "world"}, "shuffle 'world'; known: global, node, none"),
        ({"eviction": "fifo"}, "eviction 'fifo'; known: none, lru"),
        ({"seed": -1}, "seed -1; must be at least 0"),
    ],
)
def test_data_set_that_cannot_be_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"plan data: data set: {problem}") + "$"):
        check(plan_of(LOAD, dataset=dataclasses.replace(GOOD, **changes)))


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (Load("batch"), "names no level of storage, but the plan has a data set; end its read with storage"),
        (
            Load("batch", ("storage", "disk")),
            "reads storage, disk; only storage surely has every sample, so it comes last",
        ),
        (Load("batch", ("memory",)), "reads memory; only storage surely has every sample, so it comes last"),
        (Load("batch", ("disk", "disk", "storage")), "reads disk 2 times; name each level once"),
        (Load("batch", ("tape", "storage")), "reads 'tape'; known: memory, peer, disk, storage"),
        (Load("batch", ("storage",), ("peer",)), "keeps on 'peer'; known: memory, disk"),
        (Load("batch", ("storage",), ("storage",)), "keeps on 'storage'; known: memory, disk"),
        (Load("batch", ("storage",), ("disk", "disk")), "keeps on disk 2 times; name each level once"),
        (StageIn(Group(8)), "the group of 8 is no node; those of the data set are a group of 2"),
        (StageIn(Group(2, 2)), "the group of 2 at stride 2 is no node; those of the data set are a group of 2"),
    ],
)
def test_operation_that_does_not_fit_the_data_set_is_shown(op: Op, problem: str) -> None:
    expected = f"plan data: {op_text(op)} at step 0: {problem}\nbody 0:\n"
    with pytest.raises(PlanError, match=re.escape(expected)):
        check(plan_of(op))


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (LOAD, "reads levels of storage, but the plan has no data set; give it one, or leave read and keep empty"),
        (Load("batch", (), ("disk",)), "reads levels of storage, but the plan has no data set; give it one, or leave"),
        (StageIn(Group(2)), "brings files of a data set, but the plan has none; give it one"),
    ],
)
def test_operation_on_a_data_set_that_is_not_there_is_refused(op: Op, problem: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"{op_text(op)} at step 0: {problem}")):
        check(plan_of(op, dataset=None))


def test_buffer_that_does_not_hold_a_batch_is_refused() -> None:
    problem = "loads into 'batch' of 41 bytes; a batch of the data set has 40"
    with pytest.raises(PlanError, match=re.escape(problem)):
        check(plan_of(LOAD, batch=dataclasses.replace(BATCH, count=41)))


@pytest.mark.slow
@given(data_plans())
def test_random_plans_with_data_sets_are_legal_and_survive_json(plan: Plan) -> None:
    check(plan)
    again = loads(dumps(plan))
    assert again == plan
    assert again.digest() == plan.digest()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"seed": 0', '"sead": 0', "dataset.sead: unknown field; known: batch_size, decoders, disk_nbytes"),
        ('"shuffle": "global"', '"shuffle": "all"', "dataset.shuffle: Input should be 'global', 'node' or 'none'"),
        ('"disk", "storage"', '"tape", "storage"', "bodies[0][0].read[0]: Input should be 'memory', 'peer', 'disk' or"),
        ('"warm": false', '"warm": 0', "dataset.warm: Input should be a valid boolean; found 0"),
    ],
)
def test_damaged_data_set_in_a_file_is_refused_with_its_place(old: str, new: str, problem: str) -> None:
    text = dumps(plan_of(LOAD))
    assert text.count(old) == 1
    with pytest.raises(PlanError, match=re.escape(f"<text>: {problem}")):
        loads(text.replace(old, new))
