"""The measured rate of one machine as an input of a scenario."""

import numpy as np
import pytest
from pydantic import ValidationError

from simdist.cost.compute import compute_s
from simdist.errors import ScenarioError
from simdist.runs.building import delay_sampler, lost_share
from simdist.scenario import Interference, Scenario, load, loads
from simdist.studies.comparison import compare
from simdist.studies.remarks import remarks_of

TEXT = """
cluster:
  nodes: {nodes}
  gpus_per_node: 4
  fabric: {{latency: 5 us, bandwidth: 10 GB/s}}
  network: {{latency: 30 us, bandwidth: 25 Gbit/s}}
workload: {{tensors: [{{name: a, count: 10000000}}], batch_size: 32, forward: 30 ms, backward: 60 ms, optimize: 1 ms}}
disturbances: [{{kind: interference, machine_samples_per_s: {rate}, noise: {noise}}}]
schedules: {schedules}
steps: 400
"""


def scenario(rate: float, *, nodes: int = 1, noise: float = 0.0, schedules: str = "[{kind: sync}]") -> Scenario:
    return loads(TEXT.format(rate=rate, nodes=nodes, noise=noise, schedules=schedules))


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_one_machine_runs_at_the_rate_that_was_measured(noise):
    (row,) = compare(scenario(1200.0, noise=noise), n_seeds=10)
    assert 4 * 32 / row.step_s == pytest.approx(1200.0, rel=1e-9 if noise == 0 else 2e-3)


def test_more_machines_lose_as_much_or_more_with_noise():
    steps = [compare(scenario(1200.0, nodes=16, noise=noise), n_seeds=5)[0].step_s for noise in (0.0, 1.0)]
    lost_s = lost_share(scenario(1200.0), Interference(machine_samples_per_s=1200.0)) * 0.09
    harmonic = {n: sum(1 / i for i in range(1, n + 1)) for n in (4, 64)}
    assert steps[1] - steps[0] == pytest.approx(lost_s * (harmonic[64] / harmonic[4] - 1), rel=0.03)


def test_the_same_share_is_lost_by_every_schedule_and_number_of_machines():
    of = Interference(machine_samples_per_s=1200.0)
    shares = {
        lost_share(scenario(1200.0, nodes=nodes, schedules=schedules), of)
        for nodes in (1, 4)
        for schedules in ("[{kind: sync}]", "[{kind: local_sgd, period: 4}]", "[{kind: torus}, {kind: sync}]")
    }
    assert len(shares) == 1


def test_a_machine_that_is_measured_as_fast_as_simulated_loses_nothing():
    assert lost_share(scenario(5000.0), Interference(machine_samples_per_s=5000.0)) == 0.0
    assert lost_share(scenario(1.0), Interference(lost=0.25)) == 0.25


def test_what_nobody_measured_may_be_uncertain_beside_the_rate_of_a_machine():
    ranges = {"disturbances[0].noise": {"from": "0%", "to": "100%"}}
    (row,) = compare(scenario(1200.0, nodes=16, noise=0.5).changed(uncertain=ranges, steps=100), n_seeds=4)
    low, high = (compare(scenario(1200.0, nodes=16, noise=noise), n_seeds=4)[0].step_s for noise in (0.0, 1.0))
    assert row.step_s_range == pytest.approx((low, high), rel=0.01)
    assert low < row.step_s < high


def test_a_rate_of_one_gpu_in_place_of_a_machine_is_refused():
    with pytest.raises(
        ScenarioError, match=r"machine_samples_per_s 300 is far less .* rate of all 4 GPUs of one machine"
    ):
        compare(scenario(300.0))


@pytest.mark.parametrize(
    ("preset", "precision", "lost"),
    [
        ("dgx-a100", "tf32", 0.023),
        ("dgx-a100", "bf16", 0.05),
        ("dgx-h100", "fp16", 0.015),
        ("dgx-b200", "tf32", 0.011),
        ("v100x8-25gbit", "fp16", 0.114),
        ("gcp-t4x4-32gbit", "fp32", 0.052),
        ("mi250x", "bf16", 0.05),
        ("mi300x", "bf16", 0.05),
    ],
)
def test_a_typical_loss_is_that_of_the_generation_and_precision(preset, precision, lost):
    text = f"""
cluster: {{preset: {preset}, nodes: 1}}
workload: {{preset: resnet50, precision: {precision}, forward: 30 ms, backward: 60 ms}}
disturbances: [{{kind: interference, typical: true}}]
schedules: [{{kind: sync}}]
steps: 1
"""
    assert lost_share(loads(text), Interference(typical=True)) == lost


def test_a_typical_loss_of_a_gpu_of_no_stated_generation_is_refused():
    with pytest.raises(ScenarioError, match=r"typical: the loss depends on the generation .* or lost: 5% instead"):
        lost_share(scenario(1200.0), Interference(typical=True))


