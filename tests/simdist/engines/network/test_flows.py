"""Many flows: rates and times as flows come, go, or change bottlenecks; plain and compiled, to the last bit."""

import functools
import random
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from fluid import exact_end_s, exact_rates
from hypothesis import example, given
from hypothesis import strategies as st
from scripts import ROOT
from tiers import examples

from benchmarks.network import max_min_rates
from simdist.cost import Stage, Transfer
from simdist.engines.network import flows as flows_module
from simdist.engines.network.flows import Flow, Flows
from simdist.engines.network.fluid import FluidNetwork, Timeline

PLAIN = 10**9  # pairs to fill before compilation: more than are filled
COMPILED = 0
N_SHARED = 5
N_OWN = 6


def stage(*pairs, latency_s=0.0):
    """Return a stage of `(resource, nbytes)`."""
    resources, nbytes = zip(*pairs, strict=True)
    return Stage(latency_s, np.array(resources), np.array(nbytes, dtype=np.float64))


@st.composite
def readers(draw, sizes, n_max=9):
    """Draw starts of stages over some shared resources; many also use one of their own, which sets their pace."""
    starts = []
    for number in range(draw(st.integers(1, n_max))):
        used = draw(st.sets(st.integers(0, N_SHARED - 1), min_size=1, max_size=4))
        own = {N_SHARED + number % N_OWN} if draw(st.booleans()) else set()
        pairs = [(resource, draw(st.sampled_from(sizes))) for resource in sorted(used | own)]
        starts.append((draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])), stage(*pairs)))
    return sorted(starts, key=lambda each: each[0])


def loads(seed, n_max=40):
    """
    Draw starts of loads, and capacities. Half of them miss: they use the server's bytes and operations, client, NIC,
    disk, memory and cores of their node, and their own readers; those that hit use disk, memory, cores and readers.
    Some do without a few of these. Sizes and amounts are lognormal. Most resources carry about what all who use them
    want together, so that who is held back by what changes often.
    """
    rng = np.random.default_rng(seed)
    n_nodes, n, missing = rng.integers(2, 5), rng.integers(2, n_max), rng.choice([0.0, 0.05, 0.3])
    server, nodes, own = np.split(np.arange(2 + 6 * n_nodes + n), [2, 2 + 6 * n_nodes])
    wanted_Bps = np.zeros(len(server) + len(nodes) + n)
    starts = []
    for number in range(n):
        client, nic, written, read, memory, cores = nodes.reshape(-1, 6)[rng.integers(n_nodes)]
        shared = [read, memory, cores] if rng.random() < 0.5 else [*server, client, nic, written, memory, cores]
        used = [each for each in shared if rng.random() >= missing] + [own[number]]
        nbytes = rng.lognormal(0.0, 1.0) * rng.lognormal(0.0, 0.2, len(used))
        wanted_Bps[used] += nbytes / nbytes.max()
        starts.append((rng.choice([0.0, rng.uniform()]), stage(*zip(used, nbytes, strict=True))))
    room = rng.lognormal(0.0, 0.2, len(wanted_Bps)) * rng.choice([1.0, 1.0, 5.0], len(wanted_Bps))
    room[own] *= 10
    return sorted(starts, key=lambda each: each[0]), np.where(wanted_Bps, wanted_Bps, 1.0) * room


def capacities(of):
    n = N_SHARED + N_OWN
    return st.lists(st.sampled_from(of), min_size=n, max_size=n).map(np.array)


def ends_s(starts, capacity_Bps):
    """Return when stages end in a network."""
    timeline = Timeline()
    network = FluidNetwork(timeline, capacity_Bps)
    end_s = np.full(len(starts), np.nan)
    for number, (start_s, each) in enumerate(starts):
        network.fly(
            Transfer((each,)), lambda number=number: end_s.__setitem__(number, timeline.now), start_s=float(start_s)
        )
    timeline.run()
    return end_s


@contextmanager
def interpreted():
    """Let flows begin as they do where nothing has been compiled yet."""
    compiled = flows_module._compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows_module, "_compiled", functools.cache(compiled.__wrapped__))
        yield


def exactly_s(starts, capacity_Bps):
    """Return when stages end, in fractions."""
    return exact_end_s([(start_s, Transfer((each,))) for start_s, each in starts], capacity_Bps)


