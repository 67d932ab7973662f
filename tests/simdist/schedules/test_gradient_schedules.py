"""Operations, bytes and times of schedules that reduce gradients in every step."""

import dataclasses

import numpy as np
import pytest
from engine_runs import des, fast

from simdist import scenario
from simdist.cost import Shared
from simdist.errors import PlanError, ScenarioError
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Backward,
    Buffer,
    Copy,
    Densify,
    Merge,
    Op,
    Plan,
    ReduceScatter,
    Select,
)
from simdist.plan.check import check
from simdist.plan.group import Group
from simdist.plan.lanes import COMM
from simdist.proof import prove
from simdist.runs.building import build, delays, job
from simdist.scenario.warnings import warnings_of
from simdist.schedules import GradientSchedule, Job, LocalSGD, Sync, kinds
from simdist.schedules.gtopk import GTopK
from simdist.schedules.hitopk import HiTopK
from simdist.schedules.job import Shape
from simdist.schedules.naive_ag import NaiveAllGather
from simdist.schedules.parameter_server import ParameterServer
from simdist.schedules.sparse import SparseSchedule
from simdist.schedules.torus import Torus

JOB = Job(world_size=8, ranks_per_node=4, n_steps=3, tensor_counts=(4000, 300_000, 300_000, 8))
SPARSE = [NaiveAllGather(density=0.01), HiTopK(density=0.01), GTopK(density=0.01)]
DENSE = [Sync(), Torus(), ParameterServer(servers=2)]


def label(schedule: GradientSchedule) -> str:
    return schedule.name


def ops_of(plan: Plan, *types: type[Op]) -> list[Op]:
    """Return the operations of these types in the last step."""
    return [op for op in plan.bodies[-1] if isinstance(op, types)]


# ---------------------------------------------------------------- buckets and copies


@pytest.mark.parametrize("schedule", [*SPARSE, *DENSE], ids=label)
def test_without_a_bucket_size_the_whole_gradient_is_one_bucket(schedule: GradientSchedule) -> None:
    plan = schedule.model_copy(update={"bucket_nbytes": None}).plan(JOB)
    assert [op.dst for op in ops_of(plan, Backward)] == ["grad.0"]
    assert plan.buffer("grad.0").tensors == (0, 4)


@pytest.mark.parametrize("schedule", SPARSE, ids=label)
def test_sparse_schedules_select_from_the_whole_gradient_unless_told_otherwise(schedule: GradientSchedule) -> None:
    assert len(ops_of(schedule.plan(JOB), Select)) == 1
    assert len(ops_of(schedule.model_copy(update={"bucket_nbytes": 1_201_000}).plan(JOB), Select)) == 2


@pytest.mark.parametrize("schedule", [HiTopK(density=0.01), *DENSE], ids=label)
def test_half_precision_is_copied_after_each_backward_pass_and_back_after_all_of_them(
    schedule: GradientSchedule,
) -> None:
    plan = schedule.model_copy(update={"compression": "fp16", "bucket_nbytes": 1_201_000}).plan(JOB)
    body = plan.bodies[-1]
    passes = [at for at, op in enumerate(body) if isinstance(op, Backward)]
    assert [body[at + 1] for at in passes] == [Copy("grad.0", "half.0"), Copy("grad.1", "half.1")]
    backs = [body.index(Copy(f"half.{number}", f"grad.{number}")) for number in (0, 1)]
    assert passes[-1] < min(backs)
    assert types_of_what_is_sent(plan) == {"float16"}


@pytest.mark.parametrize("schedule", [NaiveAllGather(density=0.01), GTopK(density=0.01)], ids=label)
def test_entries_are_converted_when_they_are_selected_and_before_they_are_scattered(
    schedule: GradientSchedule,
) -> None:
    plan = schedule.model_copy(update={"compression": "fp16"}).plan(JOB)
    (select,), (copy,), (densify,) = (ops_of(plan, type_) for type_ in (Select, Copy, Densify))
    last = ops_of(plan, AllGather, Merge)[-1]
    assert (select.src, copy.src, copy.dst, densify.src) == ("grad.0", last.dst, "wide.0", "wide.0")
    assert [plan.buffer(name).dtype for name in (select.dst, last.dst, "wide.0")] == ["float16", "float16", "float32"]
    assert types_of_what_is_sent(plan) == {"float16"}
    assert "half.0" not in {buffer.name for buffer in plan.buffers}


