"""When the buffers of a sharded plan need memory.

A *life* of a buffer begins with an operation that writes it anew. It ends with the last operation that uses these
contents (`simdist.plan.liveness`). Between two lives, nothing needs the contents. So a rank holds a gathered unit, its
gradients and what is sent only while they are in use, as `fully_shard` does.

Views of a buffer stay valid, because memory is taken for the same storage. Autograd keeps such views of parameters from
the forward pass to the backward pass, and reads them when the plan has gathered them again.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from real.buffers.memory import Memory
from simdist.plan import Body, Instance, Plan, ops
from simdist.plan.liveness import uses


@dataclass(frozen=True, slots=True)
class _BodyLives:
    """The lives of buffers in one body.

    Args:
        begins: Position of an operation -> the buffers whose life it begins, with the number of uses.
        uses: Position of an operation -> the buffers that it uses.
    """

    begins: Mapping[int, Mapping[str, int]]
    uses: Mapping[int, tuple[str, ...]]


@final
class Lifetimes:
    """Takes memory when a life of a buffer begins, and gives it back when the life ends.

    Args:
        plan: The plan.
        memory: Its buffers.

    Attributes:
        peak_nbytes: Most bytes that buffers had at a time since `start`.
    """

    def __init__(self, plan: Plan, memory: Memory) -> None:
        self._memory = memory
        self._names = frozenset(name for name in short_lived(plan) - memory.kept if name in memory)
        self._bodies = [_lives(body, self._names) for body in plan.bodies]
        self._left: dict[str, int] = {}  # uses of a buffer until its life ends
        self._changing = threading.Lock()
        self._held_nbytes = self.peak_nbytes = memory.held_nbytes

    def start(self) -> None:
        """Give back the memory of all buffers that are in no life."""
        for name in self._names:
            self._memory.give_back(name)
        self._held_nbytes = self.peak_nbytes = self._memory.held_nbytes

    def begin(self, instance: Instance, body: int) -> None:
        """Take memory for the buffers whose life an instance of a body begins."""
        begins = self._bodies[body].begins.get(instance.position)
        if begins is None:
            return
        with self._changing:
            for name, n_uses in begins.items():
                self._memory.take(name)
                self._left[name] = n_uses
                self._held_nbytes += self._memory.dense(name).nbytes
            self.peak_nbytes = max(self.peak_nbytes, self._held_nbytes)

    def end(self, instance: Instance, body: int) -> None:
        """Give back the memory of the buffers whose life ends with an instance of a body."""
        used = self._bodies[body].uses.get(instance.position, ())
        if not used:
            return
        with self._changing:
            for name in used:
                self._left[name] -= 1
                if not self._left[name]:
                    self._memory.give_back(name)
                    self._held_nbytes -= self._memory.dense(name).nbytes


def short_lived(plan: Plan) -> set[str]:
    """Return the buffers on the device that nothing reads before a step has written them.

    If a model is not sharded there are none: then the gradients of a step are in memory until the next one.
    """
    if all(buffer.sharded_over == ops.ALONE for buffer in plan.buffers):
        return set()
    found = {buffer.name for buffer in plan.buffers if buffer.place == "device" and not buffer.initialized}
    for body in plan.bodies:
        seen: set[str] = set()
        for op in body:
            found -= {name for name, is_new in uses(op) if name not in seen and not is_new}
            seen.update(name for name, _ in uses(op))
    return found


def _lives(body: Body, names: frozenset[str]) -> _BodyLives:
    begins: dict[int, dict[str, int]] = {}
    used: dict[int, tuple[str, ...]] = {}
    current: dict[str, int] = {}  # position at which the current life of a buffer began
    for position, op in enumerate(body):
        for name, is_new in uses(op):
            if name not in names:
                continue
            if is_new:
                current[name] = position
                begins.setdefault(position, {})[name] = 0
            begins[current[name]][name] += 1
            used[position] = (*used.get(position, ()), name)
    return _BodyLives(begins, used)
