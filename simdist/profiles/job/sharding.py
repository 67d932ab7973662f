"""How a traced job shards its model: units, groups of ranks, and what is gathered, reduced and kept when.

FSDP2 and HSDP gather each unit before its forward pass and, if it was freed, before its backward pass. They
reduce-scatter its gradients in the backward pass. HSDP then all-reduces slices between the copies of the model. A job
that reduce-scatters in its forward pass, as with tensor parallelism, is not of this kind.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from simdist.errors import ScenarioError, TraceError
from simdist.plan.plan import ITEM_NBYTES
from simdist.profiles.job.job import TracedJob
from simdist.profiles.job.unit_order import Sent, find_root, gathered_again, reduced
from simdist.profiles.kineto.columns import Shapes
from simdist.profiles.steps.model import HostMark, RankStep, TracedCollective
from simdist.settings.base import listed, plural

_MOST_TOLD = 4  # units
_MORE_THAN_CLOCKS = 0.1  # of a gather; a shorter overlap may be an error of clocks


@dataclass(frozen=True, slots=True)
class TracedUnit:
    """A unit of a sharded model: the parameters that are gathered and reduced together.

    Args:
        name: Its modules; empty for the root, and if the traces do not name it.
        count: Elements that are gathered, with padding.
        shapes: Shapes of its parameters; empty if the traces do not show them.
        is_gathered_again: It is gathered in the backward pass.
        is_reduced: Its gradients are reduced.
    """

    name: str
    count: int
    shapes: Shapes
    is_gathered_again: bool
    is_reduced: bool


@dataclass(frozen=True, slots=True)
class TracedPass:
    """A forward and a backward pass of a rank: when it handled which unit.

    Args:
        begin: The beginning of the forward pass.
        middle: The beginning of the backward pass.
        end: The end of the backward pass.
        gathers: Unit -> when it was gathered for the forward pass, in the order of the gathers.
        copied: Unit -> when it was copied out for the forward pass.
        gathered_again: Unit -> when it was gathered for the backward pass, in the order of the gathers.
        copied_again: Unit -> when it was copied out for the backward pass.
        reduced: Unit -> when its reduce-scatter was issued, in the order of these.
        averaged: Number of all-reduces between copies of the model.
    """

    begin: HostMark
    middle: HostMark
    end: HostMark
    gathers: dict[int, HostMark]
    copied: dict[int, HostMark]
    gathered_again: dict[int, HostMark]
    copied_again: dict[int, HostMark]
    reduced: dict[int, HostMark]
    averaged: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a job shards its model.

    Args:
        units: In the order of the forward pass.
        root: The unit that holds what the others do not; None without any.
        shard: Ranks that share a copy of the model.
        replicas: Copies.
        kept_over: Ranks that gather units for the backward pass, if they are fewer; None otherwise.
        param_dtype: Type of gathered parameters.
        reduce_dtype: Type in which gradients are reduced.
        communicators: 1 if gathers and reduce-scatters share one, else 2.
        passes: The passes of each step of each rank that has the usual ones, `[n_ranks][n_steps][n_passes]`.
        exposed_s: What was sent -> seconds of a step in which a device computes nothing meanwhile, with waiting, mean.
        doubts: What the traces do not show, one sentence each.
    """

    units: tuple[TracedUnit, ...]
    root: int | None
    shard: int
    replicas: int
    kept_over: int | None
    param_dtype: str
    reduce_dtype: str
    communicators: int
    passes: tuple[tuple[tuple[TracedPass, ...], ...], ...]
    exposed_s: dict[str, float]
    doubts: tuple[str, ...]

    @property
    def usual(self) -> tuple[TracedPass, ...]:
        """The passes of one step."""
        return next(chain(*self.passes))

    @property
    def root_comes_first(self) -> bool:
        """Whether the root is reduced after all other units, which a unit with raw input would be."""
        order = list(self.usual[-1].reduced)
        return self.root not in order or order[-1] == self.root

    def name(self, number: int) -> str:
        """Return what people call a unit."""
        return "the root" if number == self.root else self.units[number].name or f"unit {number}"


