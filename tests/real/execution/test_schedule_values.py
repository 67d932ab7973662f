"""Values that schedules compute: process world = virtual world for all, and the effect of compression."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from pool import Pool
from sharded_values import by_sharded_plan
from trainings import CPU, Training, by_plan, by_torchft, by_torchs_powersgd, in_virtual_world, loss

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from real.buffers.memory import Memory  # noqa: E402
from real.execution import virtual  # noqa: E402
from real.execution.running import check_world  # noqa: E402
from real.programs.module import ModuleProgram  # noqa: E402
from real.programs.optimizers import nesterov  # noqa: E402
from simdist.errors import RunError  # noqa: E402
from simdist.plan import Backward, Forward, Optimize, Plan, TrustRatios  # noqa: E402
from simdist.plan.check import check  # noqa: E402
from simdist.schedules import Gossip, GradientSchedule, HierarchicalSGD, LocalSGD, Schedule, Sync, kinds  # noqa: E402
from simdist.schedules.diloco import DiLoCo  # noqa: E402
from simdist.schedules.fusion import Fusion, fuse  # noqa: E402
from simdist.schedules.job import Shape  # noqa: E402
from simdist.schedules.parameter_server import ParameterServer  # noqa: E402
from simdist.schedules.powersgd import PowerSGD  # noqa: E402
from simdist.schedules.sparse import SparseSchedule  # noqa: E402
from simdist.schedules.torus import Torus  # noqa: E402

WORLD_SIZE, RANKS_PER_NODE, N_STEPS = 8, 4, 6
SMALL = {"first_bucket_nbytes": 100, "bucket_nbytes": 400}  # of `Training`, in several buckets
EXAMPLES = [  # who is late to backup workers, only arrivals tell: see test_backup_workers.py
    cls(**example)
    for cls in kinds().values()
    for example in cls.examples
    if cls.__name__ != "BackupWorkers" or not example["backup"]
]
GRADIENT = [cls for cls in kinds().values() if issubclass(cls, GradientSchedule)]
SPARSE = [cls for cls in kinds().values() if issubclass(cls, SparseSchedule)]

each_sparse = pytest.mark.parametrize("kind", SPARSE, ids=[cls.__name__ for cls in SPARSE])


def plan_of(schedule: Schedule, training: Training, n_steps: int = N_STEPS) -> Plan:
    plan = schedule.plan(training.job(WORLD_SIZE, n_steps, ranks_per_node=RANKS_PER_NODE))
    check(plan)
    return plan


def moved(parameters: np.ndarray, training: Training) -> np.ndarray:
    """Return how far training has moved the parameters."""
    module, _ = training.make()
    return parameters - torch.cat([each.detach().flatten() for each in module.parameters()]).numpy()


def assert_moved_alike(ours: np.ndarray, theirs: np.ndarray, training: Training, tolerance: float) -> None:
    """Compare how far parameters `[world_size, n]` were moved, relative to the longest way."""
    one, other = moved(ours, training), moved(theirs, training)
    assert np.abs(one - other).max() <= tolerance * np.abs(other).max()
    assert np.abs(other).max() > 0


# --- the worlds agree ---


@pytest.mark.parametrize("schedule", EXAMPLES, ids=[each.name for each in EXAMPLES])
def test_worlds_agree_on_every_schedule(eight: Pool, schedule: Schedule) -> None:
    training = Training()
    plan = plan_of(schedule, training, 4 if isinstance(schedule, GradientSchedule) else N_STEPS)
    train = by_sharded_plan if schedule.shards else by_plan
    theirs = np.stack([parameters for parameters, _ in eight.run(train, plan, training)])
    halves = "fp16" in schedule.name or "bf" in schedule.name
    tolerance = 1e-2 if halves else 1e-11  # half precision rounds with every addition
    assert_moved_alike(theirs, in_virtual_world(plan, training)[0], training, tolerance)


@pytest.mark.parametrize("cls", GRADIENT, ids=[cls.__name__ for cls in GRADIENT])
def test_worlds_agree_on_several_buckets_and_shared_trust_ratios(eight: Pool, cls: type[GradientSchedule]) -> None:
    training = Training(optimizer="lars")
    density = {"density": 0.1} if issubclass(cls, SparseSchedule) else {}
    plan = plan_of(cls(**cls.examples[0] | SMALL | density | {"parallel_optimizer": True}), training, 4)
    theirs = np.stack([parameters for parameters, _ in eight.run(by_plan, plan, training)])
    assert_moved_alike(theirs, in_virtual_world(plan, training)[0], training, 1e-6)  # ratios are single precision


SHARING = [cls for cls in GRADIENT if cls is not ParameterServer]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("cls", SHARING, ids=[cls.__name__ for cls in SHARING])
def test_shared_updates_are_those_that_each_would_do_to_the_last_bit(
    cls: type[GradientSchedule], optimizer: str
) -> None:
    training = Training("one rank uses it", optimizer=optimizer)
    density = {"density": 0.1, "warmup_steps": 2} if issubclass(cls, SparseSchedule) else {}
    alone, shared = (cls(**SMALL, **density, shared_update=each) for each in (False, True))
    one, other = (in_virtual_world(plan_of(each, training), training)[0] for each in (alone, shared))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("cls", [Sync, Torus], ids=["sync", "torus"])
def test_processes_that_share_updates_end_as_those_that_do_not(
    eight: Pool, cls: type[GradientSchedule], optimizer: str
) -> None:
    training = Training(optimizer=optimizer)
    plans = [plan_of(cls(**SMALL, shared_update=shared), training) for shared in (False, True)]
    one, other = (np.stack([each for each, _ in eight.run(by_plan, plan, training)]) for plan in plans)
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-15)  # the padding moves the beginnings of a ring's sums


DEGREES: list[dict[str, Any]] = [
    {"shared_update": 2},
    {"shared_update": "node"},
    {"shared_update": True},
    {"shared_update": 2, "updates_sent_by": "broadcast"},
    {"shared_update": 4, "updates_sent_by": "broadcast", "compression": "none", "bucket_nbytes": None},
    {"shared_update": True, "updates_sent_by": "broadcast"},
]


@pytest.mark.parametrize(
    ("pool", "world_size", "settings"),
    [
        pytest.param(
            pool,
            world_size,
            settings,
            marks=pytest.mark.full if number % 2 == (world_size == 8) else (),
            id=f"{world_size}-{Sync(**settings).name}",
        )
        for pool, world_size in (("four", 4), ("eight", 8))
        for number, settings in enumerate(DEGREES)
    ],
)
def test_updates_shared_by_some_ranks_are_those_of_a_whole_model(
    request: pytest.FixtureRequest, pool: str, world_size: int, settings: dict[str, Any]
) -> None:
    """AdamW in float64, whose slices have padding, on 4 and 8 ranks of nodes with 4 and 2."""
    training = Training("odd", "adamw")
    job = training.job(world_size, 6, ranks_per_node=world_size // 2)
    plans = [Sync(**SMALL | each).plan(job) for each in ({}, settings)]
    found = [in_virtual_world(plan, training)[0] for plan in plans]
    found.append(np.stack([each for each, _ in request.getfixturevalue(pool).run(by_plan, plans[1], training)]))
    for ours in found[1:]:
        assert_moved_alike(ours, found[0], training, 1e-12)


def by_definition_of_masters(training: Training, world_size: int, n_steps: int) -> np.ndarray:
    """Return parameters of single precision after updates of their copy in double precision."""
    module, _ = training.make()
    master = [each.detach().double() for each in module.parameters()]
    optimizer = torch.optim.AdamW(master, lr=0.01)
    for step in range(n_steps):
        for each in master:
            each.grad = torch.zeros_like(each)
        for rank in range(world_size):
            module.zero_grad()
            inputs, targets = training.batch(step, rank)
            loss(module(inputs), targets).backward()
            for each, parameter in zip(master, module.parameters(), strict=True):
                each.grad += parameter.grad.double() / world_size
        optimizer.step()
        with torch.no_grad():
            for each, parameter in zip(master, module.parameters(), strict=True):
                parameter.copy_(each)
    return torch.cat([each.detach().flatten() for each in module.parameters()]).numpy()


@pytest.mark.parametrize("by", ["all_gather", "broadcast"])
def test_ranks_update_slices_in_a_type_of_their_own(four: Pool, by: str) -> None:
    training = Training("odd", "adamw", dtype=torch.float32)
    job = dataclasses.replace(training.job(4, 6, ranks_per_node=2), dtype="float64")
    plan = Sync(**SMALL, shared_update=2, updates_sent_by=by, param_dtype="float32").plan(job)
    expected = by_definition_of_masters(training, 4, 6)
    in_processes = np.stack([each for each, _ in four.run(by_plan, plan, training)])
    for found in (in_virtual_world(plan, training)[0], in_processes):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=0, atol=2e-6)


def test_changes_too_small_for_the_type_of_the_parameters_add_up() -> None:
    """A third of the distance between numbers of single precision a step, which plain single precision would lose."""

    class Slow(Training):
        def optimizer_of(self, module: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=1e-8)

    training = Slow("mlp", dtype=torch.float32)
    job = training.job(4, 30)
    plans = {
        kept: Sync(shared_update=2, param_dtype="float32").plan(dataclasses.replace(job, dtype=kept))
        for kept in ("float32", "float64")
    }
    changed = {kept: np.mean(moved(in_virtual_world(plan, training)[0], training) != 0) for kept, plan in plans.items()}
    assert changed["float32"] < changed["float64"] / 2


@pytest.mark.parametrize(
    ("model", "optimizer", "rank", "warmup_steps", "rate"),
    [
        ("mlp", "momentum", 1, 2, 2.0),
        ("mlp", "adam", 2, 3, 1.0),
        ("mlp", "sgd", 4, 2, 0.5),  # by QR; vectors, too
        ("conv", "sgd", 1, 2, 1.0),
    ],
)
def test_powersgd_is_that_of_torch(
    four: Pool, model: str, optimizer: str, rank: int, warmup_steps: int, rate: float
) -> None:
    """Factors, seeds, warm start, warm-up and error feedback of `powerSGD_hook`, in several buckets of DDP."""
    training = Training(model, optimizer)
    schedule = PowerSGD(
        rank=rank, warmup_steps=warmup_steps, min_compression_rate=rate, first_bucket_nbytes=512, bucket_nbytes=512
    )
    plan = schedule.plan(training.job(4, 9))
    torchs = four.run(by_torchs_powersgd, training, 9, rank, warmup_steps, rate)
    expected = np.stack([parameters for parameters, _ in torchs])
    buckets = [list(range(*op.tensors)) for op in plan.buffers if op.name.startswith("grad")]
    assert len(buckets) == len(torchs[0][1]) > 1
    assert model == "conv" or buckets == torchs[0][1]  # DDP's come as autograd does, whose order differs there
    ours = np.stack([parameters for parameters, _ in four.run(by_plan, plan, training)])
    for found in (ours, in_virtual_world(plan, training)[0]):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_factors_of_gradients_of_zeros_stay_finite() -> None:
    """A parameter that nobody uses, and its Q, must not become NaN, or zero for good."""
    training = Training("all use it or none", optimizer="sgd")
    plan = plan_of(PowerSGD(rank=2, min_compression_rate=0.5), training)
    found = moved(in_virtual_world(plan, training)[0], training)
    assert np.isfinite(found).all()
    assert (np.abs(found).max(axis=0) > 0).mean() > 0.9


def test_servers_beside_the_ranks_are_for_simulation_only() -> None:
    training = Training()
    apart, among = (plan_of(ParameterServer(servers=2, apart=each), training) for each in (True, False))
    check_world(among, WORLD_SIZE)
    with pytest.raises(RunError, match=r"plan ps-2-apart: .* goes through servers beside the ranks, which can be"):
        check_world(apart, WORLD_SIZE)
    ours, theirs = (in_virtual_world(plan, training)[0] for plan in (apart, among))
    np.testing.assert_array_equal(ours, theirs)


# --- nothing but the way differs ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", GRADIENT, ids=[cls.__name__ for cls in GRADIENT])
def test_whole_gradients_train_as_sync_whichever_way_they_go(cls: type[GradientSchedule], dtype: torch.dtype) -> None:
    training = Training(dtype=dtype)
    whole = {"density": 1.0} if issubclass(cls, SparseSchedule) else {}
    if cls is PowerSGD:  # of full rank, a projection leaves nothing out
        whole = {"rank": 100, "min_compression_rate": 1e-3}
    ours, losses = in_virtual_world(plan_of(cls(**cls.examples[0] | SMALL | whole), training), training)
    theirs, expected = in_virtual_world(plan_of(Sync(), training), training)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("cycle_s", [None, 2e-3], ids=["without cycles", "with cycles"])
def test_fusion_changes_no_values(eight: Pool, cycle_s: float | None) -> None:
    training = Training()
    plan = plan_of(Sync(first_bucket_nbytes=0, bucket_nbytes=0), training, 3)
    gradients = [op.dst for op in plan.bodies[0] if isinstance(op, Backward)]
    ready_s = {name: 1e-3 * number for number, name in enumerate(gradients)}
    fused = fuse(plan, Fusion(buffer_nbytes=700, cycle_s=cycle_s), ready_s)
    check(fused)
    assert len(fused.buffers) > len(plan.buffers)
    theirs = np.stack([parameters for parameters, _ in eight.run(by_plan, fused, training)])
    assert_moved_alike(theirs, in_virtual_world(plan, training)[0], training, 1e-12)


@pytest.mark.parametrize("cls", [Sync, *SPARSE], ids=["Sync", *(cls.__name__ for cls in SPARSE)])
def test_shared_trust_ratios_are_those_that_each_would_compute_to_the_last_bit(cls: type[GradientSchedule]) -> None:
    training = Training(optimizer="lars")
    alone, shared = (cls(**SMALL, parallel_optimizer=parallel) for parallel in (False, True))
    plans = [plan_of(each, training) for each in (alone, shared)]
    sizes = [{op.group.size for op in plan.bodies[0] if isinstance(op, TrustRatios)} for plan in plans]
    assert sizes == [{1}, {WORLD_SIZE}]
    one, other = (in_virtual_world(plan, training)[0] for plan in plans)
    np.testing.assert_array_equal(one, other)


# --- averages that come late, and outer optimizers ---


@pytest.mark.parametrize(
    ("period", "fragments", "delay", "alpha"),
    [(4, 1, 0, 0.0), (4, 2, 0, 0.0), (6, 2, 2, 0.0), (6, 2, 1, 0.5), (3, 1, 2, 0.25)],
)
def test_diloco_and_its_stream_train_as_those_of_torchft(
    eight: Pool, period: int, fragments: int, delay: int, alpha: float
) -> None:
    pytest.importorskip("torchft.local_sgd")
    training, turn = Training(optimizer="adamw"), period // fragments
    schedule = DiLoCo(
        period=period, fragments=fragments, overlap_steps=delay, mixing=alpha, phase=(turn - delay - 1) % turn
    )
    plan = plan_of(schedule, training, 14)
    settings = {"fragments": fragments, "delay": delay, "alpha": alpha}
    theirs = np.stack(eight.run(by_torchft, training, 14, period, settings))
    ours = np.stack([parameters for parameters, _ in eight.run(by_plan, plan, training)])
    for found in (ours, in_virtual_world(plan, training)[0]):
        assert_moved_alike(found, theirs, training, 1e-11)


def test_local_sgd_trains_as_that_of_torchft(eight: Pool) -> None:
    pytest.importorskip("torchft.local_sgd")
    training = Training(optimizer="adamw")
    theirs = np.stack(eight.run(by_torchft, training, 8, 3, None))
    assert_moved_alike(in_virtual_world(plan_of(LocalSGD(period=3), training, 8), training)[0], theirs, training, 1e-11)


def stacked(modules: Sequence[nn.Module]) -> Tensor:
    return torch.stack([torch.cat([each.detach().flatten() for each in module.parameters()]) for module in modules])


def parameters_by_step(schedule: Schedule, n_steps: int, outer: dict[str, float] | None = None) -> Tensor:
    """Return the parameters after every step, `[n_steps, world_size, n]`."""
    training, seen = Training(optimizer="adamw"), []
    plan = plan_of(schedule, training, n_steps)
    make = nesterov if outer is None else lambda params: torch.optim.SGD(params, **outer)
    note = lambda step, modules: seen.append(stacked(modules).clone())  # noqa: E731
    virtual.train_together(plan, training.make, loss, training.batch, on_step=note, outer_optimizer=make)
    return torch.stack(seen)


def by_definition(
    n_steps: int, period: int, delay: int, alpha: float, outer: dict[str, float] | None, fragments: tuple[slice, ...]
) -> Tensor:
    """Train all ranks in turn as the papers define it, with one vector for each rank; likewise."""
    training, seen, sent = Training(optimizer="adamw"), [], {}
    made = [training.make(rank) for rank in range(WORLD_SIZE)]
    anchor = stacked([module for module, _ in made])[0]
    turn = period // len(fragments)
    anchors = [nn.Parameter(anchor[part].clone()) for part in fragments]
    optimizers = [torch.optim.SGD([each], **(outer or {"lr": 0.0})) for each in anchors]
    for step in range(n_steps):
        for rank, (module, optimizer) in enumerate(made):
            inputs, targets = training.batch(step, rank)
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
        vectors = stacked([module for module, _ in made])
        if (step + 1) % turn == 0 and not delay:
            sent[step] = vectors.clone()
        if step - delay in sent:
            number = (step - delay) // turn % len(fragments)
            part, then = fragments[number], sent.pop(step - delay)
            if outer is None:
                vectors[:, part] += then[:, part].mean(dim=0) - then[:, part]
            else:
                anchors[number].grad = (anchors[number].detach() - then[:, part]).mean(dim=0)
                optimizers[number].step()
                vectors[:, part] = alpha * vectors[:, part] + (1 - alpha) * anchors[number].detach()
        if (step + 1) % turn == 0 and delay:  # what was taken is sent on
            sent[step] = vectors.clone()
        for (module, _), vector in zip(made, vectors, strict=True):
            nn.utils.vector_to_parameters(vector.clone(), list(module.parameters()))
        seen.append(vectors)
    return torch.stack(seen)


NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
WHOLE, HALVES = (slice(None),), (slice(56), slice(56, None))  # of the first layer, and the rest


@pytest.mark.parametrize(
    ("schedule", "definition"),
    [
        (LocalSGD(period=4), (4, 0, 0.0, None, WHOLE)),
        (LocalSGD(period=4, overlap_steps=3), (4, 3, 0.0, None, WHOLE)),
        (LocalSGD(period=2, overlap_steps=2), (2, 2, 0.0, None, WHOLE)),
        (DiLoCo(period=3), (3, 0, 0.0, NESTEROV, WHOLE)),
        (DiLoCo(period=4, fragments=2, overlap_steps=3, mixing=0.5), (4, 3, 0.5, NESTEROV, HALVES)),
        (DiLoCo(period=4, overlap_steps=4, mixing=0.25), (4, 4, 0.25, NESTEROV, WHOLE)),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_averages_are_as_defined_after_every_step(schedule: Schedule, definition: tuple[object, ...]) -> None:
    ours, theirs = parameters_by_step(schedule, 13), by_definition(13, *definition)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{"period": 1}, {"period": 3}, {"period": 4, "warmup_steps": 2}])
def test_diloco_of_learning_rate_1_without_momentum_averages_parameters(settings: dict[str, int]) -> None:
    ours, theirs = (parameters_by_step(each, 8, {"lr": 1.0}) for each in (DiLoCo(**settings), LocalSGD(**settings)))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)


def test_an_average_that_is_taken_at_once_is_a_plain_one() -> None:
    training = Training()
    for plain, late in (
        (LocalSGD(period=2), LocalSGD(period=2, overlap_steps=0)),
        *((HierarchicalSGD(levels={2: 4, 4: 8}), HierarchicalSGD(levels={2: 4, 4: 8}, overlap_steps=0)),),
    ):
        assert plan_of(plain, training).digest() == plan_of(late, training).digest()


def by_gossip(n_steps: int, pairs_of: Callable[[int], Sequence[Sequence[int]]]) -> Tensor:
    """Train all ranks in turn; after each step, give both ranks of a pair the mean of their parameters."""
    training, seen = Training(optimizer="adamw"), []
    made = [training.make(rank) for rank in range(WORLD_SIZE)]
    for step in range(n_steps):
        for rank, (module, optimizer) in enumerate(made):
            inputs, targets = training.batch(step, rank)
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            for one, other in pairs_of(step):
                for mine, theirs in zip(made[one][0].parameters(), made[other][0].parameters(), strict=True):
                    mine.copy_((mine + theirs) / 2)
                    theirs.copy_(mine)
        seen.append(stacked([module for module, _ in made]))
    return torch.stack(seen)


def test_gossip_in_a_ring_is_as_defined_to_the_last_bit() -> None:
    turns = [[(0, 1), (2, 3), (4, 5), (6, 7)], [(1, 2), (3, 4), (5, 6), (7, 0)]]
    ours, theirs = parameters_by_step(Gossip(matching="ring"), 5), by_gossip(5, lambda step: turns[step % 2])
    np.testing.assert_array_equal(ours, theirs)


def test_gossip_of_random_pairs_is_as_defined_to_the_last_bit_in_processes_too(eight: Pool) -> None:
    schedule, training = Gossip(matchings=3, seed=4), Training(optimizer="adamw")
    shape = Shape(WORLD_SIZE, RANKS_PER_NODE)
    theirs = by_gossip(5, lambda step: group.members(WORLD_SIZE) if (group := schedule.average(step, shape)) else [])
    np.testing.assert_array_equal(parameters_by_step(schedule, 5), theirs)
    ours = np.stack([parameters for parameters, _ in eight.run(by_plan, plan_of(schedule, training, 5), training)])
    np.testing.assert_array_equal(ours, theirs[-1])


# --- error feedback ---


def exchanged(
    schedule: SparseSchedule | PowerSGD, n_steps: int, compute: Callable[[Tensor], object], residual: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of what was given and what was applied, and what is left; means over ranks, bucket by bucket.

    Args:
        schedule: Whose exchanges.
        n_steps: How many.
        compute: Writes a gradient, `[world_size, count]`.
        residual: Contents of every residual at the beginning, as if it had been given.
    """
    plan = communication_of(plan_of(schedule, Training(), n_steps))
    memory = Memory(plan, CPU, {buffer.name for buffer in plan.buffers}, n_ranks=WORLD_SIZE)
    gradients = [buffer for buffer in plan.buffers if buffer.name.startswith("grad")]
    given = {buffer.name: torch.full((buffer.count,), residual, dtype=torch.float64) for buffer in gradients}
    applied = {name: torch.zeros_like(total) for name, total in given.items()}

    def give() -> None:
        for buffer in gradients:
            rows = memory.dense(buffer.name)
            compute(rows)
            rows[:, buffer.count - buffer.padding :] = 0
            given[buffer.name] += rows.mean(dim=0)

    def update(step: int) -> None:
        for buffer in gradients:
            rows = memory.dense(buffer.name)
            assert torch.equal(rows, rows[:1].expand_as(rows)), "ranks would update with different gradients"
            applied[buffer.name] += rows[0]
        if step + 1 < n_steps:
            give()

    residuals = [memory.dense(f"residual.{number}") for number in range(len(gradients))]
    for rows in residuals:
        rows.fill_(residual)
    give()
    programs = [idle(plan, memory.row(rank), rank) for rank in range(WORLD_SIZE)]
    virtual.perform_together(plan, programs, memory, on_step=update)
    left = [left_over(rows, buffer.count) for rows, buffer in zip(residuals, gradients, strict=True)]
    return torch.cat(list(given.values())), torch.cat(list(applied.values())), torch.cat(left)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("method", ["exact", "mstopk", "dgc"])
