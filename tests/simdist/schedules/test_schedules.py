"""Conditions on every schedule (the conformance suite), and the plan of each, as text and step by step."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from covers import cover
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import simdist.schedules
from simdist.errors import PlanError
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Backward,
    Body,
    Broadcast,
    Copy,
    Dataset,
    Delay,
    Forward,
    Load,
    Optimize,
    Plan,
    ReduceScatter,
    Save,
    StageIn,
    TrustRatios,
    Wait,
    algorithms,
    dumps,
    loads,
    plan_text,
)
from simdist.plan.check import check
from simdist.plan.group import Group
from simdist.plan.ops import lane_of
from simdist.plan.walk import walk
from simdist.proof import prove
from simdist.schedules import GradientSchedule, InputPath, Job, Schedule, kinds
from simdist.schedules.job import POLICIES, Checkpoint, Policy, Shape, levels
from simdist.schedules.local_sgd import LocalSGD
from simdist.schedules.parts import gradient_buckets
from simdist.schedules.sharded import ShardedSchedule
from simdist.testing import check_schedule

GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "golden"
SCHEDULES = [cls(**example) for cls in kinds().values() for example in cls.examples]
FILES = Dataset(n_samples=330, batch_size=4, ranks_per_node=4, sample_nbytes=16, file_nbytes=(5,))  # 10 steps an epoch
PATHS = [
    InputPath("device"),
    InputPath("memory", "pinned"),
    InputPath("memory", "pageable"),
    *(InputPath("storage", copy, prefetch) for copy in ("pinned", "pageable") for prefetch in (1, 2, 3)),
]
DATA_PATHS = [InputPath("storage", "pinned", 2, FILES, policy) for policy in POLICIES]
RUN_AHEAD_STEPS = [0, 1, 3, None]
FIRST_DIGESTS = {
    "gtopk": "7bbe1a07a0a7452a",
    "hierarchical_sgd": "4df6431d21bb4237",
    "hitopk": "a3505508f66ed3bf",
    "local_sgd": "269439ba2cac2c53",
    "naive_ag": "3a40536b7a2d15e1",
    "parameter_server": "083ba3abc023d749",
    "sync": "5fe0faeaa0a7618e",
    "torus": "e6d30c3b620d2780",
}
JOB = Job(
    world_size=8,
    ranks_per_node=4,
    n_steps=25,
    tensor_counts=(300_000, 300_000, 8, 500),
    tensor_rows=(500, 100, 8, 20),
    batch_nbytes=64,
    delay_channels=frozenset({"host", "compute", "io"}),
)


def schedule_id(schedule: Schedule) -> str:
    return f"{schedule.name}-{SCHEDULES.index(schedule)}"


def shares_update(schedule: Schedule) -> bool:
    return isinstance(schedule, GradientSchedule) and bool(schedule.shared_update)


def path_id(path: InputPath) -> str:
    return f"{path.source}-{path.copy}-{path.prefetch}" + (f"-{path.policy}" if path.dataset else "")


def checkpoint_id(checkpoint: Checkpoint | None) -> str:
    return f"saves-{checkpoint.every}" if checkpoint else "saves-never"


every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_id)
every_path = pytest.mark.parametrize("path", PATHS, ids=path_id)


# ---------------------------------------------------------------- conformance


@pytest.mark.parametrize("cls", kinds().values(), ids=lambda cls: cls.__name__)
def test_every_schedule_is_imported_from_the_package(cls: type[Schedule]) -> None:
    assert cls.__name__ in simdist.schedules.__all__
    assert getattr(simdist.schedules, cls.__name__) is cls


@every_schedule
def test_schedule_keeps_the_rules_that_authors_of_others_can_run(schedule: Schedule) -> None:
    check_schedule(schedule)


@cover(
    schedule=SCHEDULES,
    path=PATHS,
    run_ahead_steps=RUN_AHEAD_STEPS,
    micro_batches=[1, 3],
    checkpoint=[None, Checkpoint(3, "state", "disk", is_async=True), Checkpoint(4, "parameters", by=Group(8))],
    ids={"schedule": schedule_id, "path": path_id, "checkpoint": checkpoint_id},
)
def test_plan_is_legal_and_computes_what_the_schedule_declares(
    schedule: Schedule, path: InputPath, run_ahead_steps: int | None, micro_batches: int, checkpoint: Checkpoint | None
) -> None:
    job = dataclasses.replace(
        JOB, input_path=path, run_ahead_steps=run_ahead_steps, micro_batches=micro_batches, checkpoint=checkpoint
    )
    plan = schedule.plan(job)
    saving = [any(isinstance(op, Save) for op in plan.bodies[number]) for number in plan.body_of_steps()]
    every = checkpoint.every if checkpoint else job.n_steps + 1
    assert saving == [(step + 1) % every == 0 for step in range(job.n_steps)]
    cycle = schedule.cycle_with_checkpoints(job)
    assert len(cycle) % (checkpoint.every if checkpoint else 1) == len(cycle) % len(schedule.cycle(job)) == 0
    assert (plan.world_size, plan.n_steps) == (job.world_size, job.n_steps)
    check(plan)
    assert prove(plan, lambda step: schedule.result(step, job)) == job.world_size


@pytest.mark.parametrize(
    ("schedule", "path"),
    [  # every kind of schedule with every policy, and every example with one; the rest is for `-m full`
        pytest.param(
            schedule,
            path,
            id=f"{schedule_id(schedule)}-{path_id(path)}",
            marks=() if (example - number) % min(len(cls.examples), len(DATA_PATHS)) == 0 else pytest.mark.full,
        )
        for cls in kinds().values()
        for example, schedule in enumerate(cls(**example) for example in cls.examples)
        for number, path in enumerate(DATA_PATHS)
    ],
)
def test_plan_that_reads_a_data_set_is_legal_and_computes_the_same(schedule: Schedule, path: InputPath) -> None:
    job = dataclasses.replace(JOB, input_path=path)
    plan = schedule.plan(job)
    check(plan)
    assert prove(plan, lambda step: schedule.result(step, job)) == job.world_size
    assert len(list(plan.loads())) == job.n_steps
    assert loads(dumps(plan)).digest() == plan.digest()


@every_path
@every_schedule
def test_plan_survives_json_and_prints(schedule: Schedule, path: InputPath) -> None:
    plan = schedule.plan(dataclasses.replace(JOB, input_path=path))
    again = loads(dumps(plan))
    assert again == plan
    assert again.digest() == plan.digest()
    text = plan_text(plan)
    assert text.startswith(f"plan {schedule.name}: 8 ranks, 25 steps, ")
    assert all(0 < len(line) <= 200 for line in text.splitlines())


def test_digests_of_plans_without_a_data_set_are_what_they_were_before_there_were_any() -> None:
    digests = {
        kind: cls(**cls.examples[0]).plan(dataclasses.replace(JOB, input_path=InputPath("storage"))).digest()[:16]
        for kind, cls in kinds().items()
    }
    assert digests.items() >= FIRST_DIGESTS.items()


def test_digest_tells_data_sets_and_what_is_read_of_them() -> None:
    paths = [InputPath("storage")]
    paths += [InputPath("storage", dataset=FILES, policy=policy) for policy in POLICIES]
    changes = {"seed": 1, "warm": True, "eviction": "lru", "disk_nbytes": 9, "readers": 3, "file_nbytes": (6,)}
    for name, value in changes.items():
        paths.append(InputPath("storage", dataset=dataclasses.replace(FILES, **{name: value})))
    plans = [kinds()["sync"]().plan(dataclasses.replace(JOB, input_path=path)) for path in paths]
    assert len({plan.digest() for plan in plans}) == len(paths)


def test_settings_of_a_schedule_replace_those_of_the_scenario() -> None:
    job = dataclasses.replace(JOB, input_path=InputPath("storage", dataset=FILES, policy="files"))
    plain = kinds()["sync"]().plan(job)
    own = {"policy": "datacache", "prefetch": 3, "readers": 2, "decode_workers": 5}
    schedule = kinds()["sync"](input=own)
    assert schedule.name == "sync+datacache+prefetch3+readers2+workers5"
    plan = schedule.plan(job)
    assert (plain.dataset, plan.dataset) == (FILES, dataclasses.replace(FILES, readers=2, decoders=5))
    assert [sum(buffer.name.startswith("batch.") for buffer in each.buffers) for each in (plain, plan)] == [2, 3]
    assert [next(each.loads()).keep for each in (plain, plan)] == [("disk",), ("disk", "memory")]


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_load_of_batch_k_reads_as_the_policy_says_for_its_epoch(policy: Policy, prefetch: int) -> None:
    """Batches that are read ahead belong to a later epoch than the step that they are read in."""
    path = InputPath("storage", prefetch=prefetch, dataset=FILES, policy=policy)
    plan = kinds()["sync"]().plan(dataclasses.replace(JOB, input_path=path))
    loads = list(plan.loads())
    assert [load.dst for load in loads] == [f"batch.{number % prefetch}" for number in range(25)]
    assert [(load.read, load.keep) for load in loads] == [levels(policy, number // 10) for number in range(25)]
    staged = [op for number in plan.body_of_steps() for op in plan.bodies[number] if isinstance(op, StageIn)]
    assert staged == ([StageIn(Group(4))] if policy == "staged" else [])


def test_plans_are_the_same_in_another_process() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_schedules as t; "
        "print([s.plan(t.JOB).digest() for s in t.SCHEDULES])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == str([schedule.plan(JOB).digest() for schedule in SCHEDULES])


@every_path
@every_schedule
def test_a_long_plan_folds_to_few_runs_of_few_bodies(schedule: Schedule, path: InputPath) -> None:
    plan = schedule.plan(dataclasses.replace(JOB, input_path=path, n_steps=241, run_ahead_steps=1))
    assert len(plan.order) <= 6
    assert len(plan.bodies) <= 40
    assert sum(len(run.bodies) for run in plan.order) <= 64


@pytest.mark.parametrize("ranks_per_node", [1, 3, 6])
@every_schedule
def test_buckets_that_do_not_divide_by_the_gpus_of_a_node_are_padded(schedule: Schedule, ranks_per_node: int) -> None:
    job = dataclasses.replace(
        JOB,
        world_size=6,
        ranks_per_node=ranks_per_node,
        tensor_counts=(7, 300_001, 11),
        tensor_rows=(7, 491, 11),
        n_steps=6,
    )
    if schedule.problems(Shape(6, ranks_per_node)):
        pytest.skip("it needs a power of two, or groups that divide 8 ranks")
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    gathers = any(buffer.name.startswith("unit") for buffer in plan.buffers)
    params = [buffer for buffer in plan.buffers if buffer.name.startswith("unit" if gathers else "param")]
    assert sum(buffer.count - buffer.padding for buffer in params) == 300_019
    row = 300_001 // 491 if isinstance(schedule, ShardedSchedule) else 1  # which pads rows of every tensor
    assert sum(buffer.padding for buffer in plan.buffers) < 6 * row * len(plan.buffers)


@every_schedule
def test_lars_computes_trust_ratios_once_in_every_step(schedule: Schedule) -> None:
    job = dataclasses.replace(JOB, optimizer="lars")
    if shares_update(schedule):
        with pytest.raises(PlanError, match="shared_update: LARS has trust ratios, which take norms of whole tensors"):
            schedule.plan(job)
        return
    if isinstance(schedule, ShardedSchedule) and schedule.sharers(8) > 1:
        with pytest.raises(PlanError, match="LARS takes norms of whole tensors, and ranks have slices"):
            schedule.plan(job)
        return
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    for step in steps_of(plan):
        ratios = [op for op in step if isinstance(op, TrustRatios)]
        assert [(op.dst, op.group) for op in ratios] == [("ratios", Group(1))]
        assert [op.ratios for op in step if isinstance(op, Optimize) and op.optimizer == "inner"] == ["ratios"]


@pytest.mark.parametrize(
    "schedule",
    [each for each in SCHEDULES if isinstance(each, GradientSchedule) and not each.shared_update],
    ids=schedule_id,
)
def test_parallel_optimizer_gathers_the_ratios_of_equal_shares(schedule: GradientSchedule) -> None:
    job = dataclasses.replace(JOB, optimizer="lars", tensor_counts=(5,) * 17, tensor_rows=())
    shared = schedule.model_copy(update={"parallel_optimizer": True})
    plan = shared.plan(job)
    check(plan)
    prove(plan, lambda step: shared.result(step, job))
    assert (plan.buffer("ratios.share").count, plan.buffer("ratios").count) == (3, 24)  # 17 tensors, 8 ranks
    for step in steps_of(plan):
        at = next(place for place, op in enumerate(step) if isinstance(op, TrustRatios))
        scaled = step[at]
        assert isinstance(scaled, TrustRatios)
        assert scaled.group == Group(8)
        assert step[at + 1] == AllGather("ratios.share", "ratios", Group(8))
        assert isinstance(step[at + 2], Optimize)
    with pytest.raises(PlanError, match="it shares the trust ratios of LARS; the optimizer is sgd"):
        shared.plan(JOB)


@pytest.mark.parametrize("ranks_per_node", [8, 4, 1])
@pytest.mark.parametrize(
    "schedule",
    [each for each in SCHEDULES if isinstance(each, GradientSchedule) and each.kind != "parameter_server"],
    ids=schedule_id,
)
def test_shared_update_is_of_equal_slices_and_leaves_the_same_parameters(
    schedule: GradientSchedule, ranks_per_node: int
) -> None:
    alone = {"fusion": None} if "fusion" in type(schedule).model_fields else {}
    shared = schedule.model_copy(update={"shared_update": True, **alone})
    job = dataclasses.replace(JOB, ranks_per_node=ranks_per_node)
    plan = shared.plan(job)
    check(plan)
    prove(plan, lambda step: shared.result(step, job))
    sharers = ranks_per_node if schedule.kind in ("torus", "hitopk") and ranks_per_node > 1 else 8
    for body in plan.bodies:
        update = next(op for op in body if isinstance(op, Optimize))
        assert update.shared_by == Group(sharers)
        gathers = [op for op in body if isinstance(op, AllGather) and op.src in update.slices]
        assert [(op.src, op.dst, op.group) for op in gathers] == [
            (mine, whole, update.shared_by) for mine, whole in zip(update.slices, update.params, strict=True)
        ]
        for at, op in enumerate(body):  # with no slice of a gradient or parameters missing
            if isinstance(op, Optimize):
                for changed in (
                    dataclasses.replace(op, slices=op.slices[::-1], params=op.params[::-1]),
                    dataclasses.replace(op, shared_by=Group(sharers // 2)),
                ):
                    if len(op.params) > 1 or changed.shared_by != op.shared_by:
                        other = dataclasses.replace(
                            plan, bodies=((*body[:at], changed, *body[at + 1 :]),) * len(plan.bodies)
                        )
                        with pytest.raises(PlanError):
                            check_and_prove(other, shared)


@pytest.mark.parametrize(("degree", "size"), [(2, 2), (4, 4), ("node", 4), (True, 8), (8, 8)])
@pytest.mark.parametrize("by", ["all_gather", "broadcast"])
def test_so_many_consecutive_ranks_share_an_update(degree: bool | int | str, size: int, by: str) -> None:
    schedule = kinds()["sync"](shared_update=degree, updates_sent_by=by, first_bucket_nbytes=1, bucket_nbytes=1)
    plan = schedule.plan(JOB)
    check_and_prove(plan, schedule)
    body = plan.bodies[0]
    update = next(op for op in body if isinstance(op, Optimize))
    assert update.shared_by == Group(size)
    n_elements = sum(JOB.tensor_counts)
    slices = sum(plan.buffer(name).count for name in update.slices)
    assert n_elements <= size * slices < n_elements + size * len(update.slices)
    exchanged = [(type(op), op.group) for op in body[: body.index(update)] if isinstance(op, COLLECTIVES)]
    gathers = [op for op in body[body.index(update) :] if isinstance(op, AllGather)]
    if by == "broadcast":
        assert set(exchanged) == {(AllReduce, Group(8))}
        assert [(op.dst, op.group, op.algorithm) for op in gathers] == [("param", Group(size), "broadcasts")]
    else:
        between = {(AllReduce, Group(8 // size, stride=size))} if size < 8 else set()
        assert set(exchanged) == {(ReduceScatter, Group(size)), *between}
        assert [(op.group, op.algorithm) for op in gathers] == [(Group(size), "auto")] * 4


@pytest.mark.parametrize("settings", [{}, {"compression": "fp16"}, {"updates_sent_by": "broadcast"}])
def test_ranks_may_keep_their_slices_in_another_type(settings: dict[str, object]) -> None:
    schedule = kinds()["sync"](shared_update=4, param_dtype="bfloat16", **settings)
    check_schedule(schedule)
    plan = schedule.plan(JOB)
    update = next(op for op in plan.bodies[0] if isinstance(op, Optimize))
    assert {plan.buffer(name).dtype for name in (*update.params, *update.grads)} == {"bfloat16"}
    assert [(plan.buffer(name).dtype, plan.buffer(name).initialized) for name in update.slices] == [("float32", True)]


def test_gradients_for_one_buffer_of_parameters_cover_it() -> None:
    schedule = kinds()["sync"](shared_update=2, updates_sent_by="broadcast", first_bucket_nbytes=1, bucket_nbytes=1)
    plan = schedule.plan(JOB)
    at, update = next((at, op) for at, op in enumerate(plan.bodies[0]) if isinstance(op, Optimize))
    for grads, problem in (
        (update.grads[1:], "the gradients do not cover exactly the tensors of the parameters"),
        ((*update.grads, "grad.0"), "the gradients do not cover exactly the tensors of the parameters"),
    ):
        changed = dataclasses.replace(update, grads=grads)
        body = (*plan.bodies[0][:at], changed, *plan.bodies[0][at + 1 :])
        with pytest.raises(PlanError, match=problem):
            check(dataclasses.replace(plan, bodies=(body,)))


def test_updates_that_a_node_shares_are_those_of_a_torus() -> None:
    plans = [kinds()[kind](shared_update=degree).plan(JOB) for kind, degree in (("sync", "node"), ("torus", True))]
    assert plans[0].digest() == plans[1].digest()


@pytest.mark.parametrize("wrong", ["nodes", 1, 0, -2, 2.5, None, [2]])
def test_no_number_of_ranks_that_share_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="write true, false, node, or the number of ranks that share, 2 or more"):
        kinds()["sync"](shared_update=wrong)


@pytest.mark.parametrize(
    ("kind", "settings", "ranks_per_node", "field", "problem"),
    [
        ("sync", {"shared_update": 3}, 4, "shared_update", "3 does not divide the 8 ranks"),
        ("sync", {"shared_update": "node"}, 1, "shared_update", "node: a node has one rank: write true, or a number"),
        ("torus", {"shared_update": 2}, 4, "shared_update", "2: the 4 ranks of a node share the exchange: write true"),
        (
            "sync",
            {"updates_sent_by": "broadcast"},
            4,
            "updates_sent_by",
            "broadcast: it is for updates that ranks share",
        ),
        ("sync", {"param_dtype": "bfloat16"}, 4, "param_dtype", "bfloat16: it is for updates that ranks share"),
        ("sync", {"algorithm": "broadcasts"}, 4, "algorithm", "write shared_update: true and updates_sent_by: broad"),
    ],
)
def test_ranks_that_cannot_share_an_update_are_told(
    kind: str, settings: dict[str, object], ranks_per_node: int, field: str, problem: str
) -> None:
    ((at, told),) = kinds()[kind](**settings).problems(Shape(8, ranks_per_node))
    assert at == field
    assert problem in told


def test_shared_update_sends_as_much_as_an_all_reduce() -> None:
    """2 (n - 1) / n of the parameters per rank and step (arXiv 1910.02054, section 7)."""
    plan = kinds()["sync"](shared_update=True).plan(dataclasses.replace(JOB, tensor_counts=(800, 1600), tensor_rows=()))
    sent = {
        type(op): sum(
            plan.buffer(name).nbytes for each in plan.bodies[0] if isinstance(each, type(op)) for name in names(each)
        )
        for op, names in (
            (ReduceScatter("", "", Group(8)), lambda op: [op.src]),
            (AllGather("", "", Group(8)), lambda op: [op.dst]),
        )
    }
    assert sent == {ReduceScatter: 2400 * 4, AllGather: 2400 * 4}


def gathers_again(body: Body, at: int) -> bool:
    op = body[at]
    return isinstance(op, AllGather) and any(isinstance(each, AllGather) and each.dst == op.dst for each in body[:at])


@every_schedule
def test_no_collective_can_be_left_out(schedule: Schedule) -> None:
    """A broadcast of what all ranks hold already can: it stands for the time of a published algorithm.

    So can a gather for the backward pass of what the forward pass gathered: it saves memory.
    """
    plan = schedule.plan(JOB)
    for number, body in enumerate(plan.bodies):
        needed = [
            at
            for at, op in enumerate(body)
            if isinstance(op, COLLECTIVES) and not isinstance(op, Broadcast) and not gathers_again(body, at)
        ]
        for at in needed:
            bodies = (*plan.bodies[:number], (*body[:at], *body[at + 1 :]), *plan.bodies[number + 1 :])
            with pytest.raises(PlanError):
                check_and_prove(dataclasses.replace(plan, bodies=bodies), schedule)


@every_schedule
def test_delays_stand_in_the_plan_only_where_they_are_injected(schedule: Schedule) -> None:
    for channels in ((), ("host",), ("compute",), ("host", "compute")):
        plan = schedule.plan(dataclasses.replace(JOB, delay_channels=frozenset(channels)))
        for step in steps_of(plan):
            assert sorted(op.channel for op in step if isinstance(op, Delay)) == sorted(channels)


@every_schedule
def test_host_delay_stands_right_after_the_wait_for_the_loss(schedule: Schedule) -> None:
    for step in steps_of(schedule.plan(JOB)):
        before = step[step.index(Delay("host")) - 1]
        assert isinstance(before, Wait)
        assert before.buffer.startswith("loss")


@every_schedule
def test_delays_of_the_backward_pass_stand_before_its_last_bucket(schedule: Schedule) -> None:
    plan = schedule.plan(dataclasses.replace(JOB, delay_channels=frozenset({"backward", "overlap"})))
    check_and_prove(plan, schedule)
    for step in steps_of(plan):
        first, *_, last = [at for at, op in enumerate(step) if isinstance(op, Backward)] * 2
        is_fused = getattr(schedule, "fusion", None)  # afterwards: what was to run beside buckets may run behind them
        is_beside = bool(is_fused) or any(lane_of(op).kind == "comm" for op in step[first:last])
        assert [op for op in step if isinstance(op, Delay)] == [Delay("backward"), Delay("overlap")][: 1 + is_beside]
        assert isinstance(step[last - 1], Delay)


@every_schedule
def test_algorithm_that_does_not_fit_is_refused_beforehand(schedule: Schedule) -> None:
    for algorithm in algorithms.names():
        chosen = schedule.model_copy(update={"algorithm": algorithm})
        problems = [field for field, _ in chosen.problems(Shape(8, 4))]
        if not problems:
            check(chosen.plan(JOB))
        assert set(problems) <= {"algorithm"}
        assert not (
            problems and algorithm in ("auto", "ring") and schedule.kind not in ("parameter_server", "backup_workers")
        )


@every_schedule
def test_run_ahead_of_a_schedule_goes_before_that_of_the_job(schedule: Schedule) -> None:
    chosen = schedule.model_copy(update={"run_ahead_steps": 3})
    expected = schedule.plan(dataclasses.replace(JOB, run_ahead_steps=3))
    for run_ahead_steps in (0, 1, None):
        assert chosen.plan(dataclasses.replace(JOB, run_ahead_steps=run_ahead_steps)) == expected


@pytest.mark.parametrize("kind", kinds())
def test_class_is_final_documented_and_named_by_its_kind(kind: str) -> None:
    cls = kinds()[kind]
    assert vars(cls)["__final__"]
    assert cls.__doc__
    assert cls.__module__ == f"simdist.schedules.{kind}"
    assert cls.examples
    for example in cls.examples:
        schedule = cls(**example)
        assert schedule.kind == kind
        assert schedule.problems(Shape(8, 4)) == []
        assert 0 < len(schedule.name) <= 100
        assert "/" not in schedule.name
        assert cls.model_validate(schedule.model_dump()) == schedule


@pytest.mark.parametrize("kind", kinds())
def test_unknown_parameter_is_refused_with_the_nearest_known_one(kind: str) -> None:
    cls = kinds()[kind]
    with pytest.raises(ValidationError, match="unknown key 'labell': did you mean 'label'"):
        cls(**cls.examples[0], labell="x")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_steps_repeat_the_cycle(schedule: Schedule) -> None:
    job = dataclasses.replace(JOB, n_steps=30)
    plan = schedule.plan(job)
    repeated = plan.repeated(schedule.cycle(job), 43)
    assert repeated.digest() == schedule.plan(dataclasses.replace(job, n_steps=43)).digest()
    assert repeated.repeated(schedule.cycle(job), 30).digest() == plan.digest()


def check_and_prove(plan: Plan, schedule: Schedule) -> None:
    check(plan)
    prove(plan, lambda step: schedule.result(step, JOB))


def steps_of(plan: Plan) -> list[tuple[object, ...]]:
    return [plan.bodies[body] for body in plan.body_of_steps()]


# ---------------------------------------------------------------- a new schedule takes one file

NEW_SCHEDULE = '''
"""Synchronous SGD without buckets."""

from typing import Literal, final

from simdist.plan import Group, Plan
from simdist.plan import Result
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import Job


@final
class Unbucketed(Schedule):
    """Average the whole gradient over all ranks in every step."""

    kind: Literal["{kind}"] = "{kind}"

    def default_label(self) -> str:
        return "unbucketed"

    def write(self, job: Job) -> Plan:
        buckets = ((0, len(job.tensor_counts)),)
        backward = parts.last_backward(job, buckets, all_reduce=Group(job.world_size), algorithm=self.algorithm)
        rest = (*backward, *parts.optimize(job, buckets))
        steps = ((*parts.begin_step(job, t, buckets), *rest) for t in range(job.n_steps))
        buffers = parts.training_buffers(job, buckets)
        return Plan.from_steps(self.name, world_size=job.world_size, buffers=buffers, steps=steps)

    def result(self, step: int, job: Job) -> Result:
        return Result(gradients=Group(job.world_size), parameters=Group(1))
'''


@pytest.fixture
def add_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Give a function that adds a file to the package of schedules, for the time of one test."""
    package = simdist.schedules
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    added: list[str] = []

    def add(module: str, kind: str) -> None:
        (tmp_path / f"{module}.py").write_text(NEW_SCHEDULE.replace("{kind}", kind), encoding="utf-8")
        added.append(module)

    yield add
    for module in added:
        sys.modules.pop(f"{package.__name__}.{module}", None)
        vars(package).pop(module, None)


