"""Jobs that failed, as published: the page has what the program computes, and misses are the ones it names."""

import pytest
from scripts import ROOT, load_script

from simdist.report import insert_tables
from simdist.runs.failing_job import ranks_per_replica
from simdist.scenario import load
from simdist.studies.comparison import compare

HERE = ROOT / "experiments" / "published_goodput"
run = load_script(HERE / "run.py")


def test_the_page_has_the_rows_of_the_program_which_miss_only_where_it_says_why() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, run.tables()) == page
    missed = {each.scenario for each in run.rows() if abs(each.error) > 0.10}
    assert missed == {"opt", "ft-hsdp-restart", "scout-restart-15", "scout-torchft-2", "scout-torchft-4", "rsc-1024"}


def test_the_recoveries_of_scout_are_in_the_published_order_with_four_replicas() -> None:
    names = ("migration", "restart-15", "torchft-2", "restart-25", "torchft-4")
    minutes = [run.simulated(f"scout-{name}", "minutes") for name in names]
    assert minutes == sorted(minutes)
    assert minutes[3] == pytest.approx(818, rel=0.1)


def test_llama_3_trains_between_90_and_97_percent_of_the_time() -> None:
    with_recovery, without = (run.simulated(name, "goodput") for name in ("llama3-recovery", "llama3"))
    assert 90 < with_recovery < without < 97


@pytest.mark.parametrize("replicas", [2, 4])
def test_steps_of_torchft_are_as_long_as_its_average_by_gloo_makes_them(replicas: int) -> None:
    (row,) = compare(load(HERE / "scenarios" / f"scout-gloo-{replicas}.yaml"), n_seeds=1)
    job = load(HERE / "scenarios" / f"scout-torchft-{replicas}.yaml")
    assert job.failures is not None
    assert job.failures.step_factor == pytest.approx(row.step_s / 7.83, rel=0.01)
    assert job.cluster.world_size // ranks_per_replica(job.schedules[0], job.cluster.world_size) == replicas
