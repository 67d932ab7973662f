"""Traces of data-parallel training become a scenario that takes as long; other traces are refused with the node's name.

The nodes of `pytorch` are like those of the converter of mlc-chakra 1.0.0 for PyTorch: its output for a trace of this
shape was imported with the same result.
"""

import gzip
import json
import random
from pathlib import Path

import pytest
from chakra_messages import Attribute, head, node, replaced
from commandline import Answer, call, edited, write
from messages import assert_message

from simdist.chakra.files import NodeType, read_trace, write_trace
from simdist.chakra.importing import import_traces
from simdist.chakra.rank_traces import Rhythm, find_rhythm
from simdist.errors import UnsupportedError
from simdist.runs.building import simulate
from simdist.scenario import load, loads

ROUNDING_S = 12 * 4 * 0.5e-9  # 12 steps of 4 computations, each to the nanosecond
CLEAN = edited(
    ("probability: 10%", "probability: 0%"),
    ("{kind: transient", "{kind: transient, on: compute"),
    ("forward: 20 ms", "forward: 20.0001234567 ms"),  # no whole microseconds
)
CLUSTER = """\
nodes: 2
gpus_per_node: 4
fabric: ideal
network: {latency: 25 us, bandwidth: 25 Gbit/s}
"""


def export(capsys, tmp_path, schedule: str = "- kind: sync", text: str = CLEAN) -> Path:
    """Export one schedule of a scenario; return the folder of its traces."""
    head, _, _ = text.partition("schedules:")
    scenario = write(tmp_path / "original.yaml", f"{head}schedules:\n  {schedule}\n")
    answer = call(capsys, "chakra", "export", scenario, "-o", tmp_path / "traces")
    assert answer.code == 0, answer.err
    return tmp_path / "traces"


def imported(capsys, tmp_path, *names, cluster: str = CLUSTER, args: tuple[str, ...] = ()) -> Answer:
    machines = write(tmp_path / "cluster.yaml", cluster)
    output = tmp_path / "imported.yaml"
    return call(capsys, "chakra", "import", *names, "-o", output, "--cluster", machines, "--force", *args)


def traced(path: Path, change) -> None:
    """Write a trace again with its head and nodes changed; None leaves a message out."""
    messages = [change(message) for message in read_trace(path)]
    with path.open("wb") as file:
        write_trace(file, [message for message in messages if message is not None])


def without_own(message):
    """Take away what only simdist writes, so that a trace looks like any other, in whole microseconds."""
    return replaced(message, attr=[each for each in message.attr if not each.name.startswith("simdist")])


@pytest.mark.parametrize(
    "schedule",
    ["- kind: sync", "- {kind: sync, bucket_size: 1 kB, first_bucket_size: 1 kB}", "- {kind: sync, compression: fp16}"],
)
def test_an_exported_job_takes_as_long_when_it_is_imported(capsys, tmp_path, schedule):
    folder = export(capsys, tmp_path, schedule)
    answer = imported(capsys, tmp_path, folder)
    assert answer.code == 0, answer.err
    original, back = load(tmp_path / "original.yaml"), load(tmp_path / "imported.yaml")
    assert back.steps == original.steps == 12
    assert simulate(back).makespan_s == pytest.approx(simulate(original).makespan_s, abs=ROUNDING_S)


def test_a_trace_without_own_attributes_is_right_to_the_microseconds_of_its_nodes(capsys, tmp_path):
    folder = export(capsys, tmp_path, "- {kind: sync, bucket_size: 1 kB, first_bucket_size: 1 kB}")
    for path in folder.glob("*.et"):
        traced(path, without_own)
    answer = imported(capsys, tmp_path, folder)
    assert answer.code == 0, answer.err
    assert "note: steps are not marked; all-reduces repeat as 12 steps of 2 all-reduces" in answer.err
    original, back = load(tmp_path / "original.yaml"), load(tmp_path / "imported.yaml")
    rounding_s = 12 * 4 * 0.5e-6  # 12 steps of 4 computations
    assert abs(simulate(back).makespan_s - simulate(original).makespan_s) <= rounding_s