def test_adding_a_schedule_takes_one_file(add_schedule: Callable[[str, str], None]) -> None:
    before = kinds()
    add_schedule("unbucketed", "unbucketed")
    assert kinds().keys() - before.keys() == {"unbucketed"}
    schedule = kinds()["unbucketed"]()
    plan = schedule.plan(JOB)
    check(plan)
    assert prove(plan, lambda step: schedule.result(step, JOB)) == 8
    assert plan.digest() != kinds()["sync"]().plan(JOB).digest()


def test_two_schedules_of_one_kind_are_refused_with_both_places(add_schedule: Callable[[str, str], None]) -> None:
    add_schedule("unbucketed", "sync")
    with pytest.raises(TypeError, match=r"simdist\.schedules\.unbucketed.*simdist\.schedules\.sync.*'sync'"):
        kinds()


def test_kinds_are_in_alphabetical_order() -> None:
    assert list(kinds()) == sorted(kinds())
    assert {"sync", "local_sgd", "hierarchical_sgd"} <= kinds().keys()


# ---------------------------------------------------------------- golden plans

DRAWING = Job(
    world_size=16,
    ranks_per_node=2,
    n_steps=8,
    tensor_counts=(9_408, 300_000, 300_000, 1_000),
    delay_channels=frozenset({"host"}),
)
STORED = Job(
    world_size=4,
    ranks_per_node=2,
    n_steps=12,
    tensor_counts=(9_408, 300_000, 300_000, 1_000),
    batch_nbytes=19_267_584,
    input_path=InputPath("storage", "pageable", prefetch=2),
    run_ahead_steps=1,
    delay_channels=frozenset({"io", "compute"}),
)
CACHED = dataclasses.replace(
    STORED,
    input_path=InputPath(
        "storage", "pinned", 2, Dataset(600, 32, 2, 602_112, (110_000,), disk_nbytes=10**9), "datacache"
    ),
)
RATED = dataclasses.replace(STORED, input_path=InputPath(), optimizer="lars")
GOLDEN_PLANS: dict[str, tuple[str, dict[str, object], Job]] = {
    "gtopk": ("gtopk", {"density": 0.01, "broadcast": True}, RATED),
    "hitopk": ("hitopk", {"density": 0.01, "bucket_nbytes": 1_000_000, "warmup_steps": 2}, DRAWING),
    "naive_ag": ("naive_ag", {"density": 0.01, "method": "dgc"}, DRAWING),
    "parameter_server": ("parameter_server", {"servers": 2, "placement": "tensors"}, DRAWING),
    "sync_fp16_parallel_optimizer": ("sync", {"compression": "fp16", "parallel_optimizer": True}, RATED),
    "torus": (
        "torus",
        {},
        dataclasses.replace(DRAWING, ranks_per_node=4, tensor_counts=(9_407, 300_000, 300_001, 1_000)),
    ),
    "hierarchical_sgd": ("hierarchical_sgd", {"levels": {2: 4, 4: 8, 8: 16}}, DRAWING),
    "sync": ("sync", {}, DRAWING),
    "local_sgd_warmup": ("local_sgd", {"period": 4, "warmup_steps": 3}, dataclasses.replace(DRAWING, n_steps=15)),
    "powersgd": (
        "powersgd",
        {"rank": 2, "warmup_steps": 2, "bucket_nbytes": 1_000_000},
        dataclasses.replace(DRAWING, tensor_rows=(64, 500, 500, 1_000)),
    ),
    "sync_shared_update": ("sync", {"shared_update": True, "compression": "fp16", "bucket_nbytes": 1_000_000}, DRAWING),
    "sync_shared_by_some": (
        "sync",
        {"shared_update": 4, "param_dtype": "bfloat16", "bucket_nbytes": 1_000_000},
        DRAWING,
    ),
    "sync_shared_by_broadcast": (
        "sync",
        {"shared_update": 4, "updates_sent_by": "broadcast", "bucket_nbytes": 1_000_000},
        DRAWING,
    ),
    "sync_from_storage": ("sync", {}, STORED),
    "sync_datacache": ("sync", {}, CACHED),
    "sync_staged": ("sync", {"input": {"policy": "staged", "prefetch": 1}}, CACHED),
}


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_plan_reads_as_it_did(name: str) -> None:
    """`WRITE_GOLDEN=1 pytest tests/simdist/schedules/test_schedules.py` writes the files; say so in the change log."""
    kind, settings, job = GOLDEN_PLANS[name]
    text = plan_text(kinds()[kind](**settings).plan(job)) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*GOLDEN_PLANS, "messages"}


