"""Small models trained in several ways: by a plan in processes or in the virtual world, and by what torch brings."""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
from drawn_plans import every_group
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from real.buffers.memory import Memory, Scratch
from real.checkpoints.planned import CheckpointFiles
from real.collectives.servers import sum_by_servers
from real.collectives.worlds import ProcessWorld, groups_of, late_servers
from real.execution import virtual
from real.execution.executor import Executor
from real.execution.streams import Lanes
from real.programs.binding import Binding, trained_parameters
from real.programs.module import ModuleProgram
from real.programs.optimizers import Lars
from real.recording.recorder import Recorder
from simdist.errors import RunError
from simdist.plan import Plan, Servers
from simdist.plan.group import Group
from simdist.schedules import HierarchicalSGD, InputPath, Job, LocalSGD, Schedule, Sync
from simdist.schedules.diloco import DiLoCo

CPU = torch.device("cpu")
Values = Mapping[str, tuple[np.ndarray, ...]]


class Sometimes(nn.Module):
    """Has a layer that it uses only for batches whose first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if inputs[0, 0] > 0:
            hidden = hidden + self.extra(hidden)
        return self.last(hidden)


class Tied(nn.Module):
    """Uses the weights of its first layer again in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Backwards(nn.Module):
    """Uses its layers in the opposite order, so gradients arrive in the order of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 4), nn.Linear(6, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


class Skips(nn.Module):
    """Has a layer between others that it uses only for batches whose first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.extra, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        if inputs[0, 0] > 0:
            hidden = hidden + self.extra(hidden)
        return self.last(hidden)


