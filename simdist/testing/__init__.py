"""Rules for schedules, disturbances and algorithms. Call these functions from your own tests.

    from simdist.testing import check_schedule

    def test_my_schedule_keeps_the_rules() -> None:
        check_schedule(MySchedule)

Each raises an `AssertionError` that names the broken rule and the case. simdist tests its own classes in this way.
"""

from simdist.testing.algorithms import check_algorithm
from simdist.testing.disturbances import check_disturbance
from simdist.testing.schedules import check_schedule

__all__ = ["check_algorithm", "check_disturbance", "check_schedule"]