# ---------------------------------------------------------------- when averages fall


def averages(schedule: Schedule, job: Job) -> dict[int, int]:
    """Return step -> size of the group whose parameters are averaged, read from the plan."""
    found: dict[int, int] = {}
    for step, ops in enumerate(steps_of(schedule.plan(job))):
        sizes = [op.group.size for op in ops if isinstance(op, AllReduce) and op.buffer == "flat"]
        assert len(sizes) <= 1
        if sizes:
            found[step] = sizes[0]
    return found


def hierarchical(**settings: object) -> Schedule:
    return kinds()["hierarchical_sgd"](**settings)


def local(**settings: object) -> LocalSGD:
    return LocalSGD(**settings)


SIXTEEN = dataclasses.replace(DRAWING, n_steps=17)
LEVELS = {2: 4, 4: 8, 8: 16}

AVERAGES = [
    # at the end of every period, the largest group wins
    (hierarchical(levels=LEVELS), {1: 4, 3: 8, 5: 4, 7: 16, 9: 4, 11: 8, 13: 4, 15: 16}),
    (hierarchical(levels={4: 8, 8: "world"}), {3: 8, 7: 16, 11: 8, 15: 16}),
    (hierarchical(levels={1: 2, 8: 16}), {step: 16 if step in (7, 15) else 2 for step in range(17)}),
    # periods count from the end of the warm-up
    (hierarchical(levels=LEVELS, warmup_steps=3), {4: 4, 6: 8, 8: 4, 10: 16, 12: 4, 14: 8, 16: 4}),
    (local(period=4), dict.fromkeys((3, 7, 11, 15), 16)),
    (local(period=4, warmup_steps=3), dict.fromkeys((6, 10, 14), 16)),
    (local(period=1), dict.fromkeys(range(17), 16)),
    (local(period=20), {}),
    # HierarchicalModelAverager: step >= warmup_steps and step % period == 0, the largest period first
    (hierarchical(levels=LEVELS, phase=0), {0: 16, 2: 4, 4: 8, 6: 4, 8: 16, 10: 4, 12: 8, 14: 4, 16: 16}),
    (hierarchical(levels=LEVELS, phase=0, warmup_steps=3), {4: 8, 6: 4, 8: 16, 10: 4, 12: 8, 14: 4, 16: 16}),
    # PeriodicModelAverager: step >= warmup_steps and (step - warmup_steps) % period == 0
    (local(period=4, phase=0), dict.fromkeys((0, 4, 8, 12, 16), 16)),
    (local(period=4, phase=3, warmup_steps=3), dict.fromkeys((3, 7, 11, 15), 16)),
    (local(period=4, phase=5 % 4, warmup_steps=5), dict.fromkeys((5, 9, 13), 16)),
]


