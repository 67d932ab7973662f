"""Interruptions that are one event."""

from simdist.failure_logs.records import Interruption, joined_events


def node(at_s, *hosts, job="a"):
    return Interruption(at_s, "node failure", "node", frozenset(hosts), frozenset([job]))


def process(at_s, *hosts, job="a"):
    return Interruption(at_s, "failed job", "process", frozenset(hosts), frozenset([job]))


def test_nodes_that_fail_together_are_one_event():
    (event,) = joined_events([node(20.0, "b"), node(0.0, "a"), node(59.0, "c", job="b")])
    assert (event.at_s, event.hosts, event.n_ended) == (0.0, {"a", "b", "c"}, 3)


def test_processes_are_one_event_if_they_share_a_host_or_a_job():
    assert len(list(joined_events([process(0.0, "a"), process(5.0, "a", job="b")]))) == 1
    assert len(list(joined_events([process(0.0, "a"), process(5.0, "b")]))) == 1
    assert len(list(joined_events([process(0.0, "a"), process(5.0, "b", job="b")]))) == 2


def test_events_a_minute_apart_are_two():
    assert len(list(joined_events([node(0.0, "a"), node(61.0, "a")]))) == 2


def test_a_node_is_the_cause_of_processes_that_failed_with_it():
    (event,) = joined_events([process(0.0, "a"), node(1.0, "a", job="b")])
    assert (event.cause, event.at_s, event.n_ended) == ("node failure", 0.0, 2)


def test_a_hang_that_began_when_a_process_died_is_its_consequence():
    hang = Interruption(605.0, "collective time-out", "hang", jobs=frozenset("a"), hung_s=604.0)
    (event,) = joined_events([hang, process(3.0, "a")])
    assert (event.cause, event.hung_s, event.n_ended) == ("failed job", 0.0, 2)


def test_a_preemption_has_nothing_to_do_with_a_failure():
    preempted = Interruption(1.0, "preemption", "planned", frozenset("a"), frozenset("b"))
    assert [each.cause for each in joined_events([process(0.0, "a"), preempted])] == ["failed job", "preemption"]
