"""Sharded plans in processes and in the virtual world train as `fully_shard` of torch does."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from pool import Pool
from pretended import CPU, IN_THREAD, Pretended, execute
from sharded import plan_of
from sharded_values import by_definition_of_local_averages, by_sharded_plan, sharded_plan
from torch import Tensor, nn
from trainings import Training, in_virtual_world, loss

from real.buffers.lives import in_order_nbytes, short_lived
from real.buffers.memory import Memory
from real.execution import virtual
from real.execution.lifetimes import Lifetimes
from real.execution.streams import Lanes
from real.programs.binding import Binding, GradientBuckets
from real.programs.module import ModuleProgram
from simdist.errors import PlanError, RunError
from simdist.plan import AllGather, Backward, Forward, Op, Plan
from simdist.plan.liveness import lifetimes
from simdist.plan.walk import walk
from simdist.schedules import HierarchicalSGD, Job, LocalSGD
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.diloco import DiLoCo
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.schedules.sharded import ShardedSchedule
from simdist.schedules.sync import Sync
from simdist.schedules.units import ModelUnit

if torch.__version__ < "2.13":
    pytest.skip("the helpers name what fully_shard calls from torch 2.13 on", allow_module_level=True)

from fsdp_settings import MicroBatch
from fsdp_trainings import Sharded, by_fully_shard, by_one_process

N_STEPS = 6
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}  # of the largest parameter
BF16 = torch.bfloat16
NO_SYNC = MicroBatch(reduces=False)
NO_ALL_REDUCE = MicroBatch(all_reduces=False)
LAST = MicroBatch()
AHEAD = {"communicators": 2, "reduce_buffers": 2, "forward_prefetch": 2, "backward_prefetch": 2}
CASES: dict[str, tuple[ShardedSchedule, Sharded]] = {
    "4": (FSDP(), Sharded((4,))),
    "2 x 2": (HSDP(shard=2), Sharded((2, 2))),
    "kept": (FSDP(reshard_after_forward=False), Sharded((4,), reshard_after_forward=False)),
    "in 2 parts": (FSDP(reshard_after_forward=2), Sharded((4,), reshard_after_forward=2)),
    "ahead": (FSDP(**AHEAD), Sharded((4,))),
    "clipped": (HSDP(shard=2), Sharded((2, 2), max_norm=0.05)),
    "reduced each time": (HSDP(shard=2), Sharded((2, 2), micro_batches=(LAST, LAST))),
    "local": (FSDP(accumulation="local"), Sharded((4,), micro_batches=(NO_SYNC, NO_SYNC, LAST), max_norm=0.1)),
    "last": (
        HSDP(shard=2, all_reduce="last", reshard_after_backward=False),
        Sharded((2, 2), micro_batches=(NO_ALL_REDUCE, NO_ALL_REDUCE, LAST)),
    ),
}
EIGHT: dict[str, tuple[ShardedSchedule, Sharded]] = {
    "2 x 4": (HSDP(shard=4), Sharded((2, 4))),
    "2 x 4, last": (HSDP(shard=4, all_reduce="last"), Sharded((2, 4), micro_batches=(NO_ALL_REDUCE, LAST))),
}
MIXED: dict[str, tuple[ShardedSchedule, Sharded]] = {
    "reduced in float32": (
        FSDP(param_dtype="bfloat16", reduce_dtype="float32"),
        Sharded((4,), param_dtype=BF16, reduce_dtype=torch.float32),
    ),
    "added up in float32": (
        HSDP(shard=2, param_dtype="bfloat16", reduce_dtype="float32", accumulation="local"),
        Sharded((2, 2), param_dtype=BF16, reduce_dtype=torch.float32, micro_batches=(NO_SYNC, LAST)),
    ),
    "bfloat16": (HSDP(shard=2, param_dtype="bfloat16"), Sharded((2, 2), param_dtype=BF16)),
    "reduced in bfloat16": (HSDP(shard=2, reduce_dtype="bfloat16"), Sharded((2, 2), reduce_dtype=BF16)),
}


def training_of(how: Sharded, dtype: torch.dtype) -> Training:
    return Training("odd", "adamw", dtype, micro_batches=len(how.micro_batches))


def assert_alike(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert abs(found - expected).max() <= tolerance * abs(expected).max()


def by_plan(pool: Pool, schedule: ShardedSchedule, how: Sharded, dtype: torch.dtype) -> np.ndarray:
    training = training_of(how, dtype)
    plan = sharded_plan(schedule, training, pool.world_size, N_STEPS)
    return np.stack([each for each, _ in pool.run(by_sharded_plan, plan, training, False, how.max_norm)])


@pytest.mark.parametrize("name", CASES)
def test_processes_train_as_fully_shard(four: Pool, name: str) -> None:
    schedule, how = CASES[name]
    theirs = four.run(by_fully_shard, how, training_of(how, torch.float64), N_STEPS)
    ours = by_plan(four, schedule, how, torch.float64)
    assert_alike(ours, np.stack([parameters for parameters, _ in theirs]), TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", ["4", "local", "last", "clipped"])
def test_processes_train_in_single_precision(four: Pool, name: str) -> None:
    schedule, how = CASES[name]
    expected = by_one_process(how, training_of(how, torch.float32), N_STEPS)
    assert_alike(by_plan(four, schedule, how, torch.float32), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", EIGHT)
def test_eight_processes_train_as_fully_shard(eight: Pool, name: str) -> None:
    schedule, how = EIGHT[name]
    theirs = eight.run(by_fully_shard, how, training_of(how, torch.float64), N_STEPS)
    ours = by_plan(eight, schedule, how, torch.float64)
    assert_alike(ours, np.stack([parameters for parameters, _ in theirs]), TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", MIXED)
def test_mixed_types_round_as_fully_shard_does(four: Pool, name: str) -> None:
    schedule, how = MIXED[name]
    theirs = four.run(by_fully_shard, how, training_of(how, torch.float32), N_STEPS)
    ours = by_plan(four, schedule, how, torch.float32)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, np.stack([parameters for parameters, _ in theirs]))


def test_the_calling_thread_may_compute(four: Pool) -> None:
    training = training_of(CASES["last"][1], torch.float64)
    plan = sharded_plan(CASES["last"][0], training, 4, 4)
    in_thread, in_caller = (four.run(by_sharded_plan, plan, training, each) for each in (False, True))
    np.testing.assert_array_equal([each for each, _ in in_thread], [each for each, _ in in_caller])


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_copies_average_their_slices_of_parameters_after_each_period(four: Pool, max_norm: float | None) -> None:
    training = Training("odd", "adamw")
    plan = sharded_plan(HSDP(shard=2, between="local-3"), training, 4, 8)
    ours = np.stack([each for each, _ in four.run(by_sharded_plan, plan, training, False, max_norm)])
    copies = by_definition_of_local_averages(training, 4, 2, 3, 8, max_norm)
    assert_alike(ours, copies.repeat(2, axis=0), 1e-12)
    assert abs(copies[0] - copies[1]).max() > 1e-3


BETWEEN: dict[str, tuple[AveragingSchedule, AveragingSchedule]] = {
    "outer optimizer": (DiLoCo(period=3), DiLoCo(period=3, ranks_per_worker=2)),
    "late, mixed": (
        DiLoCo(period=2, warmup_steps=2, overlap_steps=1, mixing=0.5),
        DiLoCo(period=2, warmup_steps=2, overlap_steps=1, mixing=0.5, ranks_per_worker=2),
    ),
    "late averages": (
        LocalSGD(period=3, overlap_steps=2),
        HierarchicalSGD(levels={3: "world"}, overlap_steps=2),  # the gradients of a node are those of a copy
    ),
}
LEVELS = (
    HierarchicalSGD(levels={2: 2, 4: "world"}, intra_node_gradients=False, warmup_steps=1),
    HierarchicalSGD(levels={2: 4, 4: "world"}, warmup_steps=1),
)
WORKERS = (DiLoCo(period=3, ranks_per_worker=2), DiLoCo(period=3, ranks_per_worker=4))


def by_unsharded(schedule: AveragingSchedule, training: Training, world_size: int, n_steps: int) -> np.ndarray:
    """Train workers of two ranks that average gradients, each rank with a whole model."""
    plan = schedule.plan(replace(training.job(world_size, n_steps), ranks_per_node=2))
    return in_virtual_world(plan, training)[0]


@pytest.mark.parametrize("name", BETWEEN)
def test_sharded_copies_train_as_workers_with_whole_models(four: Pool, name: str) -> None:
    between, unsharded = BETWEEN[name]
    training = Training("odd", "adamw")
    plan = sharded_plan(HSDP(shard=2, between=between), training, 4, 8)
    expected = by_unsharded(unsharded, training, 4, 8)
    assert_alike(in_virtual_world(plan, training)[0], expected, 1e-12)
    found = np.stack([each for each, _ in four.run(by_sharded_plan, plan, training)])
    assert_alike(found, expected, 1e-12)


@pytest.mark.parametrize(("between", "unsharded"), [LEVELS, WORKERS])
def test_levels_of_sharded_copies_train_as_levels_of_nodes(between: AveragingSchedule, unsharded: AveragingSchedule):
    training = Training("odd", "adamw")
    plan = sharded_plan(HSDP(shard=2, between=between), training, 8, 8)
    assert_alike(in_virtual_world(plan, training)[0], by_unsharded(unsharded, training, 8, 8), 1e-12)


@pytest.mark.parametrize("name", [*CASES, *EIGHT])
def test_virtual_world_trains_as_one_process(name: str) -> None:
    schedule, how = (CASES | EIGHT)[name]
    if how.max_norm is not None:
        pytest.skip("the virtual world has no clipping")
    training = training_of(how, torch.float64)
    plan = sharded_plan(schedule, training, how.shard * how.replicas, 6)
    assert_alike(in_virtual_world(plan, training)[0], by_one_process(how, training, 6), 1e-12)


@pytest.mark.parametrize(
    "schedule",
    [Sync(), Sync(shared_update=True), Sync(shared_update=2), Sync(shared_update=2, updates_sent_by="broadcast")],
    ids=lambda each: each.name,
)
def test_gradients_of_unsharded_models_are_clipped(four: Pool, schedule: Sync) -> None:
    training = Training("odd", "adamw")
    plan = schedule.plan(training.job(4, 6))
    found = np.stack([each for each, _ in four.run(by_sharded_plan, plan, training, False, 0.05)])
    assert_alike(found, by_one_process(Sharded((4,), max_norm=0.05), training, 6), 1e-12)


def no_batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("nothing is trained")


def test_trust_ratios_of_gradients_before_clipping_are_refused() -> None:
    training = Training(optimizer="lars")
    plan = Sync().plan(training.job(2, 1))
    module, optimizer = training.make()
    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    with pytest.raises(PlanError, match="computes trust ratios from gradients, so they cannot be clipped afterwards"):
        ModuleProgram(plan, module, nn.Identity(), optimizer, no_batch, memory, device=CPU, max_norm=1.0)


MODELS = {
    "one rank uses it": FSDP(),
    "some ranks skip it": FSDP(),
    "checkpointed": HSDP(shard=2),
    "tied": FSDP(),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_that_skip_layers_or_compute_them_again_train_as_unsharded_ones(four: Pool, model: str) -> None:
    training = Training(model, "adamw")
    expected, _ = in_virtual_world(Sync().plan(training.job(4, 6)), training)
    plan = sharded_plan(MODELS[model], training, 4, 6)
    found = np.stack([each for each, _ in four.run(by_sharded_plan, plan, training)])
    assert_alike(found, expected, 1e-12)
    assert_alike(in_virtual_world(plan, training)[0], expected, 1e-12)


@pytest.mark.parametrize(
    "schedule", [FSDP(wrap="blocks"), FSDP(wrap="blocks", keep_last_unit=True)], ids=["root", "last"]
)
def test_a_root_is_gathered_first_and_kept(four: Pool, schedule: ShardedSchedule) -> None:
    training = Training("odd", "adamw")
    plan = sharded_plan(schedule, training, 4, 6, root=(0, 3))
    found = np.stack([each for each, _ in four.run(by_sharded_plan, plan, training)])
    assert_alike(found, by_one_process(Sharded((4,)), training, 6), 1e-12)


def test_gradients_in_a_bucket_of_another_type_are_not_taken_for_missing() -> None:
    used, unused = (nn.Parameter(torch.ones(2, dtype=BF16)) for _ in range(2))
    places = [torch.ones(2), torch.ones(2)]
    buckets = GradientBuckets({"grad": list(zip((used, unused), places, strict=True))})
    buckets.expect([Backward(("unit",), "grad")], lambda: None)
    (3 * used).sum().backward()
    buckets.finish()
    assert [place.tolist() for place in places] == [[3, 3], [0, 0]]
    assert buckets.unused == {unused}
    used.grad = None
    buckets.expect([Backward(("unit",), "grad", adds=True)], lambda: None)
    (3 * used).sum().backward()
    buckets.finish()
    assert [place.tolist() for place in places] == [[6, 6], [0, 0]]


# --- memory ---


def test_buffers_have_memory_only_while_they_are_in_use(four: Pool) -> None:
    """All of the poisoned memory that the other tests take is written before it is read."""
    training = Training("odd", "adamw")
    plan = sharded_plan(FSDP(), training, 4, 4)
    of = {buffer.name: buffer.nbytes for buffer in plan.buffers if not buffer.name.startswith(("loss", "activ"))}
    shards = sum(nbytes for name, nbytes in of.items() if name.startswith("param"))
    for _, (everything, peak, left) in four.run(by_sharded_plan, plan, training):
        assert everything == sum(of.values())
        assert left == shards
        assert shards < peak < everything


@pytest.mark.parametrize("schedule", [FSDP(), HSDP(shard=2, all_reduce="last")], ids=["fsdp", "hsdp"])
def test_the_most_bytes_are_those_of_buffers_in_use(schedule: ShardedSchedule) -> None:
    plan = plan_of(schedule, 3, micro_batches=2, n_steps=2)
    memory = Memory(plan, CPU, [buffer.name for buffer in plan.buffers])
    lives = Lifetimes(plan, memory)
    lives.start()
    bodies = list(plan.body_of_steps())
    for instance in walk(plan):
        lives.begin(instance, bodies[instance.step])
        lives.end(instance, bodies[instance.step], has_run=True)
    in_use = np.full(plan.n_instances, sum(buffer.nbytes for buffer in plan.buffers if buffer.initialized))
    for life in lifetimes(plan):
        in_use[life.begin : max(life.ends) + 1] += life.buffer.nbytes
    kept_nbytes = sum(buffer.nbytes for buffer in plan.buffers if buffer.initialized)
    assert lives.peak_nbytes == in_use.max() == kept_nbytes + in_order_nbytes(plan, short_lived(plan))
    assert memory.held_nbytes == kept_nbytes


def test_before_the_first_step_only_the_model_has_memory() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    program, memory = program_of(module, FSDP(), (ModelUnit(0, 2), ModelUnit(2, 4)))
    program.warm_up(1)
    names = {f"{kind}.{unit}" for kind in ("param", "unit", "grad", "gathered", "ready") for unit in (0, 1)}
    held = {name for name in names if memory.is_held(name)}
    assert held == {"param.0", "param.1", "unit.0", "unit.1"}


def test_a_plan_that_fits_while_it_runs_may_be_performed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(FSDP(), 3)
    names = [buffer.name for buffer in plan.buffers]
    kept_nbytes = sum(buffer.nbytes for buffer in plan.buffers if buffer.initialized)
    needed_nbytes = kept_nbytes + in_order_nbytes(plan, short_lived(plan))
    monkeypatch.setattr("real.buffers.memory.free_memory_nbytes", lambda: needed_nbytes)
    Memory(plan, CPU, names, begins_freed=True)
    with pytest.raises(RunError, match="for its buffers; the host has"):
        Memory(plan, CPU, names)
    monkeypatch.setattr("real.buffers.memory.free_memory_nbytes", lambda: needed_nbytes - 1)
    with pytest.raises(RunError, match="for its buffers; the host has"):
        Memory(plan, CPU, names, begins_freed=True)


def test_an_unsharded_model_keeps_its_buffers() -> None:
    assert short_lived(Sync().plan(Training().job(4, 2))) == set()


def test_what_is_short_lived_is_written_first() -> None:
    plan = plan_of(HSDP(shard=2, all_reduce="last"), 2, micro_batches=2)
    found = {name.removesuffix(".0") for name in short_lived(plan) if not name.endswith(".1")} - {"loss", "activations"}
    assert found == {"slice", "gathered", "unit", "grad", "ready", "reduced", "partial"}
    kept = plan_of(FSDP(reshard_after_forward=2), 2)
    assert {"kept.0", "kept.1"} <= short_lived(kept)


def test_memory_of_a_buffer_is_taken_for_the_same_storage() -> None:
    plan = plan_of(FSDP(), 1)
    buffer = replace(plan.buffer("gathered.0"), padding=2)
    memory = Memory(replace(plan, buffers=(buffer,)), CPU, {buffer.name})
    view = memory.dense(buffer.name)[:3]
    assert (memory.held_nbytes, memory.is_held(buffer.name)) == (buffer.nbytes, True)
    memory.give_back(buffer.name)
    assert (memory.held_nbytes, memory.is_held(buffer.name)) == (0, False)
    memory.take(buffer.name)
    memory.dense(buffer.name)[:-2].fill_(7)
    assert memory.held_nbytes == buffer.nbytes
    assert view.tolist() == [7, 7, 7]
    assert memory.dense(buffer.name)[-2:].tolist() == [0, 0]


class Returning(nn.Module):
    """Uses its first layer again after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(self.second(self.first(inputs)))


