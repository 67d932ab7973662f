"""A proof that a plan computes the result that its schedule declares, by running it on symbols.

Every buffer of every rank holds a linear combination of *sources*: the parameters that rank q had at the beginning of
the step, and the gradient that rank q computed in it. The plan is executed on these weights, exactly (integers over a
common denominator). A forward and backward pass puts weight 1 on a rank's own gradient of that pass, or adds it to the
bucket's contents. Collectives average and sum. The optimizer adds the gradients' weights to the parameters' weights.
After each step, the weights must be those of the schedule's `Result`, the same for every pass of the step. Contents of
earlier steps carry their age, so they can never pass for fresh.

Each step starts from new symbols for the parameters (induction over steps), so equal bodies in equal states are proved
once. Element-wise, a buffer is a row of *atoms*: the tensor ranges that buffers split the model into, times the slices
that reduce-scatters split them into. Each atom carries its place in the model, so the proof also finds a shard that
ends up in the wrong place. Forward passes must read this step's parameters, and each loaded batch once.

A top-k selection depends on values, so symbols cannot follow it. In the proof it selects every entry. The proof shows
that the selection is summed over the right ranks, divided by the right number and put in the right place. Unselected
values stay with their rank, by the meaning of `Select`. A merge drops the same values on all ranks that hold them, so
each may keep only its share. After the divisions, the shares must add up to one full copy. So nothing is lost or
counted twice. A sparse buffer holds symbols of the dense vector that it stands for, so gathering sums them. The factors
of a low rank hold symbols of the matrices that they approximate, likewise all of them. The proof requires that ranks
project on the same factor.

Ranks that share an update hold the same parameters at the beginning of a step. They must do so at its end, too. So do
ranks that hold one slice each of sharded parameters.

A forward pass may be several operations. Together they must use every parameter once.

Trust ratios scale an update and change no weights. The proof requires that they belong to the updated tensors. It also
requires that the parameters in a checkpoint are those at the end of the step.

The set of late ranks depends on time. In the proof, the last members of a group are late.

The proof treats an outer optimizer as one that subtracts outer gradients from anchors. With learning rate 1 and no
momentum, that is parameter averaging. Any other optimizer treats the same outer gradients alike on every rank. Like
parameters, anchors are new symbols in every step. A step must leave them unchanged unless its result declares
otherwise. After a step's last write to parameters or anchors, both are the symbols of the next step. So data sent after
it carries its age, too: an average that is applied late must be exactly the declared number of steps old.

This is the smallest interpreter of the plan, and the living definition of its operations.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.errors import PlanError
from simdist.plan import Plan, ops
from simdist.plan.check import fail_at
from simdist.plan.group import Group, Result
from simdist.proof.layout import AtomLayout, BrokenError
from simdist.proof.symbols import (
    AtomPlaces,
    Move,
    State,
    Tag,
    Value,
    Weights,
    aged,
    assembled,
    at_root,
    broadcast_to_members,
    concatenated,
    digest,
    fraction,
    fraction_text,
    gather,
    gathered,
    joined_atoms,
    lowest_terms,
    root_mask,
    same,
    scatter,
    scattered,
    summed,
    tag_text,
    total,
)

_FULL_WORLD_SIZE = 256  # up to here the contributions of all ranks are followed; beyond, of an evenly spread sample
_N_SOURCES = 64  # ranks followed at a time
_MAX_WEIGHTS = 2**18  # of one atom
_RATIOS = "ratios of update "  # kind of source, followed by its number in the step
_OLDEST = 2  # age in steps from which on all ages count as equal, unless a mean is applied late


def prove(plan: Plan, result: Callable[[int], Result]) -> int:
    """Show that every step of `plan` has the result that `result(step)` declares.

    Args:
        plan: A legal plan (see `simdist.plan.check`).
        result: The schedule's declaration.

    Returns:
        The number of ranks with contributions that were followed: all, or an even sample in large worlds.

    Raises:
        PlanError: A step has another result. The message names the step, the operation and the ranks.
        UnsupportedError: Weights outgrow 64 bits.
    """
    sources = np.arange(plan.world_size)
    if plan.world_size > _FULL_WORLD_SIZE:
        n_sources = max(2, min(_N_SOURCES, _MAX_WEIGHTS // plan.world_size))
        sources = np.unique(np.linspace(0, plan.world_size - 1, n_sources).astype(np.int64))
    for block in np.array_split(sources, math.ceil(len(sources) / _N_SOURCES)):
        _Proof(plan, block).run(result)
    return len(sources)


def _updated(op: ops.Optimize | ops.TrustRatios, state: State) -> tuple[Value, ...]:
    """Return the contents of an update's parameters and gradients. They are equal only if the values are the same."""
    return tuple(state[name] for name in (*op.params, *op.grads))


