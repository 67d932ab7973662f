"""Rules for schedules, disturbances and algorithms of users: call these from your own tests.

    from simdist.testing import check_schedule

    def test_my_schedule_keeps_the_rules() -> None:
        check_schedule(MySchedule)

Each raises an `AssertionError` that says which rule is broken, and where. simdist holds its own classes to the same.
"""

from simdist.testing.algorithms import check_algorithm
from simdist.testing.disturbances import check_disturbance
from simdist.testing.schedules import check_schedule

__all__ = ["check_algorithm", "check_disturbance", "check_schedule"]
