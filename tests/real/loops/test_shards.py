"""The slices of a model under `fully_shard` on one rank, without other processes."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from real.loops.shards import Shards, local_part, shards_of, uses_of_parameters  # noqa: E402
from simdist.errors import UnsupportedError  # noqa: E402
from simdist.plan import AllReduce, Backward, Buffer, Copy, Forward, Group, Op, Optimize, Plan  # noqa: E402


@pytest.fixture
def shards() -> Iterator[Shards]:
    """The slices of rank 1 of 6: three ranks share a copy, and of five rows each of them has two, two and one."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=6)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))["shard"]
    found = shards_of(fully_shard(nn.Linear(3, 5, bias=False), mesh=mesh))
    assert found is not None
    yield found
    dist.destroy_process_group()


def test_ranks_of_the_same_slice_are_those_of_all_copies(shards: Shards) -> None:
    assert [shards.copy_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert shards.groups() == [(0, 3), (1, 4), (2, 5)]
    assert shards.n_copies == 2


def test_stand_ins_of_uneven_slices_are_as_large_as_the_first() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    found = shards_of(fully_shard(nn.Linear(3, 5, bias=False), mesh=init_device_mesh("cpu", (3,))))
    dist.destroy_process_group()
    assert found is not None
    (stand_in,) = found.model.parameters()
    (slice_of_rank,) = (local_part(each) for each in found.parameters)
    assert (slice_of_rank.shape, stand_in.shape) == ((1, 3), (2, 3))
    assert torch.equal(stand_in[:1], slice_of_rank)
    assert not stand_in[1:].any()


def test_slices_have_the_gradients_of_the_memory_where_the_plan_averages_them(shards: Shards) -> None:
    (parameter,), (stand_in,) = shards.parameters, shards.model.parameters()
    for value in (1.0, 2.0):
        stand_in.grad = torch.full_like(stand_in, value)  # another memory each time
        shards.put_gradients()
        assert local_part(parameter.grad).tolist() == [[value] * 3] * 2
        stand_in.grad.mul_(4)
        assert local_part(parameter.grad).tolist() == [[4 * value] * 3] * 2
        assert shards.n_in_memory_of(parameter.grad) == 1
    kept = parameter.grad
    shards.put_gradients()
    assert parameter.grad is kept
    stand_in.grad = None
    shards.put_gradients()
    assert parameter.grad is None


def test_slices_and_stand_ins_have_the_parameters_of_one_another(shards: Shards) -> None:
    (parameter,), (stand_in,) = shards.parameters, shards.model.parameters()
    with torch.no_grad():
        local_part(parameter).fill_(3.0)
    shards.take_parameters()
    assert stand_in.tolist() == [[3.0] * 3] * 2
    with torch.no_grad():
        stand_in.fill_(4.0)
    shards.put_parameters()
    assert local_part(parameter).tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_a_pass_reduces_gradients_unless_the_model_is_told_not_to(shards: Shards, setting: str) -> None:
    assert shards.reduces_gradients()
    (unit,) = shards._units
    getattr(unit, setting)(False)
    assert not shards.reduces_gradients()


def uses(*step: Op) -> tuple[bool, bool]:
    names = ("param", "grad", "copy", "anchor")
    buffers = tuple(Buffer(name, 4, tensors=(0, 1), initialized=name != "grad") for name in names)
    plan = Plan.from_steps("drawn", world_size=2, buffers=(*buffers, Buffer("loss", 1)), steps=[step])
    found = uses_of_parameters(plan, {"param"})(0)
    return found.is_any, found.ends_elsewhere


PASSES = (Forward(("param",), ("loss",)), Backward(("param", "loss"), "grad"))
UPDATE = Optimize(("param",), ("grad",))
TAKEN, AVERAGED, GIVEN = Copy("param", "copy"), AllReduce("param", Group(2)), Copy("copy", "param")


def test_a_step_may_end_with_an_average_of_parameters() -> None:
    assert uses(*PASSES, UPDATE) == (False, False)
    assert uses(*PASSES, UPDATE, TAKEN, AVERAGED) == (True, True)
    assert uses(*PASSES, UPDATE, AVERAGED, GIVEN) == (True, False)


def test_parameters_are_not_used_before_their_update_even_after_one_of_anchors() -> None:
    outer = Optimize(("anchor",), ("copy",), optimizer="outer")
    with pytest.raises(UnsupportedError, match="uses parameters before the update of its step"):
        uses(*PASSES, outer, TAKEN, UPDATE)
