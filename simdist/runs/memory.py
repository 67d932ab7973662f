"""Memory of a device under a schedule of a scenario."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.engines.observers import FirstRank, Observer
from simdist.engines.run import run as simulated
from simdist.plan import Plan, ops
from simdist.plan.delays import SeedDelays, no_delays
from simdist.plan.optimizers import OPTIMIZERS
from simdist.plan.plan import ITEM_NBYTES
from simdist.runs.building import Built
from simdist.scenario.scenario import Scenario
from simdist.scenario.workload import Workload
from simdist.settings.units import format_nbytes
from simdist.traces.memory import Occupancy, least_peak_nbytes, occupancy
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    from simdist.engines.alike import KindsRun
    from simdist.engines.des import EventRun
    from simdist.engines.vector import VectorRun

#: A plan, and when its instances start and end on the first rank.
_PlanTimes: TypeAlias = tuple[Plan, NDArray[np.float64], NDArray[np.float64]]

_MOST_RESERVED = 1.18  # of what is counted: torchtitan, 1.05 to 1.18 (experiments/published_sharding)
_MOST_ROWS = 50_000  # of a trace that is simulated for its memory
_STEPS_AFTER = 1  # simulated after the first step of every kind


def memory_of(scenario: Scenario, built: Built) -> Occupancy:
    """Return the memory of the first rank's device over the first steps, without disturbances.

    The steps are those until every kind of step has been seen and, unless ranks are simulated one by one, one more.
    """
    return _occupancy(*_times(built), scenario.workload)


def memory_of_trace(trace: Trace, workload: Workload) -> Occupancy:
    """Return the memory of the first rank's device over a trace."""
    return _occupancy(trace.plan, trace.start_s[:, 0], trace.end_s[:, 0], workload)


def _occupancy(plan: Plan, start_s: NDArray[np.float64], end_s: NDArray[np.float64], workload: Workload) -> Occupancy:
    return occupancy(
        plan,
        start_s,
        end_s,
        state_nbytes=_state_nbytes(plan, workload),
        activation_nbytes=_activation_nbytes(plan, workload),
        recomputed_nbytes=_recomputed_nbytes(plan, workload),
    )


def _times(built: Built) -> _PlanTimes:
    """Return the first steps of a plan, and when their instances start and end on the first rank."""
    plan = _first_steps(built.plan, n_more=_STEPS_AFTER)
    return simulated(plan, built.costs, no_delays(plan), observe=_FirstSteps(built), courses=built.courses)


class _FirstSteps(Observer[_PlanTimes]):
    """Keeps when each operation starts and ends on the first rank; of fewer steps if all ranks are simulated."""

    of_one_seed = True

    def __init__(self, built: Built) -> None:
        self._built = built

    def prefers_kinds(self, plan: Plan, delays: SeedDelays) -> bool:
        return True

    def by_vectors(self, run: "VectorRun") -> _PlanTimes:
        return run.plan, *FirstRank().by_vectors(run)

    def by_kinds(self, run: "KindsRun") -> _PlanTimes:
        return run.plan, *FirstRank().by_kinds(run)

    def by_events(self, run: "EventRun") -> _PlanTimes:
        shorter = _first_steps(self._built.plan, n_more=0)
        times_s = simulated(shorter, self._built.costs, no_delays(shorter), observe=FirstRank(), engine="des")
        return shorter, *times_s


def most_nbytes(built: Built, workload: Workload) -> int:
    """Return bytes that no time can exceed: those of all buffers on the device, whether in use or not."""
    activations = _activation_nbytes(built.plan, workload)
    on_device = (buffer for buffer in built.plan.buffers if buffer.place == "device")
    nbytes = sum(activations.get(buffer.name, buffer.nbytes) for buffer in on_device)
    again = max(_recomputed_nbytes(built.plan, workload).values(), default=0)
    return nbytes + again + _state_nbytes(built.plan, workload)


def not_counted(workload: Workload) -> str | None:
    """Say that the memory of a device is counted in part only, and what to state; None if all of it is counted."""
    if workload.activations is not None:
        return None
    hint = "write workload.activation_size, their bytes per sample"
    if 0 < workload.recompute < 1:
        hint += f", and kept_activation_size, because recompute of {workload.recompute:.0%} does not tell which stay"
    return f"memory is counted without activations: {hint}"


def surely_fits(nbytes: float, limit_nbytes: float) -> bool:
    """Tell whether a limit holds what is in use, and what PyTorch's allocator reserves besides."""
    return _MOST_RESERVED * nbytes <= limit_nbytes