@pytest.mark.parametrize("schedule", [NaiveAllGather(density=0.01), GTopK(density=0.01)], ids=label)
def test_whole_gradients_of_a_warm_up_are_copied_to_half_precision(schedule: GradientSchedule) -> None:
    plan = schedule.model_copy(update={"compression": "fp16", "warmup_steps": 1}).plan(JOB)
    assert [op for op in plan.bodies[0] if isinstance(op, Copy | AllReduce)] == [
        Copy("grad.0", "half.0"),
        AllReduce("half.0", Group(8)),
        Copy("half.0", "grad.0"),
    ]
    check(plan)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("schedule", SPARSE, ids=label)
def test_residuals_are_of_the_gradients_own_type(schedule: GradientSchedule, compression: str) -> None:
    plan = schedule.model_copy(update={"compression": compression}).plan(JOB)
    residuals = {op.residual for op in ops_of(plan, Select, Merge)}
    assert [plan.buffer(name).dtype for name in residuals] == ["float32"]


def types_of_what_is_sent(plan: Plan) -> set[str]:
    touched = {name for op in ops_of(plan, *COLLECTIVES) for name in names(op)}
    return {plan.buffer(name).dtype for name in touched}


def names(op: Op) -> tuple[str, ...]:
    return (op.src, op.dst) if isinstance(op, ReduceScatter | AllGather) else (op.buffer,)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_two_bytes_are_not_compressed(dtype: str) -> None:
    small = dataclasses.replace(JOB, dtype=dtype)
    assert Sync(compression="fp16").plan(small).bodies == Sync().plan(small).bodies


# ---------------------------------------------------------------- dense


def test_torus_scatters_in_the_node_and_reduces_slices_between_nodes() -> None:
    node, peers = Group(4), Group(2, stride=4)
    assert ops_of(Torus(bucket_nbytes=None).plan(JOB), *COLLECTIVES) == [
        ReduceScatter("grad.0", "shard.0", node),
        AllReduce("shard.0", peers),
        AllGather("shard.0", "grad.0", node),
    ]


@pytest.mark.parametrize(
    ("ranks_per_node", "types"),
    [(8, [ReduceScatter, AllGather]), (1, [AllReduce]), (4, [ReduceScatter, AllReduce, AllGather])],
)
def test_torus_leaves_out_what_has_one_member(ranks_per_node: int, types: list[type[Op]]) -> None:
    plan = Torus(bucket_nbytes=None).plan(dataclasses.replace(JOB, ranks_per_node=ranks_per_node))
    assert [type(op) for op in ops_of(plan, *COLLECTIVES)] == types


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"servers": 3}, [(100_003, 100_003, 100_002), (101_334, 101_333, 101_333)]),
        # tensors 0 and 2 on server 0, 1 and 3 on server 1
        ({"servers": 2, "placement": "tensors"}, [(300_000, 8), (4_000, 300_000)]),
        ({"servers": 3, "placement": "tensors"}, [(8, 0, 300_000), (4_000, 300_000, 0)]),
        # 0 on server 0; then 1, 2, 3 on servers 1, 0, 1, the least loaded each time
        ({"servers": 2, "placement": "greedy"}, [(300_000, 8), (4_000, 300_000)]),
        ({"servers": 4, "placement": "greedy"}, [(0, 0, 300_000, 8), (4_000, 300_000, 0, 0)]),
        ({"servers": 1}, [(300_008,), (304_000,)]),
    ],
)
def test_servers_hold_these_parts_of_the_buckets(settings: dict[str, object], parts: list[tuple[int, ...]]) -> None:
    plan = ParameterServer(**settings).plan(JOB)
    assert [op.servers.parts for op in ops_of(plan, AllReduce)] == parts


