"""Settings of all tests."""

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "simdist",
    deadline=None,  # no test of wall-clock time
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("simdist")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `-n auto` means: half as many again as CPUs, because many tests wait for processes."""
    return max(2, (os.cpu_count() or 1) * 3 // 2)


# A shell without job control starts what runs in its background with SIGINT ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, whoever does so first
