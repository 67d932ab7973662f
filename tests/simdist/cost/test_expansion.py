"""Algorithms message by message: they reduce, and take what the closed forms say."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from expansion import Played, Round, Wire, Wires, play, rounds
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist.cost import price
from simdist.errors import PlanError
from simdist.plan import (
    AllGather,
    AllReduce,
    Broadcast,
    Buffer,
    Collective,
    Group,
    Plan,
    Reduce,
    ReduceScatter,
    Servers,
)
from simdist.scenario import Cluster, Workload
from simdist.scenario.cluster import Link

LATENCY_S, BANDWIDTH_BPS, NBYTES = 1e-3, 1e9, 8_000_000 * 3
NO_WIRE = Wire(0.0, 1e12)


def wires(n: int) -> Wires:
    """Return a network of nodes with one member each."""
    return Wires(np.arange(n), NO_WIRE, Wire(LATENCY_S, BANDWIDTH_BPS))


def played(op: Collective, *, n_chunks: int = 1, n_apart: int = 0, start_s: np.ndarray | None = None) -> Played:
    return play(rounds(op, n_chunks=n_chunks), wires(op.group.size + n_apart), nbytes=NBYTES, start_s=start_s)


def servers(n: int, n_servers: int, *, apart: bool = False) -> Servers:
    members = () if apart else tuple(server * (n // n_servers) for server in range(n_servers))
    return Servers((NBYTES // 4 // n_servers,) * n_servers, members)


def all_reduces(n: int) -> list[AllReduce]:
    found = [AllReduce("grad", Group(n), algorithm=name) for name in ("ring", "tree", "double_tree", "direct")]
    if n & (n - 1) == 0:
        found.append(AllReduce("grad", Group(n), algorithm="halving_doubling"))
    return [*found, AllReduce("grad", Group(n), algorithm="server", servers=servers(n, 1))]


def price_of(op: Collective) -> tuple[float, dict[int, float]]:
    """Return the seconds of the closed form, and its bytes on each resource."""
    n = op.group.size
    whole, shard = Buffer("grad", NBYTES // 4, initialized=True), Buffer("shard", NBYTES // 4 // n, initialized=True)
    plan = Plan.from_steps("one", world_size=n, buffers=(whole, shard), steps=[(op,)])
    link = Link(latency_s=LATENCY_S, bandwidth_Bps=BANDWIDTH_BPS)
    cluster = Cluster(
        nodes=n, gpus_per_node=1, fabric=Link.ideal(), network=link, collectives={"library": "gloo"}
    )  # ideal pipelines
    workload = Workload.model_validate({"tensors": [{"name": "w", "count": 1}], "batch_size": 1, "forward_s": 0.0})
    cost = price(plan, cluster, workload).of[op]
    nbytes: dict[int, float] = {}
    for stage in cost.transfers[0].stages:
        for resource, amount in zip(stage.resources.tolist(), stage.nbytes.tolist(), strict=True):
            nbytes[resource] = nbytes.get(resource, 0.0) + amount
    return float(cost.alone_s), nbytes


# ---------------------------------------------------------------- what the messages do


def carried_out(messages: list[Round], data: np.ndarray) -> np.ndarray:
    """Carry messages out on `data[member, chunk]`; all of a round read what was there before it."""
    for each in messages:
        before = data.copy()
        for src, dst, first in zip(each.src, each.dst, each.first, strict=True):
            chunks = slice(first, first + each.length)
            if each.adds:
                data[dst, chunks] += before[src, chunks]
            else:
                data[dst, chunks] = before[src, chunks]
    return data


def n_chunks_of(messages: list[Round]) -> int:
    return max(int(each.first.max()) + each.length for each in messages if len(each.first))


@examples(60)
@given(n=st.integers(2, 17), data=st.data())
def test_all_reduce_leaves_the_sum_with_every_member(n: int, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(all_reduces(n)))
    messages = list(rounds(op, n_chunks=data.draw(st.integers(1, 5))))
    values = np.random.default_rng(n).integers(0, 1000, size=(n, n_chunks_of(messages)))
    assert (carried_out(messages, values.copy()) == values.sum(axis=0)).all()


@pytest.mark.parametrize(
    ("algorithm", "owner_of_chunk"),
    [
        ("ring", range(8)),
        ("direct", range(8)),
        ("halving_doubling", (0, 4, 2, 6, 1, 5, 3, 7)),  # bit after bit, the neighbour's first
    ],
)
def test_reduce_scatter_leaves_each_sum_with_its_owner(algorithm: str, owner_of_chunk: Sequence[int]) -> None:
    values = np.random.default_rng(0).integers(1, 1000, size=(8, 8))
    messages = list(rounds(ReduceScatter("grad", "shard", Group(8), algorithm=algorithm)))
    reduced = carried_out(messages, values.copy())
    is_sum = reduced == values.sum(axis=0)
    assert [np.flatnonzero(column).tolist() for column in is_sum.T] == [[owner] for owner in owner_of_chunk]


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_all_gather_hands_every_chunk_to_everybody(algorithm: str) -> None:
    values = np.diag(np.arange(1, 9))
    messages = list(rounds(AllGather("shard", "grad", Group(8), algorithm=algorithm)))
    assert (carried_out(messages, values) == np.arange(1, 9)).all()


@examples(40)
@given(n=st.integers(2, 17), algorithm=st.sampled_from(["ring", "tree", "direct"]), data=st.data())
def test_rooted_collectives_end_where_they_should(n: int, algorithm: str, data: st.DataObject) -> None:
    root, n_chunks = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, 4))
    values = np.random.default_rng(n).integers(0, 1000, size=(n, n_chunks if algorithm == "ring" else 1))
    reduce = rounds(Reduce("grad", Group(n), root, algorithm=algorithm), n_chunks=n_chunks)
    assert (carried_out(list(reduce), values.copy())[root] == values.sum(axis=0)).all()
    broadcast = rounds(Broadcast("grad", Group(n), root, algorithm=algorithm), n_chunks=n_chunks)
    assert (carried_out(list(broadcast), values.copy()) == values[root]).all()


def test_servers_apart_reduce_what_the_members_push() -> None:
    op = AllReduce("grad", Group(6), algorithm="server", servers=servers(6, 3, apart=True))
    values = np.zeros((9, 3), dtype=np.int64)
    values[:6] = np.random.default_rng(0).integers(0, 1000, size=(6, 3))
    assert (carried_out(list(rounds(op)), values.copy())[:6] == values.sum(axis=0)).all()


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_what_is_made_of_other_algorithms_is_refused(algorithm: str) -> None:
    with pytest.raises(PlanError, match="is made of other algorithms"):
        list(rounds(AllReduce("grad", Group(4), algorithm=algorithm)))


# ---------------------------------------------------------------- how long it takes


def exact(n: int) -> list[Collective]:
    group = Group(n)
    ops: list[Collective] = [each for each in all_reduces(n) if each.algorithm != "double_tree"]
    ops += [ReduceScatter("grad", "shard", group, algorithm=name) for name in ("ring", "direct")]
    ops += [AllGather("shard", "grad", group, algorithm=name) for name in ("ring", "direct")]
    ops += [Reduce("grad", group, 1, algorithm=name) for name in ("tree", "direct")]
    ops += [Broadcast("grad", group, 1, algorithm=name) for name in ("tree", "direct")]
    if n & (n - 1) == 0:
        ops += [ReduceScatter("grad", "shard", group, algorithm="halving_doubling")]
        ops += [AllGather("shard", "grad", group, algorithm="halving_doubling")]
    return ops


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 12])
def test_closed_form_is_the_time_of_the_last_message(n: int) -> None:
    for op in exact(n):
        if op.algorithm != "tree" or n & (n - 1) == 0:
            assert played(op).end_s.max() == pytest.approx(price_of(op)[0], rel=1e-9), op


@pytest.mark.parametrize("n", [3, 6, 12])
def test_incomplete_tree_saves_at_most_the_latency_of_a_level_where_a_sender_had_nothing_to_wait_for(n: int) -> None:
    for op in [each for each in exact(n) if each.algorithm == "tree"]:
        closed_s = price_of(op)[0]
        assert closed_s - 2 * LATENCY_S - 1e-12 <= played(op).end_s.max() <= closed_s + 1e-12, op


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 12])
def test_closed_form_puts_the_bytes_of_the_messages_on_every_card(n: int) -> None:
    for op in [*exact(n), AllReduce("grad", Group(n), algorithm="double_tree")]:
        sent = played(op)
        _, nbytes = price_of(op)
        found = np.array([nbytes.get(2 * n + port, 0.0) for port in range(2 * n)])
        assert found == pytest.approx(np.concatenate([sent.sent_nbytes[n:], sent.received_nbytes[n:]]), rel=1e-9), op


@pytest.mark.parametrize("n_servers", [1, 2, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_parameter_servers_take_the_time_of_the_closed_form(n_servers: int, apart: bool) -> None:
    op = AllReduce("grad", Group(8), algorithm="server", servers=servers(8, n_servers, apart=apart))
    n_apart = n_servers if apart else 0
    assert played(op, n_apart=n_apart).end_s.max() == pytest.approx(price_of(op)[0], rel=0.08)


@pytest.mark.parametrize(
    "op", [Broadcast("grad", Group(6), 2, algorithm="ring"), Reduce("grad", Group(6), 2, algorithm="ring")]
)
def test_pipeline_takes_a_hop_more_for_every_link_and_chunk(op: Collective) -> None:
    whole_s = NBYTES / BANDWIDTH_BPS
    for n_chunks in (1, 4, 100):
        expected_s = 5 * LATENCY_S + (n_chunks + 4) * whole_s / n_chunks
        assert played(op, n_chunks=n_chunks).end_s.max() == pytest.approx(expected_s, rel=1e-9)
    assert price_of(op)[0] == pytest.approx(5 * LATENCY_S + whole_s, rel=1e-9)  # as if chunks were infinitely small


@pytest.mark.parametrize("n", [4, 8, 16])
def test_double_tree_is_never_faster_than_its_closed_form_and_comes_near_it(n: int) -> None:
    """The closed form is that of an ideal pipeline. Here who is ready first goes first, and ports are idle at times."""
    op = AllReduce("grad", Group(n), algorithm="double_tree")
    fluid_s = price_of(op)[0]
    taken_s = played(op, n_chunks=24).end_s.max()
    assert fluid_s * 0.999 <= taken_s <= fluid_s * 1.35


def test_ring_over_nodes_takes_no_longer_than_its_closed_form_and_no_less_than_its_slowest_link() -> None:
    """The closed form adds the latencies of a whole way round to the time of the slowest link: an upper bound."""
    nodes, per_node = 4, 4
    op = AllReduce("grad", Group(nodes * per_node), algorithm="ring")
    fabric, network = Wire(2e-6, 10e9), Wire(30e-6, 1e9)
    sent = play(rounds(op), Wires(np.arange(16) // per_node, fabric, network), nbytes=NBYTES)
    bytes_s = 30 / 16 * NBYTES / 1e9
    latency_s = 30 / 4 * (3 * 2e-6 + 30e-6) + 30e-6
    assert bytes_s < sent.end_s.max() <= bytes_s + latency_s


# ---------------------------------------------------------------- start skew and size


def test_late_member_holds_up_a_ring_by_what_it_is_late() -> None:
    op = AllReduce("grad", Group(8), algorithm="ring")
    on_time_s = played(op).end_s.max()
    late = np.zeros(8)
    late[3] = 0.25
    assert played(op, start_s=late).end_s.max() == pytest.approx(0.25 + on_time_s, rel=1e-9)


def test_late_receiver_gets_what_its_sender_has_had_for_long() -> None:
    """Both messages of the second round leave node 0, so messages go one by one; member 3 sends nothing itself."""
    op = Broadcast("grad", Group(4), 0, algorithm="tree")
    network = Wires(np.array([0, 1, 0, 1]), NO_WIRE, Wire(LATENCY_S, BANDWIDTH_BPS))
    sent = play(rounds(op), network, nbytes=NBYTES, start_s=np.array([0.0, 0.0, 0.0, 1.0]))
    assert sent.end_s[3] == pytest.approx(1.0 + NBYTES / BANDWIDTH_BPS, rel=1e-9)


@examples(30)
@given(n=st.integers(2, 12), data=st.data())
def test_starting_later_is_never_faster_and_never_costs_more_than_the_delay(n: int, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([each for each in all_reduces(n) if each.algorithm in ("ring", "tree")]))
    start_s = np.array(data.draw(st.lists(st.floats(0, 0.1), min_size=n, max_size=n)))
    on_time_s, end_s = played(op).end_s.max(), played(op, start_s=start_s).end_s.max()
    assert on_time_s - 1e-12 <= end_s <= on_time_s + start_s.max() + 1e-12


def test_exchange_of_everybody_with_everybody_can_be_played_for_many_members() -> None:
    op = AllReduce("grad", Group(64), algorithm="direct")
    assert played(op).end_s.max() == pytest.approx(price_of(op)[0], rel=1e-9)


def test_large_ring_fits_into_little_memory() -> None:
    n = 1024
    start_s = np.random.default_rng(0).uniform(0, 1e-3, n)
    tracemalloc.start()
    sent = played(AllReduce("grad", Group(n), algorithm="ring"), start_s=start_s)
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sent.n_messages == 2 * (n - 1) * n == 2_095_104
    assert peak_nbytes < 2**30
    assert sent.end_s.max() == pytest.approx(2 * (n - 1) * (LATENCY_S + NBYTES / n / BANDWIDTH_BPS), rel=0.01)
