"""The page on published backup workers shows what its script computes."""

import math

import numpy as np
from scripts import ROOT, load_script

from simdist.report import insert_tables

run = load_script(ROOT / "experiments" / "backup_workers" / "run.py")


def test_delays_make_the_median_step_as_much_longer_as_is_published():
    delay_s = run.mean_delay_s(50, 1.1)
    drawn = np.random.default_rng(0).exponential(delay_s, (20_000, 50))
    ratio = np.median(1 + drawn.max(axis=1)) / (1 + delay_s * math.log(2))
    assert abs(ratio - 1.1) < 1e-3


def test_page_shows_the_tables():
    page = (ROOT / "experiments" / "backup_workers" / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, run.tables(run.measure())) == page
