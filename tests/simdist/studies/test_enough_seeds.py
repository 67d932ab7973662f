"""As many seeds as intervals of a stated width take."""

import pytest
from commandline import call

import simdist
from simdist import scenario
from simdist.engines.run import run
from simdist.studies import measuring
from simdist.studies.comparison import compare
from simdist.studies.enough_seeds import EnoughSeeds, compare_with_enough

OFTEN = """
cluster:
  nodes: 2
  gpus_per_node: 4
  fabric: {latency: 0 s, bandwidth: 100 GB/s}
  network: {latency: 1 us, bandwidth: 25 Gbit/s, efficiency: 0.9}
workload: {preset: resnet18, forward: 30 ms, backward: 60 ms}
disturbances: [{kind: transient, probability: 20%, delay: 100 ms}]
steps: 40
schedules: [sync, local-4, local-8]
"""


def widths(rows) -> list[float]:
    return [(high - low) / 2 / row.step_s for row in rows for low, high in [row.step_s_ci95]]


@pytest.mark.parametrize("width", [0.02, 0.005])
def test_seeds_are_drawn_until_every_interval_is_narrow_enough(width: float) -> None:
    measured: list = []
    rows = compare_with_enough(scenario.loads(OFTEN), n_seeds=EnoughSeeds(width), measured=measured)
    assert max(widths(rows)) <= width
    n_seeds = rows[0].seeds
    assert len(measured[0].step_s) == n_seeds
    assert rows.remarks[-1].text.startswith(f"{n_seeds} of at most 1,000 seeds were drawn")
    at_once = compare(scenario.loads(OFTEN), n_seeds=n_seeds)
    assert [row.document() for row in rows] == [row.document() for row in at_once]


def test_each_seed_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [{"kind": "persistent", "on": "link", "link": "nic_out", "nodes": [1], "share": 0.5}]
    often = scenario.loads(OFTEN).changed(steps=8, schedules=["sync"])
    often = often.changed(disturbances=(*often.disturbances, *slow))
    asked = []

    def counted(*args, **options):
        asked.append(args[2].seeds)
        return run(*args, **options)

    monkeypatch.setattr(measuring, "run", counted)
    enough = EnoughSeeds(width=1e-6, most=70)
    rows = compare_with_enough(often, n_seeds=enough, warm_up=4)
    assert [len(each) for each in asked] == [20] * 4 + [50] * 4  # with links and without, of all steps and of the first
    assert all({*again}.isdisjoint(first) for first, again in zip(asked[:4], asked[4:], strict=True))
    (found,), (at_once,) = ([row.document() for row in each] for each in (rows, compare(often, n_seeds=70, warm_up=4)))
    assert found.pop("links_s") == pytest.approx(at_once.pop("links_s"), rel=1e-12)  # summed in another order
    assert found == at_once


def test_few_seeds_are_enough_where_nothing_is_random() -> None:
    calm = scenario.loads(OFTEN).changed(disturbances=())
    assert compare_with_enough(calm)[0].seeds == 20


def test_a_budget_that_does_not_suffice_is_said() -> None:
    rows = compare_with_enough(scenario.loads(OFTEN), n_seeds=EnoughSeeds(width=1e-6, most=30))
    assert rows[0].seeds == 30
    (remark,) = [each for each in rows.remarks if each.kind == "accuracy"]
    assert remark.text.startswith("30 seeds, the most, do not bring all intervals within 0 %")


def test_the_question_in_python_takes_auto() -> None:
    found = scenario.loads(OFTEN).changed(schedules=["sync"])
    assert simdist.compare(found, n_seeds="auto")[0].seeds == compare_with_enough(found)[0].seeds > 20


def test_the_command_takes_a_budget_of_seeds(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "often.yaml"
    path.write_text(OFTEN)
    answer = call(capsys, "compare", path, "--seeds", "auto", "--width", "0.5%", "--most-seeds", "24")
    assert "24 seeds, the most, do not bring all intervals within 0.5 %" in answer.out.replace("\n", " ")
    alone = call(capsys, "compare", path, "--most-seeds", "24")
    assert alone.code == 2
    assert "--seeds auto" in alone.err
