"""Injected delays: the shapes that fit a plan, and what each of its operations takes."""

import numpy as np
import pytest

from simdist.errors import PlanError
from simdist.plan import Backward, Buffer, Delay, Forward, Load, Op, Optimize, Plan, codec
from simdist.plan.check import check
from simdist.plan.delays import check_delays, delay_shapes, no_delays, of_micro_batches, seconds_of
from simdist.plan.ops import micro_batches

BUFFERS = (
    Buffer("param", 2, tensors=(0, 1), initialized=True),
    Buffer("grad", 2, tensors=(0, 1)),
    Buffer("loss", 1),
)
FORWARD = Forward(("param",), ("loss",))
BACKWARD = Backward(("param", "loss"), "grad")
ADDED = Backward(("param", "loss"), "grad", adds=True)
UPDATE = Optimize(("param",), ("grad",))
PASSES: tuple[Op, ...] = (
    *(Delay("compute", 0), FORWARD, BACKWARD),
    *(Delay("compute", 1), FORWARD, Delay("host"), ADDED, UPDATE),
)
OF_STEPS = np.arange(6.0).reshape(1, 3, 2)
OF_PASSES = np.arange(12.0).reshape(1, 3, 2, 2)


def plan_of(*body: Op) -> Plan:
    plan = Plan.from_steps("passes", world_size=2, buffers=BUFFERS, steps=[body] * 3)
    check(plan)
    return plan


def test_an_operation_takes_the_delays_of_its_micro_batch_or_all_of_the_step() -> None:
    delays = {"compute": OF_PASSES, "host": OF_PASSES, "io": OF_STEPS}
    assert np.array_equal(seconds_of(Delay("compute", 1), delays), OF_PASSES[:, :, 1])
    assert np.array_equal(seconds_of(Delay("host"), delays), OF_PASSES.sum(axis=2))
    assert seconds_of(Delay("io"), delays) is OF_STEPS


def test_delays_of_steps_or_of_micro_batches_fit_what_takes_them() -> None:
    plan = plan_of(*PASSES)
    assert delay_shapes(plan) == ((1, 3, 2), (1, 3, 2, 2))
    check_delays(plan, no_delays(plan))
    check_delays(plan, {"compute": OF_PASSES, "host": OF_STEPS})
    check_delays(plan, {"compute": OF_PASSES, "host": OF_PASSES})
    one = plan_of(Delay("compute"), FORWARD, BACKWARD, UPDATE)
    assert delay_shapes(one) == ((1, 3, 2),)
    check_delays(one, {"compute": OF_STEPS})


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (
            OF_STEPS,
            r"compute delays have shape \(1, 3, 2\); a run of plan passes takes \(1, 3, 2, 2\): seeds x steps x ",
        ),
        (OF_PASSES[:, :2], r"have shape \(1, 2, 2, 2\)"),
        (np.zeros((1, 3, 4, 2)), r"have shape \(1, 3, 4, 2\)"),
        (OF_PASSES - 3, r"compute delay -3.0 at step 0, micro-batch 0, rank 0; delays are seconds, 0 or more"),
    ],
)
def test_delays_of_other_micro_batches_are_refused(compute: np.ndarray, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_delays(plan_of(*PASSES), {"compute": compute, "host": OF_STEPS})


def test_a_step_without_micro_batches_takes_no_delays_of_them() -> None:
    with pytest.raises(PlanError, match=r"have shape \(1, 3, 2, 2\); a run of plan passes takes \(1, 3, 2\)"):
        check_delays(plan_of(Delay("compute"), FORWARD, BACKWARD, UPDATE), {"compute": OF_PASSES})
    with pytest.raises(PlanError, match="the plan delays single micro-batches: give seeds x steps x micro-batches x"):
        seconds_of(Delay("compute", 1), {"compute": OF_STEPS})
    with pytest.raises(PlanError, match="delays micro-batch -1; they are counted from 0"):
        plan_of(Delay("compute", -1), FORWARD, BACKWARD, UPDATE)


def test_delays_of_steps_lie_in_the_first_micro_batch_on_compute_and_in_the_last_otherwise() -> None:
    for channel, place in (("compute", 0), ("host", 1), ("backward", 1)):
        late = of_micro_batches(channel, OF_STEPS, 2)
        assert np.array_equal(late[:, :, place], OF_STEPS)
        assert late.sum() == OF_STEPS.sum()
    assert of_micro_batches("host", OF_STEPS, 1) is OF_STEPS


def test_a_micro_batch_ends_with_its_backward_pass() -> None:
    assert micro_batches(PASSES) == (0, 0, 0, 1, 1, 1, 1, 1)
    assert micro_batches((Load("batch"), FORWARD, FORWARD, BACKWARD, ADDED)) == (0,) * 5
    assert micro_batches(()) == ()


def test_only_delays_of_micro_batches_name_one_in_files() -> None:
    plan = plan_of(*PASSES)
    assert codec.loads(codec.dumps(plan)) == plan
    written = [op for op in plan.document()["bodies"][0] if op["op"] == "Delay"]
    assert [op.get("micro_batch") for op in written] == [0, 1, None]
    assert "micro_batch" not in written[2]