@each_sparse
def test_nothing_of_a_gradient_is_lost(kind: type[SparseSchedule], method: str, compression: str) -> None:
    """Applied updates and residuals add up to the mean of all gradients, and ranks agree.

    In half precision, too: what a conversion takes away stays in the residual. Only what is reduced as a whole rounds
    and forgets: hitopk's gradients in the nodes, and those of a warm-up.
    """
    generator = torch.Generator().manual_seed(0)
    halves = compression == "fp16"
    warmup_steps = 0 if halves else 2
    schedule = kind(density=0.05, method=method, warmup_steps=warmup_steps, **SMALL, compression=compression)
    given, applied, left = exchanged(schedule, 10, lambda rows: rows.normal_(generator=generator))
    assert left.abs().max() > 0.1
    np.testing.assert_allclose(
        applied + left, given, rtol=1e-12, atol=5e-3 if halves and schedule.kind == "hitopk" else 1e-12
    )


@pytest.mark.parametrize("rank", [1, 3])
def test_nothing_that_factors_leave_out_is_lost(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    schedule = PowerSGD(rank=rank, warmup_steps=2, min_compression_rate=0.4, **SMALL)
    given, applied, left = exchanged(schedule, 10, lambda rows: rows.normal_(generator=generator))
    assert left.abs().max() > 0.1
    np.testing.assert_allclose(applied + left, given, rtol=1e-12, atol=1e-12)


@each_sparse
def test_residuals_add_up_what_is_too_small_for_half_precision(kind: type[SparseSchedule]) -> None:
    """1 + 1e-4 is 1 in half precision: residuals of that type would forget all 40 gradients, 4e-3 in sum."""
    schedule = kind(density=0.05, method="exact", **SMALL, compression="fp16")
    given, applied, left = exchanged(schedule, 40, lambda rows: rows.fill_(1e-4), residual=1.0)
    assert applied.count_nonzero() > 0
    in_nodes = schedule.kind == "hitopk"  # which adds and gathers in half precision
    np.testing.assert_allclose(applied + left, given, rtol=0, atol=1e-3 if in_nodes else 1e-12)


def left_over(residuals: Tensor, count: int) -> Tensor:
    """Return the mean of the ranks' residuals; of slices, that of the j-th ranks of all nodes, one after the other."""
    if residuals.shape[1] == count:
        return residuals.mean(dim=0)
    return residuals.unflatten(0, (-1, RANKS_PER_NODE)).mean(dim=0).flatten()


def communication_of(plan: Plan) -> Plan:
    """Return the plan without a model: somebody else writes the gradients and reads what has become of them."""
    kept = [tuple(op for op in body if not isinstance(op, Forward | Backward | Optimize)) for body in plan.bodies]
    return Plan(plan.name, plan.world_size, plan.buffers, tuple(kept), plan.order)


def idle(plan: Plan, memory: Memory, rank: int) -> ModuleProgram:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    return ModuleProgram(plan, nn.Identity(), loss, optimizer, Training().batch, memory, device=CPU, rank=rank)


# --- learning ---


def losses_of(schedule: Schedule) -> Mapping[str, float]:
    """Train a network to do as another one does; return its loss at the beginning and at the end."""
    teacher = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        inputs = torch.randn(16, 6, dtype=torch.float64, generator=generator)
        return inputs, (inputs @ teacher).argmax(dim=1)

    training = Training()
    plan = plan_of(schedule, training, 80)
    found = virtual.train_together(plan, training.make, functional.cross_entropy, batch).losses.mean(dim=1)
    return {"begin": float(found[:5].mean()), "end": float(found[-5:].mean())}


@pytest.mark.parametrize("schedule", [Sync(), *(kind(density=0.1) for kind in SPARSE)], ids=lambda each: each.name)
def test_a_network_learns_from_a_tenth_of_its_gradients_too(schedule: GradientSchedule) -> None:
    found = losses_of(schedule)
    assert found["end"] < found["begin"] / 5
