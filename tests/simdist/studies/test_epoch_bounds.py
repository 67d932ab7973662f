"""Lower bounds of epochs, in closed forms: powers of two, so that they hold to the last bit."""

import math

import pytest
from data_sets import DATA_SCENARIO, data_plans, loads_plan
from engine_runs import des
from hypothesis import given

from simdist.cost import price
from simdist.errors import PlanError
from simdist.plan import Dataset, Plan
from simdist.runs.building import build
from simdist.scenario import loads
from simdist.scenario.cluster import Cluster, Disk, HostMemory, Link, Storage
from simdist.scenario.workload import Tensor, Workload
from simdist.studies.epoch_bounds import LIMITS, epoch_limits
from simdist.studies.epochs import find_epochs

SCENARIO = DATA_SCENARIO.replace("count: 100000", "count: 1000000") + "schedules: [{kind: sync}]\n"
NETWORK = Link(latency_s=0.0, bandwidth_Bps=32.0)
NFS = Storage(
    latency_s=0.5, open_s=0.25, bandwidth_Bps=64.0, request_nbytes=8, client_bandwidth_Bps=64.0, operations_per_s=8.0
)
SSD = Disk(latency_s=0.25, read_Bps=32.0, write_Bps=16.0)
RAM = HostMemory(bandwidth_Bps=256.0)
FILE_S = 0.25 + 2 * 0.5 + 16 / 32  # of a file of 16 B, alone
CLUSTER = Cluster(nodes=2, gpus_per_node=1, fabric=Link.ideal(), network=NETWORK, storage=NFS, disk=SSD, memory=RAM)
DATASET = Dataset(32, batch_size=8, ranks_per_node=1, sample_nbytes=32, file_nbytes=(16,), readers=4, decoders=2)


def of(plan: Plan, *, cluster: Cluster = CLUSTER, decode_s: float = 0.125):
    workload = Workload(
        tensors=(Tensor(name="only", count=1, flops=1.0),),
        batch_size=8,
        sample_nbytes=32,
        decode_s=decode_s,
        forward_s=1.0,
    )
    return epoch_limits(plan, price(plan, cluster, workload))


def test_epoch_from_storage_is_limited_by_bytes_operations_and_threads() -> None:
    """Two steps, in each of which two ranks read 8 files of 16 B in 2 requests."""
    one, two = of(loads_plan(DATASET, 2, n_steps=4))
    assert (one.epoch, two.epoch) == (0, 1)
    assert one.seconds == two.seconds
    assert one.seconds == {
        "computing": 0.0,
        "communication": 0.0,
        "server": 2 * 2 * 8 * 16 / 64,
        "operations": 2 * 2 * 8 * (2 + 1) / 8,
        "clients": 2 * 8 * 16 / 64,
        "network": 2 * 8 * 16 / 32,
        "disk": 0.0,
        "memory": 0.0,
        "decoding": 2 * (FILE_S + 4 * 0.125),
        "reading": 2 * 2 * FILE_S,
    }
    assert tuple(one.seconds) == LIMITS
    assert (one.name, one.least_s, one.storage_nbytes) == ("operations", 12.0, 2 * 2 * 8 * 16)


def test_part_of_an_epoch_counts_its_own_loads() -> None:
    one, part = of(loads_plan(DATASET, 2, n_steps=3))
    assert part.seconds == {name: seconds / 2 for name, seconds in one.seconds.items()}


def test_cores_limit_decoding() -> None:
    """All but the last sample are work for the one core of a node, from the first file on."""
    (found,) = of(
        loads_plan(DATASET, 2, n_steps=2),
        cluster=CLUSTER.model_copy(update={"host": {"cores_per_node": 1}}),
        decode_s=8.0,
    )
    assert found.seconds["decoding"] == 2 * (FILE_S - 0.75 + (8 - 1) * 8.0) > 2 * (FILE_S + 4 * 8.0)


def test_files_that_need_no_decoding_are_not_limited_by_it() -> None:
    cores = CLUSTER.model_copy(update={"host": {"cores_per_node": 1}})
    (found,) = of(loads_plan(DATASET, 2, n_steps=2), cluster=cores, decode_s=0.0)
    assert found.seconds["decoding"] == 0


def test_busiest_node_limits_disks_and_memories() -> None:
    """With shuffle none each node finds its own samples again."""
    still = Dataset(32, 8, 1, 32, (16,), shuffle="none", readers=4)
    first, again = of(loads_plan(still, 2, n_steps=4, policy="files"))
    assert (first.seconds["disk"], again.seconds["disk"]) == (2 * 8 * 16 / 16, 2 * 8 * 16 / 32)
    assert again.seconds["server"] == again.storage_nbytes == 0
    _, again = of(loads_plan(still, 2, n_steps=4, policy="memory"))
    assert again.seconds == dict.fromkeys(LIMITS, 0.0) | {"memory": 2 * 8 * 32 / 256}


