"""Options with units, of `python -m real` and `python -m real.calibrate`."""

import click
import pytest

pytest.importorskip("torch")

from real.options import TIME, timeout_option


@pytest.mark.parametrize(("text", "seconds"), [("8", 8), ("2.5", 2.5), ("1e3", 1000), ("8 s", 8), ("2 min", 120)])
def test_a_time_is_one_of_seconds_unless_it_has_a_unit(text, seconds) -> None:
    @click.command()
    @click.option("budget_s", "--budget", type=TIME)
    @timeout_option
    def command(budget_s: float, timeout_s: float) -> tuple[float, float]:
        return budget_s, timeout_s

    assert command.main(["--budget", text, "--timeout", text], standalone_mode=False) == (seconds, seconds)
    assert command.main(["--budget", text], standalone_mode=False) == (seconds, 60)
