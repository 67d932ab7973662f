"""Settings of all tests."""

import importlib.util
import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "simdist",
    deadline=None,  # no test of wall-clock time
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("simdist")

if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, whoever does so first
