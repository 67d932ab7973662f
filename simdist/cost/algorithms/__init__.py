"""The algorithms of collectives: who sends what to whom, in which order, one family in each file."""

from simdist.cost.algorithms.call import Call
from simdist.cost.algorithms.choice import collective_transfer
from simdist.cost.algorithms.server import n_machines

__all__ = ["Call", "collective_transfer", "n_machines"]