def ends_alone_s(starts, capacity_Bps, look=lambda sharing, flows: None, patience=PLAIN):
    """Return when stages end without a timeline; `look` at the flows whenever rates have been set."""
    sharing = Flows(capacity_Bps.tolist(), patience=patience)
    numbers = {Flow(each, lambda: None): number for number, (_, each) in enumerate(starts)}
    waiting = [(float(start_s), flow) for (start_s, _), flow in zip(starts, numbers, strict=True)]
    end_s = np.full(len(starts), np.nan)
    flying = []
    now_s = 0.0
    while waiting or flying:
        until_s = waiting[0][0] if waiting else np.inf
        ended = sharing.advance(now_s, until_s)
        now_s = sharing.next_s if ended else until_s
        for flow in ended:
            end_s[numbers[flow]] = now_s
            flying.remove(flow)
        while waiting and waiting[0][0] == now_s:
            flying.append(waiting.pop(0)[1])
            sharing.join(flying[-1], now_s)
        sharing.settle(now_s)
        if flying:
            look(sharing, flying)
    return end_s


def fair(capacity_Bps):
    """Return a look that compares the rates in it with those recomputed."""

    def look(sharing, flows):
        expected_Bps = max_min_rates([flow.stage for flow in flows], capacity_Bps)
        np.testing.assert_allclose([sharing.rate_Bps(flow) for flow in flows], expected_Bps, rtol=1e-9)

    return look


@examples(100)
@given(readers([1, 3, 1e3, 1e6]), capacities([1.0, 2.0, 1e3, 1e9]))
def test_rates_are_always_those_of_fairness(starts, capacity_Bps):
    ends_alone_s(starts, capacity_Bps, fair(capacity_Bps))


def test_flows_stop_at_their_paces_below_hubs_that_are_full_at_the_same_rate():
    """A large flow fills three hubs at 97. The slow flows on them have stopped at 3 and 1.5, also if asked late."""
    capacity_Bps = [100.0, 3.0, 3.0, 3.0, 100.0, 3.0, 100.0, 100.0, 10.0, 100.0]
    ones = [(2, 4, 8), (2, 4, 8), (3, 7, 8), (0, 4, 6, 7, 9)]
    slow_pair = Stage(0.0, np.array([1, 8, 9]), np.ones(3), np.full(3, 2.0))  # two alike flows as one
    stages = [stage(*((resource, 1.0) for resource in used)) for used in ones]
    sharing = Flows(capacity_Bps)
    flows = [Flow(each, lambda: None) for each in (*stages[:3], slow_pair, stages[3])]
    for flow in flows:
        sharing.join(flow, 0.0)
    sharing.settle(0.0)
    assert [sharing.rate_Bps(flow) for flow in flows] == [1.5, 1.5, 3.0, 1.5, 97.0]


@pytest.mark.parametrize("at_once", [True, False])
def test_rates_are_exact_where_many_levels_are_equal(at_once):
    """Few sizes and capacities, so that several hubs are often full at the same rate."""
    rng = random.Random(5)
    for _ in range(4_000):
        n_resources = rng.randint(2, 9)
        capacity_Bps = np.array([rng.choice([1.0, 2.0, 3.0, 5.0, 10.0, 10.0, 10.0, 100.0]) for _ in range(n_resources)])
        stages = []
        for _ in range(rng.randint(2, 9)):
            used = sorted(rng.sample(range(n_resources), rng.randint(1, min(5, n_resources))))
            stages.append(stage(*((resource, rng.choice([1.0, 1.0, 1.0, 2.0])) for resource in used)))
        sharing = Flows(capacity_Bps.tolist())
        flows = [Flow(each, lambda: None) for each in stages]
        for flow in flows:
            sharing.join(flow, 0.0)
            if not at_once:
                sharing.settle(0.0)
        sharing.settle(0.0)
        fair(capacity_Bps)(sharing, flows)


@examples(200)
@example(169)  # members move between levels that rise at the same time
@example(183)
@given(st.integers(0, 2**32))
def test_rates_are_those_of_fairness_among_loads_over_many_hubs(seed):
    starts, capacity_Bps = loads(seed)
    ends_alone_s(starts, capacity_Bps, fair(capacity_Bps))


@examples(100)
@given(readers([1, 2, 3, 5, 8]), capacities([1.0, 2.0, 3.0, 7.0]))
def test_rates_are_those_of_fairness_where_many_hubs_are_nearly_full(starts, capacity_Bps):
    ends_alone_s(starts, capacity_Bps, fair(capacity_Bps))


