"""Exact times: what `call_at` puts into SimPy's queue itself is taken out as if SimPy had put it there."""

import math
from functools import partial

from simpy.events import URGENT

from simdist.engines.network.fluid import LAST, Timeline


def test_calls_happen_by_time_then_priority_then_in_the_order_they_were_made_among_simpys_own():
    timeline = Timeline()
    happened = []

    def call(what, _):
        happened.append((timeline.now, what))

    timeline.call_at(2.0, partial(call, "last"), priority=LAST)
    timeline.timeout(2.0).callbacks.append(partial(call, "a timeout"))
    timeline.call_at(2.0, partial(call, "a call"))
    timeline.timeout(2.0).callbacks.append(partial(call, "another timeout"))
    timeline.call_at(2.0, partial(call, "urgent"), priority=URGENT)
    timeline.call_at(1.0, partial(call, "before"))
    timeline.run()
    assert happened == [
        (1.0, "before"),
        *((2.0, what) for what in ("urgent", "a timeout", "a call", "another timeout", "last")),
    ]


def test_call_happens_at_the_very_time_that_a_delay_would_round():
    now_s, at_s = math.ulp(1.0) / 2, 1.0 + math.ulp(1.0)
    assert now_s + (at_s - now_s) == 1.0
    timeline = Timeline(now_s)
    timeline.call_at(at_s, lambda _: None)
    timeline.run()
    assert timeline.now == at_s


def test_processes_may_wait_for_events_while_calls_happen():
    timeline = Timeline()
    done = timeline.event()
    timeline.call_at(1.5, lambda _: done.succeed("told"))

    def wait():
        return (yield done), timeline.now

    assert timeline.run(timeline.process(wait())) == ("told", 1.5)
