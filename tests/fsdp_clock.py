"""When everything happens in a step under `fully_shard`: torch's own code, run on a virtual clock.

    rows = drive(Settings(units=(Unit(forward=4, backward=8, gather=2, reduce_scatter=3),) * 3))

`fully_shard` runs on CPU tensors in a fake process group. It takes a device whose streams and events carry a clock for
`torch.cuda`, so its own waits decide order, starts and ends. Computing passes time on the current stream. A collective
starts when its stream is free and when its communicator has done what it was given before. Copies out of what was
gathered take the same time each; other copies and the host cost nothing. The rules that follow from it are in
`fsdp_rules.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_settings import (
    ALIKE,
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_GATHER,
    FORWARD,
    GATHER,
    OPTIMIZE,
    REDUCE_SCATTER,
    ROOT,
    MicroBatch,
    OneRank,
    Passes,
    Root,
    Row,
    Settings,
    Unit,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather_copy_out
from torch.testing._internal.distributed.fake_pg import FakeStore


def drive(
    settings: Settings, its: OneRank = ALIKE, *, watch: Callable[[nn.Module, Callable[[], int]], object] | None = None
) -> list[Row]:
    """Train on the virtual clock; return what was done, in the order in which the host issued it.

    Args:
        settings: Of the job.
        its: What one of several ranks meets.
        watch: Takes the model, and what tells the clock of the current stream.
    """
    device = _Device(settings, its)
    with _patched(device), _world(settings.replicas * settings.shard):
        model = _sharded(settings, device)
        if watch is not None:
            watch(model, lambda: device.current_stream().end)
        for step in range(settings.n_steps):
            for number, micro_batch in enumerate(settings.micro_batches):
                device.step = step
                device.micro_batch = number
                _prepare(model, micro_batch)
                inputs = torch.zeros(1, requires_grad=settings.input_needs_gradient)
                model(inputs).sum().backward()
            _optimize(model, settings, device)
    return device.rows


class _Stream:
    """Work in order; the host is at the end of it at once, so the clock of a stream is where its last work ends."""

    def __init__(self) -> None:
        self.end = 0

    def wait_stream(self, other: "_Stream") -> None:
        self.end = max(self.end, other.end)

    def wait_event(self, event: "_Event") -> None:
        self.end = max(self.end, event.end)

    def record_event(self) -> "_Event":
        return _Event(self.end)


class _Event:
    def __init__(self, end: int) -> None:
        self.end = end


class _CurrentStreamEvent(_Event):
    """An event as `torch.cuda.Event()` makes it, which is recorded later."""

    def __init__(self, device: "_Device") -> None:
        super().__init__(0)
        self._device = device

    def record(self) -> None:
        self.end = self._device.current_stream().end


class _Device:
    """What `fully_shard` takes `torch.cuda` for, and what writes down the operations."""

    def __init__(self, settings: Settings, its: OneRank) -> None:
        self.rows: list[Row] = []
        self._its = its
        self._n_transfers = 0
        self.step = 0
        self.micro_batch = 0
        self._shard = settings.shard
        self._copy_out = settings.copy_out
        self._is_serial = settings.serial
        self._units: dict[int, Unit | Root] = dict(enumerate(settings.units))
        if settings.root is not None:
            self._units[ROOT] = settings.root
        self._current = _Stream()
        self._free_at: dict[str, int] = {}

    def Stream(self, priority: int = 0) -> _Stream:
        return self._current if self._is_serial else _Stream()

    def Event(self) -> _CurrentStreamEvent:
        return _CurrentStreamEvent(self)

    def current_stream(self) -> _Stream:
        return self._current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before = self._current
        self._current = stream
        yield
        self._current = before

    def begin_forward(self) -> None:
        """Be late, in the model's own forward pass: its first gather may be under way."""
        self._current.end += self._its.late_by(self.step, self.micro_batch)

    def compute(self, kind: str, unit: int, duration: int) -> None:
        start = self._current.end
        self._finish(kind, unit, start, start + duration)

    def copy_out(self, *arguments: object) -> None:
        foreach_all_gather_copy_out(*arguments)
        self._current.end += self._copy_out

    def all_gather(
        self, output_tensor: Tensor, input_tensor: Tensor, *, group: dist.ProcessGroup, async_op: bool
    ) -> None:
        assert not async_op
        unit = _unit_of(output_tensor.numel() // self._shard)
        times = self._units[unit]
        duration = times.gather
        if group.size() < self._shard and times.regather is not None:
            duration = times.regather
        is_backward = torch._C._current_graph_task_id() != -1
        self._transfer(BACKWARD_GATHER if is_backward else GATHER, unit, duration, group)

    def reduce_scatter(self, *, output: Tensor, group: dist.ProcessGroup, async_op: bool, **_: object) -> None:
        assert not async_op
        unit = _unit_of(output.numel())
        self._transfer(REDUCE_SCATTER, unit, self._units[unit].reduce_scatter, group)

    def all_reduce(self, tensor: Tensor, *, group: dist.ProcessGroup, op: object) -> None:
        unit = _unit_of(tensor.numel())
        self._transfer(ALL_REDUCE, unit, self._units[unit].all_reduce, group)

    def _transfer(self, kind: str, unit: int, duration: int, group: dist.ProcessGroup) -> None:
        """Queue behind what this communicator was given before."""
        communicator = group.group_name
        begins_at = self._its.begins_at(self._n_transfers)
        start = max(self._current.end, self._free_at.get(communicator, 0), begins_at)
        self._n_transfers += 1
        self._free_at[communicator] = start + duration
        self._finish(kind, unit, start, start + duration)

    def _finish(self, kind: str, unit: int, start: int, end: int) -> None:
        self._current.end = end
        self.rows.append(Row(self.step, self.micro_batch, kind, unit, start, end))


@contextmanager
def _patched(device: _Device) -> Iterator[None]:
    modules = ("_fsdp_init", "_fsdp_param_group", "_fsdp_collectives", "_fsdp_state")
    with ExitStack() as stack:
        for name in modules:
            place = f"torch.distributed.fsdp._fully_shard.{name}._get_device_handle"
            stack.enter_context(mock.patch(place, return_value=device))
        place = "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_all_gather_copy_out"
        stack.enter_context(mock.patch(place, device.copy_out))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", device.current_stream))
        stack.enter_context(mock.patch.object(dist, "all_gather_single", device.all_gather))
        stack.enter_context(mock.patch.object(dist, "reduce_scatter_single", device.reduce_scatter))
        stack.enter_context(mock.patch.object(dist, "all_reduce", device.all_reduce))
        yield


@contextmanager
def _world(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _weight(unit: int, shard: int) -> nn.Parameter:
    """Return parameters of a size that tells which unit they are of."""
    return nn.Parameter(torch.zeros(shard * (unit + 2)))


def _unit_of(shard_numel: int) -> int:
    return shard_numel - 2


class _Work(torch.autograd.Function):
    """Work of a unit: its time passes on the current stream in its forward, and in its backward pass."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, device: _Device, unit: int, passes: Passes) -> Tensor:
        ctx.weight_shape = weight.shape
        ctx.backward_pass = (device, unit, passes.backward)
        device.compute(FORWARD, unit, passes.forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        device, unit, duration = ctx.backward_pass
        device.compute(BACKWARD, unit, duration)
        return grad, torch.zeros(ctx.weight_shape), None, None, None


class _UnitModule(nn.Module):
    def __init__(self, device: _Device, number: int, unit: Unit, shard: int) -> None:
        super().__init__()
        self.weight = _weight(number, shard)
        self._device = device
        self._number = number
        self._passes = Passes(unit.forward, unit.backward)

    def forward(self, inputs: Tensor) -> Tensor:
        return _Work.apply(inputs, self.weight, self._device, self._number, self._passes)


class _Model(nn.Module):
    def __init__(self, settings: Settings, device: _Device) -> None:
        super().__init__()
        self._device = device
        self._before = settings.root.before if settings.root else None
        self._after = settings.root.after if settings.root else None
        if settings.root is not None:
            assert self._before or self._after, "a root with parameters uses them"
            self.weight = _weight(ROOT, settings.shard)
        numbered = enumerate(settings.units)
        self.units = nn.ModuleList(_UnitModule(device, number, unit, settings.shard) for number, unit in numbered)

    def forward(self, inputs: Tensor) -> Tensor:
        self._device.begin_forward()
        if self._before is not None:
            inputs = _Work.apply(inputs, self.weight, self._device, ROOT, self._before)
        for unit in self.units:
            inputs = unit(inputs)
        if self._after is not None:
            inputs = _Work.apply(inputs, self.weight, self._device, ROOT, self._after)
        return inputs


def _sharded(settings: Settings, device: _Device) -> FSDPModule:
    model = _Model(settings, device)
    mesh = _mesh(settings)
    units: list[FSDPModule] = []
    for module, unit in zip(model.units, settings.units, strict=True):
        reshard_after_forward = unit.reshard_after_forward
        if reshard_after_forward is None:
            reshard_after_forward = settings.reshard_after_forward
        units.append(fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward))
    root = fully_shard(model, mesh=mesh, reshard_after_forward=settings.reshard_after_forward)
    root.set_reduce_scatter_max_input_buffers(settings.max_input_buffers)
    if settings.separate_group:
        root.set_separate_reduce_scatter_group(True)
    if settings.forward_prefetch:
        first = [root] if settings.root and settings.root.before else []
        for unit, later in _followed_by([*first, *units], settings.forward_prefetch):
            unit.set_modules_to_forward_prefetch(later)
    if settings.backward_prefetch:
        first = [root] if settings.root and settings.root.after else []
        for unit, earlier in _followed_by([*first, *units[::-1]], settings.backward_prefetch):
            unit.set_modules_to_backward_prefetch(earlier)
    return root


def _mesh(settings: Settings) -> DeviceMesh:
    if settings.replicas == 1:
        return init_device_mesh("cpu", (settings.shard,))
    return init_device_mesh("cpu", (settings.replicas, settings.shard), mesh_dim_names=("replicate", "shard"))


def _followed_by(units: Sequence[FSDPModule], depth: int) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    for number, unit in enumerate(units):
        yield unit, list(units[number + 1 : number + 1 + depth])


def _prepare(model: FSDPModule, micro_batch: MicroBatch) -> None:
    model.set_requires_gradient_sync(micro_batch.reduces)
    if micro_batch.reduces:
        model.set_requires_all_reduce(micro_batch.all_reduces)
    model.set_reshard_after_backward(micro_batch.reshards)
    model.set_is_last_backward(micro_batch.is_last)


def _optimize(model: FSDPModule, settings: Settings, device: _Device) -> None:
    if settings.root is not None:
        device.compute(OPTIMIZE, ROOT, settings.root.optimize)
    for number, unit in enumerate(settings.units):
        device.compute(OPTIMIZE, number, unit.optimize)
    assert isinstance(model, nn.Module)
    for parameter in model.parameters():
        parameter.grad = None