def test_times_of_phases_and_buckets_are_those_of_the_workload(capsys, tmp_path):
    answer = imported(capsys, tmp_path, export(capsys, tmp_path, "- {kind: sync, bucket_size: 1 kB}"), args=("--json",))
    found = json.loads(answer.out)
    assert (found["world_size"], found["traces"], found["steps"]) == (8, 8, 12)
    assert found["forward_s"] == pytest.approx(0.0200001234567, rel=1e-12)
    assert found["backward_s"] == pytest.approx(0.0400002469134, rel=1e-12)
    assert [bucket["count"] for bucket in found["buckets"]] == [101_000]


def test_the_scenario_states_times_in_whole_nanoseconds_that_add_up(capsys, tmp_path):
    answer = imported(capsys, tmp_path, export(capsys, tmp_path, "- {kind: sync, bucket_size: 1 kB}"))
    assert answer.code == 0, answer.err
    workload = load(tmp_path / "imported.yaml").workload
    assert workload.forward_s == 0.020000123
    assert sum(tensor.backward_s for tensor in workload.tensors) == pytest.approx(0.040000247, abs=1e-15)


def pytorch(rank: int, *, n_steps: int = 3, named: bool = True, sizes=(4000, 24000), broadcasts: int = 0) -> list:
    """Return nodes as the converter for PyTorch writes them: host operations, and the kernels that they launch.

    Kernels have ids far behind those of the host, and those of communication stand where they ran.
    """
    nodes = []

    def host(name: str, parent: int | None = None) -> int:
        deps = () if parent is None else (parent,)
        cpu = ("is_cpu_op", "bool", True)
        nodes.append(node(2 + len(nodes), name, NodeType.COMP, cpu, ctrl_deps=deps, duration_micros=3))
        return nodes[-1].id

    def kernel(name: str, parent: int, micros: int, *attributes: Attribute) -> None:
        kind = NodeType.COMM_COLL if attributes else NodeType.COMP
        told = (("is_cpu_op", "bool", False), *attributes)
        late = 100_000 - 1000 * len(attributes) + len(nodes)  # collectives have smaller ids than what ran before them
        nodes.append(node(late, name, kind, *told, ctrl_deps=(parent,), duration_micros=micros))

    groups = json.dumps([{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}])
    nodes.append(node(1, "## process_group:init ##", NodeType.METADATA, inputs={"values": f"[{groups!r}]"}))
    for _ in range(n_steps):
        for _ in range(broadcasts):
            of_buffers = host("c10d::broadcast_")
            kernel("ncclDevKernel_Broadcast", of_buffers, 5, *collective(5, 64))
        kernel("sgemm", host("aten::addmm"), 4000)
        kernel("loss", host("aten::cross_entropy"), 100)
        for micros, nbytes in zip((3000, 5000), sizes, strict=True):
            backward = host("autograd::engine::evaluate_function: AddmmBackward0" if named else "engine")
            kernel("sgemm", host("aten::mm", backward), micros)
            kernel("ncclDevKernel_AllReduce", host("c10d::allreduce_", backward), 9000 + rank, *collective(0, nbytes))
        update = host("Optimizer.step#SGD.step" if named else "step")
        kernel("multi_tensor", host("aten::_foreach_add_", update), 700)
    return nodes


def collective(kind: int, nbytes: int, group: str = "0") -> tuple[Attribute, ...]:
    return (
        ("comm_type", "int64", kind),
        ("comm_size", "int64", nbytes),
        ("pg_name", "string", group),
    )


def written(folder: Path, *ranks: list, prefix: str = "job") -> Path:
    folder.mkdir(exist_ok=True)
    for rank, nodes in enumerate(ranks):
        with (folder / f"{prefix}.{rank}.et").open("wb") as file:
            write_trace(file, [head("0.0.4"), *nodes])
    return folder


