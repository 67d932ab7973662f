"""Exported traces say what the plan says: a replay of them takes as long as the simulation, on every rank."""

import json
from collections import defaultdict

import numpy as np
import pytest
from chakra_messages import find, read_trace
from commandline import SMALL, STORAGE, Answer, call, edited, write
from engine_runs import simulate

from simdist.chakra.export import MAX_EXPORT_NBYTES, Export, NodeTemplates, ProcessGroups, cautions, refuse_size
from simdist.chakra.export import write_traces as chakra_write
from simdist.chakra.schema import NodeType
from simdist.cost import Varying
from simdist.errors import PlanError
from simdist.plan import Broadcast, Buffer, Plan, Select
from simdist.plan.group import Group
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.scenario import loads

KINDS = {
    "sync": "{kind: sync, bucket_size: 1 kB}",
    "torus": "{kind: torus}",
    "sparse": "{kind: hitopk, density: 0.01}",
    "local": "{kind: local_sgd, period: 4}",
    "hierarchical": "{kind: hierarchical_sgd, levels: {2: 4, 4: world}}",
}


def scenario_of(schedule: str, text: str = SMALL):
    head, _, _ = text.partition("schedules:")
    return loads(f"{head}schedules:\n  - {schedule}\n")


def export_of(schedule: str, text: str = SMALL, n_steps: int | None = None) -> Export:
    scenario = scenario_of(schedule, text)
    built = build(scenario, scenario.schedules[0])
    n_steps = n_steps or built.plan.n_steps
    return Export(built.plan, built.costs, scenario.workload, delays(scenario), n_steps)


def without_sharing(text: str = SMALL) -> str:
    """Return a scenario whose links are never shared: a replay cannot know what sharing costs."""
    return edited(("bandwidth: 25 Gbit/s", "bandwidth: unlimited"), text=text)


def nodes_of(export: Export, rank: int):
    head, *nodes = export.messages(rank)
    assert head.version
    return nodes


def attributes(message) -> dict[str, object]:
    return {attribute.name: find(message, attribute.name) for attribute in message.attr}


def replay(export: Export) -> list[dict[int, float]]:
    """Return when the nodes of every rank end if each begins when those are done that it depends on.

    A collective begins when the node of the same id is ready on all members of its group, as in a consumer that knows
    nothing of plans.
    """
    world_size = export.plan.world_size
    nodes = [nodes_of(export, rank) for rank in range(world_size)]
    members = {"0": list(range(world_size))} | export.groups.document()
    ends: list[dict[int, float]] = [{} for _ in range(world_size)]
    at, waiting = [0] * world_size, defaultdict(dict)
    moved = True
    while moved:
        moved = False
        for rank in range(world_size):
            while at[rank] < len(nodes[rank]):
                node = nodes[rank][at[rank]]
                ready = max((ends[rank][dep] for dep in node.data_deps if dep in ends[rank]), default=0.0)
                if not all(dep in ends[rank] for dep in node.data_deps):
                    break
                moved = True
                at[rank] += 1
                seconds = find(node, "simdist_duration_s")
                if node.type != NodeType.COMM_COLL:
                    ends[rank][node.id] = ready + seconds
                    continue
                group = waiting[node.id, find(node, "pg_name")]
                group[rank] = ready
                if sorted(group) == members[find(node, "pg_name")]:
                    for member in group:
                        ends[member][node.id] = max(group.values()) + seconds
    assert at == [len(each) for each in nodes], "the replay hangs"
    return ends


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on", ["host", "compute"])
def test_a_replay_ends_every_operation_when_the_simulation_does(kind, on):
    text = edited(("kind: transient,", f"kind: transient, on: {on},"), ("forward: 20 ms", "forward: 2 ms"))
    export = export_of(KINDS[kind], without_sharing(text) if kind in ("torus", "sparse") else text)
    assert not export.costs.contested
    trace = simulate(export.plan, export.costs, export.delays, engine="des")
    for rank, ends in enumerate(replay(export)):
        assert ends == pytest.approx({node: trace.end_s[node - 1, rank] for node in ends}, rel=1e-12)
        assert max(ends.values()) == pytest.approx(trace.end_s[:, rank].max(), rel=1e-12)


def test_groups_within_a_node_and_across_nodes_have_durations_of_their_own():
    """Pairs of ranks on nodes of 3: the first pair shares a node, the second does not."""
    text = without_sharing(edited(("nodes: 2", "nodes: 4"), ("gpus_per_node: 4", "gpus_per_node: 3")))
    export = export_of("{kind: hierarchical_sgd, levels: {2: 2, 4: world}}", text)
    trace = simulate(export.plan, export.costs, export.delays, engine="des")
    for rank, ends in enumerate(replay(export)):
        assert ends == pytest.approx({node: trace.end_s[node - 1, rank] for node in ends}, rel=1e-12)


