"""Thousands of scenarios: varied fields, computation on many processes, and the table of results.

what = load("sweep.yaml")     # what is varied: points, and a row per point and schedule
sweep(what, "runs/sweep")     # compute the rows that are missing there
frame("runs/sweep")           # a pandas table
"""

from simdist.jobs import InProcess, LocalPool, Workers
from simdist.sweeps.definition import Sweep
from simdist.sweeps.driver import sweep
from simdist.sweeps.reading import load, loads
from simdist.sweeps.results import frame, read_results
from simdist.sweeps.runs import write_plans

__all__ = [
    "InProcess",
    "LocalPool",
    "Sweep",
    "Workers",
    "frame",
    "load",
    "loads",
    "read_results",
    "sweep",
    "write_plans",
]
