"""The contents of buffers are in use from the operation that writes them anew to the last one that reads them."""

from simdist.plan import AllReduce, Backward, Buffer, Copy, Forward, Group, Op, Optimize, Plan, Wait
from simdist.plan.lanes import COMM
from simdist.plan.liveness import lifetimes

BUFFERS = (
    Buffer("param", 4, tensors=(0, 1), initialized=True),
    Buffer("loss", 1),
    Buffer("grad", 4, tensors=(0, 1)),
    Buffer("copy", 4),
)
FORWARD, BACKWARD = Forward(("param",), ("loss",)), Backward(("loss", "param"), "grad")
UPDATE = Optimize(("param",), ("grad",))


def lives(*step: Op, n_steps: int = 1) -> list[tuple[str, int, tuple[int, ...]]]:
    plan = Plan.from_steps("drawn", world_size=2, buffers=BUFFERS, steps=[step] * n_steps)
    return [(each.buffer.name, each.begin, each.ends) for each in lifetimes(plan)]


def test_each_step_writes_contents_of_its_own_and_parameters_stay() -> None:
    assert lives(FORWARD, BACKWARD, UPDATE, n_steps=2) == [
        ("loss", 0, (1,)),
        ("grad", 1, (2,)),
        ("loss", 3, (4,)),
        ("grad", 4, (5,)),
    ]


def test_a_sum_in_place_goes_on_with_the_contents() -> None:
    """The last uses by lane: row 3 computes, row 2 communicates."""
    body = (FORWARD, BACKWARD, AllReduce("grad", Group(2)), UPDATE)
    assert lives(*body) == [("loss", 0, (1,)), ("grad", 1, (3, 2))]


def test_a_wait_uses_no_contents() -> None:
    body = (FORWARD, BACKWARD, UPDATE, Wait("grad", COMM))
    assert lives(*body) == [("loss", 0, (1,)), ("grad", 1, (2,))]


def test_contents_that_nobody_reads_end_with_the_operation_that_writes_them() -> None:
    assert lives(Copy("param", "copy"), Copy("param", "copy")) == [("copy", 0, (0,)), ("copy", 1, (1,))]
