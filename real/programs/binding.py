"""A model's parameters and gradients in the buffers of a plan.

After `Binding`, each parameter is a view of a parameter buffer, and gradients are moved into the gradient buckets as
autograd completes them. So collectives, copies and averages work on whole buffers, and the model stays unchanged.

**If the loss did not depend on a parameter**, the parameter takes part with negative zeros. Their sum is a negative
zero only if no rank has added a gradient, not even one of zero. So the optimiser skips parameters that no rank used or
that were frozen meanwhile, without an additional collective, like DistributedDataParallel (`find_unused_parameters`).
Parameters that another rank used get its gradient. Entries that compression leaves out are zeros.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from real.buffers.lives import short_lived
from real.buffers.memory import TORCH_DTYPES, Memory
from real.buffers.transforms import Transform
from simdist.errors import PlanError, RunError
from simdist.plan import Buffer, Plan, ops


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters, each once, in order: the tensors of a plan.

    Of several types, each follows the others as a whole, the one with most elements last. So a plan may have a buffer
    for each, and the buckets of that type are complete first.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    counts: dict[torch.dtype, int] = {}
    for parameter in trained:
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    order = {dtype: place for place, dtype in enumerate(sorted(counts, key=lambda dtype: counts[dtype]))}
    return sorted(trained, key=lambda parameter: order[parameter.dtype])


class Binding:
    """Ties a model to a plan.

    Args:
        plan: The plan. Its buffers state their tensors.
        module: The module, already on the device of `memory`. Shapes begin with `n_ranks` if it is stacked.
        memory: The parameter and gradient buffers of the plan.
        rank: This rank. It decides which slices of a sharded model the memory holds.

    Attributes:
        own_dtype: Type of the model. Of several types, the one with most elements.
        gathered_dtype: Type of the parameters that the model reads, which differs only if it is sharded.
        buckets: Moves gradients into their buckets.

    Raises:
        PlanError: The plan is for another model.
    """

    def __init__(self, plan: Plan, module: nn.Module, memory: Memory, *, rank: int = 0) -> None:
        self._parameters = trained_parameters(module)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._names = [names[parameter] for parameter in self._parameters]
        self._memory = memory
        self._rank = rank
        all_ops = [op for body in plan.bodies for op in body]
        inner = [op for op in all_ops if isinstance(op, ops.Optimize) and op.optimizer == "inner"]
        self._homes_of = homes_of(plan)
        grads = dict.fromkeys(op.dst for op in all_ops if isinstance(op, ops.Backward))
        self._check_model(plan)
        self.own_dtype = self._parameters[-1].dtype if self._parameters else torch.float32
        self._homes: list[tuple[nn.Parameter, Tensor, int]] = []
        for name, home in self._homes_of.items():
            if home.name != name:
                self._fill_slice(name, home)
            self._lay(home)
        self.gathered_dtype = self._parameters[-1].dtype if self._parameters else torch.float32
        left = {name: dst for name, dst in left_to_autograd(plan).items() if name not in memory and dst in memory}
        self.buckets = GradientBuckets({name: self._places(plan.buffer(name)) for name in grads}, left)
        self._copies = {name: self._parts_of(dst, plan.buffer(name)) for name, dst in left.items()}
        self._laid = {name: self.parameters_of(home) for name, home in self._homes_of.items()}
        rated = (name for op in all_ops if isinstance(op, ops.TrustRatios) for name in op.grads)
        updates = dict.fromkeys((*(name for op in inner for name in op.grads), *rated))
        buffers = [
            buffer for buffer in map(plan.buffer, updates) if buffer.tensors and buffer.sharded_over == ops.ALONE
        ]
        self._gradients = {buffer.name: self._places(buffer) for buffer in buffers}

    @staticmethod
    def buffers_of(plan: Plan, *, in_loop: bool = False) -> set[str]:
        """Return the names of the buffers that a model needs: all except inputs, activations and losses.

        Args:
            plan: The plan.
            in_loop: The user's loop trains, and autograd keeps gradients that only the optimizer reads.
        """
        all_ops = list(dict.fromkeys(op for body in plan.bodies for op in body))
        needed = {name for op in all_ops for name in _kept_by(op, in_loop=in_loop)}
        copies = [(op.src, op.dst) for op in all_ops if isinstance(op, ops.Copy)]
        while more := [ends for ends in copies if len(needed.intersection(ends)) == 1]:
            needed.update(*more)
        return needed

    def copy_gradients(self, op: ops.Copy) -> bool:
        """Copy a bucket from the gradients that autograd has, if they make it up. Tell whether they do."""
        if op.src not in self._copies:
            return False
        self.buckets.copy(op.src, self._copies[op.src])
        return True

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the buffers that hold all parameters."""
        return tuple(self._laid)

    @property
    def parameter_buffers(self) -> list[Tensor]:
        """The buffers that hold all parameters."""
        return [self._memory.dense(name) for name in self._laid]

    def named(self, buffer: Buffer) -> dict[str, Tensor]:
        """Return the part of a buffer for each of its tensors, by the names of parameters in the module."""
        return dict(zip(self._names_of(buffer), self._views(buffer), strict=True))

    def views(self, buffer: Buffer) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters of a buffer's tensors, each with its part of the buffer in the parameter's shape."""
        return list(zip(self.parameters_of(buffer), self._views(buffer), strict=True))

    def held(self, buffer: Buffer) -> list[tuple[Tensor, Tensor]]:
        """Return what this rank has of each parameter, with the same part of a buffer of the same tensors.

        Of a sharded model these are the rank's own pieces of the parameters.
        """
        if buffer.sharded_over == ops.ALONE:
            return [*self.views(buffer)]
        (mine,) = (name for name, home in self._homes_of.items() if home.tensors == buffer.tensors)
        own = self._memory.dense(mine)
        held = self._memory.dense(buffer.name)
        with self._memory.lent([mine, buffer.name]):
            return [(own[place], held[place]) for _, _, place in self._own_pieces(buffer)]

    def give_gradients(self, op: ops.Optimize) -> None:
        """Give an update the gradients that it names, and remove those of other parameters, so that it skips them."""
        self.forget_gradients()
        for name in op.grads:
            for parameter, place in self._gradients[name]:
                parameter.grad = place
        self.buckets.skip_unused()

    def parameters_and_gradients(self, op: ops.Optimize | ops.TrustRatios) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters that an operation names, in that order, and the place of each gradient."""
        places = {parameter: place for name in op.grads for parameter, place in self._gradients[name]}
        parameters = [parameter for name in op.params for parameter in self._laid[name]]
        return parameters, [place for each in parameters if (place := places[each]) is not None]

    def parameters_of(self, buffer: Buffer) -> list[nn.Parameter]:
        """Return the parameters of a buffer, in its order."""
        return self._parameters[slice(*(buffer.tensors or (0, 0)))]

    def pieces(self, buffer: Buffer, member: int, count: int) -> Iterator[tuple[nn.Parameter, int, slice]]:
        """Yield the parts of a buffer's parameters that are in one of its slices.

        Args:
            buffer: The buffer.
            member: Number of the slice.
            count: Elements of a slice.

        Yields:
            The parameter, the beginning of the part in its memory, and the place of the part in the slice.
        """
        offset = -member * count
        for parameter in self.parameters_of(buffer):
            begin = max(offset, 0)
            end = min(offset + self._count(parameter), count)
            if begin < end:
                yield parameter, begin - offset, slice(begin, end)
            offset += self._count(parameter)

    def named_pieces(self, buffer: Buffer) -> dict[str, tuple[int, Tensor]]:
        """Return this rank's part of each tensor of a sharded buffer, by the names of parameters in the module.

        Returns:
            The beginning of the part in the parameter's memory, and its elements.
        """
        mine = self._memory.dense(buffer.name)
        names = dict(zip(self._parameters, self._names, strict=True))
        return {names[parameter]: (first, mine[place]) for parameter, first, place in self._own_pieces(buffer)}

    def _own_pieces(self, buffer: Buffer) -> Iterator[tuple[nn.Parameter, int, slice]]:
        return self.pieces(buffer, buffer.sharded_over.member(self._rank), buffer.count)

    def units(self) -> dict[str, list[nn.Parameter]]:
        """Return the gathered buffers of a sharded model with their parameters; nothing if it is not sharded."""
        return {home.name: self.parameters_of(home) for name, home in self._homes_of.items() if home.name != name}

    def bring_home(self, gather: Callable[[str], Tensor]) -> None:
        """Give the model whole parameters of its own type, in memory of their own, if it is sharded.

        Args:
            gather: Name of a sharded buffer -> the slices of all members of this rank's group, one after the other.
        """
        for name, home in self._homes_of.items():
            if home.name != name:
                parts = self._parts(gather(name), home)
                for parameter, part in zip(self.parameters_of(home), parts, strict=True):
                    parameter.data = part

    def reclaim(self) -> bool:
        """Take parameters back whose `data` was replaced by a tensor of the same kind. Tell whether all are in place.

        Some optimizers put a parameter back by `parameter.data = kept`, which leaves the buffer behind.
        """
        for parameter, view, address in self._homes:
            if parameter.data_ptr() == address:
                continue
            if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
                return False
            view.copy_(parameter.detach())
            parameter.data = view
        return True

    def forget_gradients(self) -> None:
        """Clear gradients before the next backward pass."""
        for parameter in self._parameters:
            parameter.grad = None

    def _check_model(self, plan: Plan) -> None:
        buffers = [plan.buffer(name) for name in self._homes_of]
        covered = sorted(buffer.tensors or (0, 0) for buffer in buffers)
        n_tensors = covered[-1][1] if covered else 0
        if [first for first, _ in covered] != [0, *(last for _, last in covered)][: len(covered)]:
            raise PlanError(f"plan {plan.name}: its parameter buffers hold tensors {covered}; they should follow on")
        if n_tensors != len(self._parameters):
            raise PlanError(
                f"plan {plan.name} is for a model of {n_tensors} tensors; this one has {len(self._parameters)} that "
                f"are trained: build the plan with this model's workload"
            )
        for buffer in buffers:
            for parameter, name in zip(self.parameters_of(buffer), self._names_of(buffer), strict=True):
                if parameter.dtype != TORCH_DTYPES[buffer.dtype]:
                    raise PlanError(
                        f"plan {plan.name}: buffer {buffer.name} is {buffer.dtype}, parameter {name} is "
                        f"{parameter.dtype}; set workload.dtype, or convert the model"
                    )
            count = sum(map(self._count, self.parameters_of(buffer)))
            home = self._homes_of[buffer.name]
            planned = home.count - home.padding
            if count != planned:
                raise PlanError(
                    f"plan {plan.name}: buffer {buffer.name} has {planned} elements; this model's tensors "
                    f"{buffer.tensors[0]}:{buffer.tensors[1]} have {count}: build the plan with this model's workload"
                    if buffer.tensors
                    else f"plan {plan.name}: buffer {buffer.name} holds no tensors"
                )

    def _names_of(self, buffer: Buffer) -> list[str]:
        return self._names[slice(*(buffer.tensors or (0, 0)))]

    def _lay(self, buffer: Buffer) -> None:
        """Move the parameters into their buffer, with their previous strides."""
        if not self._memory.is_held(buffer.name):
            self._memory.take(buffer.name)
        for parameter, view in zip(self.parameters_of(buffer), self._views(buffer), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
            self._homes.append((parameter, view, view.data_ptr()))

    def _fill_slice(self, name: str, home: Buffer) -> None:
        """Copy this rank's slice of the parameters into a sharded buffer."""
        mine = self._memory.dense(name)
        whole = mine.new_zeros(home.count)
        for parameter, part in zip(self.parameters_of(home), self._parts(whole, home), strict=True):
            part.copy_(parameter.detach())
        mine.copy_(self._memory.own_slice(name, whole, self._rank))

    def _count(self, parameter: Tensor) -> int:
        """Return the number of its elements on one rank."""
        return parameter.numel() // (self._memory.n_ranks or 1)

    def _places(self, buffer: Buffer) -> list[tuple[nn.Parameter, Tensor | None]]:
        if buffer.name not in self._memory:
            return [(parameter, None) for parameter in self.parameters_of(buffer)]
        return [*self.views(buffer)]

    def _views(self, buffer: Buffer) -> list[Tensor]:
        """Return the part of a buffer for each of its tensors, in the tensor's shape; padding is left out."""
        return self._parts_of(buffer.name, buffer)

    def _parts_of(self, name: str, like: Buffer) -> list[Tensor]:
        """Return the part of a buffer for each tensor of one that it is like."""
        with self._memory.lent([name]):  # torch makes no part of a tensor without memory
            return self._parts(self._memory.dense(name), like)

    def _parts(self, flat: Tensor, buffer: Buffer) -> list[Tensor]:
        """Return the part of a flat tensor for each tensor of the buffer that it is like."""
        parts = flat[..., : buffer.count - buffer.padding].split(
            [*map(self._count, self.parameters_of(buffer))], dim=-1
        )
        return [laid_like(part, parameter) for part, parameter in zip(parts, self.parameters_of(buffer), strict=True)]


def homes_of(plan: Plan) -> dict[str, Buffer]:
    """Return the buffer that the model reads for each buffer of parameters that the optimizer updates.

    It is the same, unless the model is sharded. Then each rank updates slices, and reads gathered units.

    Raises:
        PlanError: No forward pass reads the tensors of a slice.
    """
    all_ops = [op for body in plan.bodies for op in body]
    updates = (op for op in all_ops if isinstance(op, ops.Optimize) and op.optimizer == "inner")
    params = dict.fromkeys(name for op in updates for name in op.params)
    read = {name for op in all_ops if isinstance(op, ops.Forward) for name in op.srcs}
    units = {buffer.tensors: buffer for buffer in plan.buffers if buffer.name in read}
    homes = {}
    for buffer in map(plan.buffer, params):
        is_sharded = buffer.sharded_over != ops.ALONE
        if is_sharded and (buffer.tensors is None or buffer.tensors not in units):
            raise PlanError(f"plan {plan.name}: {buffer.name} has slices of tensors that no forward pass reads whole")
        homes[buffer.name] = units[buffer.tensors] if is_sharded else buffer
    return homes


def left_to_autograd(plan: Plan) -> dict[str, str]:
    """Return the buckets that need no memory, each with the buffer to which the plan copies it.

    Autograd has the gradients until then. Nothing adds to these buckets, and nothing else reads them. Without this,
    gradient and bucket would be in memory at a time.
    """
    found: dict[str, str] = {}
    other: set[str] = set()
    for body in plan.bodies:
        written: set[str] = set()
        for op in body:
            match op:
                case ops.Backward() if not op.adds and op.dst not in written:
                    written.add(op.dst)
                case ops.Copy() if op.src in written and found.get(op.src, op.dst) == op.dst:
                    found[op.src] = op.dst
                    written.remove(op.src)
                case _:
                    other.update((*ops.reads(op), *ops.writes(op)))
        other |= written
    return {name: dst for name, dst in found.items() if name in short_lived(plan) - other}


class GradientBuckets:
    """Moves gradients into buckets, and reports when the next one is complete.

    Args:
        parts: Bucket -> its parameters, each with its place in the bucket. With None, the gradient stays in autograd,
            and the bucket is complete at the end of the pass.
        left: Buckets whose gradients stay in autograd until `copy`. They are complete when all gradients have arrived.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[tuple[nn.Parameter, Tensor | None]]], left: Collection[str] = ()
    ) -> None:
        self._parts = parts
        self._left_to_autograd = frozenset(left)
        self._missing: dict[str, set[int]] = {}
        self._left: list[ops.Backward] = []
        self._closed: set[str] = set()  # buckets that were completed without waiting for all of their gradients
        self._unused: list[tuple[Tensor, Tensor | None]] = []
        self._complete: Callable[[], object] = _nothing
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, number))
            for bucket, members in parts.items()
            for number, (parameter, place) in enumerate(members)
            if place is not None or bucket in self._left_to_autograd
        ]

    def release(self) -> None:
        """Remove the hooks: the model is ordinary again, except for the memory of its parameters."""
        for handle in self._handles:
            handle.remove()
        self._missing = {}
        self._left = []
        self._complete = _nothing

    def expect(self, buckets: Sequence[ops.Backward], complete: Callable[[], object]) -> None:
        """Prepare for a backward pass; see `real.programs.base.Program.backward`."""
        self._left = list(reversed(buckets))
        self._missing = {op.dst: set(range(len(self._parts[op.dst]))) for op in buckets}
        self._closed = set()
        self._complete = complete

    def reach(self, bucket: str) -> None:
        """Complete the buckets before one, because autograd has come to it: the loss does not depend on their rest."""
        while self._left and self._left[-1].dst != bucket:
            turn = self._left.pop()
            self._closed.add(turn.dst)
            self.fill(turn, self._missing[turn.dst])
            self._complete()
            self._bring_next()

    @property
    def moves_gradients(self) -> bool:
        """Whether the plan does anything with gradients but update parameters."""
        return bool(self._handles)

    @property
    def unused(self) -> set[Tensor]:
        """The parameters that the passes of this step did not use on this rank."""
        return {parameter for parameter, _ in self._unused}

    def forget_unused(self) -> None:
        """Forget the parameters that the passes of this step did not use."""
        self._unused = []

    def skip_unused(self) -> None:
        """Remove the gradients of parameters that no rank has used, after the plan has averaged them."""
        for parameter, place in self._unused:
            if place is not None and not place.any() and place.signbit().all():
                parameter.grad = None
        self._unused = []

    def finish(self) -> None:
        """Complete the buckets of parameters that the loss did not depend on."""
        while self._left:
            turn = self._left.pop()
            self.fill(turn, self._missing[turn.dst])
            self._complete()
        self._missing = {}

    def fill(self, bucket: ops.Backward, missing: Collection[int] | None = None) -> None:
        """Move existing gradients into a bucket, or add them, with negative zeros for missing ones.

        Args:
            bucket: The bucket.
            missing: Numbers of its parameters whose gradients have not arrived; by default, those without a gradient.
        """
        for number, (parameter, place) in enumerate(self._parts[bucket.dst]):
            if place is None:
                if bucket.dst in self._left_to_autograd and parameter.grad is None:
                    self._unused.append((parameter, place))
                continue
            if parameter.grad is None and (missing is None or number in missing):
                if not bucket.adds:
                    place.fill_(-0.0)
                    self._unused.append((parameter, place))
                _give(parameter, place)
            _bring(parameter, place, adds=bucket.adds)

    def copy(self, bucket: str, parts: Sequence[Tensor]) -> None:
        """Copy the gradients of a bucket that autograd has, and free them; negative zeros for missing ones."""
        for (parameter, _), part in zip(self._parts[bucket], parts, strict=True):
            if parameter.grad is None:
                part.fill_(-0.0)
            else:
                part.copy_(parameter.grad)
                parameter.grad = None

    def _arrived(self, bucket: str, number: int, parameter: Tensor) -> None:
        """Take the gradient of a parameter, in autograd."""
        if bucket not in self._missing:
            return  # not a pass of the plan, but the user's own
        if bucket in self._closed:
            raise RunError(
                f"parameter {number} of bucket {bucket} gets its gradient after an earlier layer has needed its own "
                f"parameters; put the layers that use them in turns into one unit"
            )
        if number not in self._missing[bucket]:
            raise RunError(
                f"parameter {number} of bucket {bucket} gets its gradient twice in one backward pass, so it cannot be "
                f"known when it is complete; share no parameters between reentrant checkpoints: use_reentrant=False"
            )
        self._missing[bucket].remove(number)
        turn = self._left[-1]
        if bucket == turn.dst:  # another bucket may still be in use from the last step until its turn comes
            _bring(parameter, self._parts[bucket][number][1], adds=turn.adds)
        self._pass_on()

    def _pass_on(self) -> None:
        """Report each complete bucket when its turn has come."""
        while self._left and not self._missing[self._left[-1].dst]:
            self._left.pop()
            self._complete()
            self._bring_next()
        if not self._left:
            self._missing = {}

    def _bring_next(self) -> None:
        """Move the gradients of the next bucket that have arrived before its turn."""
        for turn in self._left[-1:]:
            for parameter, place in self._parts[turn.dst]:
                _bring(parameter, place, adds=turn.adds)


def _kept_by(op: ops.Op, *, in_loop: bool) -> tuple[str, ...]:
    """Return the buffers of an operation that are in the memory of the plan and not with the model."""
    match op:
        case ops.Backward():
            return () if in_loop else (op.dst,)
        case ops.Optimize() if in_loop and op.optimizer == "inner":
            return op.params
    works_on_them = isinstance(op, (*ops.COLLECTIVES, ops.Optimize, ops.TrustRatios, Transform))
    return (*ops.reads(op), *ops.writes(op)) if works_on_them else ()


def _bring(parameter: Tensor, place: Tensor | None, *, adds: bool) -> None:
    """Move the gradient of a parameter, if any, to its place in a bucket, or add it to the contents."""
    gradient = parameter.grad
    if not (gradient is None or place is None or gradient is place):
        if adds:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        _give(parameter, place)


def _give(parameter: Tensor, place: Tensor) -> None:
    """Let a parameter see its gradient in a bucket, unless that has another type, as for sums in higher precision."""
    parameter.grad = place if place.dtype == parameter.dtype else None


def _nothing() -> None:
    pass


def laid_like(flat: Tensor, like: Tensor) -> Tensor:
    """View a flat tensor with the memory layout of `like` if that is dense; in row-major order otherwise.

    Args:
        flat: `[count]`, or `[n_ranks, count]` for several ranks.
        like: A tensor of one rank, or of the same number of ranks.
    """
    if flat.dim() > 1 and _is_dense(like[0]):
        return flat.as_strided(like.size(), (flat.stride(0), *like.stride()[1:]), flat.storage_offset())
    if flat.dim() == 1 and _is_dense(like):
        return flat.as_strided(like.size(), like.stride(), flat.storage_offset())
    return flat.view(like.size())


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill a range of memory, each place once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((tensor.stride(at), tensor.size(at)) for at in range(tensor.dim())):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
