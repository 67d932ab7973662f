"""All ranks at once: the values of one rank after the other, or a reason why not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from trainings import Training, loss

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from real.execution.virtual import World, train_together  # noqa: E402
from simdist.plan import Plan  # noqa: E402
from simdist.schedules import LocalSGD, Schedule, Sync, kinds  # noqa: E402

SMALL = {"first_bucket_nbytes": 100, "bucket_nbytes": 400}
EXAMPLES = [cls(**example) for cls in kinds().values() for example in cls.examples]
SITTING_OUT, SHARED, SHARDED = (
    "ranks sit steps of the plan out",
    "the plan shares updates between ranks",
    "the plan shards the model",
)


def plan_of(schedule: Schedule, training: Training, world_size: int = 8) -> Plan:
    return schedule.plan(training.job(world_size, 6, ranks_per_node=world_size // 2))


def made(training: Training, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, None]:
    """Let ranks begin apart, so that a wrong group cannot hide."""
    module, optimizer = training.make(rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01 * rank)
    return module, optimizer, None


def world(plan: Plan, training: Training, make: Callable[[int], object] | None = None) -> World:
    return World(plan, make or partial(made, training), loss, training.batch)


def assert_same(plan: Plan, training: Training) -> None:
    assert world(plan, training).why_not is None
    results = [
        train_together(plan, lambda rank: made(training, rank)[:2], loss, training.batch, batched=batched)
        for batched in (True, False)
    ]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[training.dtype]
    (ours, theirs) = (result.parameters.numpy() for result in results)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())
    np.testing.assert_allclose(results[0].losses, results[1].losses, rtol=10 * tolerance)
    for one, other in zip(results[0].modules, results[1].modules, strict=True):
        for mine, its in zip(one.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda each: each.default_label())
def test_all_ranks_at_once_compute_what_each_computes(schedule: Schedule, dtype: torch.dtype) -> None:
    training = Training(dtype=dtype)
    plan = plan_of(schedule, training)
    reason = world(plan, training).why_not
    if reason is None:
        assert_same(plan, training)
    else:
        assert reason.startswith((SITTING_OUT, SHARED, SHARDED))


@pytest.mark.parametrize(
    "training",
    [
        Training("conv"),  # batch normalisation; tensors are not row-major
        Training("tied", "adamw", micro_batches=2),
        Training("frozen", "groups"),
        Training("even", "adagrad"),
    ],
    ids=lambda each: f"{each.model} {each.optimizer}",
)
def test_models_and_optimizers_at_once(training: Training) -> None:
    assert_same(plan_of(LocalSGD(period=3), training), training)
    assert_same(plan_of(Sync(**SMALL), training), training)


class Remembers(nn.Module):
    """Adds a buffer, which it replaces by another tensor in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.shift = self.shift + 1
        return self.layer(inputs) * self.shift


def with_other_rate(training: Training, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, None]:
    module, optimizer, _ = made(training, rank)
    optimizer.param_groups[0]["lr"] *= 1 + (rank == 2)
    return module, optimizer, None


def with_hook(training: Training, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, None]:
    module, optimizer, _ = made(training, rank)
    optimizer.register_step_post_hook(lambda *_: None)
    return module, optimizer, None


def remembering(training: Training, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, None]:
    module = Remembers()
    return module, torch.optim.SGD(module.parameters(), lr=0.1), None


@pytest.mark.parametrize(
    ("training", "make", "world_size", "reason"),
    [
        (Training("dropout"), made, 4, "vmap refuses the model: RuntimeError: vmap: called random operation"),
        (Training("one rank uses it"), made, 4, "vmap refuses the model: RuntimeError: vmap: It looks like you're att"),
        (Training(optimizer="lbfgs"), made, 4, "LBFGS updates no slices"),
        (Training(), with_other_rate, 4, "rank 2 has another"),
        (Training(), with_hook, 4, "the optimizer has hooks"),
        (Training(), remembering, 4, "the buffers of a rank would not be the same"),
    ],
)
def test_ranks_that_cannot_be_computed_at_once_are_not(
    training: Training, make: Callable[[Training, int], object], world_size: int, reason: str
) -> None:
    job = training.job(world_size, 2)
    if make is remembering:
        job = replace(job, tensor_counts=(18, 3), tensor_rows=(3, 3))
    found = world(Sync().plan(job), training, partial(make, training)).why_not
    assert reason in str(found)