def find_sharding(job: TracedJob, shard: int | None = None) -> Sharding | None:
    """Return how the job shards its model; None if it does not.

    Args:
        job: The traced ranks and steps.
        shard: Ranks that share a copy of the model, if the user states them.

    Raises:
        ScenarioError: The traces show other ranks that share a copy.
        TraceError: The traces do not show sizes or groups, or their gathers are not those of FSDP2.
    """
    if not job.shards:
        return None
    _check_sizes(job)
    steps = [step for profile in job.profiles for step in profile.steps]
    n_sharers = _shard(job, steps)
    if shard not in (None, n_sharers):
        raise ScenarioError(f"--shard {shard}: {n_sharers} ranks share a unit, as the traces tell: leave it out")
    replicas = job.world_size // n_sharers
    parsed = [[_parse(step) for step in profile.steps] for profile in job.profiles]
    layouts = Counter(each.layout for each in chain(*parsed) if each)
    if not layouts:
        raise TraceError(
            f"{job.profiles[0].path} and others: their all_gathers and reduce_scatters are not those of units of "
            f"fully_shard, so no scenario of a sharded model can be made"
        )
    usual, n_usual = layouts.most_common(1)[0]
    kept = [[each for each in of_rank if each and each.layout == usual] for of_rank in parsed]
    first = next(chain(*kept))
    doubts = list(_layout_doubts(len(steps) - n_usual, len(steps), usual))
    if replicas > 1 and not any(each.averaged for each in first.passes):
        raise TraceError(
            f"{job.profiles[0].path} and others: {n_sharers} of {job.world_size} ranks share the model, and no "
            f"all_reduce between its {replicas} copies is in the traces: trace steps in which they are averaged"
        )
    units, more = _units(first, n_sharers)
    regathers = {call.n_ranks for step in steps for call in _regathers(step)} - {None, n_sharers}
    kept_over = regathers.pop() if len(regathers) == 1 else None
    communicators, of_groups = _communicators(steps)
    doubts += [*more, *of_groups]
    return Sharding(
        units=units,
        root=_root(first, units),
        shard=n_sharers,
        replicas=replicas,
        kept_over=kept_over,
        param_dtype=_usual_dtype(steps, "all_gather"),
        reduce_dtype=_usual_dtype(steps, "reduce_scatter"),
        communicators=communicators,
        passes=tuple(tuple(each.passes for each in of_rank) for of_rank in kept),
        exposed_s=_exposed_s(steps),
        doubts=tuple(doubts),
    )


def _check_sizes(job: TracedJob) -> None:
    """Refuse traces without the sizes of gathers."""
    gathers = [call for each in job.profiles for step in each.steps for call in step.calls if call.kind == "all_gather"]
    if any(call.nbytes is None for call in gathers):
        raise TraceError(
            f"{job.profiles[0].path} and others: do not tell the sizes of all_gathers, and so not the units of this "
            f"sharded model: trace with record_shapes=True, or with a profiler of torch 2.2 or later on GPUs"
        )


def _shard(job: TracedJob, steps: Sequence[RankStep]) -> int:
    """Return the ranks that share a copy of the model."""
    calls = [call for step in steps for call in step.calls if call.kind == "reduce_scatter"]
    sizes = {len(call.ranks) if call.ranks else call.n_ranks for call in calls}
    if None in sizes:
        raise TraceError(
            f"{job.profiles[0].path}: does not tell how many ranks share a unit: give --shard N, the ranks that share "
            f"a copy of the model"
        )
    told = sorted(size for size in sizes if size)
    groups = sorted({call.ranks for call in calls if call.ranks})
    strided = [each for each in groups if each != tuple(range(each[0], each[0] + len(each)))]
    if len(told) > 1 or job.world_size % told[0] or strided:
        example = f"ranks {listed(strided[0])}" if strided else f"groups of {', '.join(map(str, told))} ranks"
        raise TraceError(
            f"{job.profiles[0].path} and others: {example} share units, of {job.world_size} ranks: only groups of one "
            f"size, of consecutive ranks, can be a scenario"
        )
    between = {call.n_ranks for step in steps for call in step.calls if _is_average(call)} - {None}
    replicas = job.world_size // told[0]
    if replicas > 1 and between - {replicas}:
        raise TraceError(
            f"{job.profiles[0].path} and others: {told[0]} of {job.world_size} ranks share a unit, and gradients are "
            f"averaged over {listed(sorted(size for size in between if size))} ranks, not over {replicas}: import the "
            f"traces of one data-parallel group only"
        )
    return told[0]


@dataclass(frozen=True, slots=True)
class _ParsedStep:
    """A step of a sharded model.

    Args:
        sent: The units, in the order of the forward pass.
        calls: The reduce-scatter of each unit that has one.
        passes: Its passes.
    """

    sent: tuple[Sent, ...]
    calls: dict[int, TracedCollective]
    passes: tuple[TracedPass, ...]

    @property
    def layout(self) -> tuple[object, ...]:
        """What steps of one job have in common."""
        orders = [
            (tuple(each.gathers), tuple(each.gathered_again), tuple(each.reduced), each.averaged)
            for each in self.passes
        ]
        return self.sent, tuple(orders)


