"""The helper that starts ranks tells what keeps them."""

import sys
from dataclasses import replace

import pytest
from processes import start

WAITS = "import threading\nprint('waits', flush=True)\nthreading.Event().wait()"


def test_a_rank_that_does_not_end_in_time_says_where_it_is() -> None:
    with start([sys.executable, "-c", WAITS], 1) as ranks:
        ranks.until("waits")
        with pytest.raises(AssertionError, match="have not ended in time") as caught:
            replace(ranks, deadline_s=0.0).wait()
    assert "in wait" in str(caught.value)  # the stack
    if sys.platform == "linux":
        assert "threads:\npython" in str(caught.value)