def test_staging_has_limits_of_its_own() -> None:
    staging, epoch = of(loads_plan(DATASET, 2, n_steps=2, policy="staged"))
    assert (staging.epoch, epoch.epoch) == (None, 0)
    assert staging.seconds["server"] == 2 * 32 * 16 / 64
    assert staging.seconds["disk"] == 32 * 16 / 16
    assert staging.seconds["reading"] == 32 / 4 * (FILE_S + 16 / 16)
    assert epoch.seconds["server"] == 0


def test_gradients_count_where_they_travel() -> None:
    """4 ranks on 2 nodes; the gradient of 4 MB crosses each NIC in a ring, 3/2 times, and so it does the samples."""
    scenario = loads(SCENARIO)
    built = build(scenario, scenario.schedules[0])
    (found, *_) = epoch_limits(built.plan, built.costs)
    copy_s = found.seconds["computing"] - 4 * 0.03
    assert 0 <= copy_s < 1e-9
    nic_Bps = 1.25e9
    assert found.seconds["communication"] >= 4 * 1.5 * 4e6 / nic_Bps
    assert found.seconds["network"] == pytest.approx((4 * 1.5 * 4e6 + 32 * 1e6) / nic_Bps)
    assert found.needed_Bps == pytest.approx(64e6 / 0.12)


FAST = {"operations_per_s": 2.0**20, "latency_s": 0.0, "open_s": 0.0}


@pytest.mark.parametrize(
    ("change", "decode_s", "limit", "seconds"),
    [
        ({}, 0.125, "operations", 12.0),
        (FAST, 32.0, "decoding", 2 * (0.5 + 4 * 32.0)),
        (FAST, 0.0, "network", 8.0),
        (FAST | {"latency_s": 8.0}, 0.0, "reading", 4 * (16.0 + 0.5)),
        (FAST | {"client_bandwidth_Bps": 2.0}, 0.0, "clients", 2 * 8 * 16 / 2),
    ],
    ids=["operations", "decoding", "network", "reading", "clients"],
)
@pytest.mark.parametrize("bandwidth_Bps", [1.0, 64.0, 2.0**30])
def test_faster_storage_helps_until_the_next_limit_whichever_it_is(change, decode_s, limit, seconds, bandwidth_Bps):
    """In two steps 512 B come from storage. A file of 16 B takes 0.5 s through a NIC, whatever the server does."""
    found = of_storage(change | {"bandwidth_Bps": bandwidth_Bps}, decode_s=decode_s)
    assert (found.next_name, found.relieved_s[limit]) == (limit, seconds)
    assert found.needed_Bps == 512 / seconds


def of_storage(change, *, decode_s: float):
    plan = loads_plan(DATASET, 2, n_steps=2)
    tensors = (Tensor(name="only", count=1, flops=1.0),)
    workload = Workload(tensors=tensors, batch_size=8, sample_nbytes=32, decode_s=decode_s, forward_s=1.0)
    storages = [NFS.model_copy(update=change), NFS.model_copy(update=change | {"bandwidth_Bps": math.inf})]
    costs, relieved = (price(plan, CLUSTER.model_copy(update={"storage": each}), workload) for each in storages)
    (found,) = epoch_limits(plan, costs, relieved=relieved)
    return found


@given(data_plans())
def test_no_run_of_loads_is_faster_than_its_limits(plan: Plan) -> None:
    """Of ranks, which do not meet here, each epoch's slowest may be another; the server is one and the same."""
    workload = Workload(
        tensors=(Tensor(name="only", count=1, flops=1.0),), batch_size=1, sample_nbytes=1, decode_s=0.5, forward_s=1.0
    )
    nodes = plan.world_size // plan.dataset.ranks_per_node
    cluster = CLUSTER.model_copy(update={"nodes": nodes, "gpus_per_node": plan.dataset.ranks_per_node})
    costs = price(plan, cluster, workload)
    found = epoch_limits(plan, costs)
    end_s = des.simulate(plan, costs, {}).end_s.max() * (1 + 1e-9)
    assert end_s >= max(each.least_s for each in found)
    for shared in ("server", "operations"):
        assert end_s >= sum(each.seconds[shared] for each in found)


def test_simulated_epochs_take_as_long_as_their_largest_limit_or_longer() -> None:
    scenario = loads(SCENARIO)
    built = build(scenario, scenario.schedules[0])
    simulated = find_epochs(des.simulate(built.plan, built.costs, {}))
    for least, epoch in zip(epoch_limits(built.plan, built.costs), simulated.epochs, strict=True):
        assert least.least_s <= epoch.seconds * (1 + 1e-9)


def test_plan_without_a_data_set_has_no_limits() -> None:
    text = SCENARIO.replace(", data: {samples: 64, file_size: 1 MB}", "").replace("3 epochs", "3")
    scenario = loads(text)
    built = build(scenario, scenario.schedules[0])
    with pytest.raises(PlanError, match="plan sync has no data set, so it has no epochs"):
        epoch_limits(built.plan, built.costs)
