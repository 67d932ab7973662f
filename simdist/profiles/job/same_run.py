"""Whether traces are of one run: then the same collective ends everywhere at about the same time."""

import numpy as np

from simdist.errors import TraceError
from simdist.profiles.job.clocks import Clocks
from simdist.profiles.job.job import TracedJob
from simdist.profiles.job.matching import Matched
from simdist.settings.units import format_seconds

_SLICE_S = 5e-3  # by so much a busy host sees an end late: about a time slice of Linux (sched_base_slice_ns, 3-4 ms)


def check_one_run(job: TracedJob, matched: Matched, clocks: Clocks) -> None:
    """Refuse a rank whose collectives are not those of the others.

    Nobody is done with a collective before its last member has come, so its ends differ by less than the time that it
    takes from then on. That time is what it took the last one to come, by that rank's own clock: the shortest of all.

    Raises:
        TraceError: The ends on a rank are further from those on the others, in the median, after its clock was
            corrected.
    """
    if not len(matched.end_s) or not len(clocks.apart_s):
        return
    alone_s = float(np.median(np.nanmin(matched.end_s - matched.arrival_s, axis=1)))
    worst = int(np.argmax(clocks.apart_s))
    apart_s = float(clocks.apart_s[worst])
    if apart_s <= max(_SLICE_S, alone_s):
        return
    raise TraceError(
        f"{job.profiles[worst].path}: collectives of rank {job.ranks[worst]} end {format_seconds(apart_s)} apart from "
        f"the same ones on other ranks, with clocks corrected, and take only {format_seconds(alone_s)}: it is of "
        f"another run, or its steps are numbered otherwise: give the traces of one run"
    )
