"""Plans as values: equal steps become one body, the digest says what is done, JSON and text say everything."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from drawn_plans import ALGORITHMS, legal_plans, schedule_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from simdist.errors import PlanError
from simdist.plan import Body, Buffer, Plan, Run, dumps, load, loads, op_text, ops, plan_text, save
from simdist.plan.group import Group
from simdist.plan.lanes import COMM, COMPUTE
from simdist.plan.text import body_text, order_text

STEP: Body = (
    ops.Forward(("param",), ("loss",)),
    ops.Backward(("loss", "param"), "grad"),
    ops.AllReduce("grad", Group(2)),
    ops.Optimize(("param",), ("grad",)),
)
BUFFERS = (
    Buffer("param", 10, tensors=(0, 1), initialized=True),
    Buffer("loss", 1),
    Buffer("grad", 10, tensors=(0, 1)),
)
TINY = Plan.from_steps("tiny", world_size=2, buffers=BUFFERS, steps=[STEP] * 3)

OPS: list[tuple[ops.Op, str, str, tuple[str, ...], tuple[str, ...]]] = [
    (ops.Load("b"), "load(-> b)", "io", (), ("b",)),
    (ops.Load("b", ("storage",)), "load(storage -> b)", "io", (), ("b",)),
    (
        ops.Load("b", ("memory", "peer", "disk", "storage"), ("disk", "memory")),
        "load(memory, else peer, else disk, else storage (kept on disk and memory) -> b)",
        "io",
        (),
        ("b",),
    ),
    (ops.StageIn(Group(4)), "stage_in(storage -> disk, group of 4)", "io", (), ()),
    (ops.Copy("a", "b"), "copy(a -> b)", "compute", ("a",), ("b",)),
    (ops.Forward(("p", "x"), ("act", "loss")), "forward(p, x -> act, loss)", "compute", ("p", "x"), ("act", "loss")),
    (ops.Backward(("p", "act"), "g"), "backward(p, act -> g)", "compute", ("p", "act"), ("g",)),
    (ops.Backward(("p", "act"), "g", True), "backward(p, act -> g, added)", "compute", ("p", "act", "g"), ("g",)),
    (ops.Optimize(("p",), ("g", "h")), "optimize(p with g, h)", "compute", ("p", "g", "h"), ("p",)),
    (ops.AllReduce("g", Group(4)), "all_reduce(g, mean over group of 4)", "comm", ("g",), ("g",)),
    (
        ops.AllReduce("g", Group(4, 2), "sum", "tree"),
        "all_reduce(g, sum over group of 4 at stride 2, tree)",
        "comm",
        ("g",),
        ("g",),
    ),
    (
        ops.ReduceScatter("g", "s", Group(4), "mean", "ring"),
        "reduce_scatter(g -> s, mean over group of 4, ring)",
        "comm",
        ("g",),
        ("s",),
    ),
    (ops.AllGather("s", "g", Group(4)), "all_gather(s -> g, group of 4)", "comm", ("s",), ("g",)),
    (ops.Reduce("g", Group(4), 1), "reduce(g, mean over group of 4 to member 1)", "comm", ("g",), ("g",)),
    (ops.Broadcast("g", Group(4), 2), "broadcast(g, group of 4 from member 2)", "comm", ("g",), ("g",)),
    (
        ops.Select("g", "s", "r", 3, "dgc"),
        "select(g -> s, 3 of it by dgc, rest to r)",
        "compute",
        ("g", "r"),
        ("s", "r"),
    ),
    (
        ops.Select("g", "s", "r", 3, lane=COMM),
        "select(g -> s, 3 of it by exact, rest to r)",
        "comm",
        ("g", "r"),
        ("s", "r"),
    ),
    (ops.Densify("s", "g"), "densify(s -> g)", "compute", ("s",), ("g",)),
    (ops.Densify("s", "g", 8, COMM), "densify(s / 8 -> g)", "comm", ("s",), ("g",)),
    (ops.Merge("a", "s", "r"), "merge(a -> s, rest to r)", "compute", ("a", "r"), ("s", "r")),
    (ops.Merge("a", "s", "r", 8, COMM), "merge(a -> s, rest / 8 to r)", "comm", ("a", "r"), ("s", "r")),
    (
        ops.LowRank("left", "g", "r", "p", "q", (ops.Matrix(0, 4, 6, 2), ops.Matrix(24, 4, 6, 2)), "o"),
        "low_rank(left: g, q -> p, q, o, 2 matrices of rank 2, rest in r)",
        "compute",
        ("r", "g", "q"),
        ("r", "p", "q", "o"),
    ),
    (
        ops.LowRank("left", "g", "r", "p", "q", (ops.Matrix(0, 4, 6, 2),), seed=7),
        "low_rank(left: g -> p, q, 1 matrix of rank 2, drawn by seed 7, rest in r)",
        "compute",
        ("r", "g"),
        ("r", "p", "q"),
    ),
    (
        ops.LowRank("right", "g", "r", "p", "q", (ops.Matrix(0, 4, 6, 2),), lane=COMM),
        "low_rank(right: p -> p, q, 1 matrix of rank 2, rest in r)",
        "comm",
        ("r", "p"),
        ("p", "q"),
    ),
    (
        ops.LowRank("product", "g", "r", "p", "q", (ops.Matrix(0, 4, 6, 2),), "o"),
        "low_rank(product: p, q, o -> g, 1 matrix of rank 2, rest in r)",
        "compute",
        ("r", "p", "q", "o"),
        ("g", "r"),
    ),
    (
        ops.Optimize(("p",), ("g",), slices=("s",), shared_by=Group(4)),
        "optimize(p with g -> s, shared by group of 4)",
        "compute",
        ("p", "g"),
        ("s",),
    ),
    (ops.Pack(("g", "h"), "f"), "pack(g, h -> f)", "comm", ("g", "h"), ("f",)),
    (ops.Unpack("f", ("g", "h")), "unpack(f -> g, h)", "comm", ("f",), ("g", "h")),
    (ops.Tick(("g", "h"), 0.005), "tick(g, h, every 5 ms)", "comm", ("g", "h"), ()),
    (
        ops.TrustRatios(("p", "q"), ("g",), "t", Group(4)),
        "trust_ratios(p, q with g -> t, shared by group of 4)",
        "compute",
        ("p", "q", "g"),
        ("t",),
    ),
    (ops.Optimize(("p",), ("g",), "t"), "optimize(p with g, t)", "compute", ("p", "g", "t"), ("p",)),
    (
        ops.Optimize(("a",), ("o",), optimizer="outer"),
        "optimize(a with o, outer optimizer)",
        "compute",
        ("a", "o"),
        ("a",),
    ),
    (ops.Combine(("a", "p"), (1.0, -1.0), "o"), "combine(a - p -> o)", "compute", ("a", "p"), ("o",)),
    (ops.Combine(("a", "p"), (-0.25, 0.75), "p"), "combine(- 0.25 a + 0.75 p -> p)", "compute", ("a", "p"), ("p",)),
    (
        ops.AllReduce("g", Group(4), "mean", "server", ops.Servers((3, 4))),
        "all_reduce(g, mean over group of 4, server (2 apart))",
        "comm",
        ("g",),
        ("g",),
    ),
    (
        ops.AllReduce("g", Group(4), "sum", "server", ops.Servers((3, 4), (0, 2))),
        "all_reduce(g, sum over group of 4, server (members 0, 2))",
        "comm",
        ("g",),
        ("g",),
    ),
    (ops.Delay("host"), "delay(host)", "host", (), ()),
    (ops.Delay("compute"), "delay(compute)", "compute", (), ()),
    (ops.Delay("io"), "delay(io)", "io", (), ()),
    (ops.Delay("host", 3), "delay(host, micro-batch 3)", "host", (), ()),
    (ops.Wait("g"), "wait(g)", "host", ("g",), ()),
    (ops.KernelLaunch("backward", 3), "kernel_launch(backward of 3 tensors)", "host", (), ()),
    (ops.Save(("p", "m")), "save(p, m)", "save", ("p", "m"), ()),
    (
        ops.Save(("p",), "file", "disk", Group(4, 2)),
        "save(p -> disk, by the first of each group of 4 at stride 2)",
        "save",
        ("p",),
        ("file",),
    ),
    (ops.Copy("p", "q", Group(8)), "copy(p -> q, by the first of each group of 8)", "compute", ("p",), ("q",)),
    (ops.Enter((1, 3)), "enter(without 1, 3)", "host", (), ()),
    (ops.Enter(awaits="p"), "enter(after p, unless the others are through)", "host", ("p",), ()),
    (
        ops.AllReduce("g", Group(8), algorithm="server", servers=ops.Servers((9,), (0,)), drop=2),
        "all_reduce(g, mean over group of 8, server (members 0), without the last 2)",
        "comm",
        ("g",),
        ("g",),
    ),
]


def test_the_table_of_operations_below_covers_every_operation() -> None:
    assert {type(op) for op, *_ in OPS} == set(get_args(ops.Op))


@pytest.mark.parametrize(("op", "text", "stream", "read", "written"), OPS)
def test_operation_states_its_text_stream_and_buffers(
    op: ops.Op, text: str, stream: str, read: tuple[str, ...], written: tuple[str, ...]
) -> None:
    assert (op_text(op), ops.lane_of(op).stream, ops.reads(op), ops.writes(op)) == (text, stream, read, written)


@examples(100)
@given(legal_plans(algorithms=ALGORITHMS))
def test_every_operation_runs_on_a_known_stream(plan: Plan) -> None:
    assert {ops.lane_of(op) for body in plan.bodies for op in body} <= set(plan.lanes)


# ---------------------------------------------------------------- from_steps


def order_of(*numbers: int) -> tuple[Run, ...]:
    bodies: list[Body] = [(ops.Delay("host"),) * (number + 1) for number in numbers]
    return Plan.from_steps("order", world_size=1, buffers=(), steps=bodies).order


def test_equal_steps_become_one_body() -> None:
    assert TINY.bodies == (STEP,)
    assert TINY.order == (Run((0,), 3),)


def test_bodies_are_numbered_in_the_order_of_their_first_step() -> None:
    other: Body = (ops.Delay("host"),)
    plan = Plan.from_steps("two", world_size=2, buffers=BUFFERS, steps=[other, STEP, other])
    assert plan.bodies == (other, STEP)
    assert list(plan.body_of_steps()) == [0, 1, 0]


@pytest.mark.parametrize(
    ("steps", "order"),
    [
        ([0], (Run((0,)),)),
        ([0, 1, 2], (Run((0, 1, 2)),)),
        ([0, 0, 0, 1], (Run((0,), 3), Run((1,)))),
        ([0, 1] * 5, (Run((0, 1), 5),)),
        ([0] * 10 + [1, 2] * 495, (Run((0,), 10), Run((1, 2), 495))),
        ([0, 0, 0, 1] * 4, (Run((0, 0, 0, 1), 4),)),
        ([0, 1, 0, 2] * 3 + [0, 1], (Run((0, 1, 0, 2), 3), Run((0, 1)))),
    ],
)
def test_order_is_written_as_few_runs(steps: list[int], order: tuple[Run, ...]) -> None:
    assert order_of(*steps) == order


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=120))
def test_folded_order_spells_out_the_steps_that_went_in(numbers: list[int]) -> None:
    steps: list[Body] = [(ops.Delay("host"),) * (number + 1) for number in numbers]
    plan = Plan.from_steps("any", world_size=1, buffers=(), steps=steps)
    assert [plan.bodies[body] for body in plan.body_of_steps()] == steps
    assert plan.n_steps == len(steps)
    assert plan.n_instances == sum(map(len, steps))
    assert all(run.times >= 1 and run.bodies for run in plan.order)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(50, 60), st.integers(0, 5))
def test_a_period_folds_to_few_runs_however_long_the_plan(pattern: list[int], times: int, extra: int) -> None:
    steps: list[Body] = [
        (ops.Delay("host"),) * (number + 1) for number in (pattern * (times + 1))[: len(pattern) * times + extra]
    ]
    assert len(Plan.from_steps("periodic", world_size=1, buffers=(), steps=steps).order) <= 4


def test_order_of_a_long_plan_has_a_few_runs_for_each_rare_step() -> None:
    """The period is longer than those that are looked for, so each stretch between is a run."""
    usual, rare = (ops.Delay("host"),), (ops.Delay("host"), ops.Delay("host"))
    steps = ([usual] * 9_999 + [rare]) * 100
    plan = Plan.from_steps("long", world_size=1, buffers=(), steps=steps)
    assert plan.order == (Run((0,), 9_999), Run((1,))) * 100


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 9), st.lists(st.integers(0, 2), max_size=20))
def test_a_run_is_the_pattern_that_covers_most(pattern: list[int], times: int, rest: list[int]) -> None:
    """As found by trying every period, all of the way; of equal ones the shortest."""
    sequence = pattern * times + rest
    numbers = {number: place for place, number in enumerate(dict.fromkeys(sequence))}
    sequence = [numbers[each] for each in sequence]
    first = order_of(*sequence)[0]
    covered = {1: 1}
    for period in range(1, len(sequence) // 2 + 1):
        repeats = 1
        while sequence[repeats * period : (repeats + 1) * period] == sequence[:period]:
            repeats += 1
        if repeats > 1:
            covered[period] = repeats * period
    best = max(covered, key=lambda period: (covered[period], -period))
    if covered[best] > 1:
        assert (len(first.bodies), first.n_steps) == (best, covered[best])
    else:
        assert first.times == 1


@examples(50)
@given(legal_plans(algorithms=ALGORITHMS))
def test_first_instances_counts_the_operations_before_each_step(plan: Plan) -> None:
    lengths = [len(plan.bodies[body]) for body in plan.body_of_steps()]
    assert plan.first_instances().tolist() == [sum(lengths[:step]) for step in range(plan.n_steps + 1)]
    assert plan.first_instances()[-1] == plan.n_instances


def test_buffer_is_found_by_name() -> None:
    assert TINY.buffer("loss") is BUFFERS[1]
    with pytest.raises(KeyError):
        TINY.buffer("nothing")


@pytest.mark.parametrize(
    ("buffer", "nbytes"),
    [
        (Buffer("a", 10), 40),
        (Buffer("a", 10, "float64"), 80),
        (Buffer("a", 10, "float16"), 20),
        (Buffer("a", 10, "bfloat16"), 20),
        (Buffer("a", 10, "uint8"), 10),
        (Buffer("a", 10, sparse=True), 80),
        (Buffer("a", 10, "float16", sparse=True), 60),
    ],
)
def test_buffer_counts_its_bytes_and_those_of_its_indices(buffer: Buffer, nbytes: int) -> None:
    assert buffer.nbytes == nbytes


# ---------------------------------------------------------------- digest


def test_digest_does_not_depend_on_the_name() -> None:
    assert dataclasses.replace(TINY, name="other").digest() == TINY.digest()


def test_digest_is_stable_across_versions_and_machines() -> None:
    assert TINY.digest() == "3d57bf21bce3cde939c2d95226486d7be68830948401ceb6ea91067a277e32e5"


# A plan of which many parts have fields now that plans did not have at first, and its digest as it was then.
OF_OLD = Plan.from_steps(
    "of old",
    world_size=2,
    buffers=(*BUFFERS, Buffer("residual", 10, initialized=True), Buffer("top", 2, sparse=True)),
    steps=[(*STEP[:2], ops.Select("grad", "top", "residual", 2), ops.Densify("top", "grad"), *STEP[2:])],
)
DIGEST_OF_OLD = "aca3f2c2ab1218cd3fbe26a0fbff81b1569c2cdcf67149dd6405186c3f3de5c7"


def test_later_fields_at_their_defaults_are_not_written_and_leave_older_digests_as_they_were() -> None:
    assert OF_OLD.digest() == DIGEST_OF_OLD
    for field in ("padding", "servers", "ratios", "lane", "divisor", "adds"):
        assert f'"{field}"' not in dumps(OF_OLD)


ON_COMM = '"lane": {"name": "comm", "kind": "comm", "communicator": "comm"}'
LATER_FIELDS: list[tuple[Buffer | ops.Op, str]] = [
    (Buffer("x", 10, padding=3), '"padding": 3'),
    (ops.Densify("top", "grad", divisor=2), '"divisor": 2'),
    (ops.Densify("top", "grad", lane=COMM), ON_COMM),
    (
        ops.Select("grad", "top", "residual", 2, lane=COMM),
        ON_COMM,
    ),
    (ops.Merge("top", "top", "residual", divisor=2), '"divisor": 2'),
    (ops.Optimize(("param",), ("grad",), "residual"), '"ratios": "residual"'),
    (ops.Backward(("loss", "param"), "grad", adds=True), '"adds": true'),
    (
        ops.AllReduce("grad", Group(2), "mean", "server", ops.Servers((4, 6), (1, 0))),
        '"servers": {"parts": [4, 6], "members": [1, 0]}',
    ),
    (
        ops.AllReduce("grad", Group(2), "mean", "server", ops.Servers((10,))),
        '"servers": {"parts": [10], "members": []}',
    ),
]


@pytest.mark.parametrize(("item", "text"), LATER_FIELDS)
def test_every_later_field_is_written_read_and_part_of_the_digest(item: Buffer | ops.Op, text: str) -> None:
    if isinstance(item, Buffer):
        plain = dataclasses.replace(item, padding=0)
        plan, other = (dataclasses.replace(TINY, buffers=(*BUFFERS, each)) for each in (item, plain))
    else:
        defaults = {"divisor": 1, "lane": COMPUTE, "ratios": None, "servers": None, "adds": False}
        fields = {field.name for field in dataclasses.fields(item)} & defaults.keys()
        plain_op = dataclasses.replace(item, **{name: defaults[name] for name in fields})
        plan, other = (dataclasses.replace(TINY, bodies=((each,),)) for each in (item, plain_op))
    assert text in dumps(plan)
    assert loads(dumps(plan)) == plan
    assert plan.digest() != other.digest()


CHANGED = [
    dataclasses.replace(TINY, world_size=4),
    dataclasses.replace(TINY, order=(Run((0,), 4),)),
    dataclasses.replace(TINY, bodies=(STEP[::-1],)),
    dataclasses.replace(TINY, bodies=((*STEP[:2], ops.AllReduce("grad", Group(2), "sum"), STEP[3]),)),
    dataclasses.replace(TINY, bodies=((*STEP[:2], ops.AllReduce("grad", Group(1)), STEP[3]),)),
    dataclasses.replace(TINY, bodies=((*STEP[:2], ops.AllReduce("grad", Group(2, 2)), STEP[3]),)),
    dataclasses.replace(TINY, bodies=((*STEP[:2], ops.Broadcast("grad", Group(2)), STEP[3]),)),
    dataclasses.replace(TINY, buffers=(dataclasses.replace(BUFFERS[0], count=11), *BUFFERS[1:])),
    dataclasses.replace(TINY, buffers=(dataclasses.replace(BUFFERS[0], dtype="float16"), *BUFFERS[1:])),
    dataclasses.replace(TINY, buffers=(dataclasses.replace(BUFFERS[0], place="host"), *BUFFERS[1:])),
    dataclasses.replace(TINY, buffers=(dataclasses.replace(BUFFERS[0], initialized=False), *BUFFERS[1:])),
]


def test_digest_depends_on_everything_else() -> None:
    digests = [TINY.digest(), *(plan.digest() for plan in CHANGED)]
    assert len(set(digests)) == len(digests)


# ---------------------------------------------------------------- JSON


@examples(100)
@given(legal_plans(algorithms=ALGORITHMS))
def test_random_plan_survives_a_round_trip_through_json(plan: Plan) -> None:
    again = loads(dumps(plan))
    assert again == plan
    assert again.digest() == plan.digest()


@examples(20)
@given(schedule_plans())
def test_plan_of_a_schedule_survives_a_round_trip_through_json(plan: Plan) -> None:
    assert loads(dumps(plan)) == plan


def test_plan_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    plan = dataclasses.replace(TINY, name="schöne Ränge")
    save(plan, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan


def test_json_has_one_operation_a_line() -> None:
    lines = dumps(TINY).splitlines()
    operations = [line for line in lines if '"op"' in line]
    assert len(operations) == len(STEP)
    assert json.loads(operations[2].strip().rstrip(",")) == {
        "op": "AllReduce",
        "buffer": "grad",
        "group": {"size": 2, "stride": 1},
        "reduction": "mean",
        "algorithm": "auto",
    }


def damaged(path: str, value: object) -> str:
    """Return TINY's document with the entry at `path` replaced, or removed where `value` is ..."""
    document = json.loads(dumps(TINY))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    place = document
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "simdist-plan-0", "format: Input should be 'simdist-plan-1'; found 'simdist-plan-0'"),
        ("world_size", ..., "world_size: Field required"),
        ("world_size", "2", "world_size: Input should be a valid integer; found '2'"),
        ("world_size", 2.0, "world_size: Input should be a valid integer; found 2.0"),
        ("world_size", True, "world_size: Input should be a valid integer; found True"),
        ("name", None, "name: Input should be a valid string; found None"),
        ("extra", 1, "extra: unknown field; known: bodies, buffers, dataset, format, name, order, world_size"),
        ("buffers/0/count", ..., "buffers[0].count: Field required"),
        ("buffers/0/colour", "red", "buffers[0].colour: unknown field; known: count, dtype,"),
        ("buffers/0/dtype", "int4", "buffers[0].dtype: Input should be 'float64', 'float32'"),
        ("buffers/0/tensors", [0], "buffers[0].tensors[1]: Field required"),
        ("bodies/0/0/op", "Teleport", "bodies[0][0]: Input tag 'Teleport'"),
        ("bodies/0/0/op", ..., "bodies[0][0]"),
        ("bodies/0/2/reduction", "max", "bodies[0][2].reduction: Input should be 'mean' or 'sum'; found 'max'"),
        ("bodies/0/2/group", 2, "bodies[0][2].group"),
        ("bodies/0/2/speed", 2, "bodies[0][2].speed: unknown field; known: algorithm, buffer, drop, group, lane, op"),
        ("bodies/0/2/group/width", 2, "bodies[0][2].group.width: unknown field; known: ranks, size, stride"),
        ("order/0/times", "3", "order[0].times: Input should be a valid integer; found '3'"),
        ("order/0/until", 3, "order[0].until: unknown field; known: bodies, times"),
        ("order", 3, "order: Input should be a valid array; found 3"),
    ],
)
def test_damaged_document_is_refused_with_the_place(path: str, value: object, message: str) -> None:
    with pytest.raises(PlanError) as error:
        loads(damaged(path, value), name="plan.json")
    assert f"plan.json: {message}" in str(error.value)


