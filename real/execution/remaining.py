"""The part of a plan that a rank still has to perform: all of it, or the steps after a checkpoint."""

from itertools import takewhile
from typing import final

from simdist.plan import Instance, Plan, ops
from simdist.plan.plan import StepIndex
from simdist.plan.walk import walk


@final
class RemainingPlan:
    """A plan from a step on, in program order.

    Args:
        plan: The plan.
        first_step: First step to perform.

    Attributes:
        plan: The whole plan.
        steps: Finds steps and bodies of instances.
        loads: Numbers loads.
        order: The instances that remain.
    """

    def __init__(self, plan: Plan, first_step: int) -> None:
        self.plan = plan
        self.steps = StepIndex(plan, [len(body) for body in plan.bodies])
        self.loads = _Loads(plan, self.steps, first_step)
        self.order = (
            each
            for each in walk(plan, self.loads.first_step)
            if each.step >= first_step or each.index in self.loads.early
        )
        self._first_index = self.steps.before(first_step)
        self._passes: dict[tuple[int, int], tuple[ops.Forward | ops.Backward, ...]] = {}  # by body and first place

    def body(self, instance: Instance) -> int:
        """Return the number of the body that an instance is in."""
        return self.steps.body(instance.step)

    def remains(self, index: int) -> bool:
        """Tell whether the rank performs an instance, or leaves it to the run before."""
        return index >= self._first_index or index in self.loads.early

    def stream(self, index: int, later: Instance) -> str:
        """Return the stream of instance `index`, which comes before `later`."""
        step = later.step
        first = later.index - later.position
        if index < first:
            step = self.steps.step(index)
            first = self.steps.before(step)
        return ops.lane_of(self.plan.bodies[self.steps.body(step)][index - first]).stream

    def pass_from(self, first: Instance) -> tuple[ops.Forward | ops.Backward, ...]:
        """Return the operations of a forward or backward pass from an instance on."""
        body = self.body(first)
        if (body, first.position) not in self._passes:
            rest = (op for op in self.plan.bodies[body][first.position :] if isinstance(op, ops.Forward | ops.Backward))
            self._passes[body, first.position] = tuple(takewhile(lambda op: type(op) is type(first.op), rest))
        return self._passes[body, first.position]


@final
class _Loads:
    """Numbers the loads of a plan, and finds loads before a first step with batches for it or for later steps.

    Attributes:
        early: Instances of these loads.
        first_step: The first step that contains one of them, or else the first step to perform.
    """

    def __init__(self, plan: Plan, steps: StepIndex, first_step: int) -> None:
        self._steps = steps
        self.first_step = first_step
        self._places = [[at for at, op in enumerate(body) if isinstance(op, ops.Load)] for body in plan.bodies]
        self._loads = StepIndex(plan, [len(places) for places in self._places])
        while self.first_step and self._loads.before(self.first_step) > first_step:
            self.first_step -= 1
        self.early = frozenset(
            steps.before(step) + at
            for step in range(self.first_step, first_step)
            for nth, at in enumerate(self._places[steps.body(step)])
            if self._loads.before(step) + nth >= first_step
        )

    def number(self, instance: Instance) -> int:
        """Return the number of a load, which is also the number of its batch."""
        places = self._places[self._steps.body(instance.step)]
        return self._loads.before(instance.step) + places.index(instance.position)