def _parse(step: RankStep) -> _ParsedStep | None:
    """Return the units of a step, and when each was handled; None if its collectives are not those of units."""
    is_named = any(call.unit is not None for call in step.calls)
    calls = [call for call in step.calls if call.unit is not None or not is_named]
    gathers = [call for call in calls if call.kind == "all_gather" and _item_nbytes(call)]
    first_s = step.passes[0][0].issued_s if step.passes else 0.0
    sent = tuple(_sent(call) for call in gathers if call.issued_s < first_s)
    if not sent or (is_named and len({each.unit for each in sent}) < len(sent)):
        return None
    found: list[TracedPass] = []
    reductions: dict[int, TracedCollective] = {}
    before = HostMark(step.marked_s, 0.0, 0.0)
    for middle, end in step.passes:
        parsed = _parse_pass(step, calls, sent, (before, middle, end))
        if parsed is None:
            return None
        one, its_reductions = parsed
        found.append(one)
        reductions |= its_reductions
        before = end
    return _ParsedStep(sent, reductions, tuple(found))


def _parse_pass(
    step: RankStep,
    calls: Sequence[TracedCollective],
    sent: tuple[Sent, ...],
    between: tuple[HostMark, HostMark, HostMark],
) -> tuple[TracedPass, dict[int, TracedCollective]] | None:
    begin, middle, end = between
    ahead = [c for c in calls if c.kind == "all_gather" and begin.issued_s <= c.issued_s < middle.issued_s]
    backward = [c for c in calls if middle.issued_s <= c.issued_s < end.issued_s]
    again = [c for c in backward if c.kind == "all_gather"]
    reductions = [c for c in backward if c.kind == "reduce_scatter"]
    n_after = sum(c.issued_s > again[-1].issued_s for c in reductions) if again else 0
    of_forward = _in_forward(sent, [_sent(c) for c in ahead])
    of_backward = gathered_again(sent, [_sent(c) for c in again], n_after)
    of_reductions = reduced(sent, [_sent(c) for c in reductions])
    if of_forward is None or of_backward is None or of_reductions is None:
        return None
    copied, copied_again = (
        _copied(step, units, (first, last))
        for units, first, last in ((of_forward, begin, middle), (of_backward, middle, end))
    )
    traced = TracedPass(
        begin,
        middle,
        end,
        _marks(of_forward, ahead),
        copied,
        _marks(of_backward, again),
        copied_again,
        _marks(of_reductions, reductions),
        sum(map(_is_average, backward)),
    )
    return traced, dict(zip(of_reductions, reductions, strict=True))


def _in_forward(units: Sequence[Sent], gathers: Sequence[Sent]) -> tuple[int, ...] | None:
    """Return the units that a forward pass gathers; later passes of a step may find all of them gathered."""
    if not gathers:
        return ()
    if len(gathers) == len(units) and all(one.may_be(other) for one, other in zip(units, gathers, strict=True)):
        return tuple(range(len(units)))
    left = list(range(len(units)))
    found: list[int] = []
    for each in gathers:
        number = next((number for number in left if each.may_be(units[number])), None)
        if number is None:
            return None
        found.append(number)
        left = left[left.index(number) + 1 :]
    return tuple(found)


def _copied(step: RankStep, units: tuple[int, ...], between: tuple[HostMark, HostMark]) -> dict[int, HostMark]:
    """Return when each unit was copied out, in the order of the gathers; nothing if that cannot be told."""
    first, last = between
    marks = [mark for mark in step.copy_outs if first.issued_s <= mark.issued_s < last.issued_s]
    return dict(zip(units, marks, strict=True)) if len(marks) == len(units) else {}


def _marks(units: Sequence[int], calls: Sequence[TracedCollective]) -> dict[int, HostMark]:
    pairs = zip(units, calls, strict=True)
    return {unit: call.mark for unit, call in pairs if call.mark is not None}