def test_greedy_placement_evens_out_what_round_robin_does_not() -> None:
    uneven = dataclasses.replace(JOB, tensor_counts=(900, 1, 500, 1, 400))
    placed = {
        placement: ops_of(ParameterServer(servers=2, placement=placement).plan(uneven), AllReduce)[0].servers.parts
        for placement in ("tensors", "greedy")
    }
    assert placed == {"tensors": (1800, 2), "greedy": (900, 902)}


@pytest.mark.parametrize(
    ("settings", "members"),
    [
        ({"servers": 1}, (0,)),
        ({"servers": 2}, (0, 4)),
        ({"servers": 3}, (0, 2, 5)),
        ({"servers": 5}, (0, 1, 3, 4, 6)),
        ({"servers": 8}, tuple(range(8))),
        ({"servers": 2, "apart": True}, ()),
    ],
)
def test_servers_are_spread_over_the_ranks(settings: dict[str, object], members: tuple[int, ...]) -> None:
    assert {op.servers.members for op in ops_of(ParameterServer(**settings).plan(JOB), AllReduce)} == {members}


@pytest.mark.parametrize("servers", range(1, 129))
def test_nodes_have_equally_many_servers_or_one_more(servers: int) -> None:
    cluster = dataclasses.replace(JOB, world_size=128, ranks_per_node=8)
    members = ops_of(ParameterServer(servers=servers).plan(cluster), AllReduce)[0].servers.members
    of_node = np.bincount(np.array(members) // 8, minlength=16)
    assert of_node.sum() == len(set(members)) == servers
    assert np.ptp(of_node) <= 1


def test_servers_that_do_not_fit_are_refused() -> None:
    assert ParameterServer(servers=9).problems(Shape(8, 4)) == [
        ("servers", "9 on 8 ranks: write at most 8, or apart: true")
    ]
    assert ParameterServer(servers=9, apart=True).problems(Shape(8, 4)) == []
    assert ParameterServer(servers=2, algorithm="ring").problems(Shape(8, 4)) == [
        ("algorithm", "ring: the servers are the algorithm; leave it out")
    ]
    assert Sync(algorithm="server").problems(Shape(8, 4)) == [
        ("algorithm", "server: it needs servers, which are `kind: parameter_server`")
    ]


# ---------------------------------------------------------------- sparse


@pytest.mark.parametrize(("density", "k"), [(1.0, 604_008), (0.01, 6_040), (0.001, 604), (1e-9, 1)])
def test_k_is_the_nearest_whole_number_and_at_least_one(density: float, k: int) -> None:
    plan = NaiveAllGather(density=density).plan(JOB)
    assert [op.k for op in ops_of(plan, Select)] == [k]
    assert plan.buffer("gathered.0").count == 8 * k
    check(plan)


def test_hitopk_selects_from_the_slice_of_the_node() -> None:
    plan = HiTopK(density=0.01, method="mstopk").plan(JOB)
    node, peers = Group(4), Group(2, stride=4)
    assert ops_of(plan, *COLLECTIVES, Select, Densify) == [
        ReduceScatter("grad.0", "shard.0", node),
        Select("shard.0", "top.0", "residual.0", 1510, "mstopk", COMM),  # 1 % of 604,008 / 4
        AllGather("top.0", "gathered.0", peers),
        Densify("gathered.0", "shard.0", 2, COMM),
        AllGather("shard.0", "grad.0", node),
    ]
    assert plan.buffer("residual.0") == Buffer("residual.0", 151_002, initialized=True)


def test_hitopk_on_one_node_gathers_no_entries_and_says_that_it_is_pointless() -> None:
    plan = HiTopK().plan(dataclasses.replace(JOB, ranks_per_node=8))
    assert [type(op) for op in ops_of(plan, *COLLECTIVES, Select, Densify)] == [
        ReduceScatter,
        Select,
        Densify,
        AllGather,
    ]
    assert HiTopK().unused_settings(Shape(8, 8, 10)) == [
        "selects entries to send between nodes, and there is one node: sync sends as little"
    ]
    assert HiTopK().unused_settings(Shape(8, 4, 10)) == []


NO_SAVING = "sends no less than whole gradients at density {}: each value takes an index along; it saves below a "


@pytest.mark.parametrize(
    ("schedule", "limit"),
    [
        (NaiveAllGather(density=0.124), None),
        (NaiveAllGather(density=0.125), "0.125"),  # 7 k (4 + 4) B against 2 x 7/8 d 4 B
        (NaiveAllGather(density=0.0833, compression="fp16"), None),
        (NaiveAllGather(density=0.0834, compression="fp16"), "0.0833"),  # 7 k (2 + 4) B against 2 x 7/8 d 2 B
        (HiTopK(density=0.49), None),
        (HiTopK(density=0.5), "0.5"),  # k (4 + 4) B against 2 x 1/2 d/n 4 B
        (GTopK(density=0.29), None),
        (GTopK(density=0.2917), "0.292"),  # 3 k (4 + 4) B against 2 x 7/8 d 4 B
        (GTopK(density=0.22, broadcast=True), "0.219"),
        (GTopK(density=1.0), "0.292"),
    ],
)
def test_density_at_which_entries_outweigh_the_gradient_is_named(schedule: SparseSchedule, limit: str | None) -> None:
    """8 ranks on 2 nodes."""
    problem = [f"{NO_SAVING.format(f'{schedule.density:g}')}density of {limit}"] if limit else []
    assert schedule.unused_settings(Shape(8, 4, 10)) == problem


@pytest.mark.parametrize(
    ("schedule", "shape", "sentence"),
    [
        (Torus(), (8, 8), "has one node, and nothing to share between nodes: sync does the same in one all-reduce"),
        (Torus(), (8, 1), "has one GPU a node, and nothing to share within nodes: it is sync"),
    ],
)
def test_what_has_no_effect_on_this_cluster_is_named(
    schedule: GradientSchedule, shape: tuple[int, int], sentence: str
) -> None:
    assert schedule.unused_settings(Shape(*shape, 10)) == [sentence]


@pytest.mark.parametrize(
    "schedule",
    [
        Torus(),
        ParameterServer(servers=1),
        ParameterServer(servers=2, placement="greedy"),
        Sync(parallel_optimizer=True),
        Sync(first_bucket_nbytes=1000),
        *SPARSE,
    ],
    ids=label,
)
def test_what_has_an_effect_is_not_named(schedule: GradientSchedule) -> None:
    assert schedule.unused_settings(Shape(8, 4, 10)) == []


def test_hitopk_on_nodes_of_one_gpu_is_the_flat_all_gather() -> None:
    flat = dataclasses.replace(JOB, ranks_per_node=1)
    mine, naive = (schedule.plan(flat) for schedule in (HiTopK(method="exact"), NaiveAllGather()))
    assert ops_of(mine, *COLLECTIVES) == ops_of(naive, *COLLECTIVES)
    assert {buffer.name for buffer in mine.buffers} == {buffer.name for buffer in naive.buffers}


def test_gtopk_merges_pairs_of_pairs_and_returns_equal_shares_of_what_it_drops() -> None:
    plan = GTopK(density=0.01).plan(JOB)
    assert ops_of(plan, *COLLECTIVES, Merge) == [
        AllGather("top.0", "pair.0", Group(2)),
        Merge("pair.0", "top.0", "residual.0", 2, COMM),
        AllGather("top.0", "pair.0", Group(2, stride=2)),
        Merge("pair.0", "top.0", "residual.0", 4, COMM),
        AllGather("top.0", "pair.0", Group(2, stride=4)),
        Merge("pair.0", "top.0", "residual.0", 8, COMM),
    ]
    assert plan.buffer("pair.0").count == 2 * plan.buffer("top.0").count == 2 * 6040


def test_gtopk_needs_a_power_of_two() -> None:
    assert GTopK().problems(Shape(12, 4)) == [
        ("kind", "gtopk merges pairs, and needs a power of two; the world has 12 ranks")
    ]
    assert GTopK().problems(Shape(1, 1)) == []
    check(GTopK().plan(dataclasses.replace(JOB, world_size=1, ranks_per_node=1)))


@pytest.mark.parametrize("schedule", SPARSE, ids=label)
def test_warm_up_all_reduces_whole_gradients(schedule: GradientSchedule) -> None:
    warmed = schedule.model_copy(update={"warmup_steps": 2})
    plan = warmed.plan(JOB)
    assert [type(op) for op in plan.bodies[0] if isinstance(op, COLLECTIVES)] == [AllReduce]
    assert list(plan.body_of_steps()) == [0, 0, 1]
    assert plan.bodies[1] == schedule.plan(JOB).bodies[0]
    assert warmed.unused_settings(Shape(8, 4, 2)) == [
        "warms up in all of the 2 steps: it is synchronous SGD, in the same buckets"
    ]
    assert warmed.unused_settings(Shape(8, 4, 3)) == []


@pytest.mark.parametrize("schedule", SPARSE, ids=label)
def test_sum_that_is_divided_by_the_wrong_number_is_refused(schedule: GradientSchedule) -> None:
    plan = schedule.plan(JOB)
    body = tuple(
        dataclasses.replace(op, divisor=op.divisor + 1) if isinstance(op, Densify) else op for op in plan.bodies[0]
    )
    wrong = dataclasses.replace(plan, bodies=(body,))
    with pytest.raises(PlanError, match="of the gradient of rank 0; the schedule declares 1/8"):
        prove(wrong, lambda step: schedule.result(step, JOB))


@pytest.mark.parametrize("schedule", SPARSE, ids=label)
def test_selection_does_not_hold_up_the_backward_pass(schedule: GradientSchedule) -> None:
    """Operations that wait for communication are not on the compute stream before the last backward pass."""
    plan = schedule.model_copy(update={"bucket_nbytes": 1_201_000}).plan(JOB)
    body = plan.bodies[0]
    last_pass = max(at for at, op in enumerate(body) if isinstance(op, Backward))
    received = {op.dst for op in body if isinstance(op, ReduceScatter | AllGather)}
    waiting = [op for op in body[:last_pass] if isinstance(op, Select | Densify) and op.src in received]
    assert all(op.lane.kind == "comm" for op in waiting)


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("sync", {"compression": "fp16", "parallel_optimizer": True}, "sync-fp16-pto"),
        ("torus", {}, "torus"),
        ("parameter_server", {"servers": 4}, "ps-4"),
        ("parameter_server", {"servers": 1, "apart": True, "placement": "tensors"}, "ps-1-apart-tensors"),
        ("naive_ag", {"density": 0.01}, "naive-ag-0.01"),
        ("hitopk", {}, "hitopk-0.001-mstopk"),
        ("hitopk", {"method": "exact", "compression": "fp16"}, "hitopk-0.001-fp16"),
        ("gtopk", {"method": "dgc", "broadcast": True}, "gtopk-0.001-dgc-broadcast"),
    ],
)
def test_label_tells_the_parameters(kind: str, settings: dict[str, object], name: str) -> None:
    assert kinds()[kind](**settings).name == name