def test_a_replay_from_storage_ends_when_the_simulation_does():
    text = edited(
        ("  fabric: ideal", f"  fabric: ideal\n  {STORAGE}"),
        ("steps: 12", "steps: 12\ninput: {source: storage}"),
        ("kind: transient,", "kind: transient, on: io,"),
    )
    export = export_of("{kind: sync}", without_sharing(text).replace("bandwidth: 1 GB/s", "bandwidth: unlimited"))
    trace = simulate(export.plan, export.costs, export.delays, engine="des")
    ends = replay(export)
    assert max(ends[0].values()) == pytest.approx(trace.makespan_s, rel=1e-12)


@pytest.mark.parametrize(("ranks", "mode"), [("first", "blocking"), ("first", "async"), ("all", "blocking")])
def test_checkpoints_are_stored_by_the_ranks_that_write_them(ranks, mode):
    disk = ("gpus_per_node: 4", "gpus_per_node: 4\n  disk: {read: 1 GB/s, write: unlimited, latency: 20 ms}")
    checkpoint = ("seed: 1", f"seed: 1\ncheckpoint: {{every: 4, what: state, to: disk, ranks: {ranks}, mode: {mode}}}")
    export = export_of(KINDS["local"], edited(disk, checkpoint, text=without_sharing()))
    trace = simulate(export.plan, export.costs, export.delays)
    for rank, ends in enumerate(replay(export)):
        stores = [node for node in nodes_of(export, rank) if node.type == NodeType.MEM_STORE]
        assert len(stores) == (3 if rank == 0 or ranks == "all" else 0)
        assert all(ends[node.id] == pytest.approx(trace.end_s[node.id - 1, rank]) for node in stores)


def test_loads_of_a_data_set_last_as_long_as_their_own_files():
    text = edited(
        ("  fabric: ideal", f"  fabric: ideal\n  {STORAGE}"),
        (
            "steps: 12",
            "input: {source: storage, data: {samples: 1024, file_size: {median: 100 kB, sigma: 0.5}}}\nsteps: 4",
        ),
    )
    export = export_of("{kind: sync}", text)
    cost = next(cost for cost in export.costs.of.values() if isinstance(cost, Varying))
    for rank in (0, 5):
        loads = [node for node in nodes_of(export, rank) if node.type == NodeType.MEM_LOAD]
        assert len(loads) == 4
        for number, node in enumerate(loads):
            transfer = cost.transfers(number)[rank]
            assert find(node, "simdist_duration_s") == transfer.alone_s(export.costs.capacity_Bps) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_reach_the_collectives_of_a_group_in_the_same_order(kind):
    export = export_of(KINDS[kind])
    orders = defaultdict(set)
    for rank in range(8):
        by_group = defaultdict(list)
        for node in nodes_of(export, rank):
            if node.type == NodeType.COMM_COLL:
                by_group[find(node, "pg_name")].append((node.id, find(node, "comm_type"), find(node, "comm_size")))
        for group, order in by_group.items():
            orders[group].add(tuple(order))
    assert orders
    assert all(len(found) == 1 for found in orders.values())


def test_nodes_depend_on_nodes_before_them_only_and_never_twice():
    for node_ids, node in ids_before(export_of(KINDS["hierarchical"]), rank=3):
        assert set(node.data_deps) <= node_ids
        assert len(set(node.data_deps)) == len(node.data_deps) <= 4


def ids_before(export: Export, rank: int):
    seen: set[int] = set()
    for node in nodes_of(export, rank):
        yield seen, node
        seen.add(node.id)


def test_a_step_of_sync_is_forward_backward_all_reduce_optimizer():
    export = export_of("{kind: sync}", edited(("probability: 10%", "probability: 100%")), n_steps=1)
    nodes = nodes_of(export, 5)
    assert [(node.id, node.type, tuple(node.data_deps), node.duration_micros) for node in nodes] == [
        (1, NodeType.COMP, (), 20000),
        (3, NodeType.COMP, (1,), 50000),  # the delay of the host, which waited for the loss
        (4, NodeType.COMP, (1, 3), 40000),
        (5, NodeType.COMM_COLL, (4,), nodes[3].duration_micros),
        (6, NodeType.COMP, (4, 5), nodes[4].duration_micros),
    ]
    assert [attributes(node)["is_cpu_op"] for node in nodes] == [False, True, False, False, False]
    all_reduce = attributes(nodes[3])
    assert [all_reduce[name] for name in ("comm_type", "comm_size", "pg_name")] == [0, 404000, "0"]
    kinds = {attribute.name: attribute.WhichOneof("value").removesuffix("_val") for attribute in nodes[3].attr}
    assert (kinds["comm_size"], kinds["comm_type"], kinds["pg_name"]) == ("int64", "int64", "string")


