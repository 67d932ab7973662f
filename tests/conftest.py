"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "simdist",
    deadline=None,  # no test of wall-clock time
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("simdist")