# ---------------------------------------------------------------- bytes


def resnet50(
    schedule: str, *, nodes: int = 16, gpus: int = 8, workload: str = "", cluster: str = ""
) -> scenario.Scenario:
    """Return ResNet-50 on links of 25 Gbit/s without latency, and free links inside nodes."""
    return scenario.loads(
        f"cluster: {{nodes: {nodes}, gpus_per_node: {gpus}, fabric: ideal, {cluster}\n"
        f"  network: {{latency: 0 s, bandwidth: 25 Gbit/s}}}}\n"
        f"workload: {{preset: resnet50, forward: 20 ms, backward: 40 ms, optimize: 0 s, {workload}}}\n"
        f"steps: 2\nschedules: [{schedule}]\n"
    )


def nic_nbytes(of: scenario.Scenario) -> float:
    """Return the bytes that enter node 0 in a step."""
    built = build(of, of.schedules[0])
    costs = built.costs
    nic = int(costs.resources.nic_in(np.array(0)))
    shared = (costs.of[op] for op in built.plan.bodies[0] if isinstance(costs.of[op], Shared))
    stages = [stage for cost in shared for transfer in cost.transfers for stage in transfer.stages]
    return float(sum(stage.nbytes[stage.resources == nic].sum() for stage in stages))


D = 25_557_032  # parameters of ResNet-50
K, K_SLICE = 25_557, 3_195  # 0.1 % of them, and of the slice of one of 8 GPUs


