"""The clock is SimPy's: processes have names, what is urgent comes first, what fails is not lost."""

import pytest
import simpy

from simdist.engines.clock import Clock, Notice


def test_processes_have_names():
    clock, names = Clock(), []

    def waiting():
        names.append(clock.active_process.name)
        yield clock.timeout(1.0)
        names.append(clock.active_process.name)

    process = clock.start("rank 3 compute", waiting())
    clock.run()
    assert (process.name, names, clock.now) == ("rank 3 compute", ["rank 3 compute"] * 2, 1.0)


def test_notices_happen_before_what_the_clock_was_told_before():
    clock, order = Clock(), []
    notice = Notice(clock)

    def told():
        yield notice
        order.append(("told", clock.now))

    def telling():
        yield clock.timeout(2.0)
        clock.timeout(0.0).callbacks.append(lambda _: order.append(("later", clock.now)))
        clock.happen(notice)
        order.append(("telling", clock.now))

    clock.start("told", told())
    clock.start("telling", telling())
    clock.run()
    assert order == [("telling", 2.0), ("told", 2.0), ("later", 2.0)]


def test_interrupts_work_as_in_simpy():
    clock, causes = Clock(), []

    def sleeping():
        try:
            yield clock.timeout(9.0)
        except simpy.Interrupt as interrupt:
            causes.append((interrupt.cause, clock.now))

    def waking(sleeper):
        yield clock.timeout(1.0)
        sleeper.interrupt("enough")

    clock.start("waking", waking(clock.start("sleeping", sleeping())))
    clock.run()
    assert causes == [("enough", 1.0)]


def test_a_process_that_fails_ends_the_run_with_its_own_error():
    clock, error = Clock(), OSError(5, "what it was")

    def failing():
        yield clock.timeout(1.0)
        raise error

    clock.start("failing", failing())
    with pytest.raises(OSError, match="what it was") as caught:
        clock.run()
    assert caught.value is error


def test_who_waits_for_a_process_may_handle_its_failure():
    clock, seen = Clock(), []

    def failing():
        yield clock.timeout(1.0)
        raise ValueError("no")

    def handling():
        try:
            yield clock.start("failing", failing())
        except ValueError as error:
            seen.append(str(error))

    clock.start("handling", handling())
    clock.run()
    assert seen == ["no"]
