"""LARS: SGD with a separate learning rate for each tensor, in proportion to its norm.

    optimizer = real.Lars(model.parameters(), lr=10.0, momentum=0.9, weight_decay=5e-5)

The proportion is the *trust ratio*. In some plans, each rank computes a share of the ratios and the ranks exchange
them. Then the optimizer uses the given ratios and computes none.

**Tensors of one dimension** (biases, scales and shifts of normalisations) have a trust ratio of 1: they use the
learning rate of their parameter group, as in the reference implementations of MLPerf. They also use the weight decay of
their group. For no weight decay, put them into a group without it.

`Rating` computes trust ratios from the gradients of a plan into its buffers, and passes them to the optimizer. `Outer`
is another optimizer of the same tensors, the outer one of DiLoCo.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from real.buffers.memory import Memory
from real.programs.binding import Binding
from simdist.errors import PlanError, RunError
from simdist.plan import Optimize, Plan, TrustRatios

_VELOCITY = "velocity"

# Makes an optimizer of parameters.
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the outer optimizer with the best results for DiLoCo.

    Source:
        Douillard et al., arXiv 2311.08105, section 3 and table 5.
    """
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@final
class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling.

        ratio = eta |w| / (|g| + weight_decay |w| + eps)        (1 if |w| or |g| is 0, or w has one dimension)
        v = momentum v + lr ratio (g + weight_decay w)
        w = w - v

    Args:
        params: As for any optimizer of torch; groups may have settings of their own.
        lr: The global learning rate.
        momentum: Momentum of the velocity v.
        weight_decay: Pulls parameters to 0.
        eta: The trust coefficient.
        eps: Keeps the ratio finite.

    Raises:
        RunError: A setting is negative.

    Source:
        You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888, algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
        eps: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "eps": eps}
        if negative := [f"{name}={value}" for name, value in settings.items() if value < 0]:
            raise RunError(f"Lars({', '.join(negative)}): settings are not negative")
        super().__init__(params, settings)
        self._given: dict[Tensor, Tensor] | None = None

    def give(self, ratios: Mapping[Tensor, Tensor] | None) -> None:
        """Make updates use these ratios instead of computing them; None computes them again.

        Args:
            ratios: Parameter -> a tensor of no dimensions, which each update reads.
        """
        self._given = None if ratios is None else dict(ratios)

    @torch.no_grad()
    def ratios(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the trust ratios of parameters, tensors of no dimensions.

        Raises:
            RunError: A parameter does not belong to this optimizer.
        """
        group_of = {
            parameter: number for number, group in enumerate(self.param_groups) for parameter in group["params"]
        }
        if any(parameter not in group_of for parameter in parameters):
            raise RunError("Lars: a trust ratio is wanted of a parameter that this optimizer does not update")
        places: dict[int, list[int]] = {}  # tensors with a ratio, by parameter group
        for place, parameter in enumerate(parameters):
            if parameter.dim() >= 2:
                places.setdefault(group_of[parameter], []).append(place)
        ratios = [parameters[0].new_ones(())] * len(parameters) if parameters else []
        for number, some in places.items():
            own = [parameters[place] for place in some], [gradients[place] for place in some]
            for place, ratio in zip(some, _ratios(*own, self.param_groups[number]).unbind(), strict=True):
                ratios[place] = ratio
        return ratios

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: Computes loss and gradients first, and returns the loss.

        Raises:
            RunError: A parameter with a gradient has no given ratio.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters]
        ratios = self.ratios(parameters, gradients) if self._given is None else self._given_to(parameters)
        velocities = [self._velocity(parameter) for parameter in parameters]
        moves = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_mul_(moves, torch._foreach_mul(ratios, group["lr"]))
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, moves)
        torch._foreach_sub_(parameters, velocities)

    def _given_to(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        assert self._given is not None
        if any(parameter not in self._given for parameter in parameters):
            raise RunError("Lars: a parameter has a gradient and was given no trust ratio")
        return [self._given[parameter] for parameter in parameters]

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if _VELOCITY not in state:
            state[_VELOCITY] = torch.zeros_like(parameter)
        velocity: Tensor = state[_VELOCITY]
        return velocity


def _ratios(parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: Mapping[str, Any]) -> Tensor:
    """Return the trust ratios of tensors of one parameter group, `[n_tensors]`, with one expression for all."""
    weights, slopes = (torch.stack(list(torch._foreach_norm(list(each)))) for each in (parameters, gradients))
    ratios = group["eta"] * weights / (slopes + group["weight_decay"] * weights + group["eps"])
    return torch.where((weights > 0) & (slopes > 0), ratios, 1.0)


def takes_ratios(plan: Plan) -> bool:
    """Tell whether a plan updates with trust ratios."""
    return any(isinstance(op, Optimize) and op.ratios for body in plan.bodies for op in body)


@final
class Rating:
    """The trust ratios of one rank.

    Raises:
        PlanError: The plan has trust ratios and the optimizer does not accept any, or the reverse.
    """

    def __init__(
        self, plan: Plan, binding: Binding, optimizer: torch.optim.Optimizer, memory: Memory, rank: int
    ) -> None:
        self._binding = binding
        self._memory = memory
        self._rank = rank
        self._lars = optimizer if isinstance(optimizer, Lars) else None
        updates = [op for body in plan.bodies for op in body if isinstance(op, Optimize) and op.optimizer == "inner"]
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
        member = op.group.member(self._rank)
        share = slice(member * ratios.numel(), (member + 1) * ratios.numel())
        parameters, gradients = self._binding.parameters_and_gradients(op)
        found = self._lars.ratios(parameters[share], gradients[share])
        if found:
            ratios[: len(found)].copy_(torch.stack(found))
        ratios[len(found) :].zero_()
        self._rated = self._versions(op.grads)

    def give(self, op: Optimize) -> None:
        """Give the next update its ratios."""
        if self._lars is None or op.ratios is None:
            return
        parameters, _ = self._binding.parameters_and_gradients(op)
        self._lars.give(dict(zip(parameters, self._memory.dense(op.ratios), strict=False)))

    def release(self) -> None:
        """Make the optimizer compute its own ratios again."""
        if self._lars is not None:
            self._lars.give(None)

    def are_stale(self, op: Optimize) -> bool:
        """Tell whether clipping or unscaling has changed gradients since their trust ratios were computed."""
        return bool(op.ratios) and self._versions(op.grads) != self._rated

    def _versions(self, names: Iterable[str]) -> Mapping[str, int]:
        return {name: self._memory.dense(name)._version for name in names}


@final
class Outer:
    """The outer optimizer of one rank: it updates anchors, which are in buffers of the plan.

    Args:
        plan: The executed plan.
        binding: The binding of the parameters.
        memory: Buffers of the plan.
        make: Makes the optimizer of all anchors, tensor by tensor. It is not called if the plan has no anchors.

    Attributes:
        optimizer: The optimizer; None if the plan has no anchors.
        names: Buffers of anchors.
    """

    def __init__(self, plan: Plan, binding: Binding, memory: Memory, make: MakeOptimizer) -> None:
        updates = (op for body in plan.bodies for op in body if isinstance(op, Optimize) and op.optimizer == "outer")
        moves = dict(each for op in updates for each in zip(op.params, op.grads, strict=True))
        self._anchors: dict[str, list[tuple[Tensor, nn.Parameter, Tensor]]] = {}
        for name, gradients in moves.items():
            anchors = binding.held(plan.buffer(name))
            views = zip(anchors, binding.held(plan.buffer(gradients)), strict=True)
            self._anchors[name] = [(of, nn.Parameter(anchor), gradient) for (of, anchor), (_, gradient) in views]
        self.names = frozenset(moves)
        self._all = [each for some in self._anchors.values() for each in some]
        self.optimizer = make([anchor for _, anchor, _ in self._all]) if self._all else None
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Set the anchors to the parameters."""
        for parameter, anchor, _ in self._all:
            anchor.copy_(parameter)

    def step(self, op: Optimize) -> None:
        """Update the anchors that an operation names; the others have no gradient."""
        assert self.optimizer is not None
        for name in op.params:
            for _, anchor, gradient in self._anchors[name]:
                anchor.grad = gradient
        self.optimizer.step()
        for _, anchor, _ in self._all:
            anchor.grad = None
