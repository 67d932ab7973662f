"""A proof that a plan computes what its schedule declares, by running it on symbols.

Every buffer of every rank holds a linear combination of *sources*: the parameters that rank q had when the step began,
and the gradient that rank q computed in it. The plan is executed on these weights, exactly (integers over a common
denominator): a forward and backward pass puts weight 1 on a rank's own gradient, collectives average and sum, the
optimiser adds the gradients' weights to those of the parameters. After each step, the weights must be those that the
schedule's `Result` states. What is left over from earlier steps carries its age and so can never pass for fresh.

Each step starts from new symbols for the parameters (induction over steps), so equal bodies in equal states are proved
once. Element-wise, a buffer is a row of *atoms*: the tensor ranges that buffers split the model into, times the slices
that reduce-scatters split them into.

This is the smallest interpreter of the plan, and the living definition of what its operations mean.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.check import fail_at
from simdist.groups import Group
from simdist.plan import (
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Copy,
    Delay,
    Densify,
    Forward,
    Load,
    Op,
    Optimize,
    Plan,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    Wait,
    writes,
)

__all__ = ["Result", "prove"]

_FULL_WORLD_SIZE = 256  # up to here the contributions of all ranks are followed
_N_SOURCES = 64  # beyond, those of this many ranks, spread evenly


@dataclass(frozen=True, slots=True)
class Result:
    """What a step leaves behind.

    Args:
        gradients: Every rank updates its parameters with the mean gradient over its group; `Group(1)` is its own.
        parameters: After the update, every rank holds the mean of the parameters over its group; `Group(1)`: no mean.
    """

    gradients: Group
    parameters: Group


@dataclass(frozen=True, slots=True)
class _Tag:
    """Kind of source (`param`, `gradient`, `selection`, `kept`) and its age in steps, capped at 2."""

    kind: str
    age: int = 0


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of sources, `numerators[rank, atom, source] / denominator`."""

    numerators: NDArray[np.int64]
    denominator: int = 1

    def __add__(self, other: "_Weights") -> "_Weights":
        common = math.lcm(self.denominator, other.denominator)
        return _reduced(
            self.numerators * (common // self.denominator) + other.numerators * (common // other.denominator), common
        )


_Value: TypeAlias = dict[_Tag, _Weights]
_State: TypeAlias = dict[str, _Value]


def prove(plan: Plan, result: Callable[[int], Result]) -> int:
    """Show that every step of `plan` leaves behind what `result(step)` declares.

    Args:
        plan: A legal plan (see `simdist.check`).
        result: The schedule's declaration.

    Returns:
        The number of ranks whose contributions were followed: all, or an even sample in large worlds.

    Raises:
        PlanError: A step does not; the message names the step, the operation and the ranks.
    """
    sources = np.arange(plan.world_size)
    if plan.world_size > _FULL_WORLD_SIZE:
        sources = np.unique(np.linspace(0, plan.world_size - 1, _N_SOURCES).astype(np.int64))
    for block in np.array_split(sources, math.ceil(len(sources) / _N_SOURCES)):
        _Proof(plan, block).run(result)
    return len(sources)


class _Proof:
    """One execution of a plan on the contributions of a few source ranks."""

    def __init__(self, plan: Plan, sources: NDArray[np.int64]) -> None:
        self._plan = plan
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._own = (np.arange(plan.world_size)[:, None, None] == sources).astype(np.int64)
        self._sources = sources
        ops = [op for body in plan.bodies for op in body]
        self._params = {name for op in ops if isinstance(op, Optimize) for name in op.params}
        self._grads = {op.dst for op in ops if isinstance(op, Backward)}
        self._n_slices = math.lcm(*(op.group.size for op in ops if isinstance(op, ReduceScatter | AllGather)))
        bounds = {bound for buffer in plan.buffers if buffer.tensors for bound in buffer.tensors}
        self._atom_of_tensor = {bound: atom for atom, bound in enumerate(sorted(bounds))}

    def run(self, result: Callable[[int], Result]) -> None:
        """Execute step after step; a step whose body, state and result were seen before is known to hold."""
        states: dict[bytes, _State] = {}
        proved: dict[tuple[bytes, int, Result], bytes] = {}
        key = b""
        states[key] = {buffer.name: self._initial(buffer.name) for buffer in self._plan.buffers if buffer.initialized}
        for step, body in enumerate(self._plan.body_of_steps()):
            declared = result(step)
            known = proved.get((key, body, declared))
            if known is None:
                state = self._step(dict(states[key]), step, body, declared)
                known = _digest(state)
                states.setdefault(known, state)
                proved[(key, body, declared)] = known
            key = known

    def _step(self, state: _State, step: int, body: int, declared: Result) -> _State:
        for position, op in enumerate(self._plan.bodies[body]):
            problem = self._execute(op, state)
            if problem:
                fail_at(self._plan, step=step, body=body, position=position, problem=problem)
        self._compare(state, step, body, declared)
        return {name: self._initial(name) if name in self._params else _aged(value) for name, value in state.items()}

    def _initial(self, name: str) -> _Value:
        if name not in self._params:
            return {}
        return {_Tag("param"): self._one_hot(name)}

    def _one_hot(self, name: str) -> _Weights:
        return _Weights(np.repeat(self._own, self._n_atoms(name), axis=1))

    def _n_atoms(self, name: str) -> int:
        first, last = self._atoms(name)
        return last - first

    def _atoms(self, name: str) -> tuple[int, int]:
        tensors = self._buffers[name].tensors
        if tensors is None:
            return 0, self._n_slices
        first, last = (self._atom_of_tensor[bound] * self._n_slices for bound in tensors)
        return first, last

    def _execute(self, op: Op, state: _State) -> str | None:
        """Execute one operation on the weights; return what is wrong with it, if anything."""
        match op:
            case Delay() | Wait() | Save():
                pass
            case Load():
                state[op.dst] = {_Tag("batch"): _Weights(self._own)}
            case Forward():
                if any(tag.kind == "used" for name in op.srcs for tag in state[name]):
                    return "trains on a batch that was used before; load another one first"
                for name in op.srcs:
                    self._use_batch(name, state)
                for name in op.dsts:
                    state[name] = {_Tag("forward"): _Weights(self._own)}
            case Backward():
                ages = {tag.age for name in op.srcs for tag in state[name] if tag.kind == "forward"}
                if not ages:
                    return "reads nothing that a forward pass wrote; add its activations or loss to srcs"
                state[op.dst] = {_Tag("gradient", max(ages)): self._one_hot(op.dst)}
            case Copy():
                state[op.dst] = state[op.src]
                self._use_batch(op.src, state)
            case Optimize():
                self._optimize(op, state)
            case AllReduce():
                state[op.buffer] = self._map(
                    state[op.buffer], op, lambda view: _spread(view.sum(1, keepdims=True), view)
                )
            case Reduce():
                state[op.buffer] = self._map(state[op.buffer], op, lambda view: _at_root(view, op.root))
            case Broadcast():
                whole = self._map(state[op.buffer], op, lambda view: _spread(view[:, op.root : op.root + 1], view))
                state[op.buffer] = whole
            case ReduceScatter():
                state[op.dst] = self._map(state[op.src], op, _scatter)
            case AllGather():
                state[op.dst] = self._map(state[op.src], op, _gather)
            case Select():
                state[op.dst] = {_Tag("selection"): self._one_hot(op.src)}
                state[op.residual] = {_Tag("kept"): self._one_hot(op.src)}
            case Densify():
                state[op.dst] = state[op.src]
            case _:
                assert_never(op)
        return None

    def _use_batch(self, name: str, state: _State) -> None:
        if any(tag.kind == "batch" for tag in state[name]):
            state[name] = {_Tag("used"): _Weights(self._own)}

    def _optimize(self, op: Optimize, state: _State) -> None:
        for param in op.params:
            first, last = self._atoms(param)
            updated = dict(state[param])
            for grad in op.grads:
                grad_first, grad_last = self._atoms(grad)
                low, high = max(first, grad_first), min(last, grad_last)
                for tag, weights in state[grad].items() if low < high else ():
                    part = np.zeros((self._plan.world_size, last - first, len(self._sources)), dtype=np.int64)
                    part[:, low - first : high - first] = weights.numerators[:, low - grad_first : high - grad_first]
                    addition = _Weights(part, weights.denominator)
                    updated[tag] = updated[tag] + addition if tag in updated else addition
            state[param] = updated

    def _map(
        self,
        value: _Value,
        op: AllReduce | Reduce | Broadcast | ReduceScatter | AllGather,
        function: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    ) -> _Value:
        """Apply a collective to all weights, viewed as `[block, member, offset, atom, source]`."""
        shape = op.group.shape(self._plan.world_size)
        mean = isinstance(op, AllReduce | Reduce | ReduceScatter) and op.reduction == "mean"
        mapped: _Value = {}
        for tag, weights in value.items():
            view = weights.numerators.reshape(*shape, *weights.numerators.shape[1:])
            moved = function(view)
            divisor = op.group.size if mean else 1
            if isinstance(op, Reduce):  # only the root holds a mean; the others keep what they had
                moved = np.where(_root_mask(moved, op.root), moved, moved * divisor)
            mapped[tag] = _reduced(
                moved.reshape(self._plan.world_size, -1, moved.shape[-1]), weights.denominator * divisor
            )
        return mapped

    def _compare(self, state: _State, step: int, body: int, declared: Result) -> None:
        gradient = self._mean(_Weights(self._own), declared.gradients)
        expected_param = {
            _Tag("param"): self._mean(_Weights(self._own), declared.parameters),
            _Tag("gradient"): self._mean(gradient, declared.parameters),
        }
        for name in sorted(self._grads & state.keys()):
            self._compare_buffer(name, state[name], {_Tag("gradient"): gradient}, step, body)
        for name in sorted(self._params):
            self._compare_buffer(name, state[name], expected_param, step, body)

    def _mean(self, weights: _Weights, group: Group) -> _Weights:
        view = weights.numerators.reshape(*group.shape(self._plan.world_size), *weights.numerators.shape[1:])
        spread = _spread(view.sum(1, keepdims=True), view)
        return _reduced(spread.reshape(weights.numerators.shape), weights.denominator * group.size)

    def _compare_buffer(self, name: str, found: _Value, expected: _Value, step: int, body: int) -> None:
        for tag in sorted({*found, *expected}, key=lambda tag: (tag.kind, tag.age)):
            zero = _Weights(np.zeros_like(self._own))
            have, want = found.get(tag, zero), expected.get(tag, zero)
            differs = have.numerators * want.denominator != want.numerators * have.denominator
            if differs.any():
                rank, atom, column = (int(index) for index in np.argwhere(differs)[0])
                problem = (
                    f"afterwards {name} of rank {rank} holds {_fraction(have, rank, atom, column)} of the "
                    f"{_tag_text(tag)} of rank {self._sources[column]}; the schedule declares "
                    f"{_fraction(want, rank, min(atom, want.numerators.shape[1] - 1), column)}"
                )
                fail_at(self._plan, step=step, body=body, position=self._last_writer(name, body), problem=problem)

    def _last_writer(self, name: str, body: int) -> int:
        ops = self._plan.bodies[body]
        return max((position for position, op in enumerate(ops) if name in writes(op)), default=len(ops) - 1)


def _spread(reduced: NDArray[np.int64], view: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.broadcast_to(reduced, view.shape)


def _root_mask(view: NDArray[np.int64], root: int) -> NDArray[np.bool_]:
    return np.reshape(np.arange(view.shape[1]) == root, (1, -1, 1, 1, 1))


def _at_root(view: NDArray[np.int64], root: int) -> NDArray[np.int64]:
    return np.where(_root_mask(view, root), view.sum(1, keepdims=True), view)


def _scatter(view: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum over the members; member j keeps the j-th slice of the atoms."""
    total = view.sum(1)  # [block, offset, atom, source]
    slices = total.reshape(*total.shape[:2], view.shape[1], -1, total.shape[-1])
    return np.moveaxis(slices, 2, 1)


def _gather(view: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the members' atoms; every member gets them all."""
    blocks, size, stride, atoms, n_sources = view.shape
    whole = np.moveaxis(view, 1, 2).reshape(blocks, 1, stride, size * atoms, n_sources)
    return np.broadcast_to(whole, (blocks, size, stride, size * atoms, n_sources))


def _reduced(numerators: NDArray[np.int64], denominator: int) -> _Weights:
    divisor = math.gcd(int(np.gcd.reduce(numerators, axis=None)), denominator)
    return _Weights(numerators // divisor, denominator // divisor) if divisor > 1 else _Weights(numerators, denominator)


def _aged(value: _Value) -> _Value:
    aged: _Value = {}
    for tag, weights in value.items():
        older = _Tag(tag.kind, min(tag.age + 1, 2))
        aged[older] = aged[older] + weights if older in aged else weights
    return aged


def _digest(state: _State) -> bytes:
    digest = hashlib.sha256()
    for part in _parts(state):
        digest.update(part)
    return digest.digest()


def _parts(state: Mapping[str, _Value]) -> Iterator[bytes]:
    for name in sorted(state):
        for tag in sorted(state[name], key=lambda tag: (tag.kind, tag.age)):
            weights = state[name][tag]
            yield f"{name} {tag} {weights.denominator} {weights.numerators.shape}".encode()
            yield weights.numerators.tobytes()


def _fraction(weights: _Weights, rank: int, atom: int, column: int) -> str:
    numerator = int(weights.numerators[rank, atom, column])
    divisor = math.gcd(numerator, weights.denominator)
    return f"{numerator // divisor}/{weights.denominator // divisor}" if numerator else "nothing"


def _tag_text(tag: _Tag) -> str:
    words = {"param": "parameters", "gradient": "gradient", "selection": "selection", "kept": "residual"}
    ages = {0: "", 1: ", one step old,", 2: ", two or more steps old,"}
    return words.get(tag.kind, tag.kind) + ages[tag.age]
