"""Where each operation of a body stands in a trace."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.plan.ops import Op
from simdist.plan.plan import Plan


@dataclass(frozen=True)
class Occurrences:
    """One operation of one body, with every step that runs it.

    Args:
        op: The operation.
        steps: The steps, int64 `[n]`, increasing; each once.
        rows: Its rows in a trace, int64 `[n]`.
    """

    op: Op
    steps: NDArray[np.int64]
    rows: NDArray[np.int64]


def occurrences(plan: Plan) -> Iterator[Occurrences]:
    """Yield every operation of every body that runs, body after body, in the order of the program."""
    first = plan.first_instances()[:-1]
    bodies = np.fromiter(plan.body_of_steps(), dtype=np.int64, count=plan.n_steps)
    for number, body in enumerate(plan.bodies):
        steps = np.flatnonzero(bodies == number)
        for position, op in enumerate(body):
            if len(steps):
                yield Occurrences(op, steps, first[steps] + position)