def read(folder: Path, **kwargs):
    return import_traces(sorted(folder.glob("*.et*")), **kwargs)


def test_a_converted_trace_of_pytorch_is_cut_by_the_names_of_what_launched_its_kernels(tmp_path):
    job = read(written(tmp_path / "job", pytorch(0), pytorch(1)))
    assert (job.world_size, job.n_steps, job.n_traces) == (2, 3, 2)
    workload = job.workload
    assert (workload.forward_s, workload.optimize_s) == pytest.approx((4100e-6, 700e-6))
    assert [(tensor.count, tensor.backward_s) for tensor in workload.tensors] == [
        (6000, pytest.approx(5000e-6)),
        (1000, pytest.approx(3000e-6)),
    ]


def with_host_collectives(nodes: list) -> list:
    """Make collectives of the host's calls of them, as the converter does: without comm_type."""
    return [replaced(each, type=NodeType.COMM_COLL) if each.name.startswith("c10d::") else each for each in nodes]


def test_collectives_of_the_host_without_a_type_are_its_work(tmp_path):
    job = read(written(tmp_path / "job", pytorch(0, broadcasts=1), pytorch(1, broadcasts=1)))
    converted = [with_host_collectives(pytorch(rank, broadcasts=1)) for rank in range(2)]
    assert read(written(tmp_path / "converted", *converted)) == job


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_nodes_in_a_file_does_not_matter(tmp_path, seed):
    nodes = pytorch(0, named=bool(seed))
    mixed = random.Random(seed).sample(nodes, len(nodes))
    assert read(written(tmp_path / "mixed", mixed)) == read(written(tmp_path / "job", nodes))


def test_hosts_that_are_called_from_themselves_or_from_each_other_are_read(tmp_path):
    nodes = pytorch(0)
    hosts = [each for each in nodes if each.type == NodeType.COMP and not each.ctrl_deps]
    called = {hosts[0].id: hosts[1].id, hosts[1].id: hosts[0].id}
    circular = [replaced(each, ctrl_deps=[called.get(each.id, each.id)]) if each in hosts else each for each in nodes]
    assert read(written(tmp_path / "circular", circular)) == read(written(tmp_path / "job", nodes))


def test_without_names_the_end_of_the_trace_tells_the_optimizer(tmp_path):
    job = read(written(tmp_path / "job", pytorch(0, named=False)))
    assert (job.workload.forward_s, job.workload.optimize_s) == pytest.approx((7100e-6, 700e-6))
    assert [tensor.backward_s for tensor in job.workload.tensors] == pytest.approx([5000e-6, 0.0])
    assert any("names tell no phases" in note for note in job.notes)


def test_broadcasts_are_left_out_and_told(tmp_path):
    job = read(written(tmp_path / "job", pytorch(0, broadcasts=2), pytorch(1, broadcasts=2)))
    assert "left out: 12 broadcasts and barriers" in job.notes
    assert job.workload.forward_s == pytest.approx(4100e-6)


def test_missing_ranks_are_told(tmp_path):
    job = read(written(tmp_path / "job", pytorch(0)))
    assert job.world_size == 2
    assert "there are traces of 1 of 2 ranks; the others count as these" in job.notes


def test_a_slow_rank_is_told_by_how_much(tmp_path):
    usual = [replaced(each, inputs=None) for each in pytorch(0)]
    slow = [replaced(each, duration_micros=2 * each.duration_micros) for each in usual]
    job = read(written(tmp_path / "job", usual, slow, usual))
    assert any("count as the others: 1 by 100%; cluster.slow_devices" in note for note in job.notes)