@pytest.mark.parametrize(
    ("schedule", "nbytes"),
    [
        # (m - 1) n k (4 + 4) B, k = rho d / n
        ("{kind: hitopk}", 15 * 8 * K_SLICE * 8),
        # (P - 1) k (4 + 4) B in each of the ring's links, one of which enters the node
        ("{kind: naive_ag, algorithm: ring}", 127 * K * 8),
        # 2 (m - 1) / m d 4 B
        ("{kind: torus, algorithm: ring, bucket_size: null}", 2 * 15 / 16 * D * 4),
        # 2 (P - 1) / P d 4 B
        ("{kind: sync, algorithm: ring, bucket_size: null}", 2 * 127 / 128 * D * 4),
        ("{kind: sync, algorithm: ring, bucket_size: null, compression: fp16}", 2 * 127 / 128 * D * 2),
        # four of seven rounds leave the node, with 8 GPUs each
        ("{kind: gtopk}", 4 * 8 * K * 8),
        # every GPU of 15 nodes pushes everything to node 0, and its own GPUs pull within the node
        ("{kind: parameter_server, servers: 1}", 120 * D * 4),
        # machines of their own push back everything to 8 GPUs
        ("{kind: parameter_server, servers: 3, apart: true}", 8 * D * 4),
        # 120 GPUs elsewhere push a sixteenth to it, and 8 GPUs pull 15 sixteenths
        ("{kind: parameter_server, servers: 16, bucket_size: null}", 120 * D * 4 / 16 + 8 * D * 4 * 15 / 16),
    ],
)
def test_bytes_into_a_node_are_those_of_the_formula(schedule: str, nbytes: float) -> None:
    assert nic_nbytes(resnet50(schedule)) == pytest.approx(nbytes, rel=1e-6)