@pytest.mark.parametrize(("schedule", "expected"), AVERAGES)
def test_averages_fall_at_these_steps(schedule: Schedule, expected: dict[int, int]) -> None:
    assert averages(schedule, SIXTEEN) == expected


@pytest.mark.parametrize("warmup_steps", range(6))
@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_phase_reproduces_the_averagers_of_pytorch(period: int, warmup_steps: int) -> None:
    steps = range(30)
    hierarchical_averager = [step for step in steps if step >= warmup_steps and step % period == 0]
    periodic_averager = [step for step in steps if step >= warmup_steps and (step - warmup_steps) % period == 0]
    assert [
        step for step in steps if local(period=period, warmup_steps=warmup_steps, phase=0).fires(period, step)
    ] == hierarchical_averager
    phase = warmup_steps % period
    assert [
        step for step in steps if local(period=period, warmup_steps=warmup_steps, phase=phase).fires(period, step)
    ] == periodic_averager


@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 10))
def test_periodic_event_falls_on_the_last_step_of_each_period(period: int, start: int, n_periods: int) -> None:
    every = local(period=period, warmup_steps=start)
    fired = [step for step in range(start + n_periods * period) if every.fires(period, step)]
    assert fired == [start + number * period - 1 for number in range(1, n_periods + 1)]