class Borrowing(nn.Module):
    """Reads the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(self.first(inputs), self.second.weight, self.second.bias)


class TiedHead(nn.Module):
    """Reads the weight of its first layer again at the end, without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(self.second(self.first(inputs)), self.first.weight)


@pytest.mark.parametrize(
    ("module", "kept"), [(Returning(), {"unit.0"}), (TiedHead(), {"unit.0"}), (Borrowing(), set())]
)
def test_a_unit_that_is_used_out_of_turn_keeps_its_memory(module: nn.Module, kept: set[str]) -> None:
    program, memory = program_of(module, FSDP(), (ModelUnit(0, 2), ModelUnit(2, 4)))
    program.warm_up(1)
    assert memory.kept == kept


def test_a_unit_that_is_used_after_it_was_freed_is_refused() -> None:
    program, memory = program_of(Returning(), FSDP(), (ModelUnit(0, 2), ModelUnit(2, 4)))
    parts = [Forward((f"unit.{number}",), (f"activations.{number}",)) for number in range(2)]
    with pytest.raises(RunError, match=r"unit\.0, the unit of first\.weight, is used again after its turn in the pass"):
        program.forward(parts, 0, lambda: memory.give_back("unit.0"))


def test_models_of_the_virtual_world_are_whole_after_each_step() -> None:
    training = Training("odd", "adamw")

    def vectors(plan: Plan) -> list[Tensor]:
        seen: list[Tensor] = []

        def note(_step: int, modules: Sequence[nn.Module]) -> None:
            rows = [torch.cat([each.detach().flatten() for each in module.parameters()]) for module in modules]
            seen.append(torch.stack(rows))

        virtual.train_together(plan, training.make, loss, training.batch, on_step=note)
        return seen

    ours, theirs = (vectors(plan) for plan in (sharded_plan(FSDP(), training, 4, 3), Sync().plan(training.job(4, 3))))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


