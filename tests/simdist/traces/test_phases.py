"""Journeys of what is communicated: which phases, in which order, and where they begin and end."""

import pytest

from simdist.plan import (
    AllGather,
    AllReduce,
    Backward,
    Body,
    Copy,
    Densify,
    Forward,
    Merge,
    Op,
    Optimize,
    Pack,
    ReduceScatter,
    Select,
    Tick,
    TrustRatios,
    Unpack,
    Wait,
    reads,
)
from simdist.plan.group import Group
from simdist.traces import phases
from simdist.traces.phases import Journey, Phase, journeys

WORLD = Group(8)
FORWARD = Forward(("param",), ("loss",))
BACKWARD = tuple(Backward(("param", "loss"), f"grad.{n}") for n in (2, 1, 0))
GRADS = ("grad.2", "grad.1", "grad.0")
OPTIMIZE = Optimize(("param",), GRADS)
REDUCE_FUSED = AllReduce("fused", WORLD)


def names(body: Body, buffer: str) -> list[str]:
    """Return the phases of the one journey of a buffer, without the time until a stream takes it up."""
    (found,) = (each for each in journeys(body) if each.buffer == buffer)
    return [phase.name for phase in found.phases if phase.name not in ("queue", "wait for compute")]


def test_every_phase_ends_with_an_operation():
    body = (FORWARD, *BACKWARD[:2], Tick(("grad.1",), 1e-3), Pack(GRADS[:2], "fused"), REDUCE_FUSED)
    body = (*body, Unpack("fused", GRADS[:2]), OPTIMIZE)
    until_unpacked = (
        Phase("queue", "ready", (3,)),
        Phase("wait for the tick", "end", (3,)),
        Phase("queue", "ready", (4,)),
        Phase("pack", "end", (4,)),
        Phase("queue", "ready", (5,)),
        Phase("wait for other ranks", "start", (5,)),
        Phase("all_reduce", "end", (5,)),
        Phase("queue", "ready", (6,)),
        Phase("unpack", "end", (6,)),
    )
    assert journeys(body) == (
        Journey("grad.2", 1, (Phase("wait for other tensors", "end", (2,)), *until_unpacked)),
        Journey("grad.1", 2, (Phase("wait for other tensors", "end", (1,)), *until_unpacked)),
    )


