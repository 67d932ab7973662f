"""What the length of a run does to its mean step."""

import numpy as np
import pytest

from simdist import scenario
from simdist.errors import ScenarioError
from simdist.runs.building import build
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import compare
from simdist.studies.measuring import measure

SCENARIO = """
cluster:
  nodes: 2
  gpus_per_node: 2
  fabric: {latency: 0 s, bandwidth: 100 GB/s}
  network: {latency: 1 us, bandwidth: 5 Gbit/s, efficiency: 0.9}
workload: {preset: resnet18, forward: 30 ms, backward: 60 ms}
disturbances: [{kind: exponential, mean: 10 ms}]
steps: 400
schedules: [sync, {kind: local_sgd, period: 4, overlap_steps: 2}]
"""


def test_a_short_run_without_its_warm_up_takes_the_step_of_a_long_run() -> None:
    calm = scenario.loads(SCENARIO).changed(disturbances=())
    period_s = [row.step_s for row in compare(calm, n_seeds=1, warm_up=200)]
    short = calm.changed(steps=12)
    assert [row.step_s for row in compare(short, n_seeds=1, warm_up=8)] == pytest.approx(period_s, rel=1e-9)
    assert compare(short, n_seeds=1)[1].step_s > 1.01 * period_s[1]


def test_facets_are_of_the_same_steps_as_the_means() -> None:
    slow = [{"kind": "persistent", "on": "link", "link": "nic_out", "nodes": [1], "share": 0.5}]
    calm = scenario.loads(SCENARIO).changed(
        {"cluster.disk": {"read": "1 GB/s", "write": "100 MB/s"}},
        disturbances=slow,
        checkpoint={"every": 4, "size": "2 MB", "to": "disk"},
        train_for=1000,
        schedules=["sync", "backup-1"],
    )
    long, short = (
        compare(calm.changed(steps=n_steps), n_seeds=1, warm_up=warm_up) for n_steps, warm_up in ((200, 100), (12, 8))
    )
    for ours, theirs in zip(short, long, strict=True):
        found, wanted = ours.document(), theirs.document()
        assert found["added_s"] == pytest.approx(wanted["added_s"], rel=1e-6)
        assert found["links_s"] == pytest.approx(wanted["links_s"], rel=1e-6)
        assert found["job_s"] == pytest.approx(1000 * ours.step_s)
        assert found.get("gradients_used") == wanted.get("gradients_used")
    without_file = compare(calm.changed(steps=10), n_seeds=1, warm_up=8)  # the last one is that of step 8
    assert without_file[0].document()["added_s"]["checkpoints"] == pytest.approx(0, abs=1e-9)


def test_steps_that_are_left_out_are_those_of_the_same_seeds() -> None:
    noisy = scenario.loads(SCENARIO).changed(steps=40)
    whole, first = (
        measure(each, build(each, noisy.schedules[1]), n_seeds=3) for each in (noisy, noisy.changed(steps=8))
    )
    rows = compare(noisy, n_seeds=3, warm_up=8)
    rest_s = (40 * whole.step_s - 8 * first.step_s) / 32
    assert rows.measured[1].step_s == pytest.approx(rest_s, rel=1e-12)
    assert sum(rows[1].states_s.values()) == pytest.approx(rows[1].step_s, rel=1e-9)


@pytest.mark.parametrize("warm_up", [400, 500, -1])
def test_a_warm_up_that_leaves_nothing_is_an_error(warm_up: int) -> None:
    with pytest.raises(ScenarioError, match=f"warm-up of {warm_up} steps: write 1 to 399"):
        compare(scenario.loads(SCENARIO), n_seeds=1, warm_up=warm_up)


@pytest.mark.parametrize(
    ("schedule", "steps", "warm_up", "said"),
    [
        ("local-16", 20, 0, True),
        ("local-16", 40, 0, True),
        ("local-16", 48, 0, False),
        ("local-16", 165, 0, False),
        ({"kind": "local_sgd", "period": 4, "overlap_steps": 2}, 20, 0, True),
        ({"kind": "local_sgd", "period": 4, "overlap_steps": 2}, 20, 8, False),
        ({"kind": "local_sgd", "period": 4, "overlap_steps": 2}, 100, 0, False),
        ("local-2", 6, 0, False),
    ],
)
def test_runs_of_few_periods_are_remarked_on_if_their_end_counts(schedule, steps, warm_up, said) -> None:
    chosen = scenario.loads(SCENARIO).changed(steps=steps, schedules=["sync", schedule])
    texts = [each.text for each in compare(chosen, n_seeds=2, warm_up=warm_up).remarks]
    assert any("its end changes the mean: write steps: " in each for each in texts) == said


def test_a_frame_per_seed_has_the_times_of_every_run_as_simulated() -> None:
    rare = scenario.loads(SCENARIO).changed(
        steps=20, disturbances=[{"kind": "transient", "probability": 0.01, "delay_s": 1.0}]
    )
    rows = compare(rare, n_seeds=3)
    found = rows.frame(per="seed")
    assert found.columns[:4].tolist() == ["schedule", "seed", "step_s", "speedup"]
    assert found.seed.tolist() == run_seeds(0, 3) * 2
    for schedule in rare.schedules:
        own = found[found.schedule == schedule.name]
        assert own.step_s.tolist() == measure(rare, build(rare, schedule), n_seeds=3).step_s.tolist()
        states_s = own[[f"{state}_s" for state in ("compute", "comm", "wait", "io", "host")]].to_numpy()
        assert states_s.sum(axis=1) == pytest.approx(own.step_s.to_numpy(), rel=1e-9)
    assert np.isfinite(found.speedup).all()
    assert found.attrs["remarks"] == rows.frame().attrs["remarks"]
