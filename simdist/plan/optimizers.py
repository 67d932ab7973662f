"""The optimizers of training jobs: what an update reads and writes, and what a rank keeps for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

OptimizerName: TypeAlias = Literal["sgd", "adamw", "lars"]


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """What an optimizer needs.

    Args:
        n_states: Numbers that it keeps for each parameter.
        has_trust_ratios: It scales the learning rate of every tensor by a ratio of norms of the whole tensor.
    """

    n_states: int
    has_trust_ratios: bool = False

    @property
    def n_passes(self) -> int:
        """Reads and writes of the parameters' bytes by an update.

        It reads parameters, gradients and states, and writes parameters and states.
        """
        return 3 + 2 * self.n_states


#: SGD keeps a momentum, as does LARS. AdamW, and Adam, keep two moments.
OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = {
    "sgd": OptimizerKind(n_states=1),
    "adamw": OptimizerKind(n_states=2),
    "lars": OptimizerKind(n_states=1, has_trust_ratios=True),
}
