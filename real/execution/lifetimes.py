"""When the buffers of a sharded plan need memory.

A *life* of a buffer begins with an operation that writes it anew. It ends with the last operation that uses these
contents (`simdist.plan.liveness`). Between two lives, nothing needs the contents. So a rank holds a gathered unit, its
gradients and what is sent only while they are in use, as `fully_shard` does.

Views of a buffer stay valid, because memory is taken for the same storage. Autograd keeps such views of parameters from
the forward pass to the backward pass, and reads them when the plan has gathered them again.

**On a GPU**, the host ends an operation when its kernels are enqueued, which may be long before they run. PyTorch's
allocator has a pool of memory for each stream: what is given back serves the next tensor of that stream at once. This
is safe if the stream waits for all kernels that used the memory before. `record_stream` would not do: then the
allocator reuses memory only when the host sees that kernels have run. So a life that has ended keeps its memory until
the stream that took it waits for the last operations of the life on other streams. `fully_shard` frees its buffers by
the same rule. A wait that the plan does not have would delay collectives. So a stream waits only for what its next
operation waits for anyway.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from real.buffers.lives import short_lived
from real.buffers.memory import Memory
from simdist.plan import Body, Instance, Plan
from simdist.plan.lanes import HOST
from simdist.plan.liveness import uses
from simdist.plan.walk import walk

# Takes a stream, and by other streams an instance each. Lets the stream wait for them, unless it is a thread; tells
# whether it is none.
LetWait = Callable[[str, Mapping[str, int]], bool]


@dataclass(frozen=True, slots=True)
class _BodyLives:
    """The lives of buffers in one body.

    Args:
        begins: Position of an operation -> the buffers whose life it begins, with the number of uses.
        uses: Position of an operation -> the buffers that it uses.
    """

    begins: Mapping[int, Mapping[str, int]]
    uses: Mapping[int, tuple[str, ...]]


@dataclass(slots=True)
class _Life:
    """A life of a buffer.

    Args:
        stream: The stream that took the memory.
        n_left: Uses until the life ends.
        enqueued: By stream, the last instance that used the memory and may not have run.
    """

    stream: str
    n_left: int = 0
    enqueued: dict[str, int] = field(default_factory=dict)


@final
class Lifetimes:
    """Takes memory when a life of a buffer begins, and gives it back when the life ends.

    Args:
        plan: The plan.
        memory: Its buffers.
        let_wait: Lets a stream wait; None if all instances are done when they end.
        first_step: First step of which an instance is performed.

    Attributes:
        peak_nbytes: Most bytes that buffers had at a time since `start`.
    """

    def __init__(self, plan: Plan, memory: Memory, let_wait: LetWait | None = None, first_step: int = 0) -> None:
        self._memory = memory
        self._names = frozenset(name for name in short_lived(plan) - memory.kept if name in memory)
        self._bodies = [_lives(body, self._names) for body in plan.bodies]
        self._lives: dict[str, _Life] = {}  # of the buffers that have memory
        self._over: set[str] = set()  # those whose life has ended
        self._order = _Precedence(plan)
        self._upcoming = _Upcoming(plan, first_step)
        self._let_wait = let_wait
        self._changing = threading.Lock()
        self._held_nbytes = self.peak_nbytes = memory.held_nbytes

    def start(self) -> None:
        """Give back the memory of all buffers that are in no life. No kernel may be running."""
        for name in self._names:
            self._memory.give_back(name)
        self._held_nbytes = self.peak_nbytes = self._memory.held_nbytes

    def finish(self) -> None:
        """Give back what ended lives still hold. All instances must be done."""
        for name in tuple(self._over):
            self._give_back(name)

    def begin(self, instance: Instance, body: int) -> None:
        """Take memory for the buffers whose life an instance of a body begins, on the current stream."""
        if not self._names:
            return
        with self._changing:
            self._order.begin(instance)
            begins = self._bodies[body].begins.get(instance.position)
            if begins is None:
                return
            for name in tuple(self._over):
                self._give_back_if_unused(name, instance.index - 1)
            for name, n_uses in begins.items():
                if name not in self._lives:
                    self._memory.take(name)
                    self._held_nbytes += self._memory.dense(name).nbytes
                    self._lives[name] = _Life(instance.lane.stream)
                self._over.discard(name)
                self._lives[name].n_left = n_uses
            self.peak_nbytes = max(self.peak_nbytes, self._held_nbytes)

    def end(self, instance: Instance, body: int, *, has_run: bool) -> None:
        """Give back the memory of the buffers whose life ends with an instance of a body, if nothing may still use it.

        Args:
            instance: Its work is done, or enqueued.
            body: Number of its body.
            has_run: The instance is done; otherwise it is enqueued on its stream.
        """
        if not self._names:
            return
        with self._changing:
            self._order.end(instance)
            for name in self._bodies[body].uses.get(instance.position, ()):
                life = self._lives[name]
                life.n_left -= 1
                if not has_run:
                    life.enqueued[instance.lane.stream] = instance.index
                if not life.n_left:
                    self._over.add(name)
                    self._give_back_if_unused(name, instance.index)

    def _give_back_if_unused(self, name: str, index: int) -> None:
        """Give back the memory of a life that is over, if the next work of its stream comes after its uses.

        Args:
            name: The buffer.
            index: Last instance that the host has submitted, or one before it.
        """
        life = self._lives[name]
        if self._order.is_after(life.stream, life.enqueued) or self._waits_early(life, index):
            self._give_back(name)

    def _waits_early(self, life: _Life, index: int) -> bool:
        """Let the stream of a life wait now for what its next instance waits for, if these are the uses of the life."""
        if self._let_wait is None or not self._upcoming.is_after(life.stream, life.enqueued, index):
            return False
        if not self._let_wait(life.stream, life.enqueued):
            return False
        self._order.wait(life.stream, life.enqueued.values())
        return True

    def _give_back(self, name: str) -> None:
        self._memory.give_back(name)
        self._held_nbytes -= self._memory.dense(name).nbytes
        self._over.discard(name)
        del self._lives[name]


@final
class _Precedence:
    """Which instances the next work of a stream comes after, by the waits of the plan.

    A stream runs its instances in order, so the last one of each stream that other work comes after says all (vector
    clocks).

    Args:
        plan: The plan. What follows from waiting for an instance is known for two steps.
    """

    def __init__(self, plan: Plan) -> None:
        self._n_kept = _n_of_two_steps(plan)
        self._last: defaultdict[str, dict[str, int]] = defaultdict(dict)  # by stream
        self._at_end: dict[int, Mapping[str, int]] = {}  # by instance, the same for what comes after it

    def begin(self, instance: Instance) -> None:
        """Note that the stream of an instance now waits for what the instance follows."""
        self.wait(instance.lane.stream, instance.after)

    def wait(self, stream: str, instances: Iterable[int]) -> None:
        """Note that a stream now waits for instances."""
        own = self._last[stream]
        for instance in instances:
            for other, index in self._at_end.get(instance, {}).items():
                own[other] = max(own.get(other, -1), index)

    def end(self, instance: Instance) -> None:
        """Note what follows from waiting for an instance."""
        own = self._last[instance.lane.stream]
        own[instance.lane.stream] = instance.index
        self._at_end[instance.index] = dict(own)
        if len(self._at_end) > self._n_kept:
            del self._at_end[next(iter(self._at_end))]

    def of(self, stream: str) -> Mapping[str, int]:
        """Return, by stream, the last instance that the next work of a stream comes after."""
        return {**self._last[HOST.stream], **self._last[stream]}  # the host enqueues the work

    def is_after(self, stream: str, instances: Mapping[str, int]) -> bool:
        """Tell whether the next work of a stream comes after these instances, given by their streams."""
        return _covers(self.of(stream), instances)


@final
class _Upcoming:
    """What the next instances of each stream come after.

    Args:
        plan: The plan.
        first_step: The first step to look at.
    """

    def __init__(self, plan: Plan, first_step: int) -> None:
        self._n_ahead = _n_of_two_steps(plan)
        self._order = _Precedence(plan)
        self._walk = walk(plan, first_step)
        self._reached = -1
        self._found: defaultdict[str, deque[tuple[int, Mapping[str, int]]]] = defaultdict(
            lambda: deque(maxlen=self._n_ahead)
        )

    def is_after(self, stream: str, instances: Mapping[str, int], index: int) -> bool:
        """Tell whether the first instance of a stream after instance `index` comes after others."""
        found = self._found[stream]
        while found and found[0][0] <= index:
            found.popleft()
        while not found and self._reached < index + self._n_ahead:
            instance = next(self._walk, None)
            if instance is None:
                return False
            self._reached = instance.index
            self._order.begin(instance)
            self._found[instance.lane.stream].append((instance.index, self._order.of(instance.lane.stream)))
            self._order.end(instance)
            while found and found[0][0] <= index:
                found.popleft()
        return bool(found) and _covers(found[0][1], instances)


def _covers(last: Mapping[str, int], instances: Mapping[str, int]) -> bool:
    return all(last.get(stream, -1) >= index for stream, index in instances.items())


def _n_of_two_steps(plan: Plan) -> int:
    return 2 * max(map(len, plan.bodies), default=0)


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