def test_delays_of_an_export_are_left_out_and_told(capsys, tmp_path):
    answer = imported(
        capsys, tmp_path, export(capsys, tmp_path, text=CLEAN.replace("probability: 0%", "probability: 10%"))
    )
    assert answer.code == 0
    assert "delays" in answer.err
    clean = loads(CLEAN.partition("schedules:")[0] + "schedules: [{kind: sync}]")
    back = load(tmp_path / "imported.yaml")
    assert simulate(back).makespan_s == pytest.approx(simulate(clean).makespan_s, abs=ROUNDING_S)


@pytest.mark.parametrize(
    ("sizes", "n_steps", "rhythm"),
    [
        ([1, 2, 1, 2], None, Rhythm(0, 2, 2)),
        ([1, 2, 3], None, Rhythm(0, 3, 1)),
        ([5, 5, 5, 5], None, Rhythm(0, 1, 4)),
        ([5, 5, 5, 5], 2, Rhythm(0, 2, 2)),
        ([9, 1, 1, 2, 1, 1, 2, 1, 1, 2], None, Rhythm(1, 3, 3)),
        ([7, 1, 2, 1, 2, 1, 2], None, Rhythm(1, 2, 3)),
        ([1, 2, 3], 2, None),
    ],
)
def test_steps_are_found_where_all_reduces_repeat(sizes, n_steps, rhythm):
    assert find_rhythm(sizes, n_steps) == rhythm


def test_a_first_step_with_other_buckets_is_left_out(tmp_path):
    first = pytorch(0, n_steps=1, sizes=(20000, 8000))
    later = [
        replaced(each, id=each.id + 1_000_000, ctrl_deps=[dep + 1_000_000 for dep in each.ctrl_deps])
        for each in pytorch(0)
    ]
    job = read(written(tmp_path / "job", first + later))
    assert job.n_steps == 3
    assert job.workload.forward_s == pytest.approx(4100e-6)
    assert "the first step has other all-reduces than those after it and was left out" in job.notes


def test_steps_that_are_stated_are_taken_and_checked(tmp_path):
    folder = written(tmp_path / "job", pytorch(0, sizes=(4000, 4000)))
    assert (read(folder).n_steps, read(folder, n_steps=3).n_steps) == (6, 3)
    with pytest.raises(UnsupportedError, match=r"6 all-reduces are not 4 equal steps: --steps takes 1, 2, 3, 6"):
        read(folder, n_steps=4)


def changed(nodes: list, index: int, *attributes: Attribute, **fields) -> list:
    """Change one node, of all-reduces the index-th: its attributes, or other fields."""
    places = [place for place, each in enumerate(nodes) if each.type == NodeType.COMM_COLL]
    new = replaced(nodes[places[index]], *attributes, keep=bool(fields), **fields)
    return [new if place == places[index] else each for place, each in enumerate(nodes)]


REFUSED = {
    "sends": (changed(pytorch(0), 1, type=NodeType.COMM_SEND), "'ncclDevKernel_AllReduce' sends to one rank"),
    "receives": (changed(pytorch(0), 1, type=NodeType.COMM_RECV), "receives from one rank"),
    "all-to-all": (changed(pytorch(0), 0, *collective(6, 8)), "is of kind all-to-all"),
    "reduce-scatter": (changed(pytorch(0), 0, *collective(7, 8)), "is of kind reduce-scatter"),
    "unknown kind": (changed(pytorch(0), 0, *collective(77, 8)), "is of comm_type 77"),
    "no kind": (changed(pytorch(0), 0), "is of comm_type None"),
    "no size": (changed(pytorch(0), 0, *collective(0, 8)[:1]), "comm_size is None; it is the bytes"),
    "size 0": (changed(pytorch(0), 0, *collective(0, 0)), "comm_size is 0; it is the bytes"),
    "another size": (changed(pytorch(0), 3, *collective(0, 8)), "all-reduce 3 of its rank, of 8 bytes; that"),
    "fewer": (pytorch(0, n_steps=2), "has 4 all-reduces; "),
    "none": ([each for each in pytorch(0) if each.type == NodeType.COMP], "has no all-reduce among 45 nodes"),
    "infinite": (
        [node(1, "x", NodeType.COMP, ("simdist_duration_s", "double", float("inf")))],
        "node 1 'x': simdist_duration_s is inf; it is seconds, from 0 to 1e+06",
    ),
}