REDUCE = ["wait for other ranks", "all_reduce"]
GATHER = ["wait for other ranks", "all_gather"]
CASES: dict[str, tuple[Body, str, list[str]]] = {
    "alone": ((*BACKWARD, AllReduce("grad.0", WORLD), OPTIMIZE), "grad.0", REDUCE),
    "in half precision": (
        (*BACKWARD, Copy("grad.0", "half"), AllReduce("half", WORLD), Copy("half", "grad.0"), OPTIMIZE),
        "grad.0",
        ["copy", *REDUCE, "copy"],
    ),
    "two buckets in half precision, fused": (
        (
            *BACKWARD,
            *(Copy(f"grad.{n}", f"half.{n}") for n in (2, 1)),
            Pack(("half.2", "half.1"), "fused"),
            REDUCE_FUSED,
            Unpack("fused", ("half.2", "half.1")),
            *(Copy(f"half.{n}", f"grad.{n}") for n in (2, 1)),
            OPTIMIZE,
        ),
        "grad.1",
        ["copy", "wait for other tensors", "pack", *REDUCE, "unpack", "copy"],
    ),
    "2-d torus": (
        (
            *BACKWARD,
            ReduceScatter("grad.0", "shard", Group(4)),
            AllReduce("shard", Group(2, 4)),
            AllGather("shard", "grad.0", Group(4)),
            OPTIMIZE,
        ),
        "grad.0",
        ["wait for other ranks", "reduce_scatter", *REDUCE, *GATHER],
    ),
    "top-k, merged": (
        (
            *BACKWARD,
            Select("grad.0", "top", "residual", 2),
            AllGather("top", "tops", Group(2)),
            Merge("tops", "top", "residual"),
            Densify("top", "grad.0", 2),
            OPTIMIZE,
        ),
        "grad.0",
        ["select", *GATHER, "merge", "densify"],
    ),
    "residual of one selection is none of another's data": (
        (
            *BACKWARD,
            Select("grad.1", "top", "residual", 2),
            AllGather("top", "tops", WORLD),
            Select("grad.0", "other", "residual", 2),
            AllGather("other", "tops", WORLD),
            OPTIMIZE,
        ),
        "grad.1",
        ["select", *GATHER],
    ),
    "fusion buffer that is used again": (
        (
            *BACKWARD,
            *(op for grad in GRADS for op in (Pack((grad,), "fused"), REDUCE_FUSED, Unpack("fused", (grad,)))),
            OPTIMIZE,
        ),
        "grad.2",
        ["pack", *REDUCE, "unpack"],
    ),
    "parameters that are averaged": (
        (FORWARD, *BACKWARD, OPTIMIZE, Copy("param", "flat"), AllReduce("flat", WORLD), Copy("flat", "param")),
        "param",
        ["copy", *REDUCE, "copy"],
    ),
    "trust ratios": (
        (
            *BACKWARD,
            *(AllReduce(grad, WORLD) for grad in GRADS),
            TrustRatios(("param",), GRADS, "ratio", WORLD),
            AllGather("ratio", "ratios", WORLD),
            Optimize(("param",), GRADS, "ratios"),
        ),
        "ratio",
        GATHER,
    ),
    "gradient that trust ratios are of": (
        (
            *BACKWARD,
            *(AllReduce(grad, WORLD) for grad in GRADS),
            TrustRatios(("param",), GRADS, "ratio", WORLD),
            AllGather("ratio", "ratios", WORLD),
            Optimize(("param",), GRADS, "ratios"),
        ),
        "grad.0",
        REDUCE,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_data_is_followed_until_it_is_used(case: str) -> None:
    body, buffer, expected = CASES[case]
    assert names(body, buffer) == expected


def test_the_second_buffer_of_a_cycle_waits_for_the_same_tick_and_then_for_the_first():
    batches = ((Pack((grad,), f"fused.{grad}"), AllReduce(f"fused.{grad}", WORLD)) for grad in GRADS[:2])
    body = (*BACKWARD, Tick(("grad.1",), 1e-3), *(op for batch in batches for op in batch), OPTIMIZE)
    (second,) = (each for each in journeys(body) if each.buffer == "grad.1")
    assert second.phases[:4] == (
        Phase("queue", "ready", (3,)),
        Phase("wait for the tick", "end", (3,)),
        Phase("queue", "ready", (6,)),
        Phase("pack", "end", (6,)),
    )


def test_a_kernel_of_the_compute_stream_waits_for_no_tick():
    body = (*BACKWARD, Tick(("grad.0",), 1e-3), Copy("grad.0", "half"), AllReduce("half", WORLD), OPTIMIZE)
    assert names(body, "grad.0") == ["copy", *REDUCE]


def test_data_queues_for_the_comm_stream_and_waits_for_the_compute_stream() -> None:
    body = (*BACKWARD, Copy("grad.0", "half"), AllReduce("half", WORLD), Copy("half", "grad.0"), OPTIMIZE)
    (found,) = journeys(body)
    assert [(phase.name, phase.positions) for phase in found.phases if phase.until == "ready"] == [
        ("wait for compute", (3,)),
        ("queue", (4,)),
        ("wait for compute", (5,)),
    ]


def test_what_is_not_communicated_makes_no_journey() -> None:
    assert journeys((FORWARD, *BACKWARD, Wait("loss"), Copy("grad.0", "half"), OPTIMIZE)) == ()
    assert [each.buffer for each in journeys((FORWARD, *BACKWARD, AllReduce("grad.1", WORLD), OPTIMIZE))] == ["grad.1"]


def test_journeys_look_only_at_operations_on_their_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many gradients, each is written, reduced and used: 1 + 2 looks each, however many others there are."""
    n_grads, looks = 100, 0

    def counted(op: Op) -> tuple[str, ...]:
        nonlocal looks
        looks += 1
        return reads(op)

    monkeypatch.setattr(phases.ops, "reads", counted)
    grads = tuple(f"grad.{n}" for n in range(n_grads))
    backward = (op for grad in grads for op in (Backward(("param",), grad), AllReduce(grad, WORLD)))
    body = (*backward, Optimize(("param",), grads))
    assert len(journeys(body)) == n_grads
    assert looks == len(body) + 2 * n_grads
