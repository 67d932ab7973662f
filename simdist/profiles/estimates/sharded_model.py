"""A sharded model as schedules need it: the tensors of each unit with their seconds, and the schedule of the job.

A unit computes from the moment at which it is copied out until the next one is. In the backward pass, the
reduce-scatter of its gradients also ends it. What is computed before the first unit counts for it, and what is computed
after the last one for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.profiles.estimates.base import BaseTimes, scaled_lows
from simdist.profiles.job.sharding import Sharding, TracedPass
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import HostMark
from simdist.scenario import Tensor
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.schedules.sharded import ShardedSchedule


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Tensors of a sharded model, and the schedule of the traced job.

    Args:
        tensors: In forward order, with seconds; their names tell the units.
        dtype: Data type of the parameters that ranks keep.
        schedule: The schedule of the job.
        sharding: What the traces show of it.
        forward_s: Seconds of each unit in a forward pass, in the order of the traces.
        backward_s: The same in a backward pass.
        is_real: These are the model's own tensors, not one per unit.
        notes: Assumptions.
    """

    tensors: tuple[Tensor, ...]
    dtype: DType
    schedule: ShardedSchedule
    sharding: Sharding
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    is_real: bool
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.count for tensor in self.tensors) * ITEM_NBYTES[self.dtype]

    @property
    def whole_per_slice(self) -> float:
        """Elements of the model for each element that a rank updates."""
        n_updated = sum(unit.count for unit in self.sharding.units) / self.sharding.shard
        return sum(tensor.count for tensor in self.tensors) / n_updated

    def seconds_of(self, number: int) -> tuple[float, float]:
        """Return the seconds of a unit in a forward and in a backward pass."""
        return self.forward_s[number], self.backward_s[number]


def base_of_units(base: BaseTimes, sharding: Sharding) -> BaseTimes:
    """Return the times of an undisturbed step whose passes are those of a sharded model."""
    n_passes = len(sharding.usual)
    pass_s = base.backward_s / n_passes
    return replace(base, buckets_s=(pass_s,), buckets_nbytes=(None,), micro_batches=n_passes)


def sharded_model(sharding: Sharding, base: BaseTimes, *, before_s: float, is_blocking: bool) -> ShardedModel:
    """Return the tensors and the schedule of a sharded job.

    Args:
        sharding: What the traces show.
        base: Undisturbed times.
        before_s: Seconds of a forward pass, besides computing, that the scenario counts with its first unit.
        is_blocking: The host waits for each collective, as on CPUs.
    """
    n_units = len(sharding.units)
    passes = list(chain(*chain(*sharding.passes)))
    forward = [row for row in (_forward_s(each, n_units) for each in passes) if row is not None]
    backward = [row for row in (_backward_s(sharding, each) for each in passes) if row is not None]
    doubts = []
    total_s = base.forward_s / base.micro_batches
    shares = np.array([unit.count for unit in sharding.units], dtype=np.float64)
    forward_s = _lows(forward, total_s, shares)
    backward_s = _lows(backward, math.fsum(base.buckets_s), forward_s if forward_s.any() else shares)
    if not forward:
        doubts.append("the traces do not show when units are copied out: the forward pass is shared by elements")
    if not backward:
        doubts.append(
            "the traces do not show when the backward pass of each unit ends: it is shared like the forward pass"
        )
    forward_s[0] += before_s
    dtype, stored = _dtype(sharding)
    schedule, unlike = _schedule_of(sharding, dtype, is_blocking=is_blocking)
    order = list(range(n_units))
    if sharding.root is not None and not sharding.root_comes_first:
        order.append(order.pop(sharding.root))
    tensors = [
        tensor
        for place, number in enumerate(order)
        for tensor in _tensors(sharding, place, number, forward_s, backward_s)
    ]
    return ShardedModel(
        tensors=_rounded(tensors),
        dtype=dtype,
        schedule=schedule,
        sharding=sharding,
        forward_s=tuple(forward_s.tolist()),
        backward_s=tuple(backward_s.tolist()),
        is_real=all(unit.shapes for unit in sharding.units),
        notes=(*sharding.doubts, *doubts, *stored, *unlike),
    )


