"""LARS: SGD in which every tensor has a learning rate of its own, in proportion to how large it is.

    optimizer = real.Lars(model.parameters(), lr=10.0, momentum=0.9, weight_decay=5e-5)

The proportion is the *trust ratio*. A plan may have the ranks compute it in shares and hand it round; the optimizer
then takes the ratios that it is given, and computes none.

**Tensors of one dimension** (biases, scales and shifts of normalisations) have a trust ratio of 1: they move at the
learning rate of their parameter group, as in the reference implementations of MLPerf. Their weight decay is that of
their group, too: make a group without for them if you want none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from simdist.errors import RunError

_VELOCITY = "velocity"


@final
class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling.

        ratio = eta |w| / (|g| + weight_decay |w| + eps)        (1 if |w| or |g| is 0, or w has one dimension)
        v = momentum v + lr ratio (g + weight_decay w)
        w = w - v

    Args:
        params: As of any optimizer of torch; groups may have settings of their own.
        lr: The global learning rate.
        momentum: Of the velocity v.
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
        """Let updates take these ratios instead of computing some; None computes them again.

        Args:
            ratios: Parameter -> a tensor of no dimensions, which is read when the update takes place.
        """
        self._given = None if ratios is None else dict(ratios)

    @torch.no_grad()
    def ratios(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the trust ratios of parameters, tensors of no dimensions.

        Args:
            parameters: Some of this optimizer's.
            gradients: One for each.

        Raises:
            RunError: A parameter is not this optimizer's.
        """
        group_of = {
            parameter: number for number, group in enumerate(self.param_groups) for parameter in group["params"]
        }
        if any(parameter not in group_of for parameter in parameters):
            raise RunError("Lars: a trust ratio is wanted of a parameter that this optimizer does not update")
        places: dict[int, list[int]] = {}  # of what has a ratio, by parameter group
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
            RunError: A parameter with a gradient was given no ratio.
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
    """Return the trust ratios of tensors of one parameter group, `[n_tensors]`: one expression, not one for each."""
    weights, slopes = (torch.stack(list(torch._foreach_norm(list(each)))) for each in (parameters, gradients))
    ratios = group["eta"] * weights / (slopes + group["weight_decay"] * weights + group["eps"])
    return torch.where((weights > 0) & (slopes > 0), ratios, 1.0)