def may_not_fit(labels: Sequence[str], limit_nbytes: float) -> str:
    """Say that a limit holds what some schedules use, but perhaps not what the allocator reserves for them."""
    more = f"PyTorch's allocator reserves up to {_MOST_RESERVED - 1:.0%} more than is in use"
    return f"{', '.join(labels)} may not fit in {format_nbytes(limit_nbytes)}: {more}"


def least_nbytes(plan: Plan, workload: Workload) -> int:
    """Return bytes that are surely in use during a backward pass, whatever the times. No simulation is needed.

    These are parameters, the optimizer's state, what else lasts, what the forward pass has left, and units.
    """
    return least_peak_nbytes(
        plan if plan.n_steps == 1 else _first_steps(plan, n_more=0),
        state_nbytes=_state_nbytes(plan, workload),
        activation_nbytes=_activation_nbytes(plan, workload),
        recomputed_nbytes=_recomputed_nbytes(plan, workload),
        computing=_that_leave_activations(plan, workload),
    )


def _state_nbytes(plan: Plan, workload: Workload) -> int:
    """Return the bytes of the optimizers' states on one rank."""
    updates = [op for op in plan.distinct_ops if isinstance(op, ops.Optimize)]
    counts = {buffer.name: buffer.count for buffer in plan.buffers}
    nbytes = {buffer.name: buffer.count * ITEM_NBYTES[buffer.dtype] for buffer in plan.buffers}
    of_inner = {name for op in updates if op.optimizer == "inner" for name in op.slices or op.params}
    of_outer = {name for op in updates if op.optimizer == "outer" for name in op.params}
    if workload.optimizer_nbytes is None:
        inner = OPTIMIZERS[workload.optimizer].n_states * sum(nbytes[name] for name in of_inner)
    else:
        inner = workload.optimizer_nbytes * sum(counts[name] for name in of_inner)
    return inner + sum(nbytes[name] for name in of_outer)


def _activation_nbytes(plan: Plan, workload: Workload) -> dict[str, int]:
    """Return the bytes that forward passes leave for backward passes, by buffer. 0 if they are not known."""
    passes = [op for op in plan.distinct_ops if isinstance(op, ops.Forward)]
    known = workload.activations
    if known is None:
        return {op.dsts[0]: 0 for op in passes}
    tensors = {buffer.name: buffer.tensors for buffer in plan.buffers}
    ranges = {op.dsts[0]: [each for name in op.srcs if (each := tensors[name])] for op in passes}
    return {name: _of_tensors(some, known.kept_nbytes, workload.batch_size) for name, some in ranges.items()}


def _that_leave_activations(plan: Plan, workload: Workload) -> set[str]:
    """Return the buffers of tensors that leave activations. What leaves none may take no time."""
    known = workload.activations
    if known is None:
        return set()
    nbytes = [kept + again for kept, again in zip(known.kept_nbytes, known.again_nbytes, strict=True)]
    return {buffer.name for buffer in plan.buffers if buffer.tensors and any(nbytes[slice(*buffer.tensors)])}


def _recomputed_nbytes(plan: Plan, workload: Workload) -> dict[str, int]:
    """Return the bytes of activations that backward passes compute again, by the buffer of their gradients."""
    known = workload.activations
    if known is None or not any(known.again_nbytes):
        return {}
    passes = [op for op in plan.distinct_ops if isinstance(op, ops.Backward)]
    tensors = {buffer.name: buffer.tensors for buffer in plan.buffers}
    ranges = {op.dst: [each] for op in passes if (each := tensors[op.dst])}
    return {name: _of_tensors(some, known.again_nbytes, workload.batch_size) for name, some in ranges.items()}


def _of_tensors(ranges: Iterable[tuple[int, int]], nbytes: Sequence[float], batch_size: int) -> int:
    """Return the bytes of some tensors for a batch."""
    return round(batch_size * math.fsum(each for tensors in ranges for each in nbytes[slice(*tensors)]))


def _first_steps(plan: Plan, *, n_more: int) -> Plan:
    """Return the plan's first steps, until every body was there, and some more. Of equal steps, two are enough."""
    missing = set(range(len(plan.bodies)))
    bodies: list[int] = []
    n_rows = 0
    n_after = 0
    for number in plan.body_of_steps():
        missing.discard(number)
        n_after += not missing
        n_rows += len(plan.bodies[number])
        if bodies and (n_after > n_more + 1 or n_rows > _MOST_ROWS):
            break
        if bodies[-2:] == [number, number]:
            n_rows -= len(plan.bodies[number])
        else:
            bodies.append(number)
    steps = [plan.bodies[number] for number in bodies]
    return Plan.from_steps(
        plan.name, world_size=plan.world_size, buffers=plan.buffers, steps=steps, dataset=plan.dataset
    )