@pytest.mark.parametrize(("density", "saves"), [("6.2%", True), ("6.3%", False)])
def test_hitopk_sends_less_than_the_torus_below_a_sixteenth(density: str, saves: bool) -> None:
    """rho < 2 b / (m (b + b_i)) = 0.0625 for 4-byte values and indices on 16 nodes."""
    sent = [
        nic_nbytes(resnet50(schedule))
        for schedule in (f"{{kind: hitopk, density: {density}}}", "{kind: torus, algorithm: ring, bucket_size: null}")
    ]
    # the torus sends 2 (m - 1) / m d b, HiTopK (m - 1) rho d (b + b_i)
    assert (sent[0] < sent[1]) == saves


# ---------------------------------------------------------------- seconds


def step_s(of: scenario.Scenario) -> float:
    """Return the makespan of the first step; both engines must agree."""
    built = build(of, of.schedules[0])
    traces = [engine.simulate(built.plan, built.costs, delays(of)) for engine in (des, fast)]
    assert traces[0].end_s == pytest.approx(traces[1].end_s, rel=1e-9, nan_ok=True)
    return float(np.nanmax(traces[0].end_s)) / of.steps


LINE_Bps = 25e9 / 8


@pytest.mark.parametrize(
    ("schedule", "exposed_s"),
    [
        ("{kind: sync, algorithm: ring, bucket_size: null}", 2 * 31 / 32 * D * 4 / LINE_Bps),
        ("{kind: torus, algorithm: ring, bucket_size: null}", 2 * 3 / 4 * D * 4 / LINE_Bps),
        ("{kind: naive_ag, algorithm: ring}", 31 * K * 8 / LINE_Bps),
        ("{kind: hitopk, method: exact}", 3 * 8 * K_SLICE * 8 / LINE_Bps),
        ("{kind: gtopk}", 2 * 8 * K * 8 / LINE_Bps),
        ("{kind: gtopk, broadcast: true}", (2 * 8 + 2) * K * 8 / LINE_Bps),
        # in at 24 GPUs' push, out at their pull
        ("{kind: parameter_server, servers: 1, bucket_size: null}", 2 * 24 * D * 4 / LINE_Bps),
        ("{kind: parameter_server, servers: 1, apart: true, bucket_size: null}", 2 * 32 * D * 4 / LINE_Bps),
    ],
)
def test_what_overlaps_with_nothing_takes_its_bytes_over_the_line_rate(schedule: str, exposed_s: float) -> None:
    """4 nodes of 8 GPUs, no latency, memory of unlimited speed."""
    assert step_s(resnet50(schedule, nodes=4)) - 0.060 == pytest.approx(exposed_s, rel=1e-6)