@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 50))
def test_event_with_a_phase_falls_once_a_period_from_the_start_on(period: int, start: int, phase: int) -> None:
    every = local(period=period, warmup_steps=start, phase=phase)
    fired = [step for step in range(start + 5 * period) if every.fires(period, step)]
    assert len(fired) == 5
    assert start <= fired[0] < start + period
    assert fired[0] % period == phase % period
    assert {later - earlier for earlier, later in pairwise(fired)} == {period}


def test_warm_up_averages_gradients_over_the_world_and_no_parameters() -> None:
    for schedule in (local(period=2, warmup_steps=3), hierarchical(levels={2: 4, 4: 8}, warmup_steps=3)):
        for step in steps_of(schedule.plan(JOB))[:3]:
            collectives = [op for op in step if isinstance(op, AllReduce)]
            assert {op.group for op in collectives} == {Group(8)}
            assert not any(op.buffer == "flat" for op in collectives)


def test_gradients_are_averaged_within_nodes_unless_switched_off() -> None:
    def gradient_groups(**settings: object) -> set[Group]:
        plan = hierarchical(levels={2: 4, 4: 8}, **settings).plan(JOB)
        return {op.group for op in plan.bodies[0] if isinstance(op, AllReduce)}

    assert gradient_groups() == {Group(4)}
    assert gradient_groups(intra_node_gradients=False) == set()


