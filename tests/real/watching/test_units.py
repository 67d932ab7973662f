"""Each exchange of `fully_shard` lies between an arrival and a leave, and no computing of a unit does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from real.watching.meetings import attach, unseen  # noqa: E402

WIDTH = 8
EXCHANGES = ("all_gather_single", "reduce_scatter_single", "all_reduce")


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Log:
    """What happens in a loop, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def arrive(self) -> None:
        self.events.append("arrive")

    def leave(self) -> None:
        self.events.append("leave")

    def while_waiting(self) -> list[str]:
        """Return what happens between an arrival and the leave after it."""
        return [event for event, waits in self._events() if waits]

    def while_working(self) -> list[str]:
        return [event for event, waits in self._events() if not waits]

    def _events(self) -> Iterator[tuple[str, bool]]:
        depth = 0
        for event in self.events:
            depth += {"arrive": 1, "leave": -1}.get(event, 0)
            assert depth >= 0
            if event not in ("arrive", "leave"):
                yield event, depth > 0
        assert depth == 0


class Noted(torch.autograd.Function):
    """Notes the computing of both passes."""

    @staticmethod
    def forward(ctx, value: Tensor, log: Log) -> Tensor:
        ctx.log = log
        log.events.append("forward")
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.log.events.append("backward")
        return gradient, None


@torch.compiler.disable
def noted(value: Tensor, log: Log) -> Tensor:
    return Noted.apply(value, log)


class Block(nn.Module):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.log = log

    def forward(self, value: Tensor) -> Tensor:
        return noted(self.layer(value), self.log)


class Model(nn.Module):
    """Blocks between two layers that the root holds.

    Args:
        log: Of the blocks.
        recomputes: Activation checkpoints contain the units, instead of the units containing them.
    """

    def __init__(self, log: Log, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(log) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, value: Tensor) -> dict[str, list[Tensor]]:
        value = self.first(value)
        for block in self.blocks:
            value = checkpoint(block, value, use_reentrant=False) if self.recomputes else block(value)
        return {"predictions": [self.last(value)]}


@dataclass(frozen=True)
class Case:
    """A way to shard and to train.

    Attributes:
        shape: Ranks that share a unit, or copies and such ranks.
        policy: Of mixed precision.
        wrap: What becomes of a block before it is a unit.
        recomputes: Activation checkpoints contain the units.
        grouped: The first two blocks are one unit.
        frozen: The first layer is not trained.
        micro_batches: Passes of a step; only the last one reduces gradients.
        reshard: Units are freed after their forward pass.
    """

    shape: tuple[int, ...] = (4,)
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    wrap: Callable[[nn.Module], nn.Module] = lambda block: block
    recomputes: bool = False
    grouped: bool = False
    frozen: bool = False
    micro_batches: int = 1
    reshard: bool = True


CASES = {
    "plain": Case(),
    "bf16": Case(policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "kept": Case(reshard=False),
    "copies": Case(shape=(2, 2)),
    "accumulated": Case(micro_batches=3),
    "frozen": Case(frozen=True),
    "grouped": Case(grouped=True),
    "checkpoints in units": Case(wrap=checkpoint_wrapper),
    "units in checkpoints": Case(recomputes=True),
    "compiled": Case(wrap=lambda block: torch.compile(block, backend="eager")),
}


def train(case: Case, log: Log, *, watched: bool = True) -> list[Tensor]:
    """Do a step; return the gradients."""
    torch.manual_seed(0)
    model = Model(log, recomputes=case.recomputes)
    model.first.requires_grad_(not case.frozen)
    for at, block in enumerate(model.blocks):
        model.blocks[at] = case.wrap(block)
    names = ("replicate", "shard")[-len(case.shape) :]
    settings = {
        "mesh": init_device_mesh("cpu", case.shape, mesh_dim_names=names),
        "mp_policy": case.policy,
        "reshard_after_forward": case.reshard,
    }
    blocks = list(model.blocks)
    for each in [blocks[:2], *blocks[2:]] if case.grouped else blocks:
        fully_shard(each, **settings)
    fully_shard(model, **settings | {"mp_policy": replace(case.policy, output_dtype=torch.float32)})
    if watched:
        attach(model, log)
    with noting_exchanges(log):
        for at in range(case.micro_batches):
            model.set_requires_gradient_sync(at == case.micro_batches - 1)
            outputs = model(torch.ones(2, WIDTH))
            log.events.append("loss")
            outputs["predictions"][0].float().sum().backward()
        log.events.append("update")
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.to_local() for each in gradients if isinstance(each, DTensor)]