# --- the executor ---


@pytest.mark.parametrize("compute_in_caller", [False, True])
@pytest.mark.parametrize("schedule", [FSDP(), HSDP(shard=2, all_reduce="last", **AHEAD)], ids=["fsdp", "hsdp"])
def test_every_instance_of_a_sharded_plan_comes_after_what_it_depends_on(
    schedule: ShardedSchedule, compute_in_caller: bool
) -> None:
    plan = plan_of(schedule, 4, micro_batches=2, n_steps=2)
    lanes = Lanes(CPU, collectives_block=True, compute_in_caller=compute_in_caller)
    (ready_s, _, end_s), _ = execute(plan, Pretended(), lanes)
    assert not np.isnan(end_s).any()
    last_of = dict.fromkeys(plan.streams, -np.inf)
    for instance in walk(plan):
        assert all(ready_s[instance.index] >= end_s[before] for before in instance.after)
        assert ready_s[instance.index] >= last_of[instance.lane.stream]
        last_of[instance.lane.stream] = end_s[instance.index]


def test_the_next_unit_is_gathered_while_one_computes() -> None:
    """Only computing the first unit lets the gather of the second end, so it must be under way meanwhile."""
    began, may_end = threading.Event(), threading.Event()

    class Overlapping(Pretended):
        def forward(self, parts: Sequence[Forward], step: int, complete: object) -> None:
            assert began.wait(60), "the second unit is not gathered while the first one computes"
            may_end.set()
            super().forward(parts, step, complete)

        def perform(self, op: Op, _step_or_memory: object) -> None:
            if isinstance(op, AllGather) and op.dst == "gathered.1" and not may_end.is_set():
                began.set()
                assert may_end.wait(60)

    execute(plan_of(FSDP(), 3), Overlapping(), IN_THREAD)
    assert may_end.is_set()