def test_averages_wait_for_the_device_unless_told_not_to() -> None:
    def average(**settings: object) -> list[str]:
        return [type(op).__name__ for op in local(period=1, **settings).plan(JOB).bodies[-1]][-4:]

    assert average() == ["Copy", "Wait", "AllReduce", "Copy"]
    assert average(synchronize=False) == ["Optimize", "Copy", "AllReduce", "Copy"]


def test_local_steps_have_one_bucket_because_nothing_is_sent() -> None:
    assert [op.dst for op in local(period=4).plan(JOB).bodies[0] if isinstance(op, Backward)] == ["grad.0"]
    warmed = local(period=4, warmup_steps=1).plan(JOB)
    assert [op.dst for op in warmed.bodies[0] if isinstance(op, Backward)] == ["grad.0", "grad.1"]


# ---------------------------------------------------------------- wrong parameters

WRONG: list[tuple[str, dict[str, object], str]] = [
    ("local_sgd", {}, "required key 'period' is missing"),
    ("local_sgd", {"period": 0}, "0: write at least 1"),
    ("local_sgd", {"period": 2, "warmup_steps": -1}, "-1: write at least 0"),
    ("local_sgd", {"period": 2, "label": "a/b"}, "a/b"),
    ("hierarchical_sgd", {"levels": {}}, "levels"),
    ("hierarchical_sgd", {"levels": {0: 4, 4: 8}}, "period 0; must be at least 1"),
    ("hierarchical_sgd", {"levels": {2: 1, 4: 8}}, "group of 1 at period 2; a group has at least 2 ranks"),
    (
        "hierarchical_sgd",
        {"levels": {2: 4, 3: 8}},
        "period 3 after 2; periods grow, each a multiple of the one before, such as 2, 4, 8",
    ),
    ("hierarchical_sgd", {"levels": {4: 4, 2: 8}}, "period 2 after 4; periods grow"),
    ("sync", {"bucket_size": -1}, "-1"),
    ("sync", {"compression": "fp8"}, "'fp8': write 'none' or 'fp16'"),
    ("hitopk", {"density": 0}, "0: write more than 0"),
    ("hitopk", {"density": 1.5}, "1.5"),
    ("naive_ag", {"method": "random"}, "'random': write 'exact', 'mstopk' or 'dgc'"),
    ("parameter_server", {}, "required key 'servers' is missing"),
    ("parameter_server", {"servers": 0}, "0: write at least 1"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), WRONG)
