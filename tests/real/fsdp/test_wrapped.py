"""`real.wrap` of models under `fully_shard`: copies of a model that exchange gradients or parameters."""

import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from pool import Pool
from trainings import Training

if torch.__version__ < "2.13":
    pytest.skip("the helpers record what fully_shard calls from torch 2.13 on", allow_module_level=True)

import sharded_loops
from fsdp_trainings import Sharded, by_fully_shard
from processes import run
from sharded_loops import ByHand, LateByHand, OuterByHand, ShardedLoop, WarmUpByHand, averaging_over, by_hand

from real.checkpoints.loading import load_checkpoint
from real.loops.planning import PlanRequest
from real.loops.shards import ParameterUse, uses_of_parameters
from simdist.errors import RunError, UnsupportedError
from simdist.plan import AllReduce, Channel, Copy, Delay, Group, Plan, Run
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.scenario import loads
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync
from simdist.schedules.diloco import DiLoCo
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.traces.trace import Trace

N_STEPS = 8
TRAINING = Training("odd", "adamw")  # rows that no number of ranks divides
SINGLE = Training("odd", "sgd", torch.float32)
TOLERANCE = 1e-12


def assert_equal(found: list[np.ndarray], expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Compare the parameters of ranks with those of copies, `[copy, n]`."""
    n_sharers = len(found) // len(expected)
    for rank, parameters in enumerate(found):
        of_copy = expected[rank // n_sharers]
        assert abs(parameters - of_copy).max() <= tolerance * abs(of_copy).max()


# --- values ---


@pytest.mark.sentinel
def test_sync_between_copies_is_native_hsdp(four: Pool) -> None:
    found = four.run(sharded_loops.train, ShardedLoop(Sync(), TRAINING, N_STEPS))
    native = four.run(by_fully_shard, Sharded((2, 2)), TRAINING, N_STEPS)
    for ours, (theirs, _) in zip(found, native, strict=True):
        assert abs(ours - theirs).max() <= TOLERANCE * abs(theirs).max()


LOCAL: Mapping[str, tuple[Schedule, Callable[[int, sharded_loops.Copies], object]]] = {
    "local SGD": (LocalSGD(period=3), averaging_over({3: 2})),
    "HSDP with local SGD": (HSDP(shard=2, between="local-3"), averaging_over({3: 2})),
    "DiLoCo": (DiLoCo(period=3), OuterByHand(TRAINING, 3)),
    "HSDP with DiLoCo": (HSDP(shard=2, between={"kind": "diloco", "period": 3}), OuterByHand(TRAINING, 3)),
}


@pytest.mark.parametrize("name", LOCAL)
def test_copies_that_train_locally_are_workers(four: Pool, name: str) -> None:
    schedule, after_step = LOCAL[name]
    found = four.run(sharded_loops.train, ShardedLoop(schedule, TRAINING, N_STEPS))
    expected = by_hand(ByHand(TRAINING, N_STEPS, after_step=after_step))
    assert_equal(found, expected)
    assert abs(expected[0] - expected[1]).max() > 1e-3  # the last two steps are local


def test_averages_come_late_and_after_a_warm_up(four: Pool) -> None:
    schedule = LocalSGD(period=3, overlap_steps=2)
    found = four.run(sharded_loops.train, ShardedLoop(schedule, TRAINING, N_STEPS + 1))
    assert_equal(found, by_hand(ByHand(TRAINING, N_STEPS + 1, after_step=LateByHand(3, 2))))
    schedule = LocalSGD(period=2, warmup_steps=2)
    found = four.run(sharded_loops.train, ShardedLoop(schedule, TRAINING, 7))
    how = ByHand(TRAINING, 7, after_backward=WarmUpByHand(2), after_step=averaging_over({2: 2}))
    assert_equal(found, by_hand(how))


@pytest.mark.sentinel
def test_hierarchical_sgd_counts_copies(eight: Pool) -> None:
    schedule = HierarchicalSGD(levels={2: 2, 4: 4}, intra_node_gradients=False)
    found = eight.run(sharded_loops.train, ShardedLoop(schedule, TRAINING, 7))
    expected = by_hand(ByHand(TRAINING, 7, n_copies=4, after_step=averaging_over({2: 2, 4: 4})))
    assert_equal(found, expected)
    assert abs(expected[0] - expected[2]).max() > 1e-3


def test_gradients_are_averaged_among_the_copies_of_a_node(eight: Pool) -> None:
    schedule = HierarchicalSGD(levels={2: 4})
    found = eight.run(sharded_loops.train, ShardedLoop(schedule, TRAINING, 3, ranks_per_node=4))

    def after_backward(copies: sharded_loops.Copies) -> None:
        for node in (copies[:2], copies[2:]):
            sharded_loops.average([[each.grad for each in module.parameters()] for module, _ in node])

    how = ByHand(TRAINING, 3, n_copies=4, after_backward=after_backward, after_step=averaging_over({2: 4}))
    assert_equal(found, by_hand(how))


@pytest.mark.parametrize("schedule", [Sync(), LocalSGD(period=2)], ids=lambda schedule: schedule.name)
def test_ranks_whose_slices_are_empty_take_part(eight: Pool, schedule: Schedule) -> None:
    """Three rows on 4 ranks."""
    found = eight.run(sharded_loops.train, ShardedLoop(schedule, TRAINING, 4, shard=4))
    if schedule.kind == "sync":
        expected = by_hand(ByHand(TRAINING, 4, shard=4, after_backward=sharded_loops.averaging_gradients))
    else:
        expected = by_hand(ByHand(TRAINING, 4, shard=4, after_step=averaging_over({2: 2})))
    assert_equal(found, expected)


@pytest.mark.parametrize("accumulates", ["no_sync", "whole gradients", "slices"])
@pytest.mark.parametrize("schedule", [Sync(), LocalSGD(period=2)], ids=lambda schedule: schedule.name)
def test_accumulated_and_clipped(four: Pool, schedule: Schedule, accumulates: str) -> None:
    """An evaluation in every step leaves gathered parameters."""
    loop = ShardedLoop(
        schedule, TRAINING, 5, n_passes=3, accumulates=accumulates, max_norm=0.05, evaluates=accumulates == "no_sync"
    )
    found = four.run(sharded_loops.train, loop)
    how = ByHand(TRAINING, 5, n_passes=3, max_norm=0.05, after_step=averaging_over({2: 2}))
    if schedule.kind == "sync":
        how = ByHand(TRAINING, 5, n_passes=3, max_norm=0.05, after_backward=sharded_loops.averaging_gradients)
    assert_equal(found, by_hand(how))


@pytest.mark.parametrize("schedule", [Sync(), LocalSGD(period=2)], ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("model", ["frozen", "all use it or none"])
def test_parameters_without_a_gradient_are_left_alone(four: Pool, model: str, schedule: Schedule) -> None:
    training = Training(model, "adamw")
    found = four.run(sharded_loops.train, ShardedLoop(schedule, training, 5))
    how = ByHand(training, 5, after_step=averaging_over({2: 2}))
    if schedule.kind == "sync":
        how = ByHand(training, 5, after_backward=sharded_loops.averaging_gradients)
    assert_equal(found, by_hand(how))


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpoints_and_compiled_models(four: Pool, compiled: bool) -> None:
    found = four.run(sharded_loops.train_blocks, compiled)
    training = Training("checkpointed", "adamw")
    assert_equal(found, by_hand(ByHand(training, 4, after_backward=sharded_loops.averaging_gradients)))


def test_derivatives_before_the_backward_pass_do_not_end_it(four: Pool) -> None:
    assert four.run(sharded_loops.penalized) == ["1"] * 4


def test_copies_all_reduce_once_a_step(four: Pool) -> None:
    """Native HSDP sends three times as much in three micro-batches."""
    counts = four.run(sharded_loops.exchanges_between_copies, 3)
    assert counts == [1] * 4


def test_mixed_precision_is_that_of_native_hsdp(four: Pool) -> None:
    """The type of the model's output is converted, so its gradient arrives there before fully_shard knows of it."""
    loop = ShardedLoop(Sync(), SINGLE, N_STEPS, param_dtype=torch.bfloat16)
    native = Sharded((2, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = four.run(sharded_loops.train, loop)
    for ours, (theirs, _) in zip(found, four.run(by_fully_shard, native, SINGLE, N_STEPS), strict=True):
        assert ours.dtype == np.float32
        assert abs(ours - theirs).max() <= 1e-6 * abs(theirs).max()
    exact = by_hand(ByHand(SINGLE, N_STEPS, after_backward=sharded_loops.averaging_gradients))
    assert abs(found[0] - exact[0]).max() > 1e-4


@pytest.mark.parametrize(("shard", "native_copies"), [(4, 1), (2, 2)])
def test_one_copy_on_all_ranks_trains_as_without_wrap(four: Pool, shard: int, native_copies: int) -> None:
    loop = ShardedLoop(FSDP() if native_copies == 1 else Sync(), TRAINING, N_STEPS, shard, native_copies)
    found = four.run(sharded_loops.train, loop)
    native = four.run(by_fully_shard, Sharded((4,) if native_copies == 1 else (2, 2)), TRAINING, N_STEPS)
    for ours, (theirs, _) in zip(found, native, strict=True):
        assert (ours == theirs).all()


def test_workers_may_be_hsdp_groups(eight: Pool) -> None:
    found = eight.run(sharded_loops.train, ShardedLoop(LocalSGD(period=2), TRAINING, 4, 2, 2))
    assert_equal(found, by_hand(ByHand(TRAINING, 4, shard=4, after_step=averaging_over({2: 2}))))


def test_averages_on_demand_and_at_the_end_are_over_copies(four: Pool) -> None:
    for before, after, end in four.run(sharded_loops.average_on_demand):
        assert before > 1e-3
        assert (after, end) == (0.0, 0.0)


# --- checkpoints ---


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [(Sync(), "sgd"), (DiLoCo(period=3), "adamw")],
    ids=["sync", "DiLoCo"],
)
def test_a_resumed_loop_ends_as_an_uninterrupted_one(
    four: Pool, schedule: Schedule, optimizer: str, tmp_path: Path
) -> None:
    training = Training("odd", optimizer)
    whole = four.run(sharded_loops.train, ShardedLoop(schedule, training, N_STEPS))
    four.run(sharded_loops.train, ShardedLoop(schedule, training, N_STEPS, checkpoint=tmp_path, stop_before=5))
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-0000000002", "step-0000000004"]
    resumed = four.run(sharded_loops.train, ShardedLoop(schedule, training, N_STEPS, checkpoint=tmp_path))
    assert all((ours == theirs).all() for ours, theirs in zip(resumed, whole, strict=True))
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-0000000006", "step-0000000008"]


@pytest.fixture(scope="module")
def finished(four: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """Return the folder with the checkpoints of a loop that has ended, and the parameters that it ended with."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, four.run(sharded_loops.train, ShardedLoop(LocalSGD(period=3), TRAINING, N_STEPS, checkpoint=folder))


@pytest.fixture
def whole(finished: tuple[Path, list[np.ndarray]], tmp_path: Path) -> list[np.ndarray]:
    """Copy the checkpoints of a loop that has ended, for a test to damage; return the parameters that it ended with."""
    folder, parameters = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return parameters


def test_an_incomplete_checkpoint_is_passed_over_and_another_job_refused(
    four: Pool, whole: list[np.ndarray], tmp_path: Path
) -> None:
    loop = ShardedLoop(LocalSGD(period=3), TRAINING, N_STEPS, checkpoint=tmp_path)
    (tmp_path / "step-0000000008" / "simdist.json").unlink()  # which is written last
    resumed = four.run(sharded_loops.train, loop)
    assert all((ours == theirs).all() for ours, theirs in zip(resumed, whole, strict=True))
    others = four.run(sharded_loops.error_of_train, ShardedLoop(Sync(), TRAINING, N_STEPS, checkpoint=tmp_path))
    assert all("step-0000000008 is of plan local-3" in each and "on 4 ranks" in each for each in others)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"/data/0") + 200] ^= 1  # of a tensor's numbers
    path.write_bytes(content)


DAMAGES: Mapping[str, tuple[str, Callable[[Path], object], str]] = {
    "metadata cut": (".metadata", cut, "damaged: .metadata is cut off or has changed"),
    "metadata empty": (".metadata", lambda path: path.write_bytes(b""), "damaged: .metadata is cut off or has changed"),
    "metadata of another format": (
        ".metadata",
        lambda path: path.write_bytes(pickle.dumps({"layers": 3})),
        "damaged: .metadata is cut off or has changed",
    ),
    "metadata missing": (".metadata", Path.unlink, "damaged: .metadata is missing on rank"),
    "index cut": ("simdist.json", cut, "damaged: simdist.json has changed"),
    "shard missing": ("__2_0.distcp", Path.unlink, "damaged: __2_0.distcp is missing on rank"),
    "shard cut": ("__2_0.distcp", cut, "damaged: __2_0.distcp is cut off or has changed"),
    "shard empty": (
        "__2_0.distcp",
        lambda path: path.write_bytes(b""),
        "damaged: __2_0.distcp is cut off or has changed",
    ),
    "shard flipped": ("__2_0.distcp", flip, "damaged: __2_0.distcp has changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    four: Pool, whole: list[np.ndarray], damage: str, tmp_path: Path
) -> None:
    name, spoil, message = DAMAGES[damage]
    loop = ShardedLoop(LocalSGD(period=3), TRAINING, N_STEPS, checkpoint=tmp_path)
    spoil(tmp_path / "step-0000000008" / name)
    found = four.run(sharded_loops.train_warned, loop, None)
    assert all((ours == theirs).all() for (ours, _), theirs in zip(found, whole, strict=True))
    told = [text for text in found[0][1] if "going on from" in text]
    assert message in told[0]
    assert told[0].endswith(f"going on from {tmp_path / 'step-0000000006'}")


def test_a_checkpoint_that_one_rank_finds_damaged_is_passed_over_by_all(
    four: Pool, whole: list[np.ndarray], tmp_path: Path
) -> None:
    loop = ShardedLoop(LocalSGD(period=3), TRAINING, N_STEPS, checkpoint=tmp_path)
    found = four.run(sharded_loops.train_warned, loop, 2)
    assert all((ours == theirs).all() for (ours, _), theirs in zip(found, whole, strict=True))
    assert any("damaged: .metadata is cut off; going on from" in text for text in found[0][1])


@pytest.mark.usefixtures("whole")
def test_damage_to_all_checkpoints_is_an_error_that_names_them(four: Pool, tmp_path: Path) -> None:
    loop = ShardedLoop(LocalSGD(period=3), TRAINING, N_STEPS, checkpoint=tmp_path)
    for path in tmp_path.glob("step-*/.metadata"):
        cut(path)
    for error in four.run(sharded_loops.error_of_train, loop):
        assert re.search("no checkpoint is complete: .*8: damaged: .*6: damaged: .*; delete them to begin again", error)
    with pytest.raises(RunError, match=r"step-0000000008: damaged: \.metadata is cut off or has changed"):
        load_checkpoint(tmp_path / "step-0000000008", TRAINING.make()[0])


@pytest.mark.usefixtures("whole")
def test_a_damaged_copy_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "step-0000000008"
    flip(path / "__2_0.distcp")
    assert load_checkpoint(path, TRAINING.make()[0], rank=0) == 8  # of the other copy
    with pytest.raises(RunError, match=r"damaged: __2_0\.distcp has changed"):
        load_checkpoint(path, TRAINING.make()[0], rank=2)
    (path / "__2_0.distcp").unlink()
    with pytest.raises(RunError, match=r"damaged: __2_0\.distcp is missing"):
        load_checkpoint(path, TRAINING.make()[0], rank=2)


def test_checkpoints_of_sharded_and_of_whole_models_share_no_folder(four: Pool, tmp_path: Path) -> None:
    (tmp_path / "of whole").mkdir()
    (tmp_path / "of whole" / "step-0000000002.ckpt").touch()
    (tmp_path / "of shards" / "step-0000000002").mkdir(parents=True)
    loop = ShardedLoop(Sync(), TRAINING, N_STEPS, checkpoint=tmp_path / "of whole")
    for error in four.run(sharded_loops.error_of_train, loop):
        assert "step-0000000002.ckpt is of a model without fully_shard; begin in another folder" in error
    for error in four.run(sharded_loops.error_without_shards, tmp_path / "of shards"):
        assert "step-0000000002 is of a model under fully_shard; begin in another folder" in error


def test_a_copy_is_loaded_without_the_job(whole: list[np.ndarray], tmp_path: Path) -> None:
    for copy in (0, 1):
        module, _ = TRAINING.make()
        assert load_checkpoint(tmp_path / "step-0000000008", module, rank=2 * copy) == 8
        assert (sharded_loops.whole_vector(module) == whole[2 * copy]).all()
    with pytest.raises(RunError, match=r"step-0000000008: it has no rank 4, of 4 from 0"):
        load_checkpoint(tmp_path / "step-0000000008", module, rank=4)
    with pytest.raises(RunError, match=r"step-0000000008 is of FSDPSequential of .* with AdamW, and does not fit"):
        load_checkpoint(tmp_path / "step-0000000008", torch.nn.Linear(2, 2))


@pytest.mark.parametrize("shard", [1, 4])
def test_a_job_goes_on_with_another_sharding(four: Pool, shard: int, tmp_path: Path) -> None:
    four.run(sharded_loops.train, ShardedLoop(Sync(), TRAINING, 4, checkpoint=tmp_path))
    found = four.run(sharded_loops.go_on, tmp_path / "step-0000000004", TRAINING, N_STEPS, shard)
    expected = by_hand(ByHand(TRAINING, N_STEPS, after_backward=sharded_loops.averaging_gradients))
    assert_equal(found, expected)


# --- delays, traces, the watch ---

DELAY_S = 0.05


@pytest.mark.parametrize(
    ("schedule", "shard", "channel"),
    [(LocalSGD(period=2), 2, "host"), (Sync(), 2, "backward"), (FSDP(), 4, "compute")],
    ids=["local SGD", "sync", "FSDP"],
)
def test_a_straggler_is_in_the_trace_of_its_rank(
    four: Pool, schedule: Schedule, shard: int, channel: Channel, tmp_path: Path
) -> None:
    path = tmp_path / "trace.npz"
    late = np.zeros((1, 4, 4))
    late[0, :, 3] = DELAY_S
    four.run(sharded_loops.train, ShardedLoop(schedule, TRAINING, 4, shard, trace=path, delays={channel: late}))
    trace = Trace.load(path)
    assert trace.plan.world_size == 4
    spans = trace.end_s - trace.start_s
    rows = [row for row, (_, op) in enumerate(ops_of(trace.plan)) if isinstance(op, Delay)]
    assert len(rows) == 4
    assert (spans[rows, 3] >= DELAY_S).all()
    assert (spans[rows, :3] < DELAY_S).all()


def ops_of(plan: Plan) -> list[tuple[int, object]]:
    return [(step, op) for step, body in enumerate(plan.body_of_steps()) for op in plan.bodies[body]]


def test_a_late_rank_is_named_by_the_watch(four: Pool) -> None:
    """The ranks of its copy wait for it where they gather, and the other copy waits where gradients are averaged."""
    for schedule, shard in ((Sync(), 2), (FSDP(), 4)):
        late = four.run(sharded_loops.watched, schedule, shard, 2)[0]
        assert late[2].kind == "persistent"
        assert [each.rank for each in late if each.ms > 75] == [2]


SCENARIO = """
cluster: {preset: ideal, nodes: 2, gpus_per_node: 2}
workload:
  tensors: [{name: a, count: 42, rows: 7}, {name: b, count: 7}, {name: c, count: 35, rows: 5}, {name: d, count: 5},
            {name: e, count: 45, rows: 9}, {name: f, count: 9}, {name: g, count: 27, rows: 3}, {name: h, count: 3}]
  batch_size: 5
  micro_batches: 2
  forward: 1 ms
disturbances: [{kind: persistent, delay: 50 ms, ranks: [1]}]
schedules: [{kind: hsdp, shard: 2}]
steps: 3
"""


@pytest.mark.parametrize(
    "settings", [{"shard": 2}, {"shard": 2, "between": "local-2"}, {"shard": 2, "all_reduce": "last"}]
)
def test_a_simulated_run_is_followed_between_copies(four: Pool, settings: dict[str, object], tmp_path: Path) -> None:
    scenario = loads(SCENARIO.replace("{kind: hsdp, shard: 2}", json.dumps({"kind": "hsdp", **settings})))
    folder = tmp_path / "run"
    built = build(scenario, scenario.schedules[0])
    run_directory.write(folder, scenario, built.plan, delays(scenario))
    path = tmp_path / "trace.npz"
    training = Training("odd", "momentum", torch.float32)
    loop = ShardedLoop(folder, training, None, n_passes=2, accumulates="by the plan", trace=path)
    found = four.run(sharded_loops.train, loop)
    how = ByHand(training, 3, n_passes=2, after_backward=sharded_loops.averaging_gradients)
    if "between" in settings:
        how = ByHand(training, 3, n_passes=2, after_step=averaging_over({2: 2}))
    assert_equal(found, by_hand(how), 1e-6)
    trace = Trace.load(path)
    rows = [row for row, (_, op) in enumerate(ops_of(trace.plan)) if isinstance(op, Delay)]
    assert len(rows) == 2 * 3  # of each micro-batch and step
    assert ((trace.end_s - trace.start_s)[rows, 1] >= 0.05 / 2).all()


def test_a_plan_of_plan_for_is_followed(four: Pool) -> None:
    found = four.run(sharded_loops.train_by_own_plan, LocalSGD(period=3), TRAINING, N_STEPS)
    assert_equal(found, by_hand(ByHand(TRAINING, N_STEPS, after_step=averaging_over({3: 2}))))


def test_a_step_that_ends_with_an_average_in_place_waits_for_it(four: Pool) -> None:
    found = four.run(sharded_loops.train_by_plan_that_averages_in_place, TRAINING, N_STEPS)
    assert_equal(found, by_hand(ByHand(TRAINING, N_STEPS, after_step=averaging_over({1: 2}))))


@pytest.mark.parametrize(
    ("ranks_per_copy", "ranks_per_node", "nodes", "expected"),
    [
        (4, None, (8, 8), 2),
        (8, None, (8, 8), 1),
        (16, None, (8, 8), 1),
        (4, None, (4, 12), 1),
        (2, 8, (), 4),
        (4, 2, (8, 8), 1),
        (1, None, (8, 8), 8),
    ],
)
def test_nodes_are_counted_in_copies(
    ranks_per_copy: int, ranks_per_node: int | None, nodes: tuple[int, ...], expected: int
) -> None:
    shards = mock.Mock(ranks_per_copy=ranks_per_copy)
    request = PlanRequest(torch.nn.Linear(2, 2), None, 1, ranks_per_node, 16, nodes=nodes, shards=shards)
    assert request.copies_per_node(LocalSGD(period=2)) == expected


def test_parameters_are_copied_only_in_steps_that_exchange_them() -> None:
    plan = LocalSGD(period=3).plan(TRAINING.job(2, 6))
    use = uses_of_parameters(plan, ("param",))
    assert [use(step).is_any for step in range(6)] == [False, False, True, False, False, True]
    assert not use(2).ends_elsewhere
    body = tuple(op for op in plan.bodies[1] if not isinstance(op, Copy))
    (average,) = (op for op in body if isinstance(op, AllReduce))
    in_place = replace(plan, bodies=((*body, replace(average, buffer="param")),), order=(Run((0,)),))
    assert uses_of_parameters(in_place, ("param",))(0) == ParameterUse(is_any=True, ends_elsewhere=True)


def test_parameters_are_not_lent_before_the_update() -> None:
    plan = Sync().plan(TRAINING.job(2, 2))
    first = (AllReduce("param", Group(2)), *plan.bodies[0])
    with pytest.raises(
        UnsupportedError, match=r"plan sync: all_reduce\(param, .*\) uses parameters before the update of"
    ):
        uses_of_parameters(replace(plan, bodies=(first,)), ("param",))


# --- refused ---


def test_what_does_not_fit_is_refused_with_a_remedy(four: Pool) -> None:
    for errors in four.run(sharded_loops.refusals):
        assert {name: text for name, text in errors.items() if REFUSED[name] not in text} == {}
        assert errors.keys() == REFUSED.keys()


REFUSED = {
    "another degree": "ScenarioError: hsdp-4: 4 of 4 ranks share a copy, and fully_shard shards over 2: write "
    "HSDP(shard=2), or choose another mesh",
    "FSDP1": "UnsupportedError: FullyShardedDataParallel has a FullyShardedDataParallel: it keeps parameters in flat "
    "tensors of its own; shard the bare model, which is its .module, by fully_shard",
    "tensor parallel": "UnsupportedError: FSDPSequential: 0.weight is distributed by (S(0), S(1)) on a mesh of (2, 2), "
    "as in tensor parallelism; copies that a plan synchronises are sharded by fully_shard alone",
    "distributed by hand": "UnsupportedError: Linear has a DTensor, distributed by hand, which a plan does not know",
    "ranks apart": "UnsupportedError: FSDPSequential: 0.weight is sharded over ranks ",
    "two meshes": "UnsupportedError: FSDPSequential: its parameters are sharded over 2 and 4 ranks: apply fully_shard "
    "with one mesh to all modules",
    "a part only": "UnsupportedError: Sequential: fully_shard has left out 1.weight, 1.bias: apply it to the outermost "
    "module, too",
    "shared update": "UnsupportedError: plan sync-shared: slices of whole tensors, and each rank has a slice of "
    "them: take Sync(), LocalSGD,",
    "LARS": "UnsupportedError: plan sync: TrustRatios of whole tensors",
    "levels of ranks": "ScenarioError: hsgd-2-4 of copies: levels: group of 4 at period 2 does not divide 2 ranks",
    "plan of ranks": "PlanError: plan sync: all_reduce(grad.0, mean over group of 4) would mix slices of different "
    "tensors, because 2 ranks share a copy of the model",
    "plan of hsdp": "it shards the model, which fully_shard does in a loop; give real.wrap the schedule, or a run",
    "not sharded": "UnsupportedError: hsdp-2 shards the model, of which this loop has all parameters on every rank: "
    "apply fully_shard to it before real.wrap",
    "feed": "UnsupportedError: worker.feed() of a model under fully_shard: its plan deals no samples to ranks; read",
    "skip": "RunError: worker.skip() of a model under fully_shard: the ranks that share a copy gather its parameters",
    "join": "RunError: worker.join() of a model under fully_shard: the ranks that share a copy gather its parameters",
    "no zero_grad": "RunError: step 1: gradients of the step before are still there",
    "two forward passes": "RunError: step 0: a second forward pass in training mode, between the forward and the",
    "some units do not reduce": "RunError: some units of the model reduce gradients in this pass and others do not",
}


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "bad batch"), ("leaves", "this rank left its loop before step 3 of 6")]
)
def test_a_rank_that_goes_wrong_is_named_while_the_others_wait_within_a_copy(how: str, message: str) -> None:
    endings = run(sharded_loops.fails_within_a_copy, 4, how, 6.0)
    for rank in (0, 1, 2):
        assert endings[rank].code == 1
        assert "rank 3 (" in endings[rank].output
        assert message in endings[rank].output
