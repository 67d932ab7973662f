"""The step to trace is one in which a rank is expected to be late again."""

import pytest

pytest.importorskip("torch")

from real.watching.lateness import Lateness, LatenessWindow
from real.watching.tracing import TraceMark, TraceMarker, next_occurrence


def window(last_step: int, *late: tuple[int, str, tuple[int, ...]]) -> LatenessWindow:
    ranks = [Lateness(rank, 20.0 - rank, last_step, 30.0, 0.1, kind, steps) for rank, kind, steps in late]
    return LatenessWindow(last_step - 49, last_step, 100.0, 0.1, tuple(ranks))


def test_a_persistent_rank_is_traced_as_soon_as_all_ranks_know() -> None:
    assert TraceMarker().after(window(49, (2, "persistent", ())), 130) == TraceMark(130, 2, "persistent")


def test_a_periodic_rank_is_traced_when_it_is_late_next() -> None:
    marker = TraceMarker()
    assert marker.after(window(49, (3, "transient", (10, 30))), 130) is None
    mark = marker.after(window(99, (3, "transient", (50, 70, 90))), 180)
    assert mark == TraceMark(190, 3, "periodic")
    assert str(mark) == "trace step 190: rank 3 is late periodically"


def test_a_rank_that_is_late_at_any_time_is_not_traced() -> None:
    marker = TraceMarker()
    assert marker.after(window(49, (3, "transient", (3, 4, 19, 44))), 130) is None


def test_a_mark_stays_until_its_steps_are_over_and_comes_once() -> None:
    marker = TraceMarker()
    first = marker.after(window(49, (2, "persistent", ())), 130)
    assert marker.after(window(99, (0, "persistent", ()), (2, "persistent", ())), 180) == first
    second = marker.after(window(149, (0, "persistent", ()), (2, "persistent", ())), 230)
    assert second == TraceMark(230, 0, "persistent")
    assert marker.after(window(249, (0, "persistent", ()), (2, "persistent", ())), 330) == second


def test_a_mark_stays_in_the_middle_of_its_steps() -> None:
    """Steps 129 to 138 are traced."""
    marker = TraceMarker()
    first = marker.after(window(49, (2, "persistent", ())), 130)
    assert marker.after(window(135, (0, "persistent", ())), 180) == first


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([0, 100, 200], 300),
        ([0, 99, 201, 300], 400),
        ([0, 1, 100, 101, 200], 300),
        ([5, 6, 7, 8], None),
        ([0, 100], None),
        ([0, 100, 150], None),
        ([0, 7, 500, 600, 700, 800], 900),
    ],
)
def test_periods_are_found(steps: list[int], expected: int | None) -> None:
    assert next_occurrence(steps, steps[-1] + 50) == expected
