"""Cost of operations: prices, derived from a plan, a cluster and a workload."""

from typing import TYPE_CHECKING

from simdist import exporting

if TYPE_CHECKING:
    from simdist.cost.compute import ComputeCost, compute_s, tensor_backward_s
    from simdist.cost.costs import Costs, Local, OpCost, Resources, Shared, Stage, Transfer, Varying
    from simdist.cost.pricing import price

__all__ = [
    "ComputeCost",
    "Costs",
    "Local",
    "OpCost",
    "Resources",
    "Shared",
    "Stage",
    "Transfer",
    "Varying",
    "compute_s",
    "price",
    "tensor_backward_s",
]

__getattr__, __dir__ = exporting(
    __name__,
    dict.fromkeys(("ComputeCost", "compute_s", "tensor_backward_s"), "compute")
    | dict.fromkeys(("Costs", "Local", "OpCost", "Resources", "Shared", "Stage", "Transfer", "Varying"), "costs")
    | {"price": "pricing"},
)