def test_delays_of_nothing_and_waits_have_no_nodes():
    names = [node.name for node in nodes_of(export_of("{kind: sync}", edited(("10%", "0%")), n_steps=2), 0)]
    assert [name.partition("(")[0] for name in names] == ["forward", "backward", "all_reduce", "optimize"] * 2


def test_durations_of_slow_devices_are_their_own():
    text = edited(("  gpus_per_node: 4", "  gpus_per_node: 4\n  slow_devices: [{ranks: [6], speed: 0.5}]"))
    export = export_of("{kind: sync}", text, n_steps=1)
    assert [nodes_of(export, rank)[0].duration_micros for rank in (5, 6)] == [20000, 40000]


def test_flops_of_a_batch_stand_at_forward_and_backward():
    text = edited(("{name: weight, count: 100000}", "{name: weight, count: 100000, flops: 1000}"))
    nodes = nodes_of(export_of("{kind: sync}", text, n_steps=1), 0)
    assert [find(node, "num_ops") for node in nodes] == [32_000, 64_000, None, None]
    assert find(nodes[0], "tensor_size") == 4 * 101_000 + 4 + 4


def test_an_all_gather_states_the_part_of_one_rank_and_a_reduce_scatter_the_whole():
    found = {}
    for kind in ("torus", "sparse"):
        for node in nodes_of(export_of(KINDS[kind], n_steps=1), 0):
            if node.type == NodeType.COMM_COLL:
                found.setdefault((kind, find(node, "comm_type")), find(node, "comm_size"))
    assert found["torus", 7] == 404_000
    assert found["torus", 2] == found["torus", 0] == 404_000 // 4
    (k,) = {op.k for body in export_of(KINDS["sparse"]).plan.bodies for op in body if isinstance(op, Select)}
    assert found["sparse", 2] == 8 * k  # values and indices


def test_every_group_has_a_number_of_its_own():
    groups = ProcessGroups.of(export_of(KINDS["torus"]).plan)
    document = groups.document()
    assert document == {
        "1": [0, 1, 2, 3],
        "2": [4, 5, 6, 7],
        "3": [0, 4],
        "4": [1, 5],
        "5": [2, 6],
        "6": [3, 7],
    }
    for group in (Group(4), Group(2, stride=4)):
        assert all(rank in document[groups.name(group, rank)] for rank in range(8))
    assert groups.name(Group(8), 3) == "0"


def test_a_broadcast_names_its_root_and_is_warned_of():
    op = Broadcast("param", Group(2, stride=2), root=1)
    plan = Plan.from_steps("p", world_size=4, buffers=(Buffer("param", 10), Buffer("loss", 1)), steps=[(op,)])
    scenario = scenario_of("{kind: sync}")
    node = NodeTemplates(plan, scenario.workload, ProcessGroups.of(plan)).make(op, rank=1)
    assert find(node, "simdist_root") == 3
    assert cautions(plan) == ["it has reduce or broadcast, which some simulators refuse or take for free"]


