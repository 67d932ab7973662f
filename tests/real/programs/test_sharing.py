"""Shared updates on one rank, without other processes: its slice moves as in a whole update."""

import copy

import pytest
import torch
from torch import Tensor, nn

from real.buffers.memory import Memory
from real.programs import sharing
from real.programs.binding import Binding
from real.programs.sharing import SharedUpdate, shared_update
from simdist.plan import Backward, Optimize, Plan
from simdist.schedules import Job, Sync

CPU = torch.device("cpu")


class Rank:
    """A rank with a model, its optimizer, and a shared update of both."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int = 2) -> None:
        counts = tuple(each.numel() for each in model.parameters())
        self.plan: Plan = Sync(shared_update=2).plan(Job(world_size, world_size, 1, tensor_counts=counts))
        self.memory = Memory(self.plan, CPU, Binding.buffers_of(self.plan))
        self.binding = Binding(self.plan, model, self.memory, rank=rank)
        (self.op,) = (op for op in self.plan.bodies[0] if isinstance(op, Optimize))
        update = shared_update(self.plan, self.binding, optimizer, self.memory, rank)
        assert update is not None
        self.update: SharedUpdate = update

    def set_gradients(self, value: Tensor | float) -> None:
        for name in self.op.grads:
            self.memory.dense(name).copy_(torch.as_tensor(value))

    @property
    def updated(self) -> Tensor:
        """The rank's slice of the parameters after an update."""
        assert self.op.slices is not None
        return torch.cat([self.memory.dense(name).detach() for name in self.op.slices])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_of_another_memory_layout_is_cut_as_its_parameter_is(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(1, 2, 4, 4)).square().sum().backward()
    optimizer.step()  # makes a state
    whole = copy.deepcopy(model)
    of_whole = torch.optim.Adam(whole.parameters(), lr=0.1)
    of_whole.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    whole.weight.grad = torch.full_like(whole.weight, 0.5)
    of_whole.step()
    one = Rank(model, optimizer, rank)
    one.set_gradients(0.5)
    one.update.update(one.op)
    in_memory = whole.weight.detach().permute(0, 2, 3, 1).flatten()
    torch.testing.assert_close(one.updated, in_memory.chunk(2)[rank], rtol=0, atol=1e-7)


def test_a_gradient_that_only_another_rank_has_moves_the_parameter_also_if_it_is_negative() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    one = Rank(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1.0), rank=0)
    one.binding.buckets.fill(next(op for op in one.plan.bodies[0] if isinstance(op, Backward)))  # no gradient here
    assert one.binding.buckets.unused == {model.weight}
    one.set_gradients(-3.0)
    one.update.update(one.op)
    assert one.updated.tolist() == [3.0, 3.0]
    one.set_gradients(-0.0)  # nobody has one
    one.update.update(one.op)
    assert one.updated.tolist() == [1.0, 1.0]  # it does not even decay


def test_each_copy_is_clipped_by_its_own_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 share an update, ranks 2 and 3 another. This is rank 2, with 2 of its 4 elements."""

    def add_others(squares: Tensor, group: object) -> None:
        squares += torch.tensor([100.0, 2 * 3.0**2])  # of both ranks of the first copy, and of rank 3

    monkeypatch.setattr(sharing.dist, "get_world_size", lambda _: 4)
    monkeypatch.setattr(sharing.dist, "all_reduce", add_others)
    model = nn.Linear(2, 2, bias=False)
    one = Rank(model, torch.optim.SGD(model.parameters(), lr=1.0), rank=2, world_size=4)
    one.set_gradients(3.0)
    norm = one.update.clip(one.op, 1.0, None)
    assert norm.item() == pytest.approx(6.0)
    assert [value for name in one.op.grads for value in one.memory.dense(name).tolist()] == pytest.approx([0.5, 0.5])


def test_a_restored_state_is_saved_again_before_the_next_update() -> None:
    states = []
    for _ in range(2):
        model = nn.Linear(2, 2, bias=False)
        one = Rank(model, torch.optim.Adam(model.parameters()), rank=0)
        if states:
            one.update.load_state_dict(states[0])
        else:
            one.set_gradients(1.0)
            one.update.update(one.op)
        states.append(one.update.state_dict())
    assert states[0].keys() == states[1].keys() == {"pieces"}
    saved, again = (each["pieces"]["state"][0] for each in states)
    assert torch.equal(saved["exp_avg"], again["exp_avg"])
    assert saved["exp_avg"].any()
