"""Work for many processes: the workers, the distribution of work, and the storage of its results.

Workers are this process (`InProcess`), processes of this machine (`LocalPool`), or workers of a Dask cluster
(`simdist.jobs.dask`). `finished` hands work out to each kind.
"""

from simdist.jobs.workers import InProcess, LocalPool, Workers, finished

__all__ = ["InProcess", "LocalPool", "Workers", "finished"]