def test_the_head_tells_version_plan_and_digest():
    export = export_of("{kind: sync}")
    head = next(export.messages(3))
    assert head.version == "0.0.4"
    told = attributes(head)
    assert told["simdist_digest"] == export.plan.digest()
    assert (told["simdist_plan"], told["simdist_rank"], told["simdist_world_size"]) == ("sync", 3, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_estimated_within_a_factor_of_two(tmp_path, kind):
    export = export_of(KINDS[kind])
    nbytes = chakra_write(export, tmp_path, "job", force=False)
    assert nbytes == sum(file.stat().st_size for file in tmp_path.glob("*.et"))
    assert nbytes / 2 < export.nbytes < nbytes * 2


def test_an_export_of_many_gigabytes_is_refused_with_the_steps_that_fit():
    scenario = scenario_of("{kind: sync}", edited(("nodes: 2", "nodes: 200"), ("steps: 12", "steps: 10000")))
    built = build(scenario, scenario.schedules[0])

    def of_steps(n_steps: int) -> Export:
        return Export(built.plan, built.costs, scenario.workload, {}, n_steps)

    with pytest.raises(PlanError, match=r"10,000 steps of 800 ranks would take about \d.* GB") as error:
        refuse_size(of_steps(10_000))
    fitting = int(str(error.value).partition("--steps ")[2].partition(" ")[0])
    assert 0.9 * MAX_EXPORT_NBYTES < of_steps(fitting).nbytes <= MAX_EXPORT_NBYTES
    refuse_size(of_steps(fitting))


def exported(capsys, tmp_path, *args, text: str = SMALL) -> Answer:
    return call(capsys, "plan", write(tmp_path / "s.yaml", text), "--chakra", tmp_path / "out", *args)


def test_the_command_writes_a_trace_for_every_rank_and_the_groups(capsys, tmp_path):
    answer = exported(capsys, tmp_path, "--schedule", "sync", "--steps", "3", "--json")
    assert answer.code == 0, answer.err
    (found,) = json.loads(answer.out)["exports"]
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == [*(f"sync.{rank}.et" for rank in range(8)), "sync.json"]
    assert found["size"] == sum(file.stat().st_size for file in files[:-1])
    assert json.loads(files[-1].read_text()) == {}
    assert {find(node, "simdist_step") for node in list(read_trace(files[2]))[1:]} == {0, 1, 2}


def test_a_run_is_exported_with_its_own_delays(capsys, tmp_path):
    call(capsys, "plan", write(tmp_path / "s.yaml"), "--schedule", "sync", "-o", tmp_path / "run")
    answer = call(capsys, "plan", tmp_path / "run", "--chakra", tmp_path / "out")
    assert answer.code == 0, answer.err
    drawn = run_directory.read(tmp_path / "run").delays["host"]
    for rank in range(8):
        nodes = list(read_trace(tmp_path / "out" / f"sync.{rank}.et"))[1:]
        delayed = {
            find(node, "simdist_step"): node.duration_micros for node in nodes if find(node, "simdist_op") == "delay"
        }
        assert delayed == {step: 50000 for step in range(12) if drawn[0, step, rank]}


def recorded(folder, *, keys: str = "") -> str:
    """Return a scenario whose delays are recorded: rank 3 is late by more from step to step."""
    late_s = np.zeros((12, 8))
    late_s[:, 3] = 1e-3 * np.arange(1, 13)
    np.savetxt(folder / "late.csv", late_s, delimiter=",")
    played = f"- {{kind: recorded, file: late.csv{keys}}}"
    return edited(("- {kind: transient, probability: 10%, delay: 50 ms}", played))


def delays_ms(folder) -> list[float]:
    nodes = list(read_trace(folder / "sync.3.et"))[1:]
    return [node.duration_micros / 1e3 for node in nodes if find(node, "simdist_op") == "delay"]


def test_recorded_delays_are_exported_as_recorded(capsys, tmp_path):
    answer = exported(capsys, tmp_path, "--schedule", "sync", text=recorded(tmp_path))
    assert (answer.code, "draws them" in answer.err) == (0, False), answer.err
    assert delays_ms(tmp_path / "out") == list(range(1, 13))


def test_resampled_delays_are_exported_with_a_note_on_their_seed(capsys, tmp_path):
    answer = exported(capsys, tmp_path, "--schedule", "sync", text=recorded(tmp_path, keys=", resample_steps: 2"))
    assert answer.code == 0
    assert "written as seed 1 draws them, in blocks of 2 steps" in answer.err
    assert delays_ms(tmp_path / "out") != list(range(1, 13))


def test_equal_scenarios_give_equal_bytes(capsys, tmp_path):
    exported(capsys, tmp_path, "--schedule", "sync")
    first = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    exported(capsys, tmp_path, "--schedule", "sync", "--force")
    assert first == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


def test_traces_that_are_there_are_replaced_with_force_only_and_leave_no_rank_behind(capsys, tmp_path):
    exported(capsys, tmp_path, "--schedule", "sync")
    smaller = edited(("nodes: 2", "nodes: 1"), ("2: 4", "2: 2"))
    answer = exported(capsys, tmp_path, "--schedule", "sync", text=smaller)
    assert answer.code == 2
    assert "sync.0.et: is there already, with 8 more; choose another folder with --chakra" in answer.err
    assert exported(capsys, tmp_path, "--schedule", "sync", "--force", text=smaller).code == 0
    assert len(list((tmp_path / "out").glob("*.et"))) == 4


def test_more_steps_than_there_are_and_an_unknown_label_are_refused(capsys, tmp_path):
    answer = exported(capsys, tmp_path, "--steps", "13")
    assert (answer.code, "--steps 13 are more than its 12 steps" in answer.err) == (2, True)
    answer = exported(capsys, tmp_path, "--schedule", "snyc")
    assert (answer.code, "no schedule is labelled 'snyc'" in answer.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_told(capsys, tmp_path):
    (tmp_path / "out").write_text("a file")
    answer = exported(capsys, tmp_path)
    assert (answer.code, "cannot be written: File exists" in answer.err) == (1, True)


def test_what_consumers_do_not_see_is_warned_of(capsys, tmp_path):
    text = edited(
        ("  fabric: ideal", f"  fabric: ideal\n  {STORAGE}"), ("steps: 12", "steps: 12\ninput: {source: storage}")
    )
    answer = exported(capsys, tmp_path, "--schedule", "sync", text=text)
    assert "warning: sync: loads and saves are memory nodes: simulators need a model of remote memory" in answer.err
