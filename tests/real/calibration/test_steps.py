"""What calibration takes from the steps of a plan: a simulated run gives back what it was simulated from."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from engine_runs import des  # noqa: E402

from real.calibration import steps  # noqa: E402
from simdist.cost import price  # noqa: E402
from simdist.plan import Plan  # noqa: E402
from simdist.plan.check import check  # noqa: E402
from simdist.plan.delays import no_delays  # noqa: E402
from simdist.scenario import load_workload, presets  # noqa: E402
from simdist.scenario.cluster import Cluster, DeviceFloors, HostLaunches, Link  # noqa: E402
from simdist.scenario.workload import WorkloadLaunches  # noqa: E402
from simdist.settings.precision import Utilization  # noqa: E402
from simdist.traces.trace import Trace  # noqa: E402

FLOORS = DeviceFloors(copy_s=2e-6, pack_s=3e-6, unpack_s=4e-6, select_s=90e-6, merge_s=50e-6, densify_s=6e-6)
LAUNCHES = HostLaunches(
    copy_s=9e-6, pack_s=12e-6, unpack_s=13e-6, select_s=400e-6, merge_s=300e-6, densify_s=50e-6, collective_s=30e-6
)


WORKLOAD = load_workload(presets.path("workloads", "mlp")).model_copy(
    update={
        "forward_s": 2e-3,
        "backward_s": 3e-3,
        "optimize_s": 1e-3,
        "utilization": Utilization(),
        "measured_batch_size": None,
        "launches": WorkloadLaunches(forward_s=5e-3, backward_s=9e-3, optimize_s=4e-3),
    }
)


def simulated(plan: Plan) -> Trace:
    check(plan)
    link = Link(latency_s=1e-6, bandwidth_Bps=1e9)
    cluster = Cluster(nodes=1, gpus_per_node=plan.world_size, fabric=link, network=link)
    cluster = cluster.model_copy(update={"host": {"launches": LAUNCHES}})
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"floors": FLOORS})})
    return des.simulate(plan, price(plan, cluster, WORKLOAD), no_delays(plan))


def test_passes_and_updates_are_those_of_the_device_and_launches_those_of_the_host() -> None:
    plan = steps.model_plan("mlp", 8, world_size=2)
    trace = simulated(plan)
    found = steps.step_times(trace)
    assert (found.forward_s, found.backward_s, found.optimize_s) == pytest.approx((2e-3, 3e-3, 1e-3))
    assert (found.n_steps, found.spread) == (5, pytest.approx(0))
    assert found.launches == WorkloadLaunches()
    launches = steps.launches_of_passes(trace)
    assert not found.is_of_host
    assert replace(found, launches=launches).is_of_host
    assert (launches.forward_s, launches.backward_s, launches.optimize_s) == pytest.approx((5e-3, 9e-3, 4e-3))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_small_operations_have_the_floors_and_launches_that_were_measured(on_gpu: bool) -> None:
    plan = steps.small_plan(2)
    found = steps.small_times(simulated(plan), on_gpu=on_gpu)
    for kind, seconds in FLOORS:
        assert getattr(found.floors, kind) == pytest.approx(seconds), kind
    for kind, seconds in LAUNCHES:
        assert getattr(found.launches, kind) == pytest.approx(seconds if on_gpu else 0.0), kind