SERVED = dataclasses.replace(
    TINY, bodies=((ops.AllReduce("grad", Group(2), "mean", "server", ops.Servers((4, 6))), ops.Tick(("grad",), 0.005)),)
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"members"', '"ranks"', "bodies[0][0].servers.ranks: unknown field; known: members, parts"),
        ("[4, 6]", "[4, 6.5]", "bodies[0][0].servers.parts[1]: Input should be a valid integer; found 6.5"),
        ('{"parts": [4, 6], "members": []}', "2", "bodies[0][0].servers"),
        ("0.005", '"5 ms"', "bodies[0][1].period_s: Input should be a valid number; found '5 ms'"),
        ('"period_s"', '"period"', "bodies[0][1].period_s: Field required"),
    ],
)
def test_damaged_servers_and_ticks_are_refused_with_the_place(old: str, new: str, message: str) -> None:
    assert old in dumps(SERVED)
    with pytest.raises(PlanError) as error:
        loads(dumps(SERVED).replace(old, new), name="plan.json")
    assert f"plan.json: {message}" in str(error.value)


def test_every_damage_is_reported_at_once() -> None:
    text = dumps(TINY).replace('"world_size": 2', '"world_size": "two"').replace('"mean"', '"max"')
    with pytest.raises(PlanError) as error:
        loads(text, name="plan.json")
    lines = str(error.value).splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["world_size", "bodies[0][2].reduction"]