# --- checkpoints ---


def test_pieces_of_a_slice_are_named_after_their_tensors() -> None:
    """Of 14 weights and 2 biases, the second of two slices has the last 6 and 2."""
    module = nn.Sequential(nn.Linear(7, 2))
    whole = torch.cat([each.detach().flatten() for each in module.parameters()])
    plan = FSDP().plan(Job(2, 2, 1, tensor_counts=(14, 2), tensor_rows=(2, 2), units=(ModelUnit(0, 2),)))
    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    pieces = Binding(plan, module, memory, rank=1).named_pieces(plan.buffer("param.0"))
    assert {name: first for name, (first, _) in pieces.items()} == {"0.weight": 8, "0.bias": 0}
    assert torch.equal(torch.cat([values for _, values in pieces.values()]), whole[8:])


# --- models that do not fit ---


def program_of(
    module: nn.Module, schedule: ShardedSchedule, units: tuple[ModelUnit, ...]
) -> tuple[ModuleProgram, Memory]:
    parameters = list(module.parameters())
    counts = tuple(each.numel() for each in parameters)
    rows = tuple(each.shape[0] for each in parameters)
    plan = schedule.plan(Job(2, 2, 1, tensor_counts=counts, tensor_rows=rows, units=units))
    memory = Memory(plan, CPU, Binding.buffers_of(plan), begins_freed=True)
    program = ModuleProgram(
        plan,
        module,
        nn.functional.cross_entropy,
        torch.optim.AdamW(module.parameters()),
        lambda number: (torch.ones(2, 6), torch.zeros(2, dtype=torch.long)),
        memory,
        device=CPU,
    )
    return program, memory


