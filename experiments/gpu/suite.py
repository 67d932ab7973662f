"""The tests that need a GPU: `pytest -m gpu`.

Those that measure times run first and alone, then the others, six at a time. A row per test: its name, its outcome,
its seconds, and the end of the report if it failed.
"""

import os

import common

PLACES = ("tests/real/test_gpu.py", "tests/real/kernels")  # all tests that need a GPU
N_PROCESSES = 6  # each starts up to four ranks, which share the GPU


class _Outcomes:
    """A plugin of pytest that emits what becomes of each test."""

    def __init__(self, part: common.Part) -> None:
        self._part = part

    def pytest_runtest_logreport(self, report) -> None:
        """Emit a row when a test is through, or when its preparation failed or said to skip it."""
        if report.when != "call" and report.outcome == "passed":
            return
        row: common.Row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.failed:
            row["report"] = report.longreprtext[-1500:]
        if report.skipped:
            row["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self._part.emit(row)


def run(part: common.Part) -> None:
    """Emit a row per test."""
    import pytest

    os.environ["UNSHRUNK"] = "1"  # a failing example is not made smaller: that can take all the time there is
    options = [*PLACES, "-p", "no:cacheprovider", f"--rootdir={common.ROOT}"]
    options += ["-o", "filterwarnings=default"]  # other releases of torch may warn of other things
    outcomes = _Outcomes(part)
    shares = {"gpu": 0} if part.dry_run else {"gpu and alone": 0, "gpu and not alone": N_PROCESSES}
    for marked, n_processes in shares.items():
        code = pytest.main([*options, "-m", marked, "-n", str(n_processes)], plugins=[outcomes])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise common.PartError(f"pytest -m {marked!r}: {code!r}")