@examples(100)
@given(readers([1, 2, 3, 8], n_max=6), capacities([1.0, 2.0, 5.0]))
def test_times_are_those_of_exact_fractions(starts, capacity_Bps):
    np.testing.assert_allclose(ends_s(starts, capacity_Bps), exactly_s(starts, capacity_Bps), rtol=1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_times_are_those_of_exact_fractions_where_components_become_large_and_fall_apart_late(seed):
    """More flows than are examined whenever one leaves, over two servers that share readers now and then."""
    rng = np.random.default_rng(seed)
    capacity_Bps = np.array([8.0, 4.0, *[2.0] * 6])
    starts = []
    for number in range(60):
        servers = [0, 1] if number % 10 == 0 else [number % 2]
        used = [*servers, 2 + int(rng.integers(6))] if number % 3 else servers
        starts.append((float(rng.integers(4)), stage(*((each, float(rng.integers(1, 9))) for each in used))))
    starts.sort(key=lambda each: each[0])
    np.testing.assert_allclose(ends_s(starts, capacity_Bps), exactly_s(starts, capacity_Bps), rtol=1e-11)


@pytest.mark.parametrize("ranks_per_node", [1, 8])
@pytest.mark.parametrize("server_Bps", [20.0, 60.0, 1e3])
def test_readers_of_a_server_end_when_recomputed_rates_say(ranks_per_node, server_Bps):
    """
    Loads of different sizes come at random times over the server, the NIC of the node and the rank's own readers, and
    now and then everybody's NIC is used by an all-reduce.
    """
    rng = np.random.default_rng(ranks_per_node)
    n_ranks = 40
    nic = 1 + np.arange(n_ranks) // ranks_per_node
    own = 100 + np.arange(n_ranks)
    capacity_Bps = np.concatenate([[server_Bps], np.full(99, 4.0 * ranks_per_node), rng.uniform(1.0, 3.0, n_ranks)])
    starts = [
        (start_s, stage((0, nbytes), (int(nic[rank]), nbytes), (int(own[rank]), nbytes * slow)))
        for rank in range(n_ranks)
        for start_s, nbytes, slow in rng.uniform((0.0, 1.0, 0.5), (30.0, 20.0, 1.5), (5, 3))
    ]
    starts += [(start_s, stage(*((each, 9.0) for each in np.unique(nic).tolist()))) for start_s in (0.0, 8.0, 16.0)]
    starts.sort(key=lambda each: each[0])
    ends_alone_s(starts, capacity_Bps, fair(capacity_Bps))
    np.testing.assert_allclose(ends_s(starts, capacity_Bps), ends_alone_s(starts, capacity_Bps), rtol=1e-12)


def test_server_serves_the_smallest_first():
    """Processor sharing: when the k-th smallest of n is done, smaller ones are done, and others have flowed as much."""
    sizes = np.random.default_rng(0).uniform(1.0, 9.0, 60)
    end_s = ends_alone_s([(0.0, stage((0, nbytes))) for nbytes in sizes], np.array([2.0]))
    np.testing.assert_allclose(end_s, [np.minimum(sizes, nbytes).sum() / 2 for nbytes in sizes], rtol=1e-12)


@pytest.mark.parametrize("n", [2, 5, 9, 10, 11, 40])
def test_utilisation_is_what_readers_demand_or_the_whole_server(n):
    """n readers of 1 B/s each read 6 B from a server of 10 B/s: 6 s, or 6 n / 10."""
    starts = [(0.0, stage((0, 6), (1 + number, 6))) for number in range(n)]
    end_s = ends_alone_s(starts, np.array([10.0, *[1.0] * n]))
    np.testing.assert_allclose(end_s, max(6.0, 0.6 * n), rtol=1e-12)


def test_slow_readers_leave_their_share_to_the_fast_ones_until_these_have_ended():
    """
    A server of 10 B/s; A reads 4 B at 1 B/s at most, B and C read 9 B each. B and C get 4.5: 2 s. A needs 4 s.
    """
    starts = [(0.0, stage((0, 4), (1, 4))), (0.0, stage((0, 9))), (0.0, stage((0, 9)))]
    assert ends_alone_s(starts, np.array([10.0, 1.0])).tolist() == [4.0, 2.0, 2.0]


def test_reader_changes_between_its_pace_and_its_share():
    """
    A server of 4 B/s; A reads at 3 B/s at most. Alone for 1 s: 3 B. B comes with 4 B: 2 each until 3 s, when B is done.
    A has 13 - 3 - 4 = 6 B left, at 3 B/s: 5 s.
    """
    starts = [(0.0, stage((0, 13), (1, 13))), (1.0, stage((0, 4)))]
    rates_Bps = []
    look = lambda sharing, flows: rates_Bps.append([sharing.rate_Bps(flow) for flow in flows])  # noqa: E731
    assert ends_alone_s(starts, np.array([4.0, 3.0]), look).tolist() == [5.0, 3.0]
    assert rates_Bps == [[3], [2, 2], [3]]


def test_hub_inside_the_server_holds_back_its_own_readers_only():
    """
    The server carries 9 B/s, the NIC of A and B 2 B/s: 1 each, and 7 for C, which has 14 B: 2 s. A has 2 B, B 4 B: 2 s
    and 3 s.
    """
    starts = [(0.0, stage((0, 2), (1, 2))), (0.0, stage((0, 4), (1, 4))), (0.0, stage((0, 14)))]
    assert ends_alone_s(starts, np.array([9.0, 2.0])).tolist() == [2.0, 3.0, 2.0]


def test_hub_learns_that_a_level_rose_before_its_members_moved_away_and_back():
    """
    Link 0 carries 12 B/s for A, B and X, link 1 20 B/s for A and D, link 2 13 B/s for B, X and E: A, B and X flow at 4,
    D at 16, E at 5. X ends at 1 s. A and B rise to 6, which is more than the 5 of E, so B joins E; they rise to 6.5,
    so B goes back. A has been at 6 all the while, and leaves 14 to D; E gets 7.
    """
    starts = [
        (0.0, stage((0, 10), (1, 10))),
        (0.0, stage((0, 10), (2, 10))),
        (0.0, stage((0, 4), (2, 4))),
        (0.0, stage((1, 30))),
        (0.0, stage((2, 12))),
    ]
    rates_Bps = []
    look = lambda sharing, flows: rates_Bps.append([sharing.rate_Bps(flow) for flow in flows])  # noqa: E731
    assert ends_alone_s(starts, np.array([12.0, 20.0, 13.0]), look).tolist() == [2.0, 2.0, 1.0, 2.0, 2.0]
    assert rates_Bps == [[4, 4, 4, 16, 5], [6, 6, 14, 7]]


def test_loads_of_three_nodes_that_read_from_server_and_disks_flow_at_recomputed_rates():
    """
    12 loads over the server (bytes, operations), and client, NIC, disk, cores and readers of 3 nodes; 8 over disk,
    cores and readers. One of the server's has little left; when it ends, others move to another level and back.
    """
    missed = (
        (0, (772557, 1272153)),
        (1, (574736, 557700, 424495, 460300, 360515, 809406)),
        (2, (417233, 432187, 437035, 358178)),
    )
    on_disk = ((0, (263257, 191903, 102640, 147264)), (1, (131635,)), (2, (175316, 253696, 72896)))
    capacity_Bps = np.array([5e8, 1e5, *[1e9, 1e10, 2e8, 3e8, 3.0] * 3, *[1.0] * 20])
    own, stages = iter(range(17, 37)), []
    for node, sizes in missed:
        client, nic, written, _, cores = range(2 + 5 * node, 7 + 5 * node)
        for n in sizes:
            by_node = ((client, n), (nic, n), (written, n), (cores, 0.001625))
            pairs = ((0, n), (1, 4.0), *by_node, (next(own), 0.002 + n * 7e-9))
            left = 1e-3 if n == 358178 else 1.0
            stages.append(stage(*((resource, nbytes * left) for resource, nbytes in pairs)))
    for node, sizes in on_disk:
        read, cores = 5 + 5 * node, 6 + 5 * node
        stages += [stage((read, n), (cores, 0.001625), (next(own), 1e-4 + n / 3e8)) for n in sizes]
    starts = [(0.0, each) for each in stages]
    ends_alone_s(starts, capacity_Bps, fair(capacity_Bps))
    np.testing.assert_allclose(ends_s(starts, capacity_Bps), ends_alone_s(starts, capacity_Bps), rtol=1e-12)


def test_large_weight_that_ends_leaves_no_rounding_behind():
    """A puts 1e12 times as much on the server for each byte as B and C; in float64, 1 + 2e-12 - 1 is not 2e-12."""
    b, c = (stage((0, 1e12), (own, 1e24)) for own in (1, 2))
    capacity_Bps = np.array([2e12, 1e26, 1e26])
    ends_alone_s([(0.0, stage((0, 1e12))), (0.0, b), (0.0, c)], capacity_Bps, fair(capacity_Bps))


@examples(150)
@given(readers([1, 3, 1e3, 1e6], n_max=20), capacities([0.0, 1.0, 2.0, 1e3, 1e9, np.inf]))
def test_compiled_and_plain_have_the_same_bits(starts, capacity_Bps):
    rates_Bps = {PLAIN: [], COMPILED: []}
    end_s = {}
    limited = [each for each in starts if not any(capacity_Bps[r] == 0 for r in each[1].resources)]
    for patience, seen in rates_Bps.items():
        look = lambda sharing, flows, seen=seen: seen.append([sharing.rate_Bps(flow) for flow in flows])  # noqa: E731
        with interpreted() if patience == PLAIN else nullcontext():
            end_s[patience] = ends_alone_s(limited, capacity_Bps, look, patience).tolist()
    assert end_s[PLAIN] == end_s[COMPILED]
    assert rates_Bps[PLAIN] == rates_Bps[COMPILED]


def test_what_numba_has_kept_of_another_source_is_not_looked_at(monkeypatch):
    names = []
    for source in ("def one(): ...", "def another(): ..."):
        monkeypatch.setattr("inspect.getsource", lambda _, source=source: source)
        functions = flows_module._compiled.__wrapped__()
        names.append({functions[name].py_func.__qualname__ for name in ("act", "advance")})
    assert names[0].isdisjoint(names[1])


def test_flows_are_compiled_when_much_has_been_filled_and_nobody_can_tell():
    starts, capacity_Bps = loads(7, n_max=60)
    compiled = []
    look = lambda sharing, flows: compiled.append(sharing.is_compiled)  # noqa: E731
    with interpreted():
        first = ends_alone_s(starts, capacity_Bps)
        assert first.tolist() == ends_alone_s(starts, capacity_Bps, look, patience=200).tolist()
    assert compiled[0] is False
    assert compiled[-1] is True


def test_where_numba_cannot_be_imported_flows_share_all_the_same():
    code = """
import sys
sys.modules["numba"] = None
import numpy as np
from simdist.cost import Stage
from simdist.engines.network import flows
many = flows.Flows([2.0], patience=0)
some = [flows.Flow(Stage(0.0, np.array([0]), np.array([1.0])), flows.nothing) for _ in range(4)]
for each in some:
    many.join(each, 0.0)
    many.settle(0.0)
print([many.rate_Bps(each) for each in some], many.is_compiled)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "[0.5, 0.5, 0.5, 0.5] False\n"
    assert ended.stderr.count("pip install 'simdist-training[fast]'") == 1


@pytest.mark.parametrize("patience", [PLAIN, COMPILED], ids=["plain", "compiled"])
def test_flows_that_use_a_hub_a_million_times_as_much_as_each_other_share_it_exactly(patience):
    """
    A and B use hub 0, C and D a millionth of it for each byte on hub 1. Others have come and gone before.

    C and D fill hub 1 of 0.5 B/s: 0.25 each; A and B what they leave of hub 0 of 3 B/s: 1.5 - 0.25e-6 each.
    """
    small = 1e-6
    pairs = [(1.0, 0.0), (1.0, 0.0), (small, 1.0), (small, 1.0)]
    on_hub = [stage(*((hub, nbytes) for hub, nbytes in enumerate(each) if nbytes)) for each in pairs]
    gone = [stage((0, 1.0), (1, 1e-6)), stage((0, 1e-6), (1, 1.0))] * 50
    capacity_Bps = np.array([3.0, 0.5])
    sharing = Flows(capacity_Bps.tolist(), patience=patience)
    staying = [Flow(each, lambda: None) for each in on_hub]
    for flow in staying:
        sharing.join(flow, 0.0)
    leaving = [Flow(each, lambda: None) for each in gone]
    for number, flow in enumerate(leaving):
        sharing.join(flow, 1e-9 * number)
        sharing.settle(1e-9 * number)
    for number, flow in enumerate(leaving):
        sharing.take_out(flow, 1e-9 * (100 + number))
        sharing.settle(1e-9 * (100 + number))
    expected_Bps = [float(each) for each in exact_rates(on_hub, capacity_Bps)]
    np.testing.assert_allclose([sharing.rate_Bps(flow) for flow in staying], expected_Bps, rtol=1e-14)


@examples(60)
@given(*[readers([1, 3, 1e3], n_max=8)] * 2, *[capacities([1.0, 2.0, 1e3])] * 2)
def test_many_that_share_nothing_end_as_if_the_others_were_not_there(some, others, some_Bps, others_Bps):
    """To the last bit."""
    n = N_SHARED + N_OWN
    moved = [(start_s, Stage(s.latency_s, s.resources + n, s.nbytes)) for start_s, s in others]
    together_s = ends_s([*some, *moved], np.concatenate([some_Bps, others_Bps]))
    alone_s = [*ends_s(some, some_Bps).tolist(), *ends_s(others, others_Bps).tolist()]
    assert together_s.tolist() == alone_s
