"""Processes besides those of the plan: actors of the user, and the traffic of a scenario."""

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias

import simpy

from simdist.cost.costs import Stage, Transfer
from simdist.cost.traffic import Background, LinkShares
from simdist.engines.clock import Steps
from simdist.engines.live import LiveCluster
from simdist.errors import RunError

Actor: TypeAlias = Callable[[simpy.Environment, LiveCluster], Generator[simpy.Event, object, object]]

_AT_ONCE = 100_000  # events that an actor may wait for without letting time pass


def perform(actor: Actor, cluster: LiveCluster) -> tuple[str, Steps]:
    """Return the name and the process of an actor.

    Raises:
        RunError: The actor is not a generator function. Or it fails while it runs, yields something that is not an
            event, or goes on without letting time pass.
    """
    try:
        steps = actor(cluster.clock, cluster)
    except TypeError as error:
        raise RunError(f"actor {actor!r} is called with the environment and the cluster: {error}") from error
    if not isinstance(steps, Generator):
        raise RunError(f"actor {actor!r} is no generator function: it returned {steps!r}, and must yield events")
    name = f"actor {getattr(actor, 'kind', steps.__name__)}"  # type: ignore[attr-defined]  # generators have a name
    return name, _performed(name, steps, cluster)


def _performed(name: str, steps: Generator[simpy.Event, object, object], cluster: LiveCluster) -> Steps:
    try:
        try:
            yield from _checked(steps, cluster)
        finally:
            steps.close()
    except Exception as error:
        raise RunError(f"{name} failed at {cluster.clock.now:g} s: {type(error).__name__}: {error}") from error


def _checked(steps: Generator[simpy.Event, object, object], cluster: LiveCluster) -> Steps:
    """Pass on the events of an actor, and send their results back to it."""
    n_at_once = 0
    moment_s = 0.0
    clock = cluster.clock
    go_on: Callable[[], simpy.Event] = steps.__next__
    while True:
        try:
            event = go_on()
        except StopIteration:
            return
        if not isinstance(event, simpy.Event):
            raise TypeError(f"it yielded {event!r}; an actor yields events, such as env.timeout(1.0)")
        n_at_once = n_at_once + 1 if clock.now == moment_s else 1
        moment_s = clock.now
        if n_at_once > _AT_ONCE:
            raise RuntimeError(f"it waited for {_AT_ONCE} events without letting time pass")
        try:
            go_on = partial(steps.send, (yield event))
        except Exception as failure:
            go_on = partial(steps.throw, failure)


def change_shares(changes: LinkShares, cluster: LiveCluster) -> Steps:
    """Set the shares of links when they change."""
    links = [cluster.links[index] for index in changes.resources if index in cluster.links]
    for at_s, share in changes.shares() if links else ():
        if at_s > cluster.clock.now:
            yield cluster.clock.at(at_s)
        for link in links:
            link.share = share


def fly(background: Background, cluster: LiveCluster) -> Steps:
    """Let the flows of another job share links, one flow after the other."""
    stage = background.stage
    clock = cluster.clock
    for flight in background.flights():
        if flight.begin_s > clock.now:
            yield clock.at(flight.begin_s)
        if flight.nbytes is not None:
            transfer = Transfer((Stage(0.0, stage.resources, stage.nbytes * flight.nbytes),))
            yield cluster.carry(background.cause, transfer)
        elif flight.end_s is None or flight.end_s > clock.now:
            flow = cluster.open(background.cause, stage)
            if flight.end_s is None or flight.end_s == math.inf:
                return
            yield clock.at(flight.end_s)
            flow.close()