class Checkpointed(nn.Module):
    """Computes its blocks again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3))
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + checkpoint(block, inputs, use_reentrant=False)
        return self.last(inputs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def even() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def odd() -> nn.Module:
    """Has parameters whose rows no number of ranks divides."""
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)
    )


def frozen() -> nn.Module:
    module = mlp()
    module[2].weight.requires_grad_(False)
    return module


def conv() -> nn.Module:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(24, 3)
    )
    return module.to(memory_format=torch.channels_last)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "even": even,
    "odd": odd,
    "frozen": frozen,
    "tied": Tied,
    "conv": conv,
    "dropout": dropout,
    "checkpointed": Checkpointed,
    "some ranks skip it": Skips,
    "one rank uses it": Sometimes,
    "all use it or none": Sometimes,
    "even backwards": Backwards,
}


@dataclass(frozen=True)
class Training:
    """A model, how it is updated, and its data, which are different on every rank and in every pass of a step."""

    model: str = "mlp"
    optimizer: str = "momentum"
    dtype: torch.dtype = torch.float64
    micro_batches: int = 1

    def make(self, rank: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            module = MODELS[self.model]().to(self.dtype)
        return module, self.optimizer_of(module)

    def optimizer_of(self, module: nn.Module) -> torch.optim.Optimizer:
        parameters = module.parameters()
        match self.optimizer:
            case "sgd":
                return torch.optim.SGD(parameters, lr=0.1)
            case "momentum":
                return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)
            case "adamw":
                return torch.optim.AdamW(parameters, lr=0.01)
            case "groups":
                groups = [
                    {
                        "params": [each for each in module.parameters() if (each.dim() > 1) == decays],
                        "weight_decay": rate,
                    }
                    for decays, rate in ((True, 0.1), (False, 0.0))
                ]
                return torch.optim.AdamW(groups, lr=0.01)
            case "adam":
                return torch.optim.Adam(parameters, lr=0.01)
            case "adagrad":
                return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)
            case "lbfgs":
                return torch.optim.LBFGS(parameters)
            case "lars":
                return Lars(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3, eta=0.5)
        raise AssertionError(self.optimizer)

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        shape = (5, 3, 5, 5) if self.model == "conv" else (5, 6)
        inputs = torch.randn(shape, dtype=self.dtype, generator=generator)
        if self.model == "one rank uses it":
            inputs[0, 0] = 1.0 if rank == step % 4 else -1.0
        if self.model == "all use it or none":
            inputs[0, 0] = 1.0 if step % 2 == 0 else -1.0
        return inputs, torch.randint(3, (5,), generator=generator)

    def job(self, world_size: int, n_steps: int, *, ranks_per_node: int = 2, path: InputPath | None = None) -> Job:
        parameters = trained_parameters(self.make()[0])
        counts = tuple(parameter.numel() for parameter in parameters)
        rows = tuple(parameter.shape[0] for parameter in parameters)
        name = str(self.dtype).removeprefix("torch.")
        kind = "lars" if self.optimizer == "lars" else "sgd"
        path = path or InputPath()
        settings = {"dtype": name, "input_path": path, "optimizer": kind, "micro_batches": self.micro_batches}
        return Job(world_size, ranks_per_node, n_steps, tensor_counts=counts, tensor_rows=rows, **settings)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


class Watch:
    """Watches no rank: the pool has a timeout."""

    def __init__(self) -> None:
        self.position = 0
        self.failed = threading.Event()

    def check(self) -> None:
        if self.failed.is_set():
            raise RunError("failed")


def by_plan(
    plan: Plan, training: Training, in_caller: bool = False, folder: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Train on this rank; return parameters and the losses of the last passes of the steps.

    Checkpoints go to a folder, each a while after it was due.
    """
    rank = dist.get_rank()
    module, optimizer = training.make(rank)
    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    losses: list[float] = []

    def noted(outputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(outputs, targets)
        losses.append(value.item())
        return value

    batch = partial(_batch, training, rank)
    files = CheckpointFiles(str(folder), rank) if folder else None

    def save(name: str, fill: Callable[[IO[bytes]], object]) -> None:
        assert files is not None
        time.sleep(0.05)
        files.write(name, fill)

    save_later = save if folder else None
    program = ModuleProgram(plan, module, noted, optimizer, batch, memory, device=CPU, rank=rank, save=save_later)
    torch.manual_seed(rank)
    execute(
        plan,
        program,
        memory,
        ProcessWorld(groups_of(plan), timeout_s=30.0),
        in_caller,
    )
    return _vector(module), np.array(losses[training.micro_batches - 1 :: training.micro_batches])


def in_virtual_world(plan: Plan, training: Training) -> tuple[np.ndarray, np.ndarray]:
    """Train on all ranks at once; return parameters and losses, rank by rank."""
    result = virtual.train_together(plan, training.make, loss, training.batch)
    return result.parameters.numpy(), result.losses.numpy().T


@dataclass(frozen=True)
class Torch:
    """How torch trains: DistributedDataParallel or a bare module, with a hook or without, with an averager or without.

    Args:
        ddp: Average gradients in every step, or as `local_after` says.
        local_after: From this step on, gradients are averaged over `node` consecutive ranks; None: never.
        node: 1 for none.
        levels: Period -> ranks, of `HierarchicalModelAverager`, or of `PeriodicModelAverager` if it is one period of
            `plain`.
        plain: Use `PostLocalSGDOptimizer` with `PeriodicModelAverager`.
        find_unused: Whether the loss may leave parameters out.
    """

    ddp: bool = True
    local_after: int | None = None
    node: int = 1
    levels: tuple[tuple[int, int], ...] = ()
    plain: bool = False
    find_unused: bool = False


def by_torch(how: Torch, training: Training, n_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Train on this rank with what torch brings; return parameters and losses."""
    rank = dist.get_rank()
    module, optimizer = training.make(rank)
    if how.levels:  # averagers make parameters row-major, and then the hook misreads gradients in other orders
        module.to(memory_format=torch.contiguous_format)
    model = _parallel(module, how) if how.ddp else module
    warmup_steps = how.local_after or 0
    averager = None
    if how.plain:
        from torch.distributed.optim import PostLocalSGDOptimizer  # warns of a deprecation inside torch

        periodic = PeriodicModelAverager(how.levels[0][0], warmup_steps=warmup_steps)
        optimizer = PostLocalSGDOptimizer(optimizer, periodic)
    elif how.levels:
        averager = HierarchicalModelAverager(OrderedDict(how.levels), warmup_steps=warmup_steps)
    losses = []
    for step in range(n_steps):
        optimizer.zero_grad()
        for left in reversed(range(training.micro_batches)):
            inputs, targets = training.batch((step + 1) * training.micro_batches - 1 - left, rank)
            with model.no_sync() if left and how.ddp else nullcontext():
                value = loss(model(inputs), targets)
                value.backward()
        optimizer.step()
        if averager:
            averager.average_parameters(module.parameters())
        losses.append(value.item())
    return _vector(module), np.array(losses)


def by_torchs_powersgd(
    training: Training, n_steps: int, rank: int, start: int, rate: float
) -> tuple[np.ndarray, list[list[int]]]:
    """Train on this rank by DDP with `powerSGD_hook`; return parameters, and the tensors of each bucket at the end."""
    module, optimizer = training.make(dist.get_rank())
    model = DistributedDataParallel(module, bucket_cap_mb=2**-11, broadcast_buffers=False)
    state = PowerSGDState(None, rank, start, min_compression_rate=rate)
    number = {parameter: each for each, parameter in enumerate(module.parameters())}
    buckets: dict[int, list[int]] = {}

    def hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets[bucket.index()] = [number[parameter] for parameter in bucket.parameters()]
        done = powerSGD_hook(state, bucket)
        done.wait()  # its callbacks would all-reduce factors of several buckets in any order, which gloo cannot
        return done

    model.register_comm_hook(state, hook)
    for step in range(n_steps):
        inputs, targets = training.batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return _vector(module), [sorted(buckets[index]) for index in sorted(buckets)]


def _parallel(module: nn.Module, how: Torch) -> DistributedDataParallel:
    model = DistributedDataParallel(
        module, bucket_cap_mb=2**-11, broadcast_buffers=False, find_unused_parameters=how.find_unused
    )
    if how.local_after is not None:
        node = dist.new_subgroups(group_size=how.node)[0] if how.node > 1 else None
        state = PostLocalSGDState(None, node, how.local_after, post_local_gradient_allreduce=how.node > 1)
        model.register_comm_hook(state, post_localSGD_hook)
    return model


class StandInManager:
    """Does what the manager of torchft is documented to do if no rank ever fails: it averages, and counts commits."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self._n_commits = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        assert name in {"start_quorum", "allow_state_dict_read", "disallow_state_dict_read", "register_state_dict_fn"}
        return lambda *_: None

    def current_step(self) -> int:
        return self._n_commits

    def should_commit(self) -> bool:
        self._n_commits += 1
        return True

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> object:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor /= dist.get_world_size()
        return work


def by_torchft(training: Training, n_steps: int, sync_every: int, outer: Mapping[str, float] | None) -> np.ndarray:
    """Train on this rank with torchft's LocalSGD, or with its DiLoCo of so many fragments; return parameters."""
    from torchft import local_sgd

    module, optimizer = training.make()
    if outer is None:
        method = local_sgd.LocalSGD(StandInManager(), module, optimizer, sync_every)
    else:
        fragments = [module[:1], module[1:]] if outer["fragments"] == 2 else [module]
        method = local_sgd.DiLoCo(
            StandInManager(),
            fragments,
            optimizer,
            [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments],
            sync_every,
            fragment_sync_delay=int(outer["delay"]),
            fragment_update_alpha=outer["alpha"],
        )
    with method:
        for step in range(n_steps):
            inputs, targets = training.batch(step, dist.get_rank())
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
    return _vector(module)


def buffers_by_plan(plan: Plan, values: Mapping[str, tuple[np.ndarray, ...]]) -> Values:
    """Perform a plan without a model on this rank, from the given values `[world_size, count]`; return what is left."""
    rank = dist.get_rank()
    memory = Memory(plan, CPU, {buffer.name for buffer in plan.buffers})
    _fill(memory, {name: tuple(array[rank] for array in arrays) for name, arrays in values.items()})
    torch.manual_seed(rank)
    execute(plan, _idle(plan, memory, rank), memory, _world_of_all_groups(), False)
    return _read(memory, plan)


def scratch_by_plan(plan: Plan, values: Mapping[str, tuple[np.ndarray, ...]]) -> tuple[int, int]:
    """Return the bytes that this rank keeps beside the buffers when it warms up, and when it performs a plan."""
    rank, memory = dist.get_rank(), Memory(plan, CPU, {buffer.name for buffer in plan.buffers})
    _fill(memory, {name: tuple(array[rank] for array in arrays) for name, arrays in values.items()})
    warm, cold = (ProcessWorld(groups_of(plan), timeout_s=30.0) for _ in range(2))
    warm.warm_up(plan, CPU)
    execute(plan, _idle(plan, memory, rank), memory, cold, False)
    return warm.scratch_nbytes, cold.scratch_nbytes


def summed_by_servers(values: np.ndarray, servers: Servers, arriving_nbytes: int) -> tuple[np.ndarray, int]:
    """Return the sum of `[world_size, count]` by servers that keep so many bytes, and the bytes that are kept."""
    buffer, scratch = torch.from_numpy(values[dist.get_rank()]).clone(), Scratch()
    ranks = range(dist.get_world_size())
    sum_by_servers(buffer, servers, ranks, dist.group.WORLD, scratch, arriving_nbytes=arriving_nbytes)
    return buffer.numpy(), scratch.nbytes


def buffers_in_virtual_world(plan: Plan, values: Mapping[str, tuple[np.ndarray, ...]]) -> Values:
    """Perform a plan without a model on all ranks at once, from the given values; return what is left."""
    memory = Memory(plan, CPU, {buffer.name for buffer in plan.buffers}, n_ranks=plan.world_size)
    _fill(memory, values)
    virtual.perform_together(plan, [_idle(plan, memory.row(rank), rank) for rank in range(plan.world_size)], memory)
    return _read(memory, plan)


@functools.cache
def _world_of_all_groups() -> ProcessWorld:
    """Make every group once, because that takes longer than most plans."""
    groups = every_group(dist.get_world_size())
    return ProcessWorld(dict.fromkeys(("comm", "average", "side"), groups), timeout_s=30.0)


def _idle(plan: Plan, memory: Memory, rank: int) -> ModuleProgram:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    batch = partial(_batch, Training(), 0)
    return ModuleProgram(plan, nn.Identity(), loss, optimizer, batch, memory, device=CPU, rank=rank)


def _fill(memory: Memory, values: Values) -> None:
    for name, arrays in values.items():
        for tensor, array in zip(memory.tensors(name), arrays, strict=True):
            tensor.copy_(torch.from_numpy(array))


def _read(memory: Memory, plan: Plan) -> Values:
    return {buffer.name: tuple(map(_array, memory.tensors(buffer.name))) for buffer in plan.buffers}


def _array(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()).numpy()


def execute(
    plan: Plan,
    program: ModuleProgram,
    memory: Memory,
    world: ProcessWorld,
    in_caller: bool,
    gives_back: bool = False,
) -> int:
    """Perform a plan; return the most bytes that its buffers had at a time."""
    running = Executor(
        plan,
        rank=world.rank,
        delays={},
        world=world,
        program=program,
        memory=memory,
        lanes=Lanes(CPU, collectives_block=True, compute_in_caller=in_caller),
        recorder=Recorder(plan),
        watch=Watch(),
        gives_back=gives_back,
    )
    running.prepare()
    running.run()
    return running.peak_nbytes


def _batch(training: Training, rank: int, step: int) -> tuple[Tensor, Tensor]:
    return training.batch(step, rank)


def _vector(module: nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in trained_parameters(module)]).numpy()


SCHEDULES: list[Schedule] = [
    Sync(first_bucket_nbytes=100, bucket_nbytes=300),
    LocalSGD(period=3, warmup_steps=2),
    HierarchicalSGD(levels={2: 2, 4: "world"}),
]
LATE: list[Schedule] = [
    LocalSGD(period=3, overlap_steps=2),
    DiLoCo(period=4, fragments=2, overlap_steps=1, mixing=0.25, warmup_steps=1),
    DiLoCo(period=3, overlap_steps=3, ranks_per_worker=2),
]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, other)