def test_wrong_parameter_is_refused_with_what_would_be_right(
    kind: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError) as error:
        kinds()[kind](**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("levels", "problems"),
    [
        ({2: 4, 4: 8}, []),
        ({2: 4, 4: "world"}, []),
        ({4: "world"}, []),
        (
            {2: 3, 4: 8},
            [
                "group of 3 at period 2 does not divide 8 ranks; sizes that do: 2, 4, 8",
                "group of 8 at period 4 after a group of 3; groups grow with the period, each a multiple of the one "
                "before",
            ],
        ),
        (
            {2: 8, 4: 4},
            [
                "group of 4 at period 4 after a group of 8; groups grow with the period, each a multiple of the one "
                "before",
                "the last group has 4 ranks; it must be the world of 8",
            ],
        ),
        ({2: 2, 4: 4}, ["the last group has 4 ranks; it must be the world of 8"]),
        (
            {2: 16},
            [
                "group of 16 at period 2 does not divide 8 ranks; sizes that do: 2, 4, 8",
                "the last group has 16 ranks; it must be the world of 8",
            ],
        ),
    ],
)
def test_levels_that_do_not_fit_the_cluster_are_named(levels: dict[int, object], problems: list[str]) -> None:
    assert hierarchical(levels=levels).problems(Shape(8, 4)) == [("levels", problem) for problem in problems]


def test_group_that_does_not_divide_the_world_is_refused_in_the_plan_too() -> None:
    with pytest.raises(PlanError, match="group of 3 does not divide 8 ranks; sizes that do at stride 1: 1, 2, 4, 8"):
        check(hierarchical(levels={2: 3, 4: 6}).plan(JOB))


# ---------------------------------------------------------------- the pieces


def test_bucket_is_closed_by_the_tensor_that_makes_it_reach_its_limit() -> None:
    job = dataclasses.replace(JOB, tensor_counts=(10, 10, 10, 10, 10, 10))  # 40 bytes each
    assert gradient_buckets(job, first_nbytes=1, nbytes=80) == ((5, 6), (3, 5), (1, 3), (0, 1))
    assert gradient_buckets(job, first_nbytes=41, nbytes=80) == ((4, 6), (2, 4), (0, 2))
    assert gradient_buckets(job, first_nbytes=80, nbytes=81) == ((4, 6), (1, 4), (0, 1))
    assert gradient_buckets(job, first_nbytes=1000, nbytes=1000) == ((0, 6),)


