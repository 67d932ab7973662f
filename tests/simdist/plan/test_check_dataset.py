"""Every way in which a plan's data set and its loads can be illegal, with its message; and what is legal passes."""

import dataclasses
import re

import pytest
from data_sets import data_plans
from hypothesis import given
from messages import assert_message

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
    "changes",
    [
        {"batch_size": 0},
        {"ranks_per_node": 0},
        {"sample_nbytes": 0},
        {"readers": 0},
        {"decoders": -1},
        {"ranks_per_node": 3},
        {"n_samples": 31},
        {"file_nbytes": (1, 2)},
        {"file_nbytes": ()},
        {"file_nbytes": (5, 0, *[7] * 98)},
        {"file_nbytes": (10**30,)},
        {"n_samples": 2**31 + 1},
        {"n_samples": 2**23, "file_nbytes": (2**40,)},
        {"disk_nbytes": -1},
        {"memory_nbytes": -5},
        {"shuffle": "world"},
        {"eviction": "fifo"},
        {"seed": -1},
    ],
)
def test_data_set_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PlanError) as error:
        check(plan_of(LOAD, dataset=dataclasses.replace(GOOD, **changes)))
    assert str(error.value).startswith("plan data: data set: ")
    assert_message(f"data set: {changes}"[:80], str(error.value))


@pytest.mark.parametrize(
    "op",
    [
        Load("batch"),
        Load("batch", ("storage", "disk")),
        Load("batch", ("memory",)),
        Load("batch", ("disk", "disk", "storage")),
        Load("batch", ("tape", "storage")),
        Load("batch", ("storage",), ("peer",)),
        Load("batch", ("storage",), ("storage",)),
        Load("batch", ("storage",), ("disk", "disk")),
        StageIn(Group(8)),
        StageIn(Group(2, 2)),
    ],
)
def test_operation_that_does_not_fit_the_data_set_is_shown(op: Op) -> None:
    with pytest.raises(PlanError) as error:
        check(plan_of(op))
    first, body, *_ = str(error.value).splitlines()
    assert first.startswith(f"plan data: {op_text(op)} at step 0: ")
    assert body == "body 0:"
    assert_message(f"data set: {op_text(op)}", first)


@pytest.mark.parametrize(
    "op",
    [
        LOAD,
        Load("batch", (), ("disk",)),
        StageIn(Group(2)),
    ],
)
def test_operation_on_a_data_set_that_is_not_there_is_refused(op: Op) -> None:
    with pytest.raises(PlanError) as error:
        check(plan_of(op, dataset=None))
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"plan data: {op_text(op)} at step 0: ")
    assert_message(f"no data set: {op_text(op)}", first)


def test_buffer_that_does_not_hold_a_batch_is_refused() -> None:
    problem = "loads into 'batch' of 41 bytes; a batch of the data set has 40"
    with pytest.raises(PlanError, match=re.escape(problem)):
        check(plan_of(LOAD, batch=dataclasses.replace(BATCH, count=41)))


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
