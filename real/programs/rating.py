"""Trust ratios on their way from a plan's buffers to the optimizer."""

from collections.abc import Iterable, Mapping
from typing import final

import torch

from real.execution.memory import Memory
from real.programs.binding import Binding
from real.programs.optimizers import Lars
from simdist.errors import PlanError
from simdist.plan import Optimize, Plan, TrustRatios


def takes_ratios(plan: Plan) -> bool:
    """Tell whether a plan updates with trust ratios."""
    return any(isinstance(op, Optimize) and op.ratios for body in plan.bodies for op in body)


@final
class Rating:
    """The trust ratios of one rank.

    Args:
        plan: What is executed.
        binding: Knows the parameters.
        optimizer: Of the same parameters.
        memory: Of the plan.
        rank: Whose.

    Raises:
        PlanError: The plan has trust ratios and the optimizer takes none, or the reverse.
    """

    def __init__(
        self, plan: Plan, binding: Binding, optimizer: torch.optim.Optimizer, memory: Memory, rank: int
    ) -> None:
        self._binding, self._memory, self._rank = binding, memory, rank
        self._lars = optimizer if isinstance(optimizer, Lars) else None
        updates = [op for body in plan.bodies for op in body if isinstance(op, Optimize)]
        if self._lars is None and takes_ratios(plan):
            raise PlanError(
                f"plan {plan.name} updates with trust ratios; {type(optimizer).__name__} takes none: use real.Lars, or "
                f"a plan for another optimizer"
            )
        if self._lars is not None and not all(op.ratios for op in updates):
            raise PlanError(
                f"plan {plan.name} has updates without trust ratios, and Lars takes them in all: use another "
                f"optimizer, or a plan for LARS"
            )
        self._rated: Mapping[str, int] = {}

    def rate(self, op: TrustRatios) -> None:
        """Compute the ratios of this rank's share of the tensors."""
        assert self._lars is not None
        ratios = self._memory.dense(op.dst)
        member = self._rank // op.group.stride % op.group.size
        share = slice(member * ratios.numel(), (member + 1) * ratios.numel())
        parameters, gradients = self._binding.parameters_and_gradients(op)
        found = self._lars.ratios(parameters[share], gradients[share])
        if found:
            ratios[: len(found)].copy_(torch.stack(found))
        ratios[len(found) :].zero_()
        self._rated = self._versions(op.grads)

    def give(self, op: Optimize) -> None:
        """Let the next update find its ratios."""
        if self._lars is None or op.ratios is None:
            return
        parameters, _ = self._binding.parameters_and_gradients(op)
        self._lars.give(dict(zip(parameters, self._memory.dense(op.ratios), strict=False)))

    def release(self) -> None:
        """Let the optimizer compute its ratios by itself again."""
        if self._lars is not None:
            self._lars.give(None)

    def are_stale(self, op: Optimize) -> bool:
        """Tell whether gradients have changed since their trust ratios were computed, by clipping or unscaling."""
        return bool(op.ratios) and self._versions(op.grads) != self._rated

    def _versions(self, names: Iterable[str]) -> Mapping[str, int]:
        return {name: self._memory.dense(name)._version for name in names}