def test_buckets_count_bytes_not_elements() -> None:
    job = dataclasses.replace(JOB, tensor_counts=(10, 10, 10, 10), dtype="float16")
    assert gradient_buckets(job, first_nbytes=40, nbytes=40) == ((2, 4), (0, 2))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 5000), st.integers(1, 5000))
def test_buckets_cover_all_tensors_once_last_first(counts: list[int], first_nbytes: int, nbytes: int) -> None:
    job = dataclasses.replace(JOB, tensor_counts=tuple(counts))
    buckets = gradient_buckets(job, first_nbytes=first_nbytes, nbytes=nbytes)
    assert [tensor for first, last in reversed(buckets) for tensor in range(first, last)] == list(range(len(counts)))
    for number, (first, last) in enumerate(buckets[:-1]):
        limit = nbytes if number else first_nbytes
        assert 4 * sum(counts[first:last]) >= limit > 4 * sum(counts[first + 1 : last])


@pytest.mark.parametrize("run_ahead_steps", RUN_AHEAD_STEPS)
def test_host_reads_the_loss_of_as_many_steps_ago_as_it_may_run_ahead(run_ahead_steps: int | None) -> None:
    plan = kinds()["sync"]().plan(dataclasses.replace(JOB, run_ahead_steps=run_ahead_steps))
    instances = list(walk(plan))
    forward_of_step = {each.step: each.index for each in instances if isinstance(each.op, Forward)}
    read = {each.step: each.after for each in instances if isinstance(each.op, Wait)}
    if run_ahead_steps is None:
        assert read == {}
    else:
        assert read == {
            step: (forward_of_step[step - run_ahead_steps],) for step in range(run_ahead_steps, plan.n_steps)
        }


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_storage_is_read_as_many_steps_ahead_as_there_are_buffers(prefetch: int) -> None:
    path = InputPath("storage", "pinned", prefetch)
    plan = kinds()["sync"]().plan(dataclasses.replace(JOB, input_path=path))
    n_loaded = 0
    for step, ops in enumerate(steps_of(plan)):
        n_loaded += sum(isinstance(op, Load) for op in ops)
        assert n_loaded == min(step + prefetch, plan.n_steps)
        assert [op.src for op in ops if isinstance(op, Copy)] == [f"batch.{step % prefetch}"]
    assert len({buffer.name for buffer in plan.buffers if buffer.name.startswith("batch")}) == prefetch


def test_pageable_copy_holds_up_the_host_and_a_pinned_one_does_not() -> None:
    for copy, waits in (("pinned", 0), ("pageable", 1)):
        plan = kinds()["sync"]().plan(dataclasses.replace(JOB, input_path=InputPath("memory", copy)))
        assert plan.bodies[0].count(Wait("input")) == waits


def test_data_on_the_device_needs_no_input_operations() -> None:
    plan = kinds()["sync"]().plan(JOB)
    assert not any(isinstance(op, Load | Copy) for body in plan.bodies for op in body)
    assert not {"input", "batch.0"} & {buffer.name for buffer in plan.buffers}


def test_plan_file_names_the_schedule() -> None:
    assert json.loads(dumps(local(period=2, label="my run").plan(JOB)))["name"] == "my run"


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("diloco", {"ranks_per_worker": "nod"}, "'nod': write a whole number, or node"),
        ("diloco", {"mixing": "110%"}, "'110%' is outside 0 to 1"),
        ("diloco", {"mixing": math.nan}, "nan is not a number"),
        ("hierarchical_sgd", {"levels": {2: "worl"}}, "'worl': write a whole number, or world"),
        ("backup_workers", {"backup": 1, "servers": 2.5}, "2.5 is not a whole number: write e.g. 8"),
        ("local_sgd", {"inner_steps": "by_spee"}, "'by_spee': write by_speed, or steps by rank, e.g. {3: 2}"),
        ("local_sgd", {"inner_steps": [1, 2]}, "[1, 2]: write by_speed, or steps by rank, e.g. {3: 2}"),
        ("local_sgd", {"inner_steps": {"a": 2}}, "'a' is not a whole number: write e.g. 8"),
    ],
)
def test_bad_setting_has_one_error_that_says_what_would_be_right(kind, settings, says) -> None:
    period = {} if kind in ("hierarchical_sgd", "backup_workers") else {"period": 8}
    with pytest.raises(ValidationError) as caught:
        kinds()[kind](**period, **settings)
    [error] = caught.value.errors()
    assert error["msg"].startswith(says)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("diloco", {"period": 8, "fragments": 4}, "has fragments: 4, and 2 tensors, which make 2"),
        ("diloco", {"period": 8, "layers": 1000}, "has layers: 1000, and 2 tensors, which make 2"),
        ("diloco", {"period": 8, "ranks_per_worker": 8}, "has one worker, of all ranks"),
        ("local_sgd", {"period": 8, "inner_steps": {3: 8}}, "has inner_steps without effect"),
        ("local_sgd", {"period": 8, "inner_steps": "by_speed"}, "has inner_steps without effect"),
        ("powersgd", {"rank": 10_000}, "sends no matrix as factors"),
        ("powersgd", {"rank": 10, "min_compression_rate": 0.1}, "sends 1.1 times as much as whole gradients"),
    ],
)
def test_settings_without_effect_on_tensors_and_devices_are_told(kind, settings, says) -> None:
    job = Job(8, 4, 10, tensor_counts=(1000, 1000), tensor_rows=(10, 10), speeds=(0.5,) * 8)
    [found] = kinds()[kind](**settings).unused_in(job)
    assert found.startswith(says)
    assert "uneven" not in kinds()[kind](**settings).name
    assert all(not cls(**example).unused_in(JOB) for cls in kinds().values() for example in cls.examples[:1])


def test_labels_of_powersgd_tell_what_is_compressed_and_when() -> None:
    settings = ({}, {"min_compression_rate": 1.5}, {"warmup_steps": 3})
    labels = [kinds()["powersgd"](rank=4, **each).name for each in settings]
    assert labels == ["powersgd-4", "powersgd-4-min1.5", "powersgd-4-warmup3"]