def _in_proportion(one: dict[Tag, Weights], other: dict[Tag, Weights]) -> bool:
    pairs = [np.broadcast_arrays(each.numerators, other[tag].numerators) for tag, each in one.items() if tag in other]
    return one.keys() == other.keys() and all((a * b.sum() == b * a.sum()).all() for a, b in pairs)


def _total_of_first(view: NDArray[np.int64], n_first: int) -> NDArray[np.int64]:
    """Return on all members the sum over the first `n_first` of them."""
    return broadcast_to_members(view[:, :n_first].sum(1, keepdims=True), view)


def _of_weights(move: Move, n_atoms: int) -> Move:
    """Return what a collective does to weights, of which one atom may stand for all `n_atoms`."""
    if move is scatter:
        return partial(scattered, n_atoms=n_atoms)
    return partial(gathered, n_atoms=n_atoms) if move is gather else move


@dataclass(slots=True)
class _StepState:
    """What the proof knows of the step that it executes.

    Args:
        n_declared: Forward passes that the schedule declares.
        entered: The own contributions of the ranks that do not sit the step out.
        covered: Places of the model that the current forward pass has used.
        n_passes: Forward passes so far.
        updated: Parameters with slices that were updated.
        rated: Contents that trust ratios belong to.
        saved: Position of each `Save`, with buffer and contents.
        moved: Weights before and after collectives that differ in the names of buffers only.
        compared: Weights found and expected at the end, by identity, that were compared.
        asked: The last value that was compared with current parameters, and whether it was equal.
    """

    n_declared: int
    entered: Weights
    covered: NDArray[np.bool_]
    n_passes: int = 0
    updated: set[str] = field(default_factory=set)
    rated: list[tuple[Value, ...]] = field(default_factory=list)
    saved: list[tuple[int, str, Value]] = field(default_factory=list)
    moved: dict[tuple[ops.Collective, bool, int, int], tuple[Weights, Weights]] = field(default_factory=dict)
    compared: dict[tuple[int, int], tuple[Weights, Weights]] = field(default_factory=dict)
    asked: tuple[Value | None, bool] = (None, False)


