"""The fastest schedule for a scenario, among all that are legal and keep to what the user demands."""

from simdist.tune.candidates import Extras
from simdist.tune.constraints import Constraints
from simdist.tune.tuning import Tuned, TuneOptions, tune

__all__ = ["Constraints", "Extras", "TuneOptions", "Tuned", "tune"]
