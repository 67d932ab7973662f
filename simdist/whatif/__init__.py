"""What if there were no stragglers, and what if the schedule were another?

`slowdown` replays a trace with some durations made ideal; `gains` simulates other schedules under the disturbances that
a job has had.
"""

from simdist.whatif.gains import Gain, Gains, gains
from simdist.whatif.pattern import Pattern, pattern
from simdist.whatif.slowdown import Loss, Slowdown, slowdown

__all__ = ["Gain", "Gains", "Loss", "Pattern", "Slowdown", "gains", "pattern", "slowdown"]