class _Proof:
    """One execution of a plan on the contributions of a few source ranks."""

    def __init__(self, plan: Plan, sources: NDArray[np.int64]) -> None:
        self._plan = plan
        self._layout = AtomLayout(plan)
        self._sources = sources
        self._own = Weights((np.arange(plan.world_size)[:, None, None] == sources).astype(np.int64))
        self._nothing = Weights(np.zeros_like(self._own.numerators))
        self._began = self._own  # parameters at the beginning of a step: a rank's own, or the first sharer's
        distinct = plan.distinct_ops
        residuals = {op.residual for op in distinct if isinstance(op, ops.Select | ops.Merge | ops.LowRank)}
        updates = [op for op in distinct if isinstance(op, ops.Optimize)]
        trained = {name for op in updates if op.optimizer == "inner" for name in op.params}
        trained |= {name for op in distinct if isinstance(op, ops.Forward) for name in op.srcs}
        lasting = [b.name for b in plan.buffers if b.initialized and b.tensors and b.name not in residuals]
        self._params = [name for name in lasting if name in trained]
        self._anchors = [name for name in lasting if name not in trained]
        self._oldest = _OLDEST
        self._loads = any(isinstance(op, ops.Load) for op in distinct)
        sharers = {op.shared_by for op in updates} | {buffer.sharded_over for buffer in plan.buffers}
        for group in sharers:
            ranks = np.arange(plan.world_size)
            first = ranks - ranks // group.stride % group.size * group.stride
            self._began = Weights(self._began.numerators[first])
        self._all_places = self._layout.ranges(self._params)
        self._now = _StepState(1, self._own, np.zeros_like(self._all_places))

    def run(self, result: Callable[[int], Result]) -> None:
        """Execute step after step. A step with a body, state and result seen before is known to hold."""
        if not self._params:
            raise PlanError(
                f"plan {self._plan.name}: no buffer holds parameters; declare one initialized, with tensors"
            )
        if any(isinstance(op, ops.Combine) for op in self._plan.distinct_ops):
            self._oldest += max(result(step).late_steps for step in range(self._plan.n_steps))
        states: dict[bytes, State] = {}
        proved: dict[tuple[bytes, int, Result], bytes] = {}
        key = b""
        states[key] = {buffer.name: self._initial(buffer.name) for buffer in self._plan.buffers if buffer.initialized}
        for step, body in enumerate(self._plan.body_of_steps()):
            declared = result(step)
            known = proved.get((key, body, declared))
            if known is None:
                state = self._step(dict(states[key]), step, body, declared)
                known = digest(state)
                states.setdefault(known, state)
                proved[(key, body, declared)] = known
            key = known

    def _step(self, state: State, step: int, body: int, declared: Result) -> State:
        enter = ops.entering(self._plan.bodies[body])
        entered = self._without(enter.absent if enter else ())
        self._now = _StepState(declared.micro_batches, entered, np.zeros_like(self._all_places))
        lasting = {*self._params, *self._anchors}
        writing = (at for at, op in enumerate(self._plan.bodies[body]) if not lasting.isdisjoint(ops.writes(op)))
        last_write = max(writing, default=len(self._plan.bodies[body]) - 1)
        left: State = {}  # parameters and anchors at the end of the step; from then on both are new symbols
        for position, op in enumerate(self._plan.bodies[body]):
            try:
                self._execute(op, state, position)
            except BrokenError as error:
                fail_at(self._plan, step=step, body=body, position=position, problem=str(error))
            if position == last_write:
                left = {name: state[name] for name in lasting}
                state |= {name: self._initial(name, age=-1) for name in lasting}
        if self._now.covered.any():
            forwards = [at for at, op in enumerate(self._plan.bodies[body]) if isinstance(op, ops.Forward)]
            problem = "the forward pass ends here and has not used all parameters; add operations for the others"
            fail_at(self._plan, step=step, body=body, position=forwards[-1], problem=problem)
        self._compare(state | left, step, body, declared)
        self._compare_saved(state, step, body)
        return {name: aged(value, self._oldest) for name, value in state.items()}

    def _without(self, absent: tuple[int, ...]) -> Weights:
        """Return the own contributions of ranks, without those of absent ranks."""
        if not absent:
            return self._own
        numerators = self._own.numerators.copy()
        numerators[list(absent)] = 0
        return Weights(numerators)

    def _initial(self, name: str, age: int = 0) -> Value:
        for kind, names in (("param", self._params), ("anchor", self._anchors)):
            if name in names:
                return self._layout.value(name, {Tag(kind, age): self._began})
        return self._layout.value(name, {})

    def _execute(self, op: ops.Op, state: State, position: int) -> None:  # noqa: C901, PLR0915 (one `match` over all)
        """Execute one operation on the weights."""
        match op:
            case ops.Enter() | ops.StageIn() | ops.Delay() | ops.Wait() | ops.Tick() | ops.KernelLaunch():
                pass
            case ops.Save():
                self._now.saved += [(position, name, state[name]) for name in op.srcs]
            case ops.Load():
                self._demand_used(op.dst, state)
                state[op.dst] = self._layout.value(op.dst, {Tag("batch"): self._own})
            case ops.Forward():
                self._forward(op, state)
            case ops.Backward():
                self._backward(op, state)
            case ops.Copy():
                self._demand_used(op.dst, state)
                state[op.dst] = self._copied(op, state[op.src])
                self._use_batch(op.src, state)
            case ops.Optimize() if op.slices:
                self._update_slices(op, state)
            case ops.Optimize():
                if op.ratios:
                    self._demand_ratios(op, op.ratios, state)
                for param in op.params:
                    state[param] = self._optimized(param, op, state)
            case ops.Combine():
                state[op.dst] = self._combined(op, state)
            case ops.TrustRatios():
                state[op.dst] = self._ratios(op, state)
            case ops.Pack():
                state[op.dst] = self._packed([state[name] for name in op.srcs])
            case ops.Unpack():
                self._unpack(op, state)
            case ops.AllReduce():
                state[op.buffer] = self._map(op, state[op.buffer], partial(_total_of_first, n_first=op.n_in))
            case ops.Reduce():
                state[op.buffer] = self._map(op, state[op.buffer], lambda view: at_root(view, op.root))
            case ops.Broadcast():
                root = slice(op.root, op.root + 1)
                state[op.buffer] = self._map(
                    op, state[op.buffer], lambda view: broadcast_to_members(view[:, root], view)
                )
            case ops.ReduceScatter():
                state[op.dst] = self._layout.as_declared(op.dst, self._map(op, state[op.src], scatter))
            case ops.AllGather():
                moved = self._map(op, state[op.src], total if self._layout.is_sparse(op.src) else gather)
                state[op.dst] = self._layout.as_declared(op.dst, moved)
            case ops.Select() | ops.Merge():
                if isinstance(op, ops.Merge):
                    self._demand_shares(op, state[op.src])
                state[op.residual] = self._kept(op.residual, op.src, state)
                state[op.dst] = state[op.src]
            case ops.LowRank():
                self._low_rank(op, state)
            case ops.Densify():
                state[op.dst] = self._divided(state[op.src], op.divisor)
            case _:
                assert_never(op)

    def _backward(self, op: ops.Backward, state: State) -> None:
        passes = {tag for name in op.srcs for tag in state[name].weights if tag.kind == "forward"}
        if not passes:
            raise BrokenError("reads nothing that a forward pass wrote; add its activations or loss to srcs")
        self._demand_own("forward", "activations", op.srcs, state)
        held = [name for name in op.srcs if state[name].has("param")]
        if not all(self._is_current(state[name]) for name in held):
            raise BrokenError("reads parameters that have changed since the step began")
        if (self._layout.ranges([op.dst]) & ~self._layout.held_places(held, state)).any():
            raise BrokenError(f"does not read the parameters of the tensors of {op.dst}; add them to srcs")
        oldest = max(passes, key=lambda tag: (tag.age, -tag.micro_batch))
        gradient = self._layout.value(op.dst, {replace(oldest, kind="gradient"): self._now.entered})
        state[op.dst] = self._sum(op.dst, state[op.dst], gradient) if op.adds else gradient

    def _update_slices(self, op: ops.Optimize, state: State) -> None:
        for number, (param, updated) in enumerate(zip(op.params, op.slices, strict=True)):
            if param in self._now.updated:
                raise BrokenError(f"updates {param} twice in a step")
            self._now.updated.add(param)
            grads = op.grads if len(op.params) == 1 else op.grads[number : number + 1]
            state[updated] = self._shared_update(op, param, grads, state)

    def _kept(self, residual: str, src: str, state: State) -> Value:
        """Return the new contents of a residual: the unselected rest of the same places as before."""
        before = state[residual]
        places = state[src].places
        if before.has("kept") and not before.places.equals(places):
            raise BrokenError(f"{residual} holds the rest of other tensors, or slices, than those of {src}")
        return Value(places, {Tag("kept"): self._own})

    def _low_rank(self, op: ops.LowRank, state: State) -> None:
        """Let factors hold symbols of the matrices that they stand for: P as well as Q, which all ranks project on."""
        match op.stage:
            case "left":
                if op.seed is None:
                    self._demand_alike(op.right, state)
                kept = self._kept(op.residual, op.grad, state)
                grad = state[op.grad]
                state[op.residual] = Value(grad.places, grad.weights | kept.weights)
                state.update(dict.fromkeys((op.left, *op.others), grad))
                state.setdefault(op.right, Value(grad.places, {}))
            case "right":
                self._demand_alike(op.left, state)
                held = state[op.residual]
                matrices = {tag: each for tag, each in held.weights.items() if tag.kind != "kept"}
                state[op.right] = Value(held.places, matrices)
            case "product":
                self._demand_alike(op.left, state)
                product = state[op.right]
                if not _in_proportion(state[op.left].weights, product.weights):
                    raise BrokenError(f"{op.left} and {op.right} are factors of different gradients, or ranks")
                if any(not same(state[name].weights, product.weights) for name in op.others):
                    raise BrokenError(f"{op.rest} is not the mean over the same ranks as {op.right}")
                state[op.residual] = self._kept(op.residual, op.grad, state)
                state[op.grad] = product
            case _:
                assert_never(op.stage)

    def _demand_alike(self, name: str, state: State) -> None:
        if any((each.numerators != each.numerators[:1]).any() for each in state[name].weights.values()):
            raise BrokenError(f"{name} differs among ranks, which must project on the same; all-reduce it first")

    def _demand_shares(self, op: ops.Merge, value: Value) -> None:
        """Require that all ranks that hold a source hold equally much, and that there are `divisor` such ranks."""
        of_ranks = value.places.of_ranks()
        places, of_atom = np.unique(of_ranks, return_inverse=True)
        of_atom = of_atom.reshape(of_ranks.shape)
        for tag, weights in value.weights.items():
            weights.demand_room(max(op.divisor, self._plan.world_size))
            held = weights.of_atoms(value.places.n_atoms)
            totals = np.zeros((len(places), held.shape[2]), dtype=np.int64)
            np.add.at(totals, of_atom, held)
            wrong = (held != 0) & (totals[of_atom] != op.divisor * held)
            if wrong.any():
                rank, atom, column = np.argwhere(wrong)[0]
                same_place = (of_ranks == of_ranks[rank, atom])[:, :, None]
                n_holders = int((same_place & (held != 0))[:, :, column].sum())
                keeping = f"keeping 1/{op.divisor}" if op.divisor > 1 else "keeping all"
                raise BrokenError(
                    f"{n_holders} ranks hold the {tag_text(tag)} of rank {self._sources[column]} and drop the same of "
                    f"it, each {keeping}; the divisor must be their number, and they must hold equally "
                    f"much, or what is dropped is lost or counted twice"
                )

    def _sum(self, name: str, held: Value, added: Value) -> Value:
        """Return the sum of a bucket's gradients and the gradients of another pass."""
        self._layout.demand_places(name, held)
        tags = held.weights | added.weights
        return Value(held.places, {tag: self._weights(held, tag) + self._weights(added, tag) for tag in tags})

    def _divided(self, value: Value, divisor: int) -> Value:
        for weights in value.weights.values():
            weights.demand_room(divisor)
        parts = {tag: lowest_terms(each.numerators, each.denominator * divisor) for tag, each in value.weights.items()}
        return Value(value.places, parts)

    def _packed(self, values: Sequence[Value]) -> Value:
        """Concatenate the atoms of buffers."""
        tags = dict.fromkeys(tag for value in values for tag in value.weights)
        places = joined_atoms([value.places for value in values])
        n_atoms = [value.places.n_atoms for value in values]
        packed = {tag: concatenated([self._weights(value, tag) for value in values], n_atoms) for tag in tags}
        return Value(places, packed)

    def _weights(self, value: Value, tag: Tag) -> Weights:
        """Return the weights of a source, zero if the value has none of it."""
        return value.weights.get(tag, self._nothing)

    def _unpack(self, op: ops.Unpack, state: State) -> None:
        """Split a fusion buffer into the atoms that it was packed from."""
        value = state[op.src]
        first = 0
        for name in op.dsts:
            begin, end = self._layout.atoms(name)
            last = first + end - begin
            parts = {tag: each.cut(first, last) for tag, each in value.weights.items()}
            state[name] = Value(value.places.cut(first, last), parts)
            first = last
        if first != value.places.n_atoms:
            raise BrokenError(f"{op.src} holds other tensors than the buffers it is taken apart into")

    def _ratios(self, op: ops.TrustRatios, state: State) -> Value:
        """Return one atom per rank: the number of its share. The source names the update that was rated."""
        n_blocks, size, stride = op.group.shape(self._plan.world_size)
        for name in op.grads if size > 1 else ():
            for weights in state[name].weights.values():
                members = weights.numerators.reshape(n_blocks, size, stride, -1)
                if (members != members[:, :1]).any():
                    raise BrokenError(f"{name} differs within a {op.group}; share the work after the gradients are")
        share = np.broadcast_to(np.arange(size)[:, None], (n_blocks, size, stride)).ravel()
        self._now.rated.append(_updated(op, state))
        return Value(
            AtomPlaces(np.arange(size)[:, None], share), {Tag(f"{_RATIOS}{len(self._now.rated) - 1}"): self._own}
        )

    def _demand_ratios(self, op: ops.Optimize, ratios: str, state: State) -> None:
        held = [tag for tag in state[ratios].weights if tag.kind.startswith(_RATIOS)]
        rated = [self._now.rated[int(tag.kind.removeprefix(_RATIOS))] for tag in held if tag.age == 0]
        now = _updated(op, state)
        if held and not any(len(then) == len(now) and all(map(operator.is_, then, now)) for then in rated):
            raise BrokenError(f"{ratios} are trust ratios of other parameters or gradients than it updates")
        shares = state[ratios].places.rows
        if len(held) != 1 or (shares != np.arange(shares.shape[1])).any():
            raise BrokenError(f"{ratios} do not hold the trust ratios of all tensors, in order")

    def _forward(self, op: ops.Forward, state: State) -> None:
        used = {tag for name in op.srcs for tag in state[name].weights if tag.kind == "used"}
        shares_input = 0 < self._now.n_passes < self._now.n_declared  # as all passes of a step do
        if used and (used != {Tag("used")} or not shares_input):
            raise BrokenError("trains on a batch that was used before; load another one first")
        self._demand_own("batch", "batch", op.srcs, state)
        begins = not self._now.covered.any()
        if begins and self._loads and not used and not any(state[name].has("batch") for name in op.srcs):
            raise BrokenError("reads no batch, though the plan loads some; add the input to srcs")
        held = [name for name in op.srcs if state[name].has("param")]
        places = self._layout.held_places([name for name in held if self._is_current(state[name])], state)
        if not places.any() or not all(self._is_current(state[name]) for name in held):
            raise BrokenError("does not read all parameters as they are when the step begins; add them to srcs")
        if (places & self._now.covered).any():
            raise BrokenError("reads parameters that an earlier part of this forward pass has used")
        for name in op.srcs:
            self._use_batch(name, state)
        for name in op.dsts:
            state[name] = self._layout.value(name, {Tag("forward", micro_batch=self._now.n_passes): self._own})
        self._now.covered |= places
        if self._now.covered[self._all_places].all():
            self._now.covered[:] = False
            self._now.n_passes += 1

    def _copied(self, op: ops.Copy, value: Value) -> Value:
        """Return what a copy holds: all of the source, or of whole tensors the rank's own slice."""
        group = self._layout.sharers(op.dst)
        if group == ops.ALONE or self._layout.sharers(op.src) != ops.ALONE:
            return value
        return self._layout.own_slices(group, value)

    def _is_current(self, value: Value) -> bool:
        """Tell whether a buffer holds its rank's own parameters as they were when the step began."""
        if value is not self._now.asked[0]:  # every operation of a backward pass asks this
            self._now.asked = value, same(value.weights, {Tag("param"): self._began})
        return self._now.asked[1]

    def _demand_own(self, kind: str, name: str, srcs: tuple[str, ...], state: State) -> None:
        found = (state[src].weights for src in srcs if state[src].has(kind))
        if any(not same(weights, dict.fromkeys(weights, self._own)) for weights in found):
            raise BrokenError(f"reads the {name} of other ranks; each rank computes on its own")

    def _demand_used(self, name: str, state: State) -> None:
        if name in state and state[name].has("batch"):
            raise BrokenError(f"overwrites a batch in {name} that is still unused")

    def _use_batch(self, name: str, state: State) -> None:
        if state[name].has("batch"):
            state[name] = self._layout.value(name, {Tag("used"): self._own})

    def _combined(self, op: ops.Combine, state: State) -> Value:
        """Return the linear combination of buffers that hold the same places."""
        places = state[op.srcs[0]].places
        if not all(state[name].places.equals(places) for name in op.srcs):
            raise BrokenError("adds up slices of different places; the buffers hold other parts of the model")
        return Value(
            places,
            summed(*((state[name].weights, fraction(each)) for name, each in zip(op.srcs, op.weights, strict=True))),
        )

    def _optimized(self, param: str, op: ops.Optimize, state: State) -> Value:
        """Return parameters after adding the weights of the gradients of the same tensors to theirs.

        Weights of outer gradients are subtracted, because these point from the parameters back to the anchors.
        """
        sign = Fraction(-1 if op.optimizer == "outer" else 1)
        if self._layout.sharers(param) != ops.ALONE:
            return self._optimized_slice(param, op, state, sign)
        additions = self._joined(param, op.grads, state)
        return Value(state[param].places, summed((state[param].weights, Fraction(1)), (additions, sign)))

    def _joined(self, param: str, grads: Sequence[str], state: State) -> dict[Tag, Weights]:
        """Return the weights of whole gradients in the order of the parameters."""
        first, last = self._layout.atoms(param)
        pieces: defaultdict[Tag, list[tuple[slice, Weights]]] = defaultdict(list)
        for grad in grads:
            grad_first, grad_last = self._layout.atoms(grad)
            self._layout.demand_places(grad, state[grad])
            low = max(first, grad_first)
            high = min(last, grad_last)
            for tag, each in state[grad].weights.items() if low < high else ():
                pieces[tag].append((slice(low - first, high - first), each.cut(low - grad_first, high - grad_first)))
        return {tag: assembled(parts, last - first) for tag, parts in pieces.items()}

    def _optimized_slice(self, param: str, op: ops.Optimize, state: State, sign: Fraction) -> Value:
        """Return slices of parameters after adding the weights of the gradients of the same slices to theirs."""
        value = state[param]
        of_same = [name for name in op.grads if self._layout.tensors(name) == self._layout.tensors(param)]
        for name in of_same:
            self._layout.demand_places(name, state[name])
        if len(of_same) != 1:
            raise BrokenError(f"has no gradients for the slices of {param}; write one buffer of the same tensors")
        terms = (value.weights, Fraction(1)), (state[of_same[0]].weights, sign)
        return Value(value.places, summed(*terms))

    def _shared_update(self, op: ops.Optimize, param: str, grads: Sequence[str], state: State) -> Value:
        """Return each member's slice of the parameters, after adding the weights of their gradients."""
        own = self._layout.own_slices(op.shared_by, state[param])
        added = state[grads[0]]
        if len(grads) > 1:
            added = Value(self._layout.places(param), self._joined(param, grads, state))
        if added.places.n_atoms != own.places.n_atoms:
            added = self._layout.own_slices(op.shared_by, added)
        if not added.places.equals(own.places):
            raise BrokenError("the gradients are of other slices than the parameters that they update")
        tags = own.weights | added.weights
        return Value(own.places, {tag: self._weights(own, tag) + self._weights(added, tag) for tag in tags})

    def _map(self, op: ops.Collective, value: Value, move: Move) -> Value:
        """Apply a collective to the weights, viewed as `[block, member, offset, atom, source]`, and to the places."""
        n_atoms = value.places.n_atoms
        if isinstance(op, ops.ReduceScatter) and n_atoms % op.group.size:
            raise BrokenError(f"scatters {n_atoms} slices over a {op.group}; a buffer is scattered once over a group")
        mean = isinstance(op, ops.AllReduce | ops.Reduce | ops.ReduceScatter) and op.reduction == "mean"
        size = op.n_in if isinstance(op, ops.AllReduce) else op.group.size
        divisor = size if mean else 1
        of_weights = _of_weights(move, n_atoms)
        weights = {}
        for tag, each in value.weights.items():
            like = ops.without_names(op), move is total, n_atoms, id(each)
            if like not in self._now.moved:
                each.demand_room(op.group.size * divisor)
                moved = of_weights(op.group.split(each.numerators))
                if isinstance(op, ops.Reduce):  # only the root holds a mean; the other members keep their contents
                    moved = np.where(root_mask(moved, op.root), moved, moved * divisor)
                rows = op.group.joined(moved)
                self._now.moved[like] = each, lowest_terms(rows, each.denominator * divisor)
            weights[tag] = self._now.moved[like][1]
        return Value(self._move_places(op, value.places, move), weights)

    def _move_places(self, op: ops.Collective, places: AtomPlaces, move: Move) -> AtomPlaces:
        if not isinstance(op, ops.AllReduce | ops.Reduce | ops.ReduceScatter) and move is not total:
            return places.moved(op.group, move)
        rows = places.in_groups(op.group)
        if (rows != rows[:, :1]).any():
            raise BrokenError("reduces slices of different places; the members hold other parts of the model")
        return places.sliced(op.group) if isinstance(op, ops.ReduceScatter) else places

    def _compare(self, state: State, step: int, body: int, declared: Result) -> None:
        gradient = self._mean(self._without(declared.absent), declared.gradients, declared.drop)
        passes = [Tag("gradient", micro_batch=number) for number in range(declared.micro_batches)]
        updates = [op for op in self._plan.bodies[body] if isinstance(op, ops.Optimize) and op.optimizer == "inner"]
        grads = {op.dst for op in self._plan.distinct_ops if isinstance(op, ops.Backward)}
        whole = {name for op in updates if not op.slices for name in op.grads} if updates else grads
        held = grads | {name for name in whole if self._layout.sharers(name) != ops.ALONE}
        expected = {name: dict.fromkeys(passes, gradient) for name in sorted(held & whole & state.keys())}
        updated = {**dict.fromkeys(passes, gradient), Tag("param"): self._began}
        kept = {"param": updated, "anchor": {Tag("anchor"): self._began}}
        exchanged = self._exchanged(updated, declared)
        for kind, names in (("param", self._params), ("anchor", self._anchors)):
            expected |= {name: (exchanged if self._is_exchanged(name, declared) else kept)[kind] for name in names}
        for name, weights in expected.items():
            problem = self._difference(name, state[name], weights)
            if problem:
                fail_at(self._plan, step=step, body=body, position=self._last_writer(name, body), problem=problem)

    def _is_exchanged(self, name: str, declared: Result) -> bool:
        first, last = self._layout.tensors(name) or (0, 0)
        return not declared.tensors or any(low <= first and last <= high for low, high in declared.tensors)

    def _exchanged(self, updated: dict[Tag, Weights], declared: Result) -> dict[str, dict[Tag, Weights]]:
        """Return the declared contents of parameters that an average reaches now, and of their anchors."""
        plus = Fraction(1)
        minus = Fraction(-1)
        anchor = {Tag("anchor"): self._began}
        age = max(declared.late_steps - 1, 0)  # the end of a step is the beginning of the next one
        sent = {Tag("param", age): self._began} if declared.late_steps else updated
        if declared.mixing is not None:
            sent = summed((sent, plus), ({Tag("anchor", age): self._began}, minus))
        mean = {tag: self._mean(each, declared.parameters) for tag, each in sent.items()}
        if declared.mixing is None:
            param = summed((updated, plus), (mean, plus), (sent, minus)) if declared.late_steps else mean
            return {"param": param, "anchor": anchor}
        anchor = summed((anchor, plus), (mean, plus))
        share = fraction(declared.mixing)
        return {"param": summed((updated, share), (anchor, 1 - share)), "anchor": anchor}

    def _compare_saved(self, state: State, step: int, body: int) -> None:
        """Require that saved parameters are those at the end of the step."""
        for position, name, value in self._now.saved:
            tensors = self._layout.tensors(name)
            left = [each for each in (*self._params, *self._anchors) if self._layout.tensors(each) == tensors]
            if left and value.has("param") and not any(same(value.weights, state[each].weights) for each in left):
                problem = f"{name} is not {left[0]} as the step leaves it; save it after updates and averages"
                fail_at(self._plan, step=step, body=body, position=position, problem=problem)

    def _mean(self, weights: Weights, group: Group, drop: int = 0) -> Weights:
        means = _total_of_first(group.split(weights.numerators), group.size - drop)
        return lowest_terms(group.joined(means), weights.denominator * (group.size - drop))

    def _difference(self, name: str, found: Value, expected: dict[Tag, Weights]) -> str | None:
        """Describe how a buffer differs from the expected weights of each of its atoms."""
        try:
            self._layout.demand_places(name, found)
        except BrokenError as error:
            return str(error)
        for tag in sorted({*found.weights, *expected}, key=lambda tag: (tag.kind, tag.age, tag.micro_batch)):
            have = self._weights(found, tag)
            want = expected.get(tag, self._nothing)
            if have is want or (id(have), id(want)) in self._now.compared:
                continue
            self._now.compared[id(have), id(want)] = have, want
            differs = have.numerators * want.denominator != want.numerators * have.denominator
            if differs.any():
                rank, atom, column = (int(index) for index in np.argwhere(differs)[0])
                return (
                    f"afterwards {name} of rank {rank} holds {fraction_text(have, rank, atom, column)} of the "
                    f"{tag_text(tag)} of rank {self._sources[column]}; the schedule declares "
                    f"{fraction_text(want, rank, 0, column)}"
                )
        return None

    def _last_writer(self, name: str, body: int) -> int:
        program = self._plan.bodies[body]
        return max(
            (position for position, op in enumerate(program) if name in ops.writes(op)), default=len(program) - 1
        )
