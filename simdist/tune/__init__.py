"""The fastest schedule for a scenario, among all legal ones that keep to the user's constraints."""

from simdist.tune.candidates import Extras
from simdist.tune.constraints import Constraints
from simdist.tune.tuning import Tuned, TuneOptions, tune

__all__ = ["Constraints", "Extras", "TuneOptions", "Tuned", "tune"]
