"""Work for many processes: where it is computed, how it is handed out, and how its outcomes are kept.

pool = LocalPool(4)                            # or InProcess, or simdist.jobs.dask
for item, future in finished(pool, read, paths):
    ...                                        # future.result(), or why there is none
"""

from simdist.jobs.handing_out import finished
from simdist.jobs.workers import InProcess, LocalPool, Workers

__all__ = ["InProcess", "LocalPool", "Workers", "finished"]
