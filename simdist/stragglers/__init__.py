"""Cost of stragglers, and gains of other schedules.

`find_slowdown` replays a trace in which some durations are made ideal. `find_gains` simulates other schedules under the
disturbances of a job.
"""

from simdist.stragglers.gains import Gain, Gains, find_gains
from simdist.stragglers.slowdown import Loss, Slowdown, find_slowdown
from simdist.stragglers.verdict import Pattern, find_pattern

__all__ = ["Gain", "Gains", "Loss", "Pattern", "Slowdown", "find_gains", "find_pattern", "find_slowdown"]