@pytest.mark.parametrize("kind", ["torus", "hitopk", "naive_ag", "sync"])
def test_buckets_overlap_with_the_backward_pass(kind: str) -> None:
    whole, buckets = (
        step_s(resnet50(f"{{kind: {kind}, algorithm: ring, compression: fp16, bucket_size: {size}}}", nodes=2))
        for size in ("null", "4 MB")
    )
    assert buckets - 0.060 < (whole - 0.060) / 4


@pytest.mark.parametrize("trust_ratios_ms", [0.1, 11.0])
def test_parallel_optimizer_saves_all_shares_but_one_and_costs_an_all_gather(trust_ratios_ms: float) -> None:
    """161 tensors on 8 ranks: 21 each. The all-gather of 168 numbers is 7 hops of 50 us and next to no bytes."""
    alone_s, shared_s = (
        step_s(
            resnet50(
                f"{{kind: sync, algorithm: ring, bucket_size: null, parallel_optimizer: {shared}}}",
                nodes=8,
                gpus=1,
                workload=f"optimizer: lars, trust_ratios: {trust_ratios_ms} ms",
            ).changed(cluster=latent(8))
        )
        for shared in ("false", "true")
    )
    saved_s = trust_ratios_ms * 1e-3 * (1 - 21 / 161)
    gather_s = 7 * 50e-6 + 7 * 21 * 4 / LINE_Bps
    assert alone_s - shared_s == pytest.approx(saved_s - gather_s, rel=1e-6)
    assert (shared_s < alone_s) == (gather_s < saved_s)


def latent(nodes: int) -> dict[str, object]:
    """Return a cluster of nodes with one GPU and links of 50 us."""
    network = {"latency_s": 50e-6, "bandwidth_Bps": LINE_Bps}
    return {"nodes": nodes, "gpus_per_node": 1, "fabric": "ideal", "network": network}


def test_trust_ratios_take_the_stated_time_and_otherwise_that_of_reading_both_norms() -> None:
    plain_s = step_s(resnet50("{kind: local_sgd, period: 9}"))
    stated = resnet50("{kind: local_sgd, period: 9}", workload="optimizer: lars, trust_ratios: 5 ms")
    assert step_s(stated) - plain_s == pytest.approx(5e-3)
    read = resnet50(
        "{kind: local_sgd, period: 9}", workload="optimizer: lars", cluster="device: {memory_bandwidth: 900 GB/s},"
    )
    assert step_s(read) - plain_s == pytest.approx(2 * D * 4 / 900e9)


# ---------------------------------------------------------------- in a scenario


def test_job_knows_the_optimizer_of_the_workload() -> None:
    assert job(resnet50("{kind: sync}")).optimizer == "sgd"
    assert job(resnet50("{kind: sync}", workload="optimizer: lars")).optimizer == "lars"


def test_parallel_optimizer_without_trust_ratios_is_refused_with_its_line() -> None:
    with pytest.raises(ScenarioError) as error:
        resnet50("{kind: torus, parallel_optimizer: true}")
    assert "schedules[0].parallel_optimizer: it shares the trust ratios of LARS; the optimizer is sgd" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("schedule", "workload", "warning"),
    [
        (
            "{kind: sync, compression: fp16}",
            "dtype: float16",
            "schedules[0].compression has no effect: gradients are of type float16 already",
        ),
        (
            "{kind: sync}",
            "trust_ratios: 5 ms",
            "workload.trust_ratios has no effect: with workload.optimizer sgd there are none",
        ),
        (
            "{kind: gtopk, warmup_steps: 2}",
            "",
            "schedules[0] (gtopk-0.001) warms up in all of the 2 steps: it is synchronous SGD, in the same buckets",
        ),
    ],
)
def test_settings_without_effect_are_named(schedule: str, workload: str, warning: str) -> None:
    assert warnings_of(resnet50(schedule, workload=workload)) == (warning,)


def test_local_schedules_take_no_compression() -> None:
    assert "compression" not in LocalSGD.model_fields
