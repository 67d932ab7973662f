"""Slow devices: ranks that compute longer in nearly every step.

In the scenario they are devices of a lower speed, not ranks with a delay. A delay comes as a whole, before the forward
pass; behind it gradients would be ready as fast as on any other rank, and their collectives would queue. On a device
that is slow throughout, every layer takes longer, and more of the communication hides behind it.
"""

from collections.abc import Sequence

from simdist.profiles.estimates.stragglers import Straggler
from simdist.scenario.cluster import DeviceOverride

_NEARLY = 0.9  # of the steps


def slow_throughout(stragglers: Sequence[Straggler], n_steps: int) -> tuple[Straggler, ...]:
    """Return those whose computing takes longer in nearly every step."""
    return tuple(
        each
        for each in stragglers
        if each.kind == "persistent" and each.channel == "compute" and len(each.steps) >= _NEARLY * n_steps
    )


def slow_devices(slow: Sequence[Straggler], computing_s: float) -> tuple[DeviceOverride, ...]:
    """Return the devices of ranks whose computing takes longer by as much as they are late.

    Args:
        slow: Who is slow throughout.
        computing_s: What a step computes undisturbed; what the host always holds it up by is part of it.
    """
    if computing_s <= 0:
        return ()
    speeds = ((each.ranks, computing_s / (computing_s + each.seconds)) for each in slow)
    return tuple(DeviceOverride(ranks=ranks, speed=round(speed, 6)) for ranks, speed in speeds)