def _schedule_of(sharding: Sharding, dtype: DType, *, is_blocking: bool) -> tuple[ShardedSchedule, list[str]]:
    """Return the schedule of a sharded job, and what of the job it does not have."""
    first = sharding.usual[0]
    last = sharding.usual[-1]
    settings: dict[str, object] = {}
    doubts = _reshard(sharding, settings)
    if sharding.root is not None:
        settings["wrap"] = "blocks"
    ahead, more = _prefetch(sharding, first)
    settings |= {key: depth for key, depth in ahead.items() if depth > 1}
    if sharding.communicators > 1:
        settings["communicators"] = sharding.communicators
    if len(sharding.usual) > 1 and not first.reduced:
        settings["accumulation"] = "local"
    if any(len(each.gathers) < len(first.gathers) for each in sharding.usual[1:]):
        settings["reshard_after_backward"] = False
    if sharding.param_dtype != dtype:
        settings["param_dtype"] = sharding.param_dtype
    if sharding.reduce_dtype != sharding.param_dtype:
        settings["reduce_dtype"] = sharding.reduce_dtype
    if is_blocking:
        settings["blocking"] = True
    if sharding.replicas == 1:
        return FSDP.model_validate(settings), [*doubts, *more]
    if first.reduced and last.averaged and not first.averaged:
        settings["all_reduce"] = "last"
    return HSDP.model_validate(settings | {"shard": sharding.shard}), [*doubts, *more]


def _reshard(sharding: Sharding, settings: dict[str, object]) -> list[str]:
    """Set what is kept after the forward pass; return what cannot be set."""
    root = sharding.root
    units = [number for number in range(len(sharding.units)) if number != root]
    kept = [number for number in units if not sharding.units[number].is_gathered_again]
    if sharding.kept_over:
        settings["reshard_after_forward"] = sharding.kept_over
    elif len(kept) == len(units):
        settings["reshard_after_forward"] = False
    elif root is not None and sharding.units[root].is_gathered_again:
        settings["reshard_after_forward"] = True
    if not kept or len(kept) == len(units):
        return []
    if kept == units[-1:]:
        settings["keep_last_unit"] = True
        return []
    names = ", ".join(sharding.name(number) for number in kept)
    return [f"kept after the forward pass: {names}; the scenario gathers them again for the backward pass"]


def _prefetch(sharding: Sharding, first: TracedPass) -> tuple[dict[str, int], list[str]]:
    """Return how far gathers run ahead, as the host issues them, and a doubt if that does not show."""
    root = sharding.root
    pairs = {
        "forward_prefetch": (first.gathers, first.copied),
        "backward_prefetch": (first.gathered_again, first.copied_again),
    }
    found = {}
    unknown = []
    for key, (gathers, copied) in pairs.items():
        order = [unit for unit in gathers if unit != root]
        if order and not copied:
            unknown.append(key.partition("_")[0])
        found[key] = _depth(order, gathers, copied)
    if not unknown:
        return found, []
    what = " and ".join(unknown)
    return found, [f"how far gathers of the {what} pass run ahead does not show: taken for one unit, as by default"]


def _depth(order: Sequence[int], gathers: dict[int, HostMark], copied: dict[int, HostMark]) -> int:
    """Return the most units that are gathered beyond the one that was copied out last."""
    deepest = 1
    for place, unit in enumerate(order):
        done = [
            at for at, other in enumerate(order) if other in copied and copied[other].issued_s < gathers[unit].issued_s
        ]
        if copied:
            deepest = max(deepest, place - max(done, default=-1))
    return deepest


def _forward_s(of: TracedPass, n_units: int) -> Floats | None:
    """Return the seconds of each unit in a forward pass; None if they do not show."""
    marks = of.copied or of.gathers
    if len(marks) < n_units:
        return None
    ends_s = [marks[number].forward_s for number in range(1, n_units)]
    return np.diff(np.array([of.begin.forward_s, *ends_s, of.middle.forward_s]))


