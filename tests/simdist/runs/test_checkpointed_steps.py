"""Steps and files by arithmetic: as a loop over single steps has them, and what going back loses."""

import random
from dataclasses import dataclass, field

import pytest

from simdist.runs.checkpointed_steps import CheckpointedSteps, Checkpoints, Pace


@dataclass
class Loop:
    """The same, step by step."""

    done: int = 0
    part: float = 0.0
    save_s: float = 0.0
    files: list[tuple[int, float]] = field(default_factory=list)


def looped(checkpoints: Checkpoints | None, step_s: float, until_s: float) -> Loop:
    now_s = 0.0
    loop = Loop()
    while now_s + step_s <= until_s:
        now_s += step_s
        loop.done += 1
        if checkpoints is None or loop.done % checkpoints.every_steps:
            continue
        usable_s = max(now_s, loop.files[-1][1] if loop.files else 0.0) + checkpoints.stall_s
        loop.save_s += min(usable_s, until_s) - now_s
        now_s = usable_s
        if usable_s > until_s:
            return loop
        loop.files.append((loop.done, usable_s + checkpoints.write_s))
    loop.part = (until_s - now_s) / step_s
    return loop


def test_intervals_by_arithmetic_are_those_of_a_loop_over_steps() -> None:
    draw = random.Random(1)
    for _ in range(1000):
        checkpoints = Checkpoints(draw.randint(1, 9), draw.choice([0, 0.3, 1.7]), draw.choice([0, 0.4, 5.0, 30.0]))
        step_s = draw.choice([0.5, 1.0, 1.3])
        until_s = draw.uniform(0, 200)
        steps = CheckpointedSteps(checkpoints, Pace(step_s))
        while steps.now_s < until_s:
            steps.advance(min(until_s, steps.now_s + draw.expovariate(1 / draw.choice([1, 50, 500]))))
        expected = looped(checkpoints, step_s, until_s)
        assert steps.position == pytest.approx(expected.done + expected.part)
        assert steps.save_s == pytest.approx(expected.save_s)
        assert steps.n_files == len(expected.files)
        usable = [step for step, usable_s in expected.files if usable_s <= until_s]
        assert steps.newest == (usable[-1] if usable else None)
        assert steps.n_usable == len(usable)


def test_a_number_of_steps_is_done_with_its_file() -> None:
    steps = CheckpointedSteps(Checkpoints(10, stall_s=3.0), Pace(1.0))
    steps.advance(1e9, 30)
    assert (steps.done, steps.now_s, steps.newest) == (30, 39.0, 30)
    steps.advance(1e9, 35)
    assert (steps.now_s, steps.newest, steps.n_files) == (44.0, 30, 3)


def test_before_the_first_file_is_usable_nothing_can_be_recovered() -> None:
    steps = CheckpointedSteps(Checkpoints(10, stall_s=1.0, write_s=100.0), Pace(1.0))
    steps.advance(60.0)
    assert steps.newest is None
    assert steps.go_back(steps.newest or 0) == 20.0  # the file of step 20 waits for that of step 10
    assert (steps.done, steps.save_s) == (0, 40.0)


def test_going_back_loses_the_seconds_of_the_paces_there() -> None:
    steps = CheckpointedSteps(Checkpoints(10), Pace(1.0))
    steps.advance(15.0)
    steps.set_pace(Pace(2.0, share=0.5, cause=3))
    steps.advance(18.0)  # 16.5 steps
    assert steps.go_back(10) == pytest.approx(5.0 + 3.0)
    steps.advance(20.0)
    assert steps.position == 11.0
    assert steps.stretches[-1].at(steps.position) == (pytest.approx(12.0), pytest.approx(10.5))


def test_the_step_in_progress_goes_on_at_another_pace() -> None:
    steps = CheckpointedSteps(None, Pace(4.0))
    steps.advance(3.0)
    steps.set_pace(Pace(8.0))
    steps.advance(5.0)
    assert (steps.done, steps.part) == (1, 0.0)
    steps.advance(9.0)
    assert steps.position == 1.5


@pytest.mark.parametrize(("at_s", "closing_s"), [(12.0, 4.0), (12.5, 3.5), (10.5, 2.5), (5.0, 3.0)])
def test_closing_ends_the_step_and_writes_a_usable_file(at_s: float, closing_s: float) -> None:
    """At 10.5 s, half of the stall of step 10's file is over; that file is usable at 13 s."""
    steps = CheckpointedSteps(Checkpoints(10, stall_s=1.0, write_s=2.0), Pace(1.0))
    steps.advance(at_s)
    assert steps.closing_s() == pytest.approx(closing_s)
    steps.close()
    assert (steps.newest, steps.now_s) == (steps.done, pytest.approx(at_s + closing_s))
