"""A model in the buffers of a plan, on one rank without others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from real.buffers.memory import Memory
from real.programs.binding import Binding, GradientBuckets, left_to_autograd, trained_parameters
from simdist.errors import RunError
from simdist.plan import Backward
from simdist.plan.liveness import carried_buffers
from simdist.schedules import FSDP, Job, Sync
from simdist.schedules.units import ModelUnit

CPU = torch.device("cpu")


def bound(model: nn.Module) -> tuple[Binding, list[Backward]]:
    counts = tuple(parameter.numel() for parameter in model.parameters())
    plan = Sync().plan(Job(world_size=1, ranks_per_node=1, n_steps=1, tensor_counts=counts))
    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    return Binding(plan, model, memory), [op for op in plan.bodies[0] if isinstance(op, Backward)]


def test_parameter_that_gets_its_gradient_twice_in_a_pass_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    binding, buckets = bound(model)
    binding.buckets.expect(buckets, lambda: None)
    model[1](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RunError, match=r"gets its gradient twice in one backward pass.*use_reentrant=False"):
        model[1](torch.ones(1, 2)).sum().backward()


def test_released_model_is_an_ordinary_one_even_within_a_pass():
    model = nn.Linear(2, 2)
    binding, buckets = bound(model)
    completed: list[str] = []
    binding.buckets.expect(buckets, lambda: completed.append("bucket"))
    binding.buckets.release()
    model(torch.ones(1, 2)).sum().backward()
    assert completed == []
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    again, buckets = bound(model)
    model.zero_grad()
    again.buckets.expect(buckets, lambda: completed.append("bucket"))
    model(torch.ones(1, 2)).sum().backward()
    assert completed == ["bucket"]


def test_losses_that_hosts_wait_for_later_are_no_buffers_of_the_model():
    """They are carried from step to step, and a checkpoint must not look for them in memory."""
    plan = Sync().plan(Job(world_size=1, ranks_per_node=1, n_steps=9, tensor_counts=(4,), run_ahead_steps=2))
    carried = carried_buffers(plan)
    assert any(name.startswith("loss") for name in carried)
    assert not set(carried) & Binding.buffers_of(plan)


def test_a_backward_pass_after_that_of_the_plan_is_the_users_own() -> None:
    model = nn.Linear(2, 2)
    binding, buckets = bound(model)
    completed: list[str] = []
    binding.buckets.expect(buckets, lambda: completed.append("bucket"))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert completed == ["bucket"]
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))


def test_autograds_own_gradient_is_freed_before_the_plan_goes_on() -> None:
    """The plan then takes memory for what it sends: a gradient and its bucket must not stay beside that."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    arrived: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad.untyped_storage()._weak_ref()))
    binding, buckets = bound(model)
    is_freed: list[bool] = []
    binding.buckets.expect(buckets, lambda: is_freed.append(torch.UntypedStorage._expired(arrived[0])))
    model(torch.tensor([1, 2])).sum().backward()
    assert is_freed == [True]


def test_gradients_of_units_that_are_reduced_after_each_pass_need_no_bucket() -> None:
    job = Job(2, 2, 1, tensor_counts=(6, 4), tensor_rows=(3, 2), units=(ModelUnit(0, 1), ModelUnit(1, 2)))
    assert left_to_autograd(FSDP().plan(job)) == {"grad.0": "ready.0", "grad.1": "ready.1"}
    twice = replace(job, micro_batches=2)
    assert left_to_autograd(FSDP().plan(twice)) == {"grad.0": "ready.0", "grad.1": "ready.1"}
    assert left_to_autograd(FSDP(accumulation="local").plan(twice)) == {}
    assert left_to_autograd(Sync().plan(job)) == {}


def test_gradients_left_to_autograd_are_copied_once_and_freed() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    buckets = GradientBuckets({"bucket": [(used, None), (unused, None)]}, ["bucket"])
    completed: list[set[torch.Tensor]] = []
    buckets.expect([Backward(("loss",), "bucket")], lambda: completed.append(buckets.unused))
    (used * 3).sum().backward()
    assert completed == []
    buckets.finish()
    assert completed == [{unused}]
    parts = [torch.full((2,), torch.nan), torch.full((3,), torch.nan)]
    buckets.copy("bucket", parts)
    assert parts[0].tolist() == [3.0, 3.0]
    assert parts[1].signbit().all()
    assert not parts[1].any()
    assert used.grad is None


def test_gradients_that_come_before_the_turn_of_their_bucket_are_added_too() -> None:
    """Autograd begins with what was computed last."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sums = [torch.ones(2), torch.ones(2)]
    buckets = GradientBuckets({"first": [(first, sums[0])], "second": [(second, sums[1])]})
    came: list[str] = []
    for name, parameter in (("first", first), ("second", second)):
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    buckets.expect([Backward(("unit",), name, adds=True) for name in ("first", "second")], lambda: None)
    ((3 * first).sum() + (5 * second).sum()).backward()
    assert came == ["second", "first"]
    assert [each.tolist() for each in sums] == [[4, 4], [6, 6]]


def test_a_parameter_that_was_replaced_by_its_data_is_taken_back_with_its_values() -> None:
    model = nn.Linear(2, 2)
    binding, _ = bound(model)
    address = model.weight.data_ptr()
    model.weight.data = torch.full((2, 2), 7.0)
    assert binding.reclaim()
    assert model.weight.data_ptr() == address
    assert model.weight.tolist() == [[7, 7], [7, 7]]
    model.weight.data = torch.zeros(2, 2, dtype=torch.float64)
    assert not binding.reclaim()


def test_the_type_of_most_elements_comes_last() -> None:
    model = nn.ParameterDict({"a": torch.ones(4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(3)})
    assert [len(each) for each in trained_parameters(model)] == [2, 4, 3]
