"""The page on mitigations of stragglers: what it says of each holds on a small cluster, too."""

import pytest
from scripts import ROOT, load_script

from simdist.report import markdown_table

FOLDER = ROOT / "experiments" / "mitigations"
run = load_script(FOLDER / "run.py")


@pytest.fixture(scope="module")
def rows():
    return run.Study(nodes=(2,), n_seeds=1, steps=64).rows()


def added_s(rows, straggler, schedule):
    return rows[straggler][16][schedule].step_s - rows["none"][16][schedule].step_s


def test_backup_workers_lose_nothing_to_a_late_rank_and_all_others_the_same_to_a_persistent_one(rows):
    assert added_s(rows, "persistent", "backup") == pytest.approx(0, abs=1e-3)
    lost_s = {schedule: added_s(rows, "persistent", schedule) for schedule in rows["none"][16] if schedule != "backup"}
    assert lost_s == pytest.approx(dict.fromkeys(lost_s, lost_s["sync"]), rel=0.1)
    assert lost_s["sync"] > 0.05


def test_backup_workers_with_a_ring_cost_what_synchronous_sgd_does_with_one_bucket():
    calm = run.Study(nodes=(8,), n_seeds=1, steps=8, ring=True).scenario(8, "none")
    by_name = {schedule.name: schedule for schedule in calm.schedules}
    one_bucket = by_name["sync"].model_copy(update={"bucket_nbytes": None, "label": "one bucket"})
    schedules = (one_bucket, by_name["backup-ring"], by_name["backup"])
    one, ring, servers = (row.step_s for row in run.compare(calm.changed(schedules=schedules), n_seeds=1))
    assert ring == pytest.approx(one, rel=0.01)
    assert servers > 1.5 * ring


def test_who_meets_seldom_loses_less_to_transient_stragglers(rows):
    lost_s = {schedule: added_s(rows, "transient", schedule) for schedule in rows["none"][16]}
    assert lost_s["local-8-overlap2"] < lost_s["local-8"] < lost_s["hsgd-2-8,8-world"] < lost_s["sync"]


def test_the_page_shows_every_schedule(rows):
    tables = {"speedups": markdown_table(run.speedups(rows)), "lost": markdown_table(run.lost(rows))}
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, table in tables.items():
        shown = page.partition(f"<!-- table {name} -->")[2].partition("<!-- end -->")[0]
        assert [line.split("|")[1] for line in shown.splitlines() if line.startswith("| `")] == [
            line.split("|")[1] for line in table.splitlines() if line.startswith("| `")
        ]