def by_arrival(
    plan: Plan, training: Training, slow: Mapping[int, Collection[int]], delay_s: float, step_s: float = 0.0
) -> tuple[np.ndarray, Mapping[int, tuple[int, ...]]]:
    """Train on this rank, where ranks are slow in some steps; return parameters, and on rank 0 who was late.

    Args:
        plan: Drops the late.
        training: The training.
        slow: Rank -> steps in which it takes `delay_s` more.
        delay_s: Seconds.
        step_s: Seconds that every step takes on every rank.
    """
    rank = dist.get_rank()
    module, optimizer = training.make(rank)
    memory = Memory(plan, CPU, Binding.buffers_of(plan))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        step, number_in_step = divmod(number, training.micro_batches)
        if number_in_step == 0:
            time.sleep(step_s + delay_s * (step in slow.get(rank, ())))
        return training.batch(number, rank)

    program = ModuleProgram(plan, module, loss, optimizer, batch, memory, device=CPU, rank=rank)
    torch.manual_seed(rank)
    world = ProcessWorld(groups_of(plan), timeout_s=30.0, servers=late_servers(plan))
    world.warm_up(plan, CPU)
    execute(plan, program, memory, world, False)
    dist.barrier()
    return _vector(module), world.late(plan)


def comes_alone(ranks: Collection[int], n_first: int, timeout_s: float, servers: Servers) -> str:
    """Let some ranks come to an exchange of more; return what they are told."""
    world = ProcessWorld({"comm": [Group(dist.get_world_size())]}, timeout_s=timeout_s, servers=servers.members)
    arrivals = world.arrivals
    try:
        if dist.get_rank() in ranks:
            arrivals.sum_of_first(torch.ones(sum(servers.parts)), dist.get_world_size() - n_first, servers)
        return ""
    except RunError as error:
        return str(error)
    finally:
        dist.barrier()