@contextmanager
def noting_exchanges(log: Log) -> Iterator[None]:
    def noted(name: str) -> Callable[..., object]:
        plain = getattr(dist, name)

        def call(*args: object, **options: object) -> object:
            log.events.append(name)
            return plain(*args, **options)

        return call

    patches = [mock.patch.object(dist, name, noted(name)) for name in EXCHANGES]
    for each in patches:
        each.start()
    yield
    for each in patches:
        each.stop()


# Compilation replaces the interpreter's evaluation of frames in the process of all other tests.
NAMES = [pytest.param(name, marks=pytest.mark.full) if name == "compiled" else name for name in CASES]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's, of the inputs of a compiled unit
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_waits_in_exchanges_and_works_in_between(name: str) -> None:
    log = Log()
    train(CASES[name], log)
    waiting = log.while_waiting()
    working = log.while_working()
    assert set(waiting) <= set(EXCHANGES)
    assert {"all_gather_single", "reduce_scatter_single"} <= set(waiting)
    assert not set(working) & set(EXCHANGES)
    assert {"forward", "backward", "loss", "update"} <= set(working)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", NAMES)
def test_a_watch_changes_no_gradient_and_no_exchange(name: str) -> None:
    watched = Log()
    alone = Log()
    for one, other in zip(train(CASES[name], watched), train(CASES[name], alone, watched=False), strict=True):
        assert torch.equal(one, other)
    assert [event for event in watched.events if event not in ("arrive", "leave")] == alone.events


def test_the_last_leave_of_a_step_is_behind_its_last_exchange() -> None:
    log = Log()
    train(CASES["copies"], log)
    assert log.events[-2:] == ["leave", "update"]


def ddp(*layers: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers))


def test_a_watch_knows_which_late_ranks_its_hooks_miss() -> None:
    sharded = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh=init_device_mesh("cpu", (4,)))
    with_buffers = ddp(nn.BatchNorm1d(WIDTH))
    assert unseen(sharded) == unseen(ddp()) == unseen(with_buffers) == ""
    assert unseen(FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), device_id=torch.device("cpu"))).startswith("slow")
    assert unseen(nn.Sequential(nn.SyncBatchNorm(WIDTH))).startswith("slow computing is not visible here")


@pytest.mark.full
def test_a_watch_knows_that_a_compiled_model_hides_the_wait_for_buffers() -> None:
    compiled = torch.compile(ddp(nn.BatchNorm1d(WIDTH)), backend="eager")
    assert unseen(compiled).startswith("a rank that loads late")


def without_exchange(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_a_backward_pass_of_ddp_is_one_wait_however_many_parameters_it_has() -> None:
    log = Log()
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)]))
    model.register_comm_hook(None, without_exchange)
    attach(model, log)
    for _ in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
    assert log.events == ["arrive", "leave"] * 2


def test_removed_hooks_note_nothing() -> None:
    log = Log()
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh=init_device_mesh("cpu", (4,)))
    for handle in attach(model, log):
        handle.remove()
    model(torch.ones(2, WIDTH)).sum().backward()
    assert log.events == []


@pytest.mark.full
def test_a_unit_that_is_compiled_in_place_as_one_graph_can_be_watched() -> None:
    class Unit(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * super().forward(value)

    log = Log()
    unit = Unit(WIDTH, WIDTH)
    unit.compile(backend="eager", fullgraph=True)
    model = fully_shard(unit, mesh=init_device_mesh("cpu", (4,)))
    attach(model, log)
    with noting_exchanges(log):
        model(torch.ones(2, WIDTH)).sum().backward()
    assert log.while_waiting() == ["all_gather_single", "reduce_scatter_single"]