def step_s(of: Scenario) -> float:
    return compare(of, n_seeds=1)[0].step_s


@pytest.mark.parametrize("label", ["sync", "fsdp", "hsdp-4", "hsdp-2"])
@pytest.mark.parametrize("n_ranks", [1, 2, 4, 8, 16])
def test_ranks_of_any_number_run_at_the_rate_that_they_were_measured_at(n_ranks, label):
    if label.startswith("hsdp") and n_ranks % int(label[-1]):
        label = "fsdp"
    sizes = {"cluster.nodes": max(1, n_ranks // 4), "cluster.gpus_per_node": min(4, n_ranks)}
    alone = scenario(1.0).changed(sizes).changed(disturbances=[], schedules=[label], steps=8)
    rate = n_ranks * 32 / step_s(alone) / 1.1
    of = Interference(machine_samples_per_s=rate, rate_ranks=n_ranks, noise=0.0)
    measured = alone.changed(disturbances=[of])
    assert n_ranks * 32 / step_s(measured) == pytest.approx(rate, rel=1e-9)


def test_what_grows_with_the_ranks_of_a_rate_is_not_that_of_one_machine():
    shares = [
        lost_share(scenario(1.0, nodes=4), Interference(machine_samples_per_s=4 * 1200.0, rate_ranks=16, noise=noise))
        for noise in (0.0, 1.0)
    ]
    harmonic = {n: sum(1 / i for i in range(1, n + 1)) for n in (4, 16)}
    assert shares[1] == pytest.approx(shares[0] * harmonic[4] / harmonic[16])


def test_ranks_of_a_rate_fill_machines():
    with pytest.raises(ScenarioError, match=r"rate_ranks: 6 GPUs are no whole number of machines of 4"):
        lost_share(scenario(1.0), Interference(machine_samples_per_s=1200.0, rate_ranks=6))
    with pytest.raises(ValidationError, match=r"GPUs of which rate\? Write machine_samples_per_s"):
        Interference(lost=0.1, rate_ranks=8)


def of_rate(ranks: int, *, nodes: int = 1, steps: int = 2, noise: float = 0.5) -> Scenario:
    workload = {"preset": "llama3-8b", "utilization": {"bf16": "40%"}, "utilization_ranks": ranks}
    typical = [{"kind": "interference", "typical": True, "noise": noise}]
    cluster = {"preset": "dgx-h100", "nodes": nodes}
    rest = {"disturbances": typical, "schedules": ["fsdp"], "steps": steps}
    return load({"cluster": cluster, "workload": workload, **rest})


def test_a_utilization_of_several_gpus_contains_their_typical_loss():
    said = "typical losses of a machine are not added, because workload.utilization is that of {} GPUs together"
    assert lost_share(of_rate(1), Interference(typical=True)) == 0.015
    for ranks in (2, 8):
        assert lost_share(of_rate(ranks), Interference(typical=True)) == 0
        assert any(said.format(ranks) in str(each) for each in remarks_of(of_rate(ranks)))
    assert str(remarks_of(of_rate(8))[-1]).endswith("8 GPUs together and contains them")
    assert str(remarks_of(of_rate(8, nodes=4))[-1]).endswith("contains them; waiting for the slowest of 32 GPUs is")


def test_more_gpus_than_those_of_a_utilization_wait_for_the_slowest():
    """Of the longest of 32 exponential delays, that of 8 is in the utilization."""
    found = of_rate(8, nodes=4, steps=2000)
    delays = delay_sampler(found, [0]).take(found.steps)
    harmonic = {n: sum(1 / i for i in range(1, n + 1)) for n in (8, 32)}
    alone_s = float(compute_s(found.workload, found.cluster)[0])
    more_s = 0.5 * 0.015 * alone_s * (harmonic[32] - harmonic[8]) / harmonic[8]
    longest_s = sum(np.asarray(delays[name]).max(axis=-1).mean() for name in delays)
    assert longest_s == pytest.approx(more_s, rel=0.05)


@pytest.mark.parametrize(("ranks", "nodes", "noise"), [(8, 1, 0.5), (32, 4, 0.5), (64, 4, 0.5), (8, 4, 0.0)])
def test_no_more_gpus_or_no_noise_add_nothing_to_a_utilization(ranks, nodes, noise):
    found = of_rate(ranks, nodes=nodes, noise=noise)
    assert step_s(found) == step_s(found.changed(disturbances=[]))


def test_a_rate_of_a_machine_that_holds_no_copy_of_the_model_asks_for_its_ranks():
    shared = scenario(1200.0, nodes=4, schedules="[{kind: hsdp, shard: 8}]")
    with pytest.raises(ScenarioError, match=r"a rate of 4 GPUs under hsdp-8: .*: write rate_ranks"):
        lost_share(shared, Interference(machine_samples_per_s=1200.0))
    assert lost_share(shared, Interference(machine_samples_per_s=2000.0, rate_ranks=8)) > 0
