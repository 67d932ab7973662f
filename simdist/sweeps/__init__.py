"""Thousands of scenarios: varied fields, computation on many processes, and the table of results.

sweep = load("sweep.yaml")         # what is varied: points, and a row per point and schedule
run(sweep, Path("runs/sweep"))     # compute the rows that are missing there
frame(Path("runs/sweep"))          # a pandas table
"""

from simdist.jobs import InProcess, LocalPool, Workers
from simdist.sweeps.definition import Sweep
from simdist.sweeps.driver import run
from simdist.sweeps.reading import load, loads
from simdist.sweeps.results import frame, read_results
from simdist.sweeps.runs import write_plans

__all__ = ["InProcess", "LocalPool", "Sweep", "Workers", "frame", "load", "loads", "read_results", "run", "write_plans"]
