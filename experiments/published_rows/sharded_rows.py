"""Errors of published rows of sharded models, as experiments/published_sharding wrote them."""

import csv
from pathlib import Path

from estimate import Residual

FILE = Path(__file__).parents[1] / "published_sharding" / "residuals.csv"


def residuals() -> list[Residual]:
    """Return log(measured / simulated) of the rows that doubts of sharded models are estimated from."""
    with FILE.open(encoding="utf-8", newline="") as lines:
        return [Residual(each["family"], "sharded", ("",), float(each["log"])) for each in csv.DictReader(lines)]
