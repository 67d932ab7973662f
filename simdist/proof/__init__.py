"""A proof that a plan computes what its schedule declares."""

from simdist.proof.prover import Result, prove

__all__ = ["Result", "prove"]
