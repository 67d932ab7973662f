"""The fastest schedule for a scenario, among all legal ones that keep to the user's constraints."""

from simdist.tuning.answer import Tuned
from simdist.tuning.candidates import Extras
from simdist.tuning.constraints import Constraints
from simdist.tuning.tuning import TuneOptions, tune

__all__ = ["Constraints", "Extras", "TuneOptions", "Tuned", "tune"]