ONLY_COLLECTIVES = [each for each in pytorch(0) if each.type == NodeType.COMM_COLL]
COMPUTE = next(place for place, each in enumerate(pytorch(0)) if each.name == "sgemm")
NO_JOB = {
    "all-reduces": ONLY_COLLECTIVES,
    "all-gathers": [replaced(each, *collective(2, 8), keep=False) for each in ONLY_COLLECTIVES],
    "sends": [replaced(each, type=NodeType.COMM_SEND) for each in ONLY_COLLECTIVES],
    "computing without durations": [replaced(each, duration_micros=0) for each in pytorch(0)],
    "host alone": [each for each in with_host_collectives(pytorch(0)) if each.name != "ncclDevKernel_AllReduce"],
    "no is_cpu_op": [*pytorch(0)[:COMPUTE], replaced(pytorch(0)[COMPUTE], keep=False), *pytorch(0)[COMPUTE + 1 :]],
}


@pytest.mark.parametrize("case", NO_JOB)
def test_what_is_no_job_is_refused_with_one_error(capsys, tmp_path, case):
    answer = imported(capsys, tmp_path, written(tmp_path / "job", NO_JOB[case]))
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert_message(f"chakra: {case}", answer.err, tmp_path)


@pytest.mark.parametrize("name", ["host", "host/pytorch_et"])
def test_a_folder_of_json_is_told_what_it_holds(capsys, tmp_path, name):
    (tmp_path / "host").mkdir()
    for rank in range(2):
        write(tmp_path / "host" / f"pytorch_et.{rank}.json", '{"schema": "1.0.1", "nodes": []}')
    answer = imported(capsys, tmp_path, tmp_path / name)
    said = f"error: {tmp_path}/host/pytorch_et.0.json: is JSON, no Chakra trace: import .et files"
    assert answer.err.startswith(said)
    assert (answer.code, answer.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(("nodes", "problem"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_data_parallel_training_is_refused_with_its_node(capsys, tmp_path, nodes, problem):
    folder = written(tmp_path / "job", pytorch(0), nodes)
    answer = imported(capsys, tmp_path, folder)
    assert answer.code == 2
    assert answer.err.startswith(f"error: {folder}/job.1.et")
    assert problem in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "imported.yaml").exists()


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("- {kind: local_sgd, period: 4}", "all-reduces of 404,000 bytes in step"),
        ("- {kind: hierarchical_sgd, levels: {1: 4, 4: world}}", "is over process group '1', 4 of 8 ranks"),
        ("- {kind: torus}", "is of kind reduce-scatter"),
    ],
)
def test_other_schedules_are_refused(capsys, tmp_path, schedule, problem):
    answer = imported(capsys, tmp_path, export(capsys, tmp_path, schedule))
    assert (answer.code, problem in answer.err) == (2, True), answer.err


def test_files_prefix_and_folder_name_the_same_traces_also_compressed(capsys, tmp_path):
    folder = written(tmp_path / "job", pytorch(0), pytorch(1))
    packed = folder / "job.1.et.gz"
    packed.write_bytes(gzip.compress((folder / "job.1.et").read_bytes()))
    (folder / "job.1.et").unlink()
    texts = set()
    for names in ([folder], [folder / "job"], [folder / "job.0.et", packed]):
        answer = imported(capsys, tmp_path, *names, cluster=CLUSTER.replace("nodes: 2", "nodes: 1"))
        assert answer.code == 0, answer.err
        texts.add((tmp_path / "imported.yaml").read_text())
    assert len(texts) == 1