def _backward_s(sharding: Sharding, of: TracedPass) -> Floats | None:
    """Return the seconds of each unit in a backward pass; None if they do not show.

    The root may compute at both ends of the model. What it computes first counts for the last unit if the root stands
    first, and what it computes last counts for the first unit if the root stands last.
    """
    root = sharding.root
    order = [number for number in reversed(range(len(sharding.units))) if number != root]
    begins = {unit: mark.backward_s for unit, mark in of.copied_again.items() if unit != root}
    ends = {unit: mark.backward_s for unit, mark in of.reduced.items()}
    seconds = np.zeros(len(sharding.units))
    since_s = of.middle.backward_s
    if root is not None and sharding.root_comes_first:
        if not sharding.units[order[-1]].is_reduced:
            begins[root] = of.end.backward_s
        order.append(root)
    elif root is not None and order[0] in begins:
        seconds[root] = begins[order[0]] - since_s
        since_s = begins[order[0]]
    ends[order[-1]] = of.end.backward_s
    for number, after in zip(order, [*order[1:], None], strict=True):
        end_s = ends.get(number, begins.get(after) if after is not None else None)
        if end_s is None:
            return None
        seconds[number] = max(0.0, end_s - since_s)
        since_s = max(since_s, end_s)
    return seconds


def _lows(rows: Sequence[Floats], total_s: float, shares: Floats) -> Floats:
    """Return low quantiles of the seconds of units that add up to a total; without rows, shares of it."""
    if not rows or not np.any(rows):
        return np.asarray(total_s * shares / shares.sum())
    return np.array(scaled_lows(np.maximum(0.0, np.array(rows)), total_s))


def _dtype(sharding: Sharding) -> tuple[DType, list[str]]:
    """Return the type of the parameters that ranks keep, and an assumption about it."""
    match sharding.param_dtype:
        case "bfloat16" | "float16" as narrow:
            note = (
                f"units are gathered in {narrow}, and the traces do not show the type in which ranks keep them: taken "
                f"for float32"
            )
            return "float32", [note]
        case "float64":
            return "float32", ["parameters are float64, which scenarios do not keep: only what is sent is"]
        case _:
            return "float32", []


def _tensors(sharding: Sharding, place: int, number: int, forward_s: Floats, backward_s: Floats) -> list[Tensor]:
    """Return the tensors of a unit, whose seconds are shared by elements."""
    unit = sharding.units[number]
    prefix = "root" if number == sharding.root else f"unit.{place}"
    times_s = float(forward_s[number]), float(backward_s[number])
    if not unit.shapes:
        name = f"{prefix}.{unit.name or 'parameters'}"
        return [Tensor(name=name, count=unit.count, forward_s=times_s[0], backward_s=times_s[1])]
    counts = [math.prod(shape) for shape in unit.shapes]
    whole = sum(counts)
    return [
        Tensor(
            name=f"{prefix}.{unit.name}.{at}" if unit.name else f"{prefix}.{at}",
            count=count,
            rows=shape[0] if len(shape) > 1 else None,
            forward_s=times_s[0] * count / whole,
            backward_s=times_s[1] * count / whole,
        )
        for at, (shape, count) in enumerate(zip(unit.shapes, counts, strict=True))
    ]


def _rounded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors with seconds to the nanosecond, whose sums are preserved."""
    columns = []
    for times_s in ([each.forward_s or 0.0 for each in tensors], [each.backward_s or 0.0 for each in tensors]):
        columns.append(np.maximum(0.0, np.round(np.diff(np.round(np.cumsum([0.0, *times_s]), 9)), 9)).tolist())
    return tuple(
        tensor.model_copy(update={"forward_s": forward_s, "backward_s": backward_s})
        for tensor, forward_s, backward_s in zip(tensors, *columns, strict=True)
    )
