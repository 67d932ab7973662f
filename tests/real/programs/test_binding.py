"""A model in the buffers of a plan, on one rank without others."""

import pytest
import torch
from torch import nn

from real.buffers.memory import Memory
from real.checkpoints.rank_state import carried_buffers
from real.programs.binding import Binding
from simdist.errors import RunError
from simdist.plan import Backward
from simdist.schedules import Job, Sync

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