def mixed_up(folder: Path) -> dict[str, tuple[list[Path], str]]:
    """Return names to import, and what is wrong with them."""
    written(folder, pytorch(0), pytorch(1))
    other = written(folder / "other", pytorch(0), prefix="a")
    written(other, pytorch(0), prefix="b")
    empty = folder / "empty"
    empty.mkdir()
    beside = written(folder / "beside", pytorch(0))
    (beside / "job.json").write_text('{"1": "all"}')
    damaged = written(folder / "damaged", pytorch(0))
    (damaged / "job.json").write_text("{")
    return {
        "none": ([folder / "nothing"], "there are no Chakra traces: write a folder, PREFIX for the files PREFIX.0.et"),
        "empty": ([empty], "there are no Chakra traces"),
        "two jobs": ([other], f"holds traces of several jobs; name one of {other}/a, {other}/b"),
        "twice": ([folder / "job.0.et", other / "a.0.et"], "is of rank 0, and so is "),
        "groups": ([beside], "job.json: cannot be read as process groups"),
        "no json": ([damaged], "job.json: cannot be read as process groups"),
    }


@pytest.mark.parametrize("case", ["none", "empty", "two jobs", "twice", "groups", "no json"])
def test_mixed_up_files_are_refused(capsys, tmp_path, case):
    names, problem = mixed_up(tmp_path / "job")[case]
    answer = imported(capsys, tmp_path, *names)
    assert (answer.code, problem in answer.err, answer.err.count("\n")) == (2, True, 1), answer.err


def test_traces_of_jobs_of_different_sizes_are_refused(capsys, tmp_path):
    folder = export(capsys, tmp_path)
    moved = (folder / "sync.1.et").rename(tmp_path / "sync.1.et")
    smaller = CLEAN.replace("nodes: 2", "nodes: 1").replace("2: 4", "2: 2")
    for path in folder.iterdir():
        path.unlink()
    export(capsys, tmp_path, text=smaller)
    answer = imported(capsys, tmp_path, folder / "sync.0.et", moved)
    assert (answer.code, "is of a job of 8 ranks, the traces before it of one of 4" in answer.err) == (2, True)


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [("dgx-a100x", "there is no such file, nor a preset of that name: "), ("", "is empty, not a cluster")],
)
def test_a_wrong_cluster_is_told(capsys, tmp_path, cluster, problem):
    folder = written(tmp_path / "job", pytorch(0), pytorch(1))
    name = cluster or write(tmp_path / "empty.yaml", "")
    answer = call(capsys, "chakra", "import", folder, "-o", tmp_path / "out.yaml", "--cluster", name)
    assert (answer.code, problem in answer.err) == (2, True), answer.err


def test_ranks_that_do_not_fill_nodes_are_told(capsys, tmp_path):
    alone = [replaced(each, inputs=None) for each in pytorch(0)]
    answer = imported(capsys, tmp_path, written(tmp_path / "job", *[alone] * 6))
    assert (answer.code, "6 ranks do not fill nodes of 4 GPUs" in answer.err) == (2, True), answer.err


def test_a_file_that_is_there_is_kept_without_force(capsys, tmp_path):
    folder = written(tmp_path / "job", pytorch(0), pytorch(1))
    output = write(tmp_path / "mine.yaml", "mine")
    answer = call(capsys, "chakra", "import", folder, "-o", output, "--cluster", "dgx-a100")
    assert (answer.code, "is there already" in answer.err, output.read_text()) == (2, True, "mine")


def test_the_scenario_says_in_comments_what_the_traces_do_not_tell(capsys, tmp_path):
    imported(capsys, tmp_path, written(tmp_path / "job", pytorch(0), pytorch(1)))
    lines = (tmp_path / "imported.yaml").read_text().splitlines()
    assert lines[0] == "# Imported from Chakra execution traces."
    assert "# Note: batch_size is not told: it is 1." in lines
