"""Work is handed out as workers are free, and every outcome comes back once, with what it is of."""

import os
import time
from concurrent.futures import BrokenExecutor
from contextlib import closing

from simdist.jobs import InProcess, LocalPool, finished


def square(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number**2


def die_of_three(number: int) -> int:
    if number == 3:
        os._exit(1)
    return number


def sleep_and_touch(path) -> None:
    path.touch()
    time.sleep(0.2)


def test_every_item_comes_back_with_its_outcome() -> None:
    found = {item: future.result() for item, future in finished(InProcess(), square, [3, 1, 2])}
    assert found == {3: 9, 1: 1, 2: 4}


def test_a_failure_is_the_items_own() -> None:
    outcomes = {item: future.exception() for item, future in finished(InProcess(), square, [-1, 2])}
    assert outcomes[2] is None
    assert str(outcomes[-1]) == "-1 is negative"


def test_items_are_taken_when_there_is_room_for_them() -> None:
    taken: list[int] = []

    def items():
        for number in range(4):
            taken.append(number)
            yield number

    for number, _ in finished(InProcess(), square, items()):
        assert taken == list(range(number + 1))


def test_a_worker_that_dies_takes_with_it_what_it_was_given_and_no_more() -> None:
    with LocalPool(2) as pool:
        outcomes = {item: future.exception() for item, future in finished(pool, die_of_three, range(8), n_underway=2)}
    assert sorted(outcomes) == list(range(8))
    assert isinstance(outcomes[3], BrokenExecutor)
    assert [item for item, error in outcomes.items() if error is not None] == [3]


def test_what_waits_is_not_begun_when_the_caller_stops(tmp_path) -> None:
    paths = [tmp_path / str(number) for number in range(20)]
    with LocalPool(1) as pool, closing(finished(pool, sleep_and_touch, paths, n_underway=2)) as outcomes:
        next(outcomes)
    assert len(list(tmp_path.iterdir())) < 6