def _sent(call: TracedCollective) -> Sent:
    return Sent(call.unit, (call.nbytes or 0) // (_item_nbytes(call) or 1))


def _item_nbytes(call: TracedCollective) -> int | None:
    match call.dtype:
        case "float64" | "float32" | "float16" | "bfloat16":
            return ITEM_NBYTES[call.dtype]
        case _:
            return None


def _is_average(call: TracedCollective) -> bool:
    """Tell whether a collective may average slices of gradients between copies of the model."""
    return call.kind == "all_reduce" and call.of_gradients


def _regathers(step: RankStep) -> list[TracedCollective]:
    """Return the gathers of the backward passes of a step."""
    spans_s = [(middle.issued_s, end.issued_s) for middle, end in step.passes]
    return [
        call
        for call in step.calls
        if call.kind == "all_gather" and any(first <= call.issued_s < last for first, last in spans_s)
    ]


def _root(first: _ParsedStep, units: Sequence[TracedUnit]) -> int | None:
    """Return the root: the unit that the traces name so, or the first one if only it is not gathered again."""
    if len(units) < 2:
        return None
    named = find_root(first.sent)
    if named is not None or first.sent[0].unit is not None:
        return named
    again = [unit.is_gathered_again for unit in units]
    order = list(first.passes[0].gathered_again)
    is_kept = not again[0] and all(again[1:-1]) and any(again)
    return 0 if is_kept or (order and order[0] == 0 and len(order) > 1) else None


def _units(first: _ParsedStep, shard: int) -> tuple[tuple[TracedUnit, ...], list[str]]:
    """Return the units, and doubts."""
    again = first.passes[0].gathered_again
    reduces = {number for each in first.passes for number in each.reduced}
    units = []
    for number, sent in enumerate(first.sent):
        call = first.calls.get(number)
        shapes = call.shapes if call and _padded(call.shapes, shard) == sent.count else ()
        units.append(TracedUnit(sent.unit or "", sent.count, shapes, number in again, number in reduces))
    doubts = []
    frozen = [unit.name or f"unit {number}" for number, unit in enumerate(units) if not unit.is_reduced]
    if frozen:
        doubts.append(
            f"no gradients of {_some(frozen)} are reduced, as if frozen: the scenario reduces those of all units"
        )
    if not all(unit.shapes for unit in units):
        doubts.append(
            f"the traces do not show the parameters of units, so each is one tensor, padded for {shard} ranks: other "
            f"numbers of ranks pad a little less or more"
        )
    return tuple(units), doubts


def _some(names: Sequence[str]) -> str:
    """List a few names."""
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(names[:_MOST_TOLD]) + more


def _padded(shapes: Shapes, shard: int) -> int:
    """Return the elements of tensors whose first dimension is padded to a multiple of the ranks."""
    total = 0
    for shape in shapes:
        rows, *rest = shape or (1,)
        elements = -(-rows // shard) * shard
        for size in rest:
            elements *= size
        total += elements
    return total


def _layout_doubts(n_other: int, n_steps: int, usual: tuple[object, ...]) -> Iterable[str]:
    if n_other:
        yield (
            f"{n_other} of {n_steps} steps of ranks gather or reduce other units than most: the times of units are "
            f"from the others"
        )


def _communicators(steps: Sequence[RankStep]) -> tuple[int, list[str]]:
    """Return the communicators of gathers and reduce-scatters, and a doubt if the traces do not name them."""
    gathers, reductions = (
        {call.communicator for step in steps for call in step.calls if call.kind == kind and call.communicator}
        for kind in ("all_gather", "reduce_scatter")
    )
    if gathers and reductions:
        return (1 if gathers & reductions else 2), []
    if any(map(_overlap, steps)):
        return 2, []
    doubt = "the traces do not name process groups: gathers and reduce-scatters are taken to share one communicator"
    return 1, [doubt]


def _overlap(step: RankStep) -> bool:
    """Tell whether a gather and a reduce-scatter run at once, which one communicator does not allow."""
    spans_s = {
        kind: sorted((call.start_s, call.end_s) for call in step.calls if call.kind == kind)
        for kind in ("all_gather", "reduce_scatter")
    }
    return any(
        min(end_s, other_end_s) - max(start_s, other_s) > _MORE_THAN_CLOCKS * (end_s - start_s)
        for start_s, end_s in spans_s["all_gather"]
        for other_s, other_end_s in spans_s["reduce_scatter"]
    )


def _usual_dtype(steps: Sequence[RankStep], kind: str) -> str:
    calls = (call for step in steps for call in step.calls if call.kind == kind and _item_nbytes(call))
    found = Counter(call.dtype for call in calls)
    return found.most_common(1)[0][0] if found else "float32"


def _exposed_s(steps: Sequence[RankStep]) -> dict[str, float]:
    """Return how long each kind of transfer was exposed in a step, mean."""
    seconds = dict.fromkeys(("gathers of the forward pass", "gathers of the backward pass", "reduce-scatters"), 0.0)
    between = "all_reduces between copies"
    for step in steps:
        again = {id(call) for call in _regathers(step)}
        for call in step.calls:
            if call.kind == "all_gather":
                key = "gathers of the backward pass" if id(call) in again else "gathers of the forward pass"
            elif call.kind == "reduce_scatter":
                key = "reduce-scatters"
            elif call.kind == "all_reduce" and call.of_gradients:
                key = between
            else:
                continue
            seconds[key] = seconds.get(key, 0.0) + call.exposed_s / len(steps)
    return seconds


def described(sharding: Sharding) -> str:
    """Describe the units of a job and the ranks that share them."""
    counts = Counter(unit.count for number, unit in enumerate(sharding.units) if number != sharding.root)
    n_units = sum(counts.values())
    copies = f", {sharding.replicas} copies" if sharding.replicas > 1 else ""
    root = " and a root" if sharding.root is not None else ""
    return f"{n_units} {plural(n_units, 'unit')}{root}, each shared by {sharding.shard} ranks{copies}"
