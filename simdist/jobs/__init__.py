"""Work for many processes: where it is computed, how it is handed out, and how its outcomes are kept.

Workers are this process (`InProcess`), processes of this machine (`LocalPool`), or those of a Dask cluster
(`simdist.jobs.dask`). `finished` hands work out to any of them.
"""

from simdist.jobs.handing_out import finished
from simdist.jobs.workers import InProcess, LocalPool, Workers

__all__ = ["InProcess", "LocalPool", "Workers", "finished"]