def test_a_unit_that_is_used_without_its_module_is_refused() -> None:
    program, _ = program_of(Borrowing(), FSDP(), (ModelUnit(0, 2), ModelUnit(2, 4)))
    parts = [Forward((f"unit.{number}",), (f"activations.{number}",)) for number in range(2)]
    program.forward(parts, 0, lambda: None)
    with pytest.raises(RunError, match=r"second\.weight of unit\.1 is used although no module that has parameters"):
        program.backward([], lambda: None)


def test_units_continue_the_plan_before_they_are_used() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    program, _ = program_of(module, FSDP(), (ModelUnit(0, 2), ModelUnit(2, 4)))
    seen: list[str] = []
    for number, layer in enumerate(module):
        layer.register_forward_hook(lambda *_, number=number: seen.append(f"layer {number}"))
    parts = [Forward((f"unit.{number}",), (f"activations.{number}",)) for number in range(2)]
    program.forward(parts, 0, lambda: seen.append("complete"))
    assert seen == ["layer 0", "complete", "layer 1", "complete"]


def test_a_module_of_two_units_waits_for_both() -> None:
    module = nn.Sequential(nn.Linear(6, 3))
    program, _ = program_of(module, FSDP(), (ModelUnit(0, 1), ModelUnit(1, 2)))
    seen: list[str] = []
    module[0].register_forward_hook(lambda *_: seen.append("layer"))
    parts = [Forward((f"unit.{number}",), (f"activations.{number}",)) for number in range(2)]
    program.forward(parts, 0, lambda: seen.append("complete"))
    assert seen == ["complete", "layer", "complete"]


def test_a_slice_of_tensors_that_nothing_reads_is_refused() -> None:
    plan = plan_of(FSDP(), 1)
    body = tuple(op for op in plan.bodies[0] if not isinstance(op, Forward))
    with pytest.raises(PlanError, match=r"param\.0 has slices of tensors that no forward pass reads whole"):
        Binding(replace(plan, bodies=(body,)), nn.Linear(4, 6, bias=False), Memory(plan, CPU, ()))
