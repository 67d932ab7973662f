"""When everything happens in a step under `fully_shard`: the rules, without torch.

`fsdp_clock.py` finds the same rows by running torch's own code, and a test compares both. So these rules are what
torch 2.13 does, where all ranks are alike, copies into what is sent take no time, and the host runs ahead.

**Streams.** Each rank has four: compute, gather, reduce (reduce-scatters) and replicate (all-reduces). A stream
runs its work in order. "A waits for B" moves what stream A runs next behind all that stream B has been given so
far.

**Communicators.** A collective starts when its stream is free, and its communicator has ended what it was given
before. Gathers and reduce-scatters share one, so they queue in the order in which the host issues them, unless the
reduce-scatters have their own group. All-reduces have another. So have the backward gathers of units that were
resharded to k parts.

**Forward pass of a micro-batch**
1. The gather stream waits for compute: for the optimizer, and for whatever the last micro-batch left there.
2. The root is gathered and taken, if it holds parameters. If it uses them before the first unit, gathers 0 .. d-1
   are issued (explicit prefetch of depth d only), and it computes.
3. Each unit i is gathered, taken, then gathers i+1 .. i+d are issued (explicit prefetch of depth d only). It
   computes.
4. To *gather* does nothing to a unit that is whole, or whose gather is already issued.
5. To *take* a unit: the gather stream waits for the copy-out of the unit taken before it; compute waits for the
   gather; the copy-out follows on compute. So gather j runs once unit j-2 is taken; with explicit depth
   d, j-d-1.
6. After its forward computation a unit is freed (`True`), kept (`False`, 1), or cut into k parts. `None` frees a
   unit and keeps the root. An integer that equals the shard size is `True`.
7. At the end the gather stream waits for the last copy-out.

**Backward pass**
1. The root's turn comes first if it computed after the last unit. If it did not, its output is that of the last
   unit, so its turn comes after that of the last unit, and before the unit computes.
2. A turn: gather the unit. If it was not whole, compute waits for the gather, the copy-out follows, and the gather
   stream waits for this copy-out. Then one gather is issued, that of the unit before it in post-forward order, in
   which the root is last. With explicit prefetch, the named units are gathered instead. A unit that names none, such
   as the first, prefetches by default. The root names units if it computed after the last one.
3. The gather of a unit in k parts waits on the gather stream for the end of the unit's forward computation, where
   the parts were cut. That of the last unit can therefore not hide behind its forward pass.
4. A unit whose input needs a gradient reduces after its backward computation; see below. So does the root, after
   what it computes before the first unit, if the model's input needs a gradient.
5. At the end, in this order: the root, then the units. Each that has not reduced yet does so (the root, and the
   first unit if its input needs no gradient). If it is the last backward pass (`set_is_last_backward`), compute waits
   after each of them for the last reduction on each stream, all-reduces too. So if the root holds parameters, the
   first unit reduces after all others have ended. A root without parameters waits for nothing.
6. In the last backward pass, compute also waits for a gather that was issued and not taken, and such a gather is
   lost. The post-forward order is cleared.

**To reduce a unit**
1. The unit is freed, unless `set_reshard_after_backward(False)`. Without gradient sync that is all.
2. While `cap` or more inputs of reduce-scatters are kept, compute waits for the oldest reduce-scatter, and it is
   dropped. The inputs are kept across micro-batches until the last backward pass has ended.
3. Compute waits for the unit's own last reduction. This matters only if its backward pass was not the last one.
4. The reduce stream waits for compute; the reduce-scatter runs on it.
5. The replicate stream waits for the reduce stream; the all-reduce runs on it, unless
   `set_requires_all_reduce(False)`.

**A backward pass that is not the last** keeps the post-forward order. So from the second micro-batch on, the unit
before the first one is the last unit of the micro-batch before, and the first unit's turn gathers it, if the root
has not come in between. The next forward pass uses this gather. After the last backward pass it is lost: k
micro-batches make k - 1 such gathers, and one of them serves nothing.

One rank in a shard gathers, copies out and scatters nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    Root,
    Row,
    Settings,
    Unit,
)


def rows_by_rules(settings: Settings, its: OneRank = ALIKE) -> list[Row]:
    """Return what is done, in the order in which the host issues it."""
    rank = _Rank(settings, its)
    for step in range(settings.n_steps):
        for number, micro_batch in enumerate(settings.micro_batches):
            rank.step = step
            rank.micro_batch = number
            rank.forward()
            rank.backward(micro_batch)
        for state in rank.states:
            rank.compute(OPTIMIZE, state, state.times.optimize)
    return rank.rows


@dataclass
class _State:
    """A unit, or the root with its parameters.

    Attributes:
        number: Of the unit; `ROOT`.
        times: Its settings.
        parts: That it is cut into after its forward pass: the shard size if it is freed, 1 if it is kept.
        is_whole: Its parameters are here.
        cut_at: When its parts were cut, until they are gathered.
        gathered_at: The end of a gather that is not taken yet.
        places: In the post-forward order.
        reduced_at: The end of its last reduction, until compute has waited for it.
        had_turn: In this backward pass.
        has_reduced: In this backward pass.
    """

    number: int
    times: Unit | Root
    parts: int
    is_whole: bool = False
    cut_at: int | None = None
    gathered_at: int | None = None
    places: list[int] = field(default_factory=list)
    reduced_at: int | None = None
    had_turn: bool = False
    has_reduced: bool = False


class _Rank:
    def __init__(self, settings: Settings, its: OneRank) -> None:
        self.settings = settings
        self._its = its
        self._n_transfers = 0
        self.rows: list[Row] = []
        self.step = 0
        self.micro_batch = 0
        self.units = [_unit_state(settings, number) for number in range(len(settings.units))]
        self.root = _root_state(settings)
        self.states = [self.root, *self.units] if self.root else self.units
        self._compute_end = 0
        self._gather_end = 0
        self._reduce_end = 0
        self._replicate_end = 0
        self._communicator_ends: dict[object, int] = {}
        self._copied_out_at: int | None = None
        self._post_forward_order: list[_State] = []
        self._reduce_scatter_ends: list[int] = []
        self._last_reduction_ends: dict[str, int] = {}

    def forward(self) -> None:
        self._gather_end = max(self._gather_end, self._compute_end)
        self._compute_end += self._its.late_by(self.step, self.micro_batch)
        if self.root:
            self._gather(self.root, GATHER)
            self._take_forward(self.root)
            if self.root.times.before:
                for named in self.units[: self.settings.forward_prefetch]:
                    self._gather(named, GATHER)
                self.compute(FORWARD, self.root, self.root.times.before.forward)
        depth = self.settings.forward_prefetch
        for number, unit in enumerate(self.units):
            self._gather(unit, GATHER)
            self._take_forward(unit)
            for later in self.units[number + 1 : number + 1 + depth]:
                self._gather(later, GATHER)
            self.compute(FORWARD, unit, unit.times.forward)
            self._leave_forward(unit)
        if self.root:
            if self.root.times.after:
                self.compute(FORWARD, self.root, self.root.times.after.forward)
            self._leave_forward(self.root)
        self._await_copy_out()

    def backward(self, micro_batch: MicroBatch) -> None:
        for state in self.states:
            state.had_turn = False
            state.has_reduced = False
        depth = self.settings.backward_prefetch
        if self.root and self.root.times.after:
            self._turn(self.root, self.units[::-1][:depth])
            self.compute(BACKWARD, self.root, self.root.times.after.backward)
        for number in reversed(range(len(self.units))):
            unit = self.units[number]
            earlier = self.units[max(0, number - depth) : number]
            self._turn(unit, earlier[::-1])
            if self.root and not self.root.had_turn:
                self._turn(self.root, [])
            self.compute(BACKWARD, unit, unit.times.backward)
            if number > 0 or self._first_input_needs_gradient():
                self._reduce(unit, micro_batch)
        if self.root:
            if self.root.times.before:
                self.compute(BACKWARD, self.root, self.root.times.before.backward)
            if self.settings.input_needs_gradient:
                self._reduce(self.root, micro_batch)
        self._end_backward(micro_batch)

    def compute(self, kind: str, state: _State, duration: int) -> None:
        start = self._compute_end
        self._compute_end = start + duration
        self._write(kind, state, start, self._compute_end)

    def _first_input_needs_gradient(self) -> bool:
        root_computes_it = self.root is not None and self.root.times.before is not None
        return self.settings.input_needs_gradient or root_computes_it

    def _gather(self, state: _State, kind: str) -> None:
        if state.is_whole or state.gathered_at is not None:
            return
        if self.settings.shard == 1:
            state.gathered_at = 0
            return
        duration = state.times.gather
        communicator: object = "shard"
        if state.cut_at is not None:
            self._gather_end = max(self._gather_end, state.cut_at)
            communicator = "parts"
            if state.times.regather is not None:
                duration = state.times.regather
        self._gather_end = self._transfer(kind, state, self._gather_end, duration, communicator)
        state.gathered_at = self._gather_end

    def _take_forward(self, state: _State) -> None:
        if state.gathered_at is None:
            return
        self._await_copy_out()
        self._take(state)
        self._copied_out_at = self._compute_end

    def _take(self, state: _State) -> None:
        assert state.gathered_at is not None
        self._compute_end = max(self._compute_end, state.gathered_at)
        if self.settings.shard > 1:
            self._compute_end += self.settings.copy_out
        state.gathered_at = None
        state.cut_at = None
        state.is_whole = True

    def _await_copy_out(self) -> None:
        if self._copied_out_at is not None:
            self._gather_end = max(self._gather_end, self._copied_out_at)
            self._copied_out_at = None

    def _leave_forward(self, state: _State) -> None:
        if state.parts > 1:
            state.is_whole = False
        if 1 < state.parts < self.settings.shard:
            state.cut_at = self._compute_end
        state.places.append(len(self._post_forward_order))
        self._post_forward_order.append(state)

    def _turn(self, state: _State, named: Sequence[_State]) -> None:
        state.had_turn = True
        self._gather(state, BACKWARD_GATHER)
        if state.gathered_at is not None:
            self._take(state)
            self._gather_end = max(self._gather_end, self._compute_end)
        if named:
            for earlier in named:
                self._gather(earlier, BACKWARD_GATHER)
            return
        place = state.places.pop()
        if place > 0:
            self._gather(self._post_forward_order[place - 1], BACKWARD_GATHER)

    def _reduce(self, state: _State, micro_batch: MicroBatch) -> None:
        state.has_reduced = True
        if micro_batch.reshards:
            state.is_whole = False
        if not micro_batch.reduces:
            return
        while len(self._reduce_scatter_ends) >= self.settings.max_input_buffers:
            self._compute_end = max(self._compute_end, self._reduce_scatter_ends.pop(0))
        if state.reduced_at is not None:
            self._compute_end = max(self._compute_end, state.reduced_at)
        self._reduce_end = max(self._reduce_end, self._compute_end)
        if self.settings.shard > 1:
            communicator = "reduce" if self.settings.separate_group else "shard"
            duration = state.times.reduce_scatter
            self._reduce_end = self._transfer(REDUCE_SCATTER, state, self._reduce_end, duration, communicator)
        self._reduce_scatter_ends.append(self._reduce_end)
        state.reduced_at = self._reduce_end
        stream = "reduce"
        if self.settings.replicas > 1 and micro_batch.all_reduces:
            ready = max(self._replicate_end, self._reduce_end)
            self._replicate_end = self._transfer(ALL_REDUCE, state, ready, state.times.all_reduce, "replicate")
            state.reduced_at = self._replicate_end
            stream = "replicate"
        self._last_reduction_ends[stream] = state.reduced_at

    def _end_backward(self, micro_batch: MicroBatch) -> None:
        for state in self.states:
            if not state.has_reduced:
                self._reduce(state, micro_batch)
            if micro_batch.is_last:
                self._finish(state)
        if micro_batch.is_last:
            self._post_forward_order.clear()
            self._compute_end = max(self._compute_end, *self._reduce_scatter_ends, 0)
            self._reduce_scatter_ends.clear()

    def _finish(self, state: _State) -> None:
        self._compute_end = max(self._compute_end, *self._last_reduction_ends.values(), 0)
        self._last_reduction_ends.clear()
        state.reduced_at = None
        state.places.clear()
        if state.gathered_at is not None:
            self._compute_end = max(self._compute_end, state.gathered_at)
            state.gathered_at = None

    def _transfer(self, kind: str, state: _State, ready: int, duration: int, communicator: object) -> int:
        start = max(ready, self._communicator_ends.get(communicator, 0), self._its.begins_at(self._n_transfers))
        self._n_transfers += 1
        end = start + duration
        self._communicator_ends[communicator] = end
        self._write(kind, state, start, end)
        return end

    def _write(self, kind: str, state: _State, start: int, end: int) -> None:
        self.rows.append(Row(self.step, self.micro_batch, kind, state.number, start, end))


def _unit_state(settings: Settings, number: int) -> _State:
    unit = settings.units[number]
    reshard = unit.reshard_after_forward
    if reshard is None:
        reshard = settings.reshard_after_forward
    return _State(number, unit, _parts(True if reshard is None else reshard, settings.shard))


def _root_state(settings: Settings) -> _State | None:
    if settings.root is None:
        return None
    reshard = settings.reshard_after_forward
    return _State(ROOT, settings.root, _parts(False if reshard is None else reshard, settings.shard))


def _parts(reshard: bool | int, shard: int) -> int:
    if reshard is True:
        return shard
    return max(1, int(reshard))