@pytest.mark.parametrize("text", ["", "plan", "[1, 2", '{"format": ', "[" * 100_000, "null", "[]", "3", '"text"', "{}"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"^run/plan\.json: "):
        loads(text, name="run/plan.json")


def test_key_that_stands_twice_in_an_object_is_refused() -> None:
    text = dumps(TINY).replace('"world_size": 2', '"world_size": 2, "world_size": 2')
    with pytest.raises(PlanError, match=r"not a JSON document: key 'world_size' stands twice in one object"):
        loads(text)


def test_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json: cannot be read as a plan"):
        load(tmp_path / "none.json")


def test_file_that_is_not_text_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"plan\.json: cannot be read as a plan"):
        load(tmp_path / "plan.json")


# ---------------------------------------------------------------- text


def test_text_shows_buffers_bodies_and_order() -> None:
    plan = Plan.from_steps(
        "tiny",
        world_size=2,
        buffers=(
            *BUFFERS,
            Buffer("batch", 2_000_000, "uint8", place="host"),
            Buffer("top", 5, sparse=True),
            Buffer("fused", 12, padding=2),
        ),
        steps=[STEP, STEP, (ops.Delay("host"), *STEP)],
    )
    assert (
        plan_text(plan).replace(plan.digest(), "DIGEST")
        == """\
plan tiny: 2 ranks, 3 steps, 13 operations per rank
digest DIGEST
buffers
    param            10 x float32       40 B  tensors 0:1  initialized
    loss              1 x float32        4 B
    grad             10 x float32       40 B  tensors 0:1
    batch     2,000,000 x uint8       2 MB  in host memory
    top               5 x float32 + index       40 B
    fused            12 x float32       48 B  2 of them padding
body 0, 2 steps
    compute  forward(param -> loss)
    compute  backward(loss, param -> grad)
    comm     all_reduce(grad, mean over group of 2)
    compute  optimize(param with grad)
body 1, 1 step
    host     delay(host)
    compute  forward(param -> loss)
    compute  backward(loss, param -> grad)
    comm     all_reduce(grad, mean over group of 2)
    compute  optimize(param with grad)
order 0x2 1"""
    )


def test_marker_points_at_the_operation() -> None:
    assert body_text(STEP, marked=2).splitlines() == [
        "    compute  forward(param -> loss)",
        "    compute  backward(loss, param -> grad)",
        "--> comm     all_reduce(grad, mean over group of 2)",
        "    compute  optimize(param with grad)",
    ]


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ((Run((0,)),), "0"),
        ((Run((0,), 10), Run((0, 1), 495)), "0x10 (0 1)x495"),
        ((Run((0, 1, 2)), Run((3,), 2)), "0 1 2 3x2"),
    ],
)
def test_order_reads_as_runs(order: tuple[Run, ...], text: str) -> None:
    assert order_text(order) == text


@examples(50)
@given(legal_plans(algorithms=ALGORITHMS))
def test_any_plan_prints_with_a_line_for_every_buffer_and_operation(plan: Plan) -> None:
    lines = plan_text(plan).splitlines()
    assert len(lines) == 4 + len(plan.buffers) + len(plan.bodies) + sum(max(1, len(body)) for body in plan.bodies)
