"""LARS: its equations, and the ratios that a plan gives it."""

import math
from dataclasses import replace

import pytest
from trainings import CPU, Training, in_virtual_world, loss

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

import real  # noqa: E402
from real import models  # noqa: E402
from real.buffers.memory import Memory  # noqa: E402
from real.programs.binding import Binding  # noqa: E402
from real.programs.module import ModuleProgram  # noqa: E402
from real.programs.optimizers import Outer, Rating  # noqa: E402
from simdist.errors import PlanError, RunError  # noqa: E402
from simdist.plan import Group, Optimize, Plan, TrustRatios  # noqa: E402
from simdist.schedules import Job, LocalSGD, Sync  # noqa: E402
from simdist.schedules.diloco import DiLoCo  # noqa: E402


def matrix(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([values], dtype=torch.float64))


def with_gradient(parameter: nn.Parameter, *values: float) -> nn.Parameter:
    parameter.grad = torch.tensor(values, dtype=torch.float64).view_as(parameter)
    return parameter


def test_the_first_update_is_that_of_the_paper() -> None:
    weight = with_gradient(matrix(3.0, 4.0), 0.0, 2.0)
    optimizer = real.Lars([weight], lr=0.5, momentum=0.9, weight_decay=0.1, eta=0.01)
    optimizer.step()
    ratio = 0.01 * 5.0 / (2.0 + 0.1 * 5.0)
    expected = [3.0 - 0.5 * ratio * (0.0 + 0.1 * 3.0), 4.0 - 0.5 * ratio * (2.0 + 0.1 * 4.0)]
    assert weight[0].tolist() == pytest.approx(expected, rel=1e-14)


def test_velocity_holds_learning_rates_of_the_steps_they_were_in() -> None:
    """Algorithm 1 multiplies by the learning rate before momentum, not after it as torch's SGD does."""
    weight = matrix(8.0)
    optimizer = real.Lars([weight], lr=1.0, momentum=0.5, eta=0.125)  # moves by lr / 8 of the weight's norm
    moves = []
    for lr in (1.0, 0.25):
        before = weight.item()
        optimizer.param_groups[0]["lr"] = lr
        with_gradient(weight, 3.0)
        optimizer.step()
        moves.append(before - weight.item())
    assert moves == [1.0, 0.5 * 1.0 + 0.25 * 7.0 / 8]


def test_a_tensor_that_is_zero_or_has_no_gradient_moves_at_the_learning_rate() -> None:
    zero, still = with_gradient(matrix(0.0, 0.0), 1.0, 2.0), with_gradient(matrix(1.0, 1.0), 0.0, 0.0)
    real.Lars([zero, still], lr=0.5, momentum=0.0, weight_decay=0.5, eta=1e-3).step()
    assert zero[0].tolist() == [-0.5, -1.0]
    assert still[0].tolist() == [0.75, 0.75]


def test_vectors_have_a_ratio_of_one() -> None:
    bias, weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 1))
    optimizer = real.Lars([bias, weight], lr=1.0, eta=0.5)
    ratios = optimizer.ratios([bias, weight], [2 * torch.ones(3), 2 * torch.ones(3, 1)])
    assert [ratio.item() for ratio in ratios] == [1.0, 0.25]


def test_groups_have_their_own_settings() -> None:
    one, other = with_gradient(matrix(1.0), 1.0), with_gradient(matrix(1.0), 1.0)
    groups = [{"params": [one], "eta": 0.25}, {"params": [other], "lr": 2.0, "weight_decay": 1.0}]
    real.Lars(groups, lr=1.0, momentum=0.0, eta=0.5).step()
    assert one.item() == 1 - 0.25
    assert other.item() == 1 - 2.0 * (0.5 / 2) * 2


def test_given_ratios_are_taken_instead_of_computed_ones() -> None:
    weight = with_gradient(matrix(3.0, 4.0), 1.0, 1.0)
    optimizer = real.Lars([weight], lr=1.0, momentum=0.0)
    optimizer.give({weight: torch.tensor(0.5)})
    optimizer.step()
    assert weight[0].tolist() == [2.5, 3.5]
    optimizer.give(None)
    (ratio,) = optimizer.ratios([weight], [weight.grad])
    optimizer.step()
    assert weight[0, 0].item() == 2.5 - ratio.item()


def test_a_parameter_without_a_ratio_is_an_error() -> None:
    weight = with_gradient(matrix(1.0), 1.0)
    optimizer = real.Lars([weight], lr=1.0)
    optimizer.give({})
    with pytest.raises(RunError, match="a parameter has a gradient and was given no trust ratio"):
        optimizer.step()
    with pytest.raises(RunError, match="of a parameter that this optimizer does not update"):
        optimizer.ratios([matrix(1.0)], [torch.ones(1, 1)])


def test_negative_settings_are_refused() -> None:
    with pytest.raises(RunError, match=r"Lars\(eta=-1, eps=-0.5\): settings are not negative"):
        real.Lars([matrix(1.0)], lr=1.0, eta=-1, eps=-0.5)


