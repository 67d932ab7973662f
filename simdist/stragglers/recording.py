"""Disturbances of a run by step and rank, so that other schedules can be tried under the same disturbances.

For a simulated run, these are the injected delays. For a measured run, they are the excess of each step over its
scenario: delays as measured, computing and input beyond their price, and gaps between operations of the host and of the
compute stream. Simulating the scenario with them approximately reproduces the measurement.
"""

from pathlib import Path
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs, Local, Shared, Varying
from simdist.engines.replay import Timing
from simdist.errors import naming_file
from simdist.plan import Channel, Delay, Load, Op, Plan, lane_of, occurrences
from simdist.plan.delays import Delays, n_micro_batches
from simdist.scenario import Recorded, Scenario
from simdist.scenario.disturbances import read_recorded
from simdist.scenario.links import LinkDisturbance
from simdist.studies.resampling import in_blocks
from simdist.traces.trace import Trace, write_npz

_Floats: TypeAlias = NDArray[np.float64]


def measured_delays(trace: Trace, timed: Timing, costs: Costs) -> dict[Channel, _Floats]:
    """Return the excess of each step of a measured trace over its price, of each of its micro-batches.

    Returns:
        Those of one run, see `simdist.plan.delays`. Channels without delays are omitted. What a micro-batch takes less
        than its price makes up for delays of others of its step.
    """
    plan = trace.plan
    n = n_micro_batches(plan)
    excess_s: dict[Channel, _Floats] = {}
    for each in occurrences(plan):
        channel = _channel(each.op)
        if channel is None:
            continue
        late_s = timed.durations_s[each.rows] - _price_s(each.op, costs, plan)
        if timed.gaps_s is not None and channel != "io":
            late_s = late_s + timed.gaps_s[each.rows]
        of_steps = excess_s.setdefault(channel, np.zeros((plan.n_steps, n, plan.world_size)))
        of_steps[each.steps, each.micro_batch] += late_s
    late = {channel: _delays(seconds) for channel, seconds in excess_s.items()}
    return {channel: seconds for channel, seconds in late.items() if seconds.any()}


def _delays(excess_s: _Floats) -> _Floats:
    """Return the delays of a run: no step is late by more than its excess, `[n_steps, n_micro_batches, world_size]`."""
    if excess_s.shape[1] == 1:
        return np.maximum(excess_s[None, :, 0], 0.0)
    late_s = np.maximum(excess_s, 0.0)
    of_steps_s = late_s.sum(axis=1, keepdims=True)
    kept_s = np.maximum(excess_s.sum(axis=1, keepdims=True), 0.0)
    shares = np.divide(kept_s, of_steps_s, out=np.zeros_like(kept_s), where=of_steps_s > 0)
    return np.asarray((late_s * shares)[None])


def _channel(op: Op) -> Channel | None:
    """Return the channel of an operation's delay; None if it does not delay a rank."""
    kind = lane_of(op).kind
    if kind == "comm" or kind == "save" or (kind == "io" and not isinstance(op, Load | Delay)):
        return None
    return kind


def _price_s(op: Op, costs: Costs, plan: Plan) -> _Floats:
    """Return the price of an operation on each rank alone, `[world_size]`; 0 for an injected delay."""
    match costs.of.get(op):
        case None:
            seconds: float | _Floats = 0.0
        case Local(seconds=seconds) | Shared(alone_s=seconds):
            pass
        case Varying():
            seconds = np.inf  # each batch of a data set takes its own time: none is late
        case unknown:
            assert_never(unknown)
    return np.broadcast_to(np.asarray(seconds, dtype=np.float64), plan.world_size)


def as_recorded(scenario: Scenario) -> Scenario:
    """Return a scenario that plays its recordings unchanged, for as many steps as they have.

    If the steps were resampled, for longer or other runs, they are put back in order.
    """
    lengths = [len(read_recorded(each)) for each in scenario.disturbances if isinstance(each, Recorded)]
    if not lengths:
        return scenario
    return scenario.changed(disturbances=in_blocks(scenario.disturbances, None), steps=min(scenario.steps, *lengths))


def delays_of_steps(delays: Delays, steps: range) -> dict[Channel, _Floats]:
    """Return the delays of some consecutive steps, without channels that have none."""
    chosen = {channel: seconds[:, steps.start : steps.stop] for channel, seconds in delays.items()}
    return {channel: seconds for channel, seconds in chosen.items() if seconds.any()}


def with_recording(scenario: Scenario, delays: Delays, folder: Path) -> Scenario:
    """Return a scenario with recorded delays as its only disturbances of ranks; links do not change.

    Args:
        scenario: Its steps are replaced by those of the recording.
        delays: Those of one run, see `simdist.plan.delays`.
        folder: Folder for the recording. It must exist as long as the scenario is used.

    Raises:
        RunError: It cannot be written.
    """
    file = folder / "recording.npz"
    with naming_file(file):
        write_npz(file, {str(channel): seconds[0] for channel, seconds in delays.items()})
    n_steps = max((seconds.shape[1] for seconds in delays.values()), default=scenario.steps)
    played = tuple(Recorded(on=channel, file=file) for channel in delays)
    links = tuple(each for each in scenario.disturbances if isinstance(each, LinkDisturbance))
    return scenario.changed(disturbances=links + played, steps=n_steps)