def test_a_closure_computes_the_gradient() -> None:
    weight = matrix(2.0)
    optimizer = real.Lars([weight], lr=1.0, momentum=0.0, eta=0.5)

    def closure() -> float:
        value = 3 * weight.sum()
        value.backward()
        return value.item()

    assert optimizer.step(closure) == 6.0
    assert weight.item() == 2.0 - 0.5 * (2.0 / 3.0) * 3.0


# --- in a plan ---


LARS = Training(optimizer="lars")


def lars_plan(world_size: int = 4, n_steps: int = 8, **settings: object) -> Plan:
    return Sync(first_bucket_nbytes=100, bucket_nbytes=400, **settings).plan(LARS.job(world_size, n_steps))


def test_a_plan_of_one_rank_updates_as_the_optimizer_alone() -> None:
    ours, _ = in_virtual_world(lars_plan(world_size=1), LARS)
    module, optimizer = LARS.make()
    for step in range(8):
        optimizer.zero_grad()
        inputs, targets = LARS.batch(step, 0)
        loss(module(inputs), targets).backward()
        optimizer.step()
    expected = torch.cat([each.detach().flatten() for each in module.parameters()])
    torch.testing.assert_close(torch.from_numpy(ours[0]), expected, rtol=0, atol=1e-7)  # ratios are single precision


@pytest.mark.parametrize("world_size", [4, 8])
def test_each_member_computes_the_ratios_of_its_share(world_size: int) -> None:
    plan = lars_plan(world_size, parallel_optimizer=True)
    op = next(op for op in plan.bodies[0] if isinstance(op, TrustRatios))
    n_tensors = 6
    share = math.ceil(n_tensors / world_size)
    found = []
    for rank in range(world_size):
        module, optimizer = LARS.make()
        memory = Memory(plan, CPU, Binding.buffers_of(plan))
        program = ModuleProgram(plan, module, loss, optimizer, batch_of, memory, device=CPU, rank=rank)
        for name in op.grads:
            memory.dense(name).fill_(0.5)
        program.perform(op, 0)
        found += memory.dense(op.dst).tolist()
    parameters = list(module.parameters())
    assert isinstance(optimizer, real.Lars)
    expected = optimizer.ratios(parameters, [torch.full_like(each, 0.5) for each in parameters])
    assert len(found) == share * world_size
    assert found[:n_tensors] == pytest.approx([ratio.item() for ratio in expected])
    assert found[1] == 1.0 != found[0]
    assert not any(found[n_tensors:])


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    return LARS.batch(step, 0)


def test_a_group_at_a_stride_shares_ratios_by_its_own_numbers() -> None:
    """Rank 1 of groups of two at a stride of 2 is the first of its group."""
    plan = lars_plan(n_steps=1, parallel_optimizer=True)
    module, optimizer = LARS.make()
    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    rating = Rating(plan, Binding(plan, module, memory, rank=1), optimizer, memory, rank=1)
    op = next(op for op in plan.bodies[0] if isinstance(op, TrustRatios))
    for name in op.grads:
        memory.dense(name).fill_(1.0)
    ratios = []
    for group, rank in ((op.group, 0), (Group(2, stride=2), 1)):
        rating._rank = rank
        rating.rate(replace(op, group=group))
        ratios.append(memory.dense(op.dst).tolist())
    assert ratios[0] == ratios[1]
    rating.rate(op)
    assert memory.dense(op.dst).tolist() != ratios[0]


def test_a_plan_with_trust_ratios_wants_lars() -> None:
    with pytest.raises(PlanError, match=r"plan sync updates with trust ratios; SGD takes none: use real\.Lars, or a"):
        in_virtual_world(lars_plan(), Training())


def test_lars_wants_a_plan_with_trust_ratios() -> None:
    plan = LocalSGD(period=2).plan(Training().job(4, 4))
    with pytest.raises(PlanError, match=r"has updates without trust ratios, and Lars takes them in all"):
        in_virtual_world(plan, LARS)


def test_models_come_with_lars_if_a_plan_wants_it() -> None:
    job = models.build_job("mlp", batch_size=2, device=CPU, dtype=torch.float32, seed=0, lars=True)
    assert isinstance(job.optimizer, real.Lars)
    weight = next(job.module.parameters())
    before = weight.detach().clone()
    inputs, targets = job.batch(0, 0)
    job.loss(job.module(inputs), targets).backward()
    job.optimizer.step()
    assert (weight - before).norm().item() == pytest.approx(0.01 * before.norm().item(), rel=1e-4)


# --- the outer optimizer ---


def test_an_update_moves_the_anchors_that_it_names_and_no_others() -> None:
    """Two fragments have turns, and each has moved once."""
    module = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    plan = DiLoCo(period=4, fragments=2).plan(Job(1, 1, 4, tensor_counts=(2, 2)))
    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    outer = Outer(plan, Binding(plan, module, memory), memory, lambda anchors: torch.optim.SGD(anchors, lr=1.0))
    updates = [op for body in plan.bodies for op in body if isinstance(op, Optimize) and op.optimizer == "outer"]
    for number in range(2):
        memory.dense(f"outer.{number}").fill_(number + 1)
    for op in updates:
        outer.step(op)
    assert [memory.dense(f"anchor.{number}").tolist() for number in range(2)] == [[-1, -1], [-2, -2]]
